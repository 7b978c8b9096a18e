"""Llama with NSA in every layer, as Transformers has its models: Llama's module names, one projection per branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from nsa.attention import Gate, NSAAttention
from nsa.cache import NSACache
from nsa.compression import Compression
from nsa.config import NSAConfig, require
from nsa.hf.cache import NSALayer
from nsa.hf.configuration import NSALlamaConfig


class NSALlamaAttention(NSAAttention):
    """`NSAAttention` with one projection per branch, so that tensor parallelism divides each by its heads. The selected
    branch has Llama's names. A pinned gate has no parameters."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        c = config
        if not c.share_kv:
            for name, head_dim in (("k", c.d_k), ("v", c.d_v)):
                for branch in ("", "_cmp", "_win"):
                    projection = nn.Linear(c.dim, c.n_kv_groups * head_dim, bias=c.qkv_bias)
                    setattr(self, f"{name}{branch}_proj", projection)
        if c.force_branch is not None:
            self.gate = PinnedGate(config)

    def projections(self) -> tuple[Sequence[nn.Linear], ...]:
        branches = ("",) if self.config.share_kv else ("_cmp", "", "_win")
        keys, values = ([getattr(self, f"{name}{branch}_proj") for branch in branches] for name in "kv")
        return [self.q_proj], keys, values

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        self.adopt_shard()
        return super().forward(x, **kwargs)

    def new_cache(self, *args: Any, **kwargs: Any) -> NSACache:
        self.adopt_shard()
        return super().new_cache(*args, **kwargs)

    def adopt_shard(self) -> None:
        """Under tensor parallelism, take on the heads of this rank: transformers divides the weights of a model that is
        already built."""
        weight = self.q_proj.weight
        if isinstance(weight, DTensor):
            c, whole = self.config, self.q_proj.out_features // self.config.d_k
            n_heads = weight.to_local().shape[0] // c.d_k
            if n_heads != c.n_heads:
                n_groups = n_heads * c.n_kv_groups // whole
                fits = n_groups * whole == n_heads * c.n_kv_groups
                accepted = f"a divisor of num_key_value_heads = {c.n_kv_groups}"
                require(fits, "the tensor-parallel size", whole // n_heads, accepted)
                self.config = self.gate.config = replace(c, n_heads=n_heads, n_kv_groups=n_groups)


class PinnedGate(Gate):
    """A gate that is fixed to one branch."""

    def __init__(self, config: NSAConfig) -> None:
        nn.Module.__init__(self)
        self.config = config


class NSALlamaDecoderLayer(GradientCheckpointingLayer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: NSALlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = NSALlamaAttention(config.attention_config())
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """`hidden_states [B, T, D]`, `attention_mask` bool `[B, T]`, `cu_seqlens` int32 `[n + 1]`."""
        x = self.input_layernorm(hidden_states)
        cache = None
        if past_key_values is not None:
            layers: list[Any] = past_key_values.layers
            layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
            accepted = "a cache with NSA layers: DynamicCache(config=model.config) or StaticCache(config=model.config)"
            require(isinstance(layer, NSALayer), "past_key_values", past_key_values, accepted)
            assert layer is not None
            cache = layer.state(self.self_attn, x)
        attended = self.self_attn(x, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class NSALlamaPreTrainedModel(PreTrainedModel):
    """The base class with what transformers needs to know of the models below."""

    config: NSALlamaConfig
    config_class = NSALlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("NSALlamaDecoderLayer",)
    _skip_keys_device_placement = ("past_key_values",)
    # The attention does not go through transformers' attention interface; "sdpa" is the default that it asks for.
    _supports_sdpa = True
    _supports_attention_backend = False
    _supports_context_parallel = False
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": NSALlamaDecoderLayer}  # noqa: RUF012
    # Buffers that checkpoints of early Llamas have.
    _keys_to_ignore_on_load_unexpected = (r"rotary_emb\.inv_freq$",)

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Initialize as `LM.reset_parameters` does, with Llama's initializer_range. Transformers skips modules that
        have no parameters of their own, so that gates and phi are known by the marks on their Linears."""
        super()._init_weights(module)
        kind = getattr(module, "nsa_init", None)
        if kind == "xavier":
            initialization.xavier_uniform_(module.weight)
            initialization.constant_(module.bias, self.config.attention_config().gate_bias)
        elif kind == "linear":
            initialization.kaiming_uniform_(module.weight, a=math.sqrt(5))
            bound = module.in_features**-0.5
            initialization.uniform_(module.bias, -bound, bound)
        elif isinstance(module, Compression):
            initialization.normal_(module.position, std=0.02)


def mark_initialization(attention: NSAAttention) -> None:
    """Mark the Linears that keep NSA's own initialization."""
    for mlp in (attention.gate, attention.phi_k, attention.phi_v):
        for name, linear in mlp.named_children():
            outer_of_gate = mlp is attention.gate and name == "outer"
            linear.nsa_init = "xavier" if outer_of_gate else "linear"  # type: ignore[assignment]


class NSALlamaModel(NSALlamaPreTrainedModel):
    """Tokens to hidden states."""

    def __init__(self, config: NSALlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = [NSALlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        for layer in layers:
            mark_initialization(layer.self_attn)
            # All layers share one set of RoPE tables.
            layer.self_attn.rope = layers[0].self_attn.rope
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run all layers.

        Args:
            input_ids: int `[B, T]`.
            attention_mask: `[B, past + T]`; 0 marks padding, on either side.
            position_ids: `[1, T]`. Without a cache or a mask, each 0 starts another packed sequence. Positions are
                otherwise counted by the layers themselves, from the mask and the cache.
            past_key_values: The cache that the new tokens are appended to.
            inputs_embeds: `[B, T, D]` in place of `input_ids`.
            use_cache: Whether to make a cache where none is given. None is made where gradients are recorded (those
                through a cache would be incomplete), and none of packed sequences.
            cu_seq_lens_q: int32 `[n + 1]`, offsets of packed sequences, `B = 1`.
            **kwargs: Of other models, not used.

        Returns:
            The hidden states `[B, T, D]` and the cache.

        Raises:
            ValueError: An argument has a wrong shape, or does not go with another.
        """
        require((input_ids is None) != (inputs_embeds is None), "input_ids", input_ids, "one of it and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cu_seq_lens_q is None and past_key_values is None and attention_mask is None and position_ids is not None:
            cu_seq_lens_q = packed_offsets(position_ids, x.shape[0])
        if past_key_values is not None:
            allowed = not (self.training and torch.is_grad_enabled())
            require(allowed, "past_key_values", "given in training", "none: keys in a cache have no gradient")
            offloading = getattr(past_key_values, "offloading", False)
            require(not offloading, "past_key_values", "offloaded", "a dynamic or a static cache")
        elif use_cache and cu_seq_lens_q is None and not torch.is_grad_enabled():
            past_key_values = DynamicCache(config=self.config)

        if attention_mask is not None:
            shape = tuple(attention_mask.shape)
            fits = len(shape) == 2 and shape[0] == x.shape[0] and shape[1] >= x.shape[1]
            require(fits, "attention_mask.shape", shape, "[B, past + T]: NSA takes padding, not patterns of attention")
            attention_mask = attention_mask[:, -x.shape[1] :].bool()
        # Fewer than there are for `assistant_early_exit`.
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x, attention_mask=attention_mask, cu_seqlens=cu_seq_lens_q, past_key_values=past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


def packed_offsets(position_ids: Tensor, batch_size: int) -> Tensor | None:
    """`cu_seqlens` of the sequences that start where `position_ids [1, T]` is 0; None for a single one."""
    if batch_size != 1 or position_ids.dim() != 2:
        return None
    is_start = position_ids[0] == 0
    if torch.compiler.is_compiling():
        # How many there are would be a shape.
        torch._assert_async(is_start.sum() < 2, "position_ids of packed sequences in compiled code: pass cu_seq_lens_q")
        return None
    starts = is_start.nonzero().flatten().int()
    if starts.numel() < 2:
        return None
    return torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])


class NSALlamaForCausalLM(NSALlamaPreTrainedModel, GenerationMixin):
    """Tokens to logits, or with labels to their mean loss.

    Args:
        config: Sizes and attention.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: NSALlamaConfig) -> None:
        super().__init__(config)
        self.model = NSALlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        config: NSALlamaConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """The padding among the new tokens, `[B, T]`: a mask that grew with the text would compile every step anew."""
        if attention_mask is None:
            return None
        # Copied: the strides are compiled for too.
        return attention_mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss of `labels`.

        Args:
            input_ids: int `[B, T]`; this and all that is not below as in `NSALlamaModel.forward`.
            labels: int64 `[B, T]`, as `input_ids`: they are shifted here. -100 is ignored.
            logits_to_keep: Only the logits of the last so many tokens, 0 for all; or of these places `[n]`.
            **kwargs: `num_items_in_batch` of the loss; `output_hidden_states`.

        Returns:
            Logits `[B, T, V]`, the loss if there are labels, and the cache.

        Raises:
            ValueError: An argument has a wrong shape, or does not go with another.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seq_lens_q=cu_seq_lens_q,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
