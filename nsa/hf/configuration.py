"""The config of an NSA model in Transformers: Llama's fields, and NSA's hyperparameters in one dict."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nsa.config import NSAConfig, RopeScaling, require

LAYER_TYPE = "nsa_attention"


@strict
class NSALlamaConfig(PreTrainedConfig):
    """Llama with NSA in every layer.

    `nsa` holds hyperparameters of `NSAConfig` that are not Llama's own: `{"n_sel": 32, "share_kv": True}`.

    Raises:
        ValueError: A field, or a key of `nsa`, has a wrong name, type or value.
    """

    model_type = "nsa_llama"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    # `phi` and the norms of queries and keys see only the heads of a rank.
    base_model_tp_plan: ClassVar = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.k_cmp_proj": "colwise",
        "layers.*.self_attn.v_cmp_proj": "colwise",
        "layers.*.self_attn.k_win_proj": "colwise",
        "layers.*.self_attn.v_win_proj": "colwise",
        "layers.*.self_attn.phi_k": "replicated_with_grad_allreduce",
        "layers.*.self_attn.phi_v": "replicated_with_grad_allreduce",
        "layers.*.self_attn.phi_k.inner": "replicated_with_grad_allreduce",
        "layers.*.self_attn.phi_k.outer": "replicated_with_grad_allreduce",
        "layers.*.self_attn.phi_v.inner": "replicated_with_grad_allreduce",
        "layers.*.self_attn.phi_v.outer": "replicated_with_grad_allreduce",
        "layers.*.self_attn.gate.outer": "colwise",
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
    # The config.json of the dense model that `nsa convert` started from.
    dense_config: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPE] * self.num_hidden_layers
        self.nsa = dict(self.nsa or {})
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers: the hyperparameters of NSA are checked too."""
        require(self.hidden_act == "silu", "hidden_act", self.hidden_act, "'silu'")
        self.attention_config()

    def validate_layer_type(self) -> None:
        """Called by transformers, whose own check knows no layer types but its own."""
        accepted = f"{LAYER_TYPE!r} for each of the {self.num_hidden_layers} layers"
        require(self.layer_types == [LAYER_TYPE] * self.num_hidden_layers, "layer_types", self.layer_types, accepted)

    def attention_config(self) -> NSAConfig:
        """The hyperparameters of every layer.

        Raises:
            ValueError: A key of `nsa` is unknown, or a value wrong.
        """
        own = {
            "dim": self.hidden_size,
            "n_heads": self.num_attention_heads,
            "n_kv_groups": self.num_key_value_heads,
            "d_k": self.head_dim,
            "d_v": self.head_dim,
            **rope_fields(self.rope_parameters),
        }
        taken = sorted(own.keys() & (self.nsa or {}).keys() - {"d_v"})
        require(not taken, "the keys of nsa", taken, "only hyperparameters that are not fields of Llama's config")
        return NSAConfig.from_dict(own | (self.nsa or {}))


def rope_fields(rope: dict[str, Any] | None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of an `NSAConfig`, from Transformers' `rope_parameters`.

    Raises:
        ValueError: The kind of RoPE is neither the default nor Llama-3's, or rotates a part of each head.
    """
    rope = rope or {}
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    require(kind in ("default", "llama3"), "rope_type", kind, "'default' or 'llama3'")
    require(part == 1.0, "partial_rotary_factor", part, "1.0: all of each head is rotated")
    scaling = None
    if kind == "llama3":
        needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [name for name in needed if name not in rope]
        require(not missing, "rope_parameters", rope, f"{missing} too, for 'llama3'")
        factor, low, high, length = (rope[name] for name in needed)
        scaling = RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_len=length)
    return {"rope_theta": rope.get("rope_theta", 10_000.0), "rope_scaling": scaling}
