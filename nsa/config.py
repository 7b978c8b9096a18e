"""The knobs of one NSA layer, checked when they are set."""

from __future__ import annotations

import difflib
import reprlib
import sys
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args

Branch = Literal["cmp", "sel", "win"]
BRANCHES: tuple[Branch, ...] = get_args(Branch)

# How values are written in an error.
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 400
SHORT.maxlist = SHORT.maxtuple = SHORT.maxset = SHORT.maxdict = 40
SHORT.maxlevel = 4

# "auto", and the names of the backends there are, whether this machine can run them or not.
BACKENDS = ("auto", "triton", "flash", "sdpa", "reference")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's frequency scaling: long wavelengths are slowed by `factor`, short ones kept, the rest blended."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_positive_number(f"rope_scaling.{name}", getattr(self, name))
        require(self.factor >= 1, "rope_scaling.factor", self.factor, "a number of at least 1")
        require(
            self.high_freq_factor > self.low_freq_factor,
            "rope_scaling.high_freq_factor",
            self.high_freq_factor,
            f"a number above low_freq_factor = {self.low_freq_factor}",
        )
        require_positive_int("rope_scaling.original_max_len", self.original_max_len)


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """One NSA layer. The one-letter names are the paper's: `l`, `d` compression block and stride, `w` window."""

    dim: int
    n_heads: int
    n_kv_groups: int
    d_k: int
    d_v: int

    l: int = 32  # noqa: E741  the paper's name
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    n_init: int = 1
    n_local: int = 2
    w: int = 512

    # How a block of l keys becomes one: "mlp" learns it (the paper), "mean" averages.
    phi: Literal["mlp", "mean"] = "mlp"
    phi_hidden: int | None = None  # None: twice the width of what is compressed
    # Rotate the compressed key ("after" phi, at the block's first position) or the raw keys ("before" phi).
    compress_rope: Literal["after", "before"] = "after"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    # One K/V for the three branches: what a converted dense checkpoint has.
    share_kv: bool = False
    gate: Literal["sigmoid", "softmax"] = "sigmoid"
    gate_hidden: int | None = None  # None: a quarter of dim
    # Pin the gate to one branch, for ablations.
    force_branch: Branch | None = None

    backend: str = "auto"
    # Turn every fallback into an error, and look at values that a GPU would have to be asked for.
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "n_heads", "n_kv_groups", "d_k", "d_v", "l", "d", "l_sel", "n_sel", "w"):
            require_positive_int(name, getattr(self, name))
        for name in ("n_init", "n_local"):
            require_int(name, getattr(self, name), at_least=0)
        for name in ("phi_hidden", "gate_hidden"):
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name))
        check_heads(self.n_heads, self.n_kv_groups, heads_name="n_heads", groups_name="n_kv_groups")
        require(self.d_k % 2 == 0, "d_k", self.d_k, "an even width, because RoPE rotates pairs")
        check_compression(self.l, self.d, block_name="l", stride_name="d")
        check_selection(
            self.d,
            self.l_sel,
            self.n_sel,
            self.n_init,
            self.n_local,
            names={"stride": "d", "select_block": "l_sel", "n_select": "n_sel"},
        )
        for name in ("share_kv", "strict"):
            require_bool(name, getattr(self, name))
        check_backend(self.backend)
        for name in ("phi", "compress_rope", "gate"):
            choices = {"phi": ("mlp", "mean"), "compress_rope": ("after", "before"), "gate": ("sigmoid", "softmax")}
            require(getattr(self, name) in choices[name], name, getattr(self, name), f"one of {choices[name]}")
        require(self.force_branch in (None, *BRANCHES), "force_branch", self.force_branch, f"None or one of {BRANCHES}")
        require_positive_number("rope_theta", self.rope_theta)
        require(
            self.rope_scaling is None or isinstance(self.rope_scaling, RopeScaling),
            "rope_scaling",
            self.rope_scaling,
            "None or a RopeScaling",
        )

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_groups

    def reads_per_step(self, length: int) -> int:
        """Keys that one decoding step reads in the three branches, for the last query of `length` tokens.

        At most `N_cmp + n_sel * l_sel + min(w, length)`. Less where the sequence has fewer than `n_sel` blocks, and
        where its last block is not full: of the query's own block only the tokens up to the query exist. With
        `n_local = 0` the query's own block is selected by score like any other, and this is the count without it.
        """
        # A config is read before torch is imported.
        from nsa.geometry import n_compressed

        require_int("length", length, at_least=0)
        n_blocks = -(-length // self.l_sel)
        selected = min(self.n_sel, n_blocks) * self.l_sel
        if self.n_local > 0 or self.n_sel >= n_blocks:
            selected -= n_blocks * self.l_sel - length
        return n_compressed(length, self.l, self.d) + selected + min(self.w, length)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: what a checkpoint or a JSON file holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NSAConfig:
        require(isinstance(values, dict), "values", values, "a dict of knobs")
        check_keys("values", values, cls)
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            check_keys("rope_scaling", scaling, RopeScaling)
            values = {**values, "rope_scaling": RopeScaling(**scaling)}
        return cls(**values)


def check_keys(name: str, values: dict[str, Any], cls: type[NSAConfig] | type[RopeScaling]) -> None:
    """The keys of `values` are fields of `cls`, and none that it needs is missing."""
    known = {field.name for field in fields(cls)}
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    unknown, missing = sorted(set(values) - known, key=str), sorted(needed - set(values))
    require(not unknown, f"the keys of {name}", unknown, f"only {sorted(known)}")
    require(not missing, f"the keys of {name}", sorted(values, key=str), f"at least {missing} too")


def require(condition: bool, name: str, value: object, accepted: str) -> None:
    """Raise the one kind of argument error there is: the name, what it was, what is accepted."""
    if not condition:
        raise ValueError(f"{name} is {shortened(value)}; accepted: {accepted}")


def shortened(value: object) -> str:
    """`repr(value)`, but never long: a value out of a file may hold itself a million times."""
    try:
        text = SHORT.repr(value)
    except ValueError:
        # Python refuses to spell an integer of more than some thousand digits.
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 1000 else f"{text[:1000]} ..."


def require_int(name: str, value: object, *, at_least: int) -> None:
    # Torch's ops take 64-bit integers.
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    require(valid, name, value, f"an integer of at least {at_least}")
    require(isinstance(value, int) and value < 2**62, name, value, "an integer below 2^62")


def require_bool(name: str, value: object) -> None:
    require(isinstance(value, bool), name, value, "True or False")


def require_positive_number(name: str, value: object) -> None:
    # Compared, not converted: an integer may be too large for a float.
    positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    require(positive, name, value, "a positive finite number")


def require_positive_int(name: str, value: object) -> None:
    require_int(name, value, at_least=1)


def check_backend(name: object) -> None:
    require(isinstance(name, str), "backend", name, "'auto' or a backend's name")
    nearest = difflib.get_close_matches(str(name).lower(), BACKENDS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    require(name in BACKENDS, "backend", name, f"one of {BACKENDS}{hint}")


def check_heads(n_heads: int, n_groups: int, *, heads_name: str, groups_name: str) -> None:
    require(n_heads % n_groups == 0, heads_name, n_heads, f"a multiple of {groups_name} = {n_groups}")


def check_compression(block: int, stride: int, *, block_name: str = "block", stride_name: str = "stride") -> None:
    require_positive_int(block_name, block)
    require_positive_int(stride_name, stride)
    require(block % stride == 0, block_name, block, f"a multiple of {stride_name} = {stride}")
    require(block < 2**31, block_name, block, "less than 2^31")


def check_selection(
    stride: int, select_block: int, n_select: int, n_init: int, n_local: int, *, names: dict[str, str] | None = None
) -> None:
    names = names or {}
    stride_name = names.get("stride", "stride")
    select_name = names.get("select_block", "select_block")
    count_name = names.get("n_select", "n_select")
    require_positive_int(select_name, select_block)
    require_positive_int(count_name, n_select)
    require_int("n_init", n_init, at_least=0)
    require_int("n_local", n_local, at_least=0)
    require(select_block % stride == 0, select_name, select_block, f"a multiple of {stride_name} = {stride}")
    require(
        n_select >= n_init + n_local, count_name, n_select, f"at least n_init + n_local = {n_init} + {n_local} blocks"
    )
