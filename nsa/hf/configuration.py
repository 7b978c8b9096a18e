"""The config of an NSA model in Transformers: Llama's fields, and NSA's hyperparameters in one dict."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nsa.config import NSAConfig, require
from nsa.model.llama import MODEL_TYPE, attention_config

LAYER_TYPE = "nsa_attention"
# How tensor parallelism divides an attention: these by heads; phi and the norms see only the heads of a rank.
BY_HEADS = ("q_proj", "k_proj", "v_proj", "k_cmp_proj", "v_cmp_proj", "k_win_proj", "v_win_proj", "gate.outer")
PHIS = [f"{phi}{part}" for phi in ("phi_k", "phi_v") for part in ("", ".inner", ".outer")]
REPLICATED = ("q_norm", "k_norm", *PHIS)


@strict
class NSALlamaConfig(PreTrainedConfig):
    """Llama with NSA in every layer.

    Args:
        nsa: Hyperparameters of `NSAConfig` that are not Llama's own: `{"n_sel": 32, "share_kv": True}`.
        dense_config: The `config.json` of the dense model that `nsa convert` started from.
        kwargs: All other fields, named as in `LlamaConfig`.

    Raises:
        ValueError: A field, or a key of `nsa`, has a wrong name, type or value.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    base_model_tp_plan: ClassVar = {
        **{f"layers.*.self_attn.{name}": "colwise" for name in BY_HEADS},
        **{f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce" for name in REPLICATED},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 2
    head_dim: int | None = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    nsa: dict[str, Any] | None = None
    dense_config: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPE] * self.num_hidden_layers
        self.nsa = dict(self.nsa or {})
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict without `layer_types`, which follow from the rest: `Trainer` reads the config of a
        checkpoint by the base class, which knows no layer types but its own.

        Returns:
            What `config.json` holds.
        """
        return {name: value for name, value in super().to_dict().items() if name != "layer_types"}

    def validate_architecture(self) -> None:
        """Called by transformers: the hyperparameters of NSA are checked too."""
        require(self.hidden_act == "silu", "hidden_act", self.hidden_act, "'silu'")
        # Llama's, which would be kept as attributes and change nothing.
        for name, accepted in (("attention_bias", "False; nsa={'qkv_bias': True}"), ("attention_dropout", "0")):
            require(not getattr(self, name, None), name, getattr(self, name, None), accepted)
        self.attention_config()

    def validate_layer_type(self) -> None:
        """Called by transformers, whose own check knows no layer types but its own."""
        accepted = f"{LAYER_TYPE!r} for each of the {self.num_hidden_layers} layers"
        require(self.layer_types == [LAYER_TYPE] * self.num_hidden_layers, "layer_types", self.layer_types, accepted)

    def attention_config(self) -> NSAConfig:
        """The hyperparameters of the attention.

        Returns:
            Those of every layer.

        Raises:
            ValueError: A key of `nsa` is unknown, or a value wrong.
        """
        return attention_config(vars(self))
