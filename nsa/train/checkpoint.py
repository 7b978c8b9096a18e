"""Checkpoints of a run: saved while it goes on, kept a few, read back on any number of ranks.

    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    found = checkpoints.load(model, optimizer)            # None in a new run, else (step, extra)
    checkpoints.save(step, model, optimizer, {"data": loader.state_dict(), "rng": rng_state()}, loss=loss)
    checkpoints.close()

`torch.distributed.checkpoint` plans who writes and reads what, copies the state to the CPU within `save`, and writes in
a thread; `nsa.train.storage` is where it goes. In a distributed run every rank makes every call.
"""

from __future__ import annotations

import base64
import json
import math
import random
import reprlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from nsa.config import require, require_bool, require_int, require_positive_int
from nsa.files import TEMPORARY
from nsa.model import LM, save_model
from nsa.train.distributed import any_rank
from nsa.train.index import INDEX, Damaged, Index
from nsa.train.run_folder import saved_steps
from nsa.train.storage import Reader, Writer, discard, recover, remove

T = TypeVar("T")


class Checkpoints:
    """The folder `step_N` for each of the `keep` newest good steps and, with `keep_best`, for that of the lowest loss.

    One that was not saved as good is kept only while it is the newest: it never costs a good one.

    An error of a save in the background is returned by `look`, said by the next `save`, which then waits for its own,
    and raised by any other call. It never costs an older checkpoint: those are removed only once the new one has its
    name.
    """

    def __init__(self, folder: Path, *, keep: int = 3, keep_best: bool = True, judge: str = "") -> None:
        require_positive_int("keep", keep)
        require_bool("keep_best", keep_best)
        require(not folder.exists() or folder.is_dir(), "folder", str(folder), "a folder, or a path where one can be")
        self.folder = folder
        self.keep = keep
        self.keep_best = keep_best
        # What the losses are of: those of other validation data are not compared with them.
        self.judge = judge
        # The thread speaks with other ranks' threads while training does: that needs a group of its own, on the CPU.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.pending: tuple[int, Future[Any]] | None = None
        self.current: int | None = None
        self.rejected: list[int] = []
        # By step: whether it is good, and its loss where that can be compared.
        self.known: dict[int, tuple[bool, float | None]] = {}
        # torch finds it remarkable that there is one process; here that is the usual case.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        extra: dict[str, Any],
        *,
        loss: float | None = None,
        good: bool = True,
        wait: bool = False,
    ) -> None:
        """Copy the state to the CPU, return, and write it in the background; with `wait`, return when it is written.

        `extra` is each rank's own. `good`: loss, gradients and parameters are finite. A save that is still being
        written is waited for first.
        """
        require_int("step", step, at_least=0)
        lost = self.settle()
        if lost is not None:
            # That state is gone, this one need not be.
            wait = True
            if self.rank == 0:
                warnings.warn(f"{lost}; trying again with step {step}", RuntimeWarning, stacklevel=2)
        # A signal often comes where a checkpoint was just read or written: it is the same state, if it is still there.
        if step == self.current and loss is None and self.from_rank_0(self.path(step).is_dir()):
            return
        said = plain_json("extra", extra)
        writer = Writer(self.path(step), step, loss, self.judge, good, said, lambda: self.prune(step))
        if self.rank == 0:
            self.set_aside()
        answer = dcp.async_save(state_of(model, optimizer), storage_writer=writer, process_group=self.group)
        self.pending = (step, answer if isinstance(answer, Future) else answer.upload_completion)
        if wait:
            self.wait()

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Read the newest intact checkpoint into both; its step and `extra`, or None where there is none at all.

        A damaged one is passed over with a warning. `extra` is what this rank saved, or what rank 0 did if there were
        more or fewer ranks. The optimizer's hyperparameters are not read: the configuration has them.
        """
        self.wait()
        if self.rank == 0:
            recover(self.folder)
        steps = self.from_rank_0(self.steps())
        problems = []
        for step in reversed(steps):
            index, problem = self.inspect(step)
            if index is not None and problem is None:
                self.read(index, model, optimizer)
                self.current = step
                same = len(index.extra) == self.ranks
                return step, index.extra[self.rank if same else 0]
            self.rejected.append(step)
            problems.append(f"step_{step}: {problem}")
            if self.rank == 0:
                message = f"{self.path(step)} is damaged ({problem}); going back to the checkpoint before it"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        if steps:
            raise ValueError(
                f"folder is {str(self.folder)!r}; accepted: one with an intact checkpoint, or none: all of {steps} are "
                f"damaged ({'; '.join(problems)}). Restore them from a copy"
            )
        return None

    def wait(self) -> None:
        """Until what is being written has its name; an error of it is raised here."""
        lost = self.settle()
        if lost is not None:
            raise lost

    def settle(self) -> OSError | RuntimeError | ValueError | None:
        """Until what is being written has its name; its error, if it does not get it."""
        if self.pending is None:
            return None
        step, future = self.pending
        self.pending = None
        try:
            future.result()
        except CheckpointException as error:
            if self.rank == 0:
                with suppress(OSError):
                    discard(self.path(step).with_name(self.path(step).name + TEMPORARY))
            return plain_error(f"saving the checkpoint of step {step} in {self.folder} failed", error)
        self.current = step
        return None

    def look(self) -> OSError | RuntimeError | ValueError | None:
        """The error of a save that has failed meanwhile; one that is being written is left to it."""
        if self.pending is None or any_rank(not self.pending[1].done(), torch.device("cpu")):
            return None
        return self.settle()

    def close(self) -> None:
        """Wait for the last save. The ranks' own group goes when the run's does."""
        self.wait()

    def latest(self) -> int | None:
        """The newest step that has its name on the disk."""
        return max(self.steps(), default=None)

    def last_good(self) -> int | None:
        """The newest step that was saved with finite loss, gradients and parameters."""
        return max((step for step in self.steps() if self.is_good(step)), default=None)

    def describe(self, step: int, *, saved: bool, good: bool) -> str:
        """What became of `step`, and which one is the last good one if it is not."""
        if good:
            return f"step {step} is saved in {self.folder}"
        # One that is being written counts.
        self.wait()
        last = self.last_good()
        kept = "no good state was saved before" if last is None else f"the last good state is that of step {last}"
        if saved:
            return f"step {step} is saved in {self.folder}, but its loss or gradients are not finite: {kept}"
        return f"step {step} is not saved, its parameters give no finite loss any more: {kept}"

    def best(self) -> int | None:
        """The good step with the lowest loss, of those that were saved with one."""
        losses = {step: self.loss(step) for step in self.steps() if self.is_good(step)}
        finite = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
        return min(finite, key=lambda step: (finite[step], -step), default=None)

    def steps(self) -> list[int]:
        return saved_steps(self.folder)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def loss(self, step: int) -> float | None:
        found = self.lookup(step)
        return found[1] if found else None

    def is_good(self, step: int) -> bool:
        found = self.lookup(step)
        return found is not None and found[0]

    def lookup(self, step: int) -> tuple[bool, float | None] | None:
        """None: the index cannot be read."""
        if step not in self.known:
            try:
                index = Index.read(self.path(step))
            except Damaged:
                return None
            self.known[step] = (index.good, index.loss if index.judge == self.judge else None)
        return self.known[step]

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def inspect(self, step: int) -> tuple[Index | None, str | None]:
        """The index, and what is wrong, the same on every rank; each looks at a part of the files."""
        index, problem = None, None
        try:
            index = Index.read(self.path(step))
            index.check(self.path(step), sorted(index.files)[self.rank :: self.ranks])
        except Damaged as error:
            problem = str(error)
        if self.group is not None:
            problems: list[str | None] = [None] * self.ranks
            dist.all_gather_object(problems, problem, group=self.group)
            problem = next((text for text in problems if text is not None), None)
        return index, problem

    def read(self, index: Index, model: nn.Module, optimizer: Optimizer) -> None:
        # A state that was saved before the first step has nothing of the optimizer's.
        began = any(name.startswith("optimizer.") for name in index.tensors)
        state = state_of(model, optimizer, create=began)
        saved, wanted = index.tensors, {name: tuple(x.shape) for name, x in state.items()}
        if not began:
            wanted = {name: shape for name, shape in wanted.items() if name.startswith("model.")}
        missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
        other = [name for name in sorted(wanted.keys() & saved.keys()) if saved[name].size != wanted[name]]
        if missing or unknown or other:
            shapes = [f"{name} {list(saved[name].size)} instead of {list(wanted[name])}" for name in other]
            parts = {"without": missing, "with": unknown, "and": shapes}
            said = "; ".join(f"{word} {names[0]}{and_more(names)}" for word, names in parts.items() if names)
            raise ValueError(f"{self.path(index.step)} is of another model: {said}")
        try:
            # In place: these are the tensors of the model and of the optimizer, not copies.
            dcp.load(
                {name: state[name] for name in wanted},
                storage_reader=Reader(self.path(index.step), index),
                process_group=self.group,
            )
        except CheckpointException as error:
            raise plain_error(f"{self.path(index.step)} could not be read", error) from error

    def set_aside(self) -> None:
        """Damaged checkpoints lose their names before a new one is written: they must not count as the newest."""
        for step in self.rejected:
            if self.path(step).exists():
                names = (f"damaged_step_{step}" + (f"_{n}" if n > 1 else "") for n in count(1))
                self.path(step).rename(next(self.folder / name for name in names if not (self.folder / name).exists()))
        self.rejected.clear()

    def prune(self, saved: int) -> None:
        """Runs on rank 0, in the thread that wrote `saved`, which therefore stays whatever its number.

        One whose index cannot be read is left alone: nobody knows what it is.
        """
        self.known.pop(saved, None)
        steps = self.steps()
        good = [step for step in steps if self.is_good(step)]
        kept = {*good[-self.keep :], saved, self.best() if self.keep_best else None}
        for step in steps:
            if step not in kept and self.lookup(step) is not None:
                remove(self.path(step))

    def from_rank_0(self, value: T) -> T:
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]


def state_of(model: nn.Module, optimizer: Optimizer, *, create: bool = False) -> dict[str, Tensor]:
    """Every tensor of both by a name that is the same sharded, replicated, compiled or plain; not copies.

    An optimizer makes its tensors at its first step: `create` has them made before.
    """
    state: dict[str, Any] = {f"model.{name}": x for name, x in get_model_state_dict(model).items()}
    if create or optimizer.state:
        flat = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        ).items()
        state |= {f"optimizer.{name.removeprefix('state.')}": x for name, x in flat if name.startswith("state.")}
    strange = sorted(name for name, x in state.items() if not isinstance(x, Tensor))
    require(not strange, "the state", f"one with {strange}", "tensors alone: anything else would be pickled")
    return state


def and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def plain_json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ValueError(
            f"{name} is not plain JSON ({error}); accepted: dict, list, str, int, float, bool, None"
        ) from error


def plain_error(what: str, error: CheckpointException) -> OSError | RuntimeError | ValueError:
    """torch wraps what each rank ran into; the reader wants the sentence."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    said = "; ".join(
        f"rank {rank}: {failure}" if len(failures) > 1 else f"{failure}" for rank, failure in failures.items()
    )
    if all(isinstance(failure, OSError) for failure in failures.values()):
        return OSError(f"{what}: {said}; older checkpoints are as they were")
    if all(isinstance(failure, ValueError) for failure in failures.values()):
        return ValueError(f"{what}: {said}")
    return RuntimeError(f"{what}: {said}")


# The state of the random number generators, as text that JSON holds.


def rng_state(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Of Python, of torch, and of `device` where it has its own."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": to_text(torch.get_rng_state())}
    if torch.device(device).type == "cuda":
        state["cuda"] = to_text(torch.cuda.get_rng_state(device))
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | str = "cpu") -> None:
    """A run that goes on elsewhere keeps what that machine has: a GPU's state is no use to a CPU.

    Raises:
        ValueError: `state` is not what `rng_state` returned.
    """
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(from_text(state["torch"]))
        if "cuda" in state and torch.device(device).type == "cuda":
            torch.cuda.set_rng_state(from_text(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"rng cannot be restored: {error!r}") from error


def to_text(x: Tensor) -> str:
    return base64.b64encode(bytes(x.tolist())).decode()


def from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """What a checkpoint's index holds besides tensors is taken up in here: a `ValueError` names the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the run cannot go on from {folder / INDEX}: {error}") from error


def check_state(extra: dict[str, Any]) -> None:
    """`ValueError` unless `extra` holds all that a run saves besides tensors."""

    def is_number(value: Any) -> bool:
        return type(value) is float or is_count(abs(value) if type(value) is int else None)

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**63

    def is_scaler(value: Any) -> bool:
        expected = torch.amp.GradScaler("cpu").state_dict().keys()
        return value == {} or (
            isinstance(value, dict) and value.keys() == expected and all(map(is_number, value.values()))
        )

    valid: dict[str, Callable[[Any], bool]] = {
        "data": lambda value: isinstance(value, dict),
        "rng": lambda value: isinstance(value, dict),
        "scaler": is_scaler,
        "ranks": is_count,
        "skipped": is_count,
        "seconds": is_number,
        "loss_start": lambda value: value is None or is_number(value),
        # Earlier versions did not save it.
        "tokens_per_step": lambda value: value is None or is_count(value),
    }
    for name, holds in valid.items():
        if not holds(extra.get(name)):
            raise ValueError(f"{name} cannot be {reprlib.repr(extra.get(name))}")


# What others load.


class HasSave(Protocol):
    """All that is asked of a tokenizer here: to write its file durably."""

    def save(self, folder: Path) -> None: ...


def put_together(model: nn.Module) -> LM | None:
    """The whole model, for the first rank, on the CPU where others hold parts of it; every rank calls it."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    # FSDP2 makes a class of its own of the model's, which is still one of these; DDP and compilation wrap it.
    config = next(module.config for module in model.modules() if isinstance(module, LM))
    with torch.device("meta"):
        whole = LM(config)
    whole.load_state_dict(state, assign=True)
    return whole


def export(model: nn.Module, folder: Path, tokenizer: HasSave | None) -> Path:
    """Write the whole model with its configuration and tokenizer for `nsa.model.load_model`; the parameters' file.

    Every rank calls it, rank 0 writes. Each file is replaced durably; files of other names are not touched.
    """
    whole = put_together(model)
    if whole is None:
        return folder
    if tokenizer is not None:
        tokenizer.save(folder)
    return save_model(whole, folder)
