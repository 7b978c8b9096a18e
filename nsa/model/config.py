"""The config of a language model. Importable without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from nsa.config import NSAConfig, check_field_names, check_fields, require

AttentionKind = Literal["nsa", "dense", "sliding", "longformer", "bigbird"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """The model: sizes, attention, and in `attn` its dim, heads and NSA hyperparameters.

    Raises:
        ValueError: A field has a wrong type or value, or two do not fit each other.
    """

    vocab_size: int
    n_layers: int
    hidden: int  # hidden size of the MLP
    seq_len: int  # training length; RoPE sets no limit
    attn: NSAConfig
    # One kind for all layers, or one per layer.
    attention: AttentionKind | tuple[AttentionKind, ...] = "nsa"
    tie_embeddings: bool = True
    norm_eps: float = 1e-5

    # Of sliding, longformer and bigbird, in tokens; then bigbird's block size and random blocks.
    window: int = 512
    n_global: int = 64
    block: int = 64
    n_random: int = 3
    random_seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, {"n_random": 0, "random_seed": 0})
        accepted = f"one of {ATTENTION_KINDS}, or a tuple of n_layers = {self.n_layers} of them"
        if isinstance(self.attention, tuple):
            require(len(self.attention) == self.n_layers, "attention", self.attention, accepted)
        # Not `self.kinds`, which takes memory in proportion to n_layers, and that may be absurd.
        kinds = self.attention if isinstance(self.attention, tuple) else (self.attention,)
        require(all(kind in ATTENTION_KINDS for kind in kinds), "attention", self.attention, accepted)
        fits = "bigbird" not in kinds or self.window % self.block == 0
        require(fits, "window", self.window, f"a multiple of block = {self.block} for bigbird")
        plain = set(kinds) == {"nsa"} or not (self.attn.qkv_bias or self.attn.qk_norm)
        require(plain, "attention", self.attention, "'nsa' with attn.qkv_bias or attn.qk_norm, which others lack")
        runs = set(kinds) != {"dense"} or self.attn.backend in ("auto", "sdpa")
        require(runs, "attn.backend", self.attn.backend, "'auto' or 'sdpa' for dense attention, which runs SDPA")

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The attention of every layer."""
        return self.attention if isinstance(self.attention, tuple) else (self.attention,) * self.n_layers

    @classmethod
    def preset(cls, name: str) -> LMConfig:
        """A config of PRESETS.

        Args:
            name: "tiny", "125m", "340m" or "1b".

        Returns:
            The config.

        Raises:
            ValueError: There is no such preset.
        """
        require(name in PRESETS, "preset", name, f"one of {sorted(PRESETS)}")
        return PRESETS[name]

    def with_backend(self, backend: str) -> LMConfig:
        """The same config with another attention backend.

        Args:
            backend: "auto" or a backend's name.

        Returns:
            The new config.

        Raises:
            ValueError: There is no such backend, or it does not run the attention of the layers.
        """
        return replace(self, attn=replace(self.attn, backend=backend))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON types, for a checkpoint.

        Returns:
            Every field by name, `attn` as of `NSAConfig.to_dict`.
        """
        values = asdict(self)
        return values if isinstance(self.attention, str) else {**values, "attention": list(self.attention)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LMConfig:
        """The inverse of `to_dict`.

        Args:
            values: Fields by name; those with a default may be missing.

        Returns:
            The config.

        Raises:
            ValueError: A key is unknown or missing, or a value is wrong.
        """
        check_field_names("values", values, cls)
        values = {**values, "attn": NSAConfig.from_dict(values["attn"])}
        if isinstance(values.get("attention"), list):
            values["attention"] = tuple(values["attention"])
        return cls(**values)


# `configs/` refers to these by name.
PRESETS = {
    # Trains on two CPU cores in about a minute. The paper's block sizes, with fewer selected blocks and a shorter
    # window, so that every branch is sparse at 512 tokens. With gates that start open the loss jumps at its learning
    # rate.
    "tiny": LMConfig(
        vocab_size=256,
        n_layers=2,
        hidden=256,
        seq_len=512,
        attn=NSAConfig(dim=128, n_heads=4, n_kv_groups=1, d_k=32, d_v=32, n_sel=4, w=128, phi_hidden=32, gate_bias=0.0),
        window=128,
        n_random=1,
    ),
    "125m": LMConfig(
        vocab_size=50257,
        n_layers=12,
        hidden=2048,
        seq_len=2048,
        attn=NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64),
    ),
    "340m": LMConfig(
        vocab_size=50257,
        n_layers=24,
        hidden=2816,
        seq_len=4096,
        attn=NSAConfig(dim=1024, n_heads=16, n_kv_groups=2, d_k=64, d_v=64),
    ),
    "1b": LMConfig(
        vocab_size=50257,
        n_layers=18,
        hidden=7168,
        seq_len=4096,
        attn=NSAConfig(dim=2048, n_heads=32, n_kv_groups=4, d_k=64, d_v=64, rope_theta=500000.0),
    ),
}
