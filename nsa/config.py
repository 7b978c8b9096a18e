"""The hyperparameters of an NSA layer, checked when they are set, and how an argument error is raised."""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nsa.lazy import renamed_attributes

BranchName = Literal["cmp", "sel", "win"]
BRANCHES: tuple[BranchName, ...] = get_args(BranchName)
__getattr__ = renamed_attributes(__name__, {"Branch": "BranchName"})

# How values are formatted in an error.
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 400
SHORT.maxlist = SHORT.maxtuple = SHORT.maxset = SHORT.maxdict = 40
SHORT.maxlevel = 4

# Targets that are not scored: the default of torch's cross-entropy.
IGNORED = -100

# Hyperparameters that the paper has a letter for, by the names that they have in `nsa.ops`.
PAPER_NAMES = {"block": "l", "stride": "d", "select_block": "l_sel", "n_select": "n_sel", "window": "w"}
# The least value of those that may be 0; of the others it is 1.
AT_LEAST = {"n_init": 0, "n_local": 0}

# Added to the mean square of a branch's output where that is normalized.
BRANCH_NORM_EPS = 1e-6

# "auto", and all backends in the order in which it tries them; this version or machine may lack some. The reference,
# which builds whole score matrices, is last.
BACKENDS = ("auto", "triton", "flash", "sdpa", "reference")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's RoPE scaling: long wavelengths are stretched by `factor`, short ones kept, the rest interpolated.

    Args:
        factor: At least 1.
        low_freq_factor: Wavelengths above `original_max_len / low_freq_factor` are stretched.
        high_freq_factor: Those below `original_max_len / high_freq_factor` are kept.
        original_max_len: Tokens that the model was trained on before.

    Raises:
        ValueError: A field is not a positive number, `factor` is below 1, or the two bounds are in the wrong order.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        check_fields(self, prefix="rope_scaling.")
        require(self.factor >= 1, "rope_scaling.factor", self.factor, "a number of at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        require(high > low, "rope_scaling.high_freq_factor", high, f"a number above low_freq_factor = {low}")


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """The hyperparameters of one NSA layer; one-letter names are the paper's.

    Raises:
        ValueError: A field has a wrong type or value, or two do not fit each other.
    """

    dim: int
    n_heads: int  # query heads
    n_kv_groups: int
    d_k: int  # head_dim of queries and keys
    d_v: int  # head_dim of values

    l: int = 32  # noqa: E741  tokens per compression block
    d: int = 16  # stride of the compression blocks
    l_sel: int = 64  # tokens per selection block
    n_sel: int = 16  # selected blocks, forced ones included
    n_init: int = 1  # first blocks that are always selected
    n_local: int = 2  # last blocks that are always selected, the query's own included
    w: int = 512  # sliding window

    # How a block of l keys becomes one: a learned MLP (the paper) or the mean.
    phi: Literal["mlp", "mean"] = "mlp"
    phi_hidden: int | None = None  # None: twice the head_dim
    # Apply RoPE to the compressed key ("after" phi, at the block's first position) or to the raw keys ("before" phi).
    compress_rope: Literal["after", "before"] = "after"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    # One K/V for the three branches, as in a converted dense checkpoint.
    share_kv: bool = False
    # As in Qwen: biases of queries, keys and values; an RMSNorm of each head of queries and keys before RoPE.
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    gate: Literal["sigmoid", "softmax"] = "sigmoid"
    gate_hidden: int | None = None  # None: a quarter of dim
    # Initial bias of the logits of the gate. Gates that start open learned recall sooner (docs/evaluation.md).
    gate_bias: float = 2.0
    # An RMSNorm, without weights, of each head of a branch's output before the gated sum. Branches then run one by one.
    branch_norm: bool = False
    # For ablations: fix the gate to one branch, or close one branch's gate.
    force_branch: BranchName | None = None
    drop_branch: BranchName | None = None

    backend: str = "auto"
    # Make every fallback an error, and check values on the GPU too, which synchronizes.
    strict: bool = False

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST, skip=("gate_bias",))
        check_heads(self.n_heads, self.n_kv_groups, heads_name="n_heads", groups_name="n_kv_groups")
        require(self.d_k % 2 == 0, "d_k", self.d_k, "an even head_dim, because RoPE rotates pairs")
        check_compression(self.l, self.d, block_name="l", stride_name="d")
        names = {"stride": "d", "select_block": "l_sel", "n_select": "n_sel"}
        check_selection(self.d, self.l_sel, self.n_sel, self.n_init, self.n_local, names=names)
        check_backend(self.backend)
        both = self.force_branch is not None and self.drop_branch is not None
        require(not both, "drop_branch", self.drop_branch, f"None with force_branch = {self.force_branch!r}")
        both = self.force_branch is not None and self.branch_norm
        require(not both, "branch_norm", self.branch_norm, f"False with force_branch = {self.force_branch!r}")
        finite = isinstance(self.gate_bias, int | float) and abs(self.gate_bias) <= sys.float_info.max
        require(finite and not isinstance(self.gate_bias, bool), "gate_bias", self.gate_bias, "a finite number")
        valid = self.rope_scaling is None or isinstance(self.rope_scaling, RopeScaling)
        require(valid, "rope_scaling", self.rope_scaling, "None or a RopeScaling")

    @property
    def heads_per_group(self) -> int:
        """Query heads per KV group."""
        return self.n_heads // self.n_kv_groups

    def reads_per_step(self, length: int) -> int:
        """Keys that one decoding step reads in the three branches.

        At most `N_cmp + n_sel * l_sel + min(w, length)`; less if the sequence has fewer than `n_sel` blocks or its last
        block is not full. With `n_local = 0` the query's own block is selected by importance like any other, and this
        is the count without it.

        Args:
            length: Tokens up to and including the query.

        Returns:
            The number of keys, as the heads of one group read them.

        Raises:
            ValueError: `length` is not an integer of at least 0.
        """
        # Imported here: configs are importable without torch.
        from nsa.geometry import n_compressed

        require_int("length", length, at_least=0)
        n_blocks = -(-length // self.l_sel)
        selected = min(self.n_sel, n_blocks) * self.l_sel
        if self.n_local > 0 or self.n_sel >= n_blocks:
            selected -= n_blocks * self.l_sel - length
        return n_compressed(length, self.l, self.d) + selected + min(self.w, length)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON types, for a checkpoint or a file.

        Returns:
            Every field by name, `rope_scaling` as a dict or None.
        """
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NSAConfig:
        """The inverse of `to_dict`.

        Args:
            values: Fields by name; those with a default may be missing.

        Returns:
            The config.

        Raises:
            ValueError: A key is unknown or missing, or a value is wrong.
        """
        require(isinstance(values, dict), "values", values, "a dict of hyperparameters")
        check_field_names("values", values, cls)
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            check_field_names("rope_scaling", scaling, RopeScaling)
            values = {**values, "rope_scaling": RopeScaling(**scaling)}
        return cls(**values)


def check_field_names(name: str, values: dict[str, Any], cls: type) -> None:
    """A ValueError unless the keys of `values` are fields of the dataclass `cls` and no required one is missing."""
    known = {field.name for field in fields(cls)}
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    unknown, missing = sorted(set(values) - known, key=str), sorted(needed - set(values))
    require(not unknown, f"the keys of {name}", unknown, f"only {sorted(known)}")
    require(not missing, f"the keys of {name}", sorted(values, key=str), f"at least {missing} too")


field_types: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def check_fields(
    config: Any, at_least: Mapping[str, int] | None = None, *, prefix: str = "", skip: Collection[str] = ()
) -> None:
    """Check each field of a dataclass by its type: a bool, an int of at least 1, a positive finite float, or one of the
    values of a `Literal`; None where the type says so. Other types, and fields of `skip`, are not checked. `at_least`:
    the least value of a field where it differs, 0 for a float; `prefix`: what names in errors start with."""
    for name, hint in field_types(type(config)).items():
        value, label = getattr(config, name), prefix + name
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if name in skip or (value is None and NoneType in kinds):
            continue
        kind, *others = (kind for kind in kinds if kind is not NoneType)
        least = (at_least or {}).get(name, 1)
        if get_origin(kind) is Literal and not others:
            values = get_args(kind)
            accepted = f"one of {values}" if len(values) > 1 else repr(values[0])
            require(value in values, label, value, f"None or {accepted}" if NoneType in kinds else accepted)
        elif kind is bool:
            require_bool(label, value)
        elif kind is int:
            require_int(label, value, at_least=least)
        elif kind is float:
            require_positive_number(label, value, or_zero=least == 0)


def require(condition: bool, name: str, value: object, accepted: str) -> None:
    """A ValueError that holds the name, the value and what is accepted, in words, unless `condition`."""
    if not condition:
        raise ValueError(f"{name} is {shortened(value)}; accepted: {accepted}")


def shortened(value: object) -> str:
    """`repr(value)`, abbreviated: a value from a file may be huge, or contain itself."""
    try:
        text = SHORT.repr(value)
    except ValueError:
        # Python does not convert an integer of more than a few thousand digits.
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 1000 else f"{text[:1000]} ..."


def require_int(name: str, value: object, *, at_least: int) -> None:
    """`require` an int, not a bool, in `[at_least, 2^62)`."""
    # Torch's ops take 64-bit integers.
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    require(valid, name, value, f"an integer of at least {at_least}")
    require(isinstance(value, int) and value < 2**62, name, value, "an integer below 2^62")


def require_bool(name: str, value: object) -> None:
    require(isinstance(value, bool), name, value, "True or False")


def require_positive_number(name: str, value: object, *, or_zero: bool = False) -> None:
    """`require` a positive finite int or float, or 0 where that is allowed."""
    # Compared, not converted: an integer may be too large for a float.
    finite = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    accepted = "0 or a positive finite number" if or_zero else "a positive finite number"
    require(finite and (or_zero or value != 0), name, value, accepted)


def require_positive_int(name: str, value: object) -> None:
    require_int(name, value, at_least=1)


def check_backend(name: object) -> None:
    """`require` "auto" or the name of a backend; the error suggests the nearest one."""
    require(isinstance(name, str), "backend", name, "'auto' or a backend's name")
    nearest = difflib.get_close_matches(str(name).lower(), BACKENDS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    require(name in BACKENDS, "backend", name, f"one of {BACKENDS}{hint}")


def check_heads(n_heads: int, n_groups: int, *, heads_name: str, groups_name: str) -> None:
    """`require` the same number of heads in every group."""
    require(n_heads % n_groups == 0, heads_name, n_heads, f"a multiple of {groups_name} = {n_groups}")


def check_compression(block: int, stride: int, *, block_name: str = "block", stride_name: str = "stride") -> None:
    """`require` a block that is a multiple of the stride."""
    require_positive_int(block_name, block)
    require_positive_int(stride_name, stride)
    require(block % stride == 0, block_name, block, f"a multiple of {stride_name} = {stride}")
    require(block < 2**31, block_name, block, "less than 2^31")


def check_selection(
    stride: int, select_block: int, n_select: int, n_init: int, n_local: int, *, names: dict[str, str] | None = None
) -> None:
    """`require` hyperparameters of block selection; `names`: what the caller calls them."""
    called = names or {}
    stride_name, select_name, count_name = (called.get(x, x) for x in ("stride", "select_block", "n_select"))
    require_positive_int(select_name, select_block)
    require_positive_int(count_name, n_select)
    require_int("n_init", n_init, at_least=0)
    require_int("n_local", n_local, at_least=0)
    require(select_block % stride == 0, select_name, select_block, f"a multiple of {stride_name} = {stride}")
    accepted = f"at least n_init + n_local = {n_init} + {n_local} blocks"
    require(n_select >= n_init + n_local, count_name, n_select, accepted)
