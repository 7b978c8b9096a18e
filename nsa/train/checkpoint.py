"""Checkpoints of a run: saved in the background, the newest and the best kept, read back on any number of ranks.

    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    found = checkpoints.load(model, optimizer)            # None in a new run, else (step, extra)
    checkpoints.save(step, model, optimizer, {"data": loader.state_dict(), "rng": rng_state()}, loss=loss)
    checkpoints.close()

`torch.distributed.checkpoint` plans which rank writes and reads what, copies the state to the CPU within `save`, and
writes it in a thread by `nsa.train.storage`. In a distributed run every rank makes every call.
"""

from __future__ import annotations

import base64
import json
import math
import random
import warnings
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from nsa.config import require
from nsa.data import Tokenizer
from nsa.files import check_json, is_natural, is_number
from nsa.model import LM, save_model
from nsa.train.distributed import any_rank, from_first
from nsa.train.run_folder import discard, recover, remove, saved_steps, temporary_name
from nsa.train.storage import Damaged, Index, Reader, Writer

# A single process is the usual case here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpoints:
    """The folders `step_N` of the `keep` newest good steps and of the one with the lowest loss.

    A checkpoint that was not saved as good is kept only while it is the newest, and never replaces a good one. Older
    checkpoints are removed only once the new one has its name. An error of a save in the background is returned by
    `failed_save`, or warned of by the next `save`, which then waits for its own, or raised by any other call. Losses
    of data with another `validation_id` are not compared.
    """

    def __init__(self, folder: Path, *, keep: int = 3, validation_id: str = "") -> None:
        require(not folder.exists() or folder.is_dir(), "folder", str(folder), "a folder, or a path where one can be")
        self.folder, self.keep, self.validation_id = folder, keep, validation_id
        # The thread communicates while training does, which needs a group of its own, on the CPU.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.pending: tuple[int, Future[Any]] | None = None
        self.current: int | None = None
        self.rejected: list[int] = []
        # By step: whether it is good, and its loss where that can be compared.
        self.known: dict[int, tuple[bool, float | None]] = {}

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
        """Copy the state to the CPU and write it in the background, once the save before it is written.

        `extra` is this rank's own state, plain JSON; `good`: loss, gradients and parameters are finite; `wait`: return
        only when it is written.
        """
        lost = self.settle()
        if lost is not None:
            wait = True
            if self.rank == 0:
                warnings.warn(f"{lost}; trying again with step {step}", RuntimeWarning, stacklevel=2)
        # A signal often comes right after a checkpoint was read or written; it may have been deleted since.
        if step == self.current and loss is None and from_first(self.path(step).is_dir(), self.group):
            return
        try:
            text = json.dumps(extra)
        except TypeError as error:
            accepted = "dict, list, str, int, float, bool, None"
            raise ValueError(f"extra is not plain JSON ({error}); accepted: {accepted}") from error
        index = Index(step, loss, self.validation_id, [], {}, {}, good)
        writer = Writer(self.path(step), index, text, then=lambda: self.prune(step))
        if self.rank == 0:
            self.set_aside()
        answer = dcp.async_save(state_of(model, optimizer), storage_writer=writer, process_group=self.group)
        self.pending = (step, answer if isinstance(answer, Future) else answer.upload_completion)
        if wait:
            self.wait()

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Read the newest intact checkpoint into both, passing over damaged ones with a warning.

        The optimizer's hyperparameters are not read: the config has them. Returns the step and this rank's `extra`, or
        that of rank 0 if the number of ranks has changed; None where there is no checkpoint. A ValueError if all
        checkpoints are damaged, or the newest intact one is of another model.
        """
        self.wait()
        if self.rank == 0:
            recover(self.folder)
        steps = from_first(self.steps(), self.group)
        problems = []
        for step in reversed(steps):
            index, problem = self.inspect(step)
            if index is not None and problem is None:
                # A state that was saved before the first step has no optimizer state.
                began = any(name.startswith("optimizer.") for name in index.tensors)
                state = state_of(model, optimizer, create=began)
                wanted = state if began else {name: x for name, x in state.items() if name.startswith("model.")}
                read_state(self.path(step), index, wanted, self.group)
                self.current = step
                return step, index.extra[self.rank if len(index.extra) == self.ranks else 0]
            self.rejected.append(step)
            problems.append(f"step_{step}: {problem}")
            if self.rank == 0:
                message = f"{self.path(step)} is damaged ({problem}); going back to the checkpoint before it"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        damaged = f"all of {steps} are damaged ({'; '.join(problems)}). Restore them from a copy"
        require(not steps, "folder", str(self.folder), f"one with an intact checkpoint, or none: {damaged}")
        return None

    def wait(self) -> None:
        """Wait for the save in the background; raises its error."""
        lost = self.settle()
        if lost is not None:
            raise lost

    def settle(self) -> OSError | RuntimeError | ValueError | None:
        """Wait for the save in the background; returns its error."""
        if self.pending is None:
            return None
        step, future = self.pending
        self.pending = None
        try:
            future.result()
        except CheckpointException as error:
            if self.rank == 0:
                with suppress(OSError):
                    discard(temporary_name(self.path(step)))
            return plain_error(f"saving the checkpoint of step {step} in {self.folder} failed", error)
        self.current = step
        return None

    def failed_save(self) -> OSError | RuntimeError | ValueError | None:
        """The error of a save in the background that has failed; does not wait for one that is still being written."""
        if self.pending is None or any_rank(not self.pending[1].done(), torch.device("cpu")):
            return None
        return self.settle()

    def last_good(self) -> int | None:
        """The newest step that was saved with finite loss, gradients and parameters."""
        return max((step for step in self.steps() if self.is_good(step)), default=None)

    def describe(self, step: int, *, saved: bool, good: bool) -> str:
        """Whether `step` was saved, and which one is the last good one if it is not."""
        if good:
            return f"step {step} is saved in {self.folder}"
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
        return (self.lookup(step) or (False, None))[1]

    def is_good(self, step: int) -> bool:
        return (self.lookup(step) or (False, None))[0]

    def lookup(self, step: int) -> tuple[bool, float | None] | None:
        """Whether the step is good, and its loss if it can be compared; None where the index cannot be read."""
        if step not in self.known:
            try:
                index = Index.read(self.path(step))
            except Damaged:
                return None
            self.known[step] = (index.good, index.loss if index.validation_id == self.validation_id else None)
        return self.known[step]

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def inspect(self, step: int) -> tuple[Index | None, str | None]:
        """The index and what is wrong with the checkpoint, the same on every rank; each checks some of the files."""
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

    def set_aside(self) -> None:
        """Rename damaged checkpoints before a new one is written: they must not count as the newest."""
        for step in self.rejected:
            if self.path(step).exists():
                names = (f"damaged_step_{step}" + (f"_{n}" if n > 1 else "") for n in count(1))
                self.path(step).rename(next(self.folder / name for name in names if not (self.folder / name).exists()))
        self.rejected.clear()

    def prune(self, saved: int) -> None:
        """Remove old ones, on rank 0 in the thread that wrote `saved`, which stays; those without an index stay too."""
        self.known.pop(saved, None)
        steps = self.steps()
        good = [step for step in steps if self.is_good(step)]
        kept = {*good[-self.keep :], saved, self.best()}
        for step in steps:
            if step not in kept and self.lookup(step) is not None:
                remove(self.path(step))


def read_state(folder: Path, index: Index, state: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read the checkpoint in `folder` into the tensors of `state`; a ValueError if it holds others."""
    saved = {name: list(x.size) for name, x in index.tensors.items()}
    wanted = {name: list(x.shape) for name, x in state.items()}
    other = [name for name in sorted(wanted.keys() & saved.keys()) if saved[name] != wanted[name]]
    parts = {
        "without": sorted(wanted.keys() - saved.keys()),
        "with": sorted(saved.keys() - wanted.keys()),
        "and": [f"{name} {saved[name]} instead of {wanted[name]}" for name in other],
    }
    found = [f"{word} {', '.join(names[:3])}, {len(names)} in all" for word, names in parts.items() if names]
    if found:
        raise ValueError(f"{folder} is of another model: {'; '.join(found)}")
    try:
        dcp.load({**state}, storage_reader=Reader(folder, index), process_group=group)
    except CheckpointException as error:
        raise plain_error(f"{folder} could not be read", error) from error


def state_of(model: nn.Module, optimizer: Optimizer, *, create: bool = False) -> dict[str, Tensor]:
    """Every tensor of both (not copies) by a name that is the same sharded, replicated, compiled or plain. With
    `create` the optimizer creates its tensors now, not at its first step."""
    state: dict[str, Any] = {f"model.{name}": x for name, x in get_model_state_dict(model).items()}
    if create or optimizer.state:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(model, optimizer, options=options).items()
        state |= {f"optimizer.{name.removeprefix('state.')}": x for name, x in flat if name.startswith("state.")}
    strange = sorted(name for name, x in state.items() if not isinstance(x, Tensor))
    require(not strange, "the state", f"one with {strange}", "tensors alone: anything else would be pickled")
    return state


def plain_error(what: str, error: CheckpointException) -> OSError | RuntimeError | ValueError:
    """The message of the error that torch wrapped, by rank if several failed."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    several = len(failures) > 1
    text = "; ".join(f"rank {rank}: {failure}" if several else str(failure) for rank, failure in failures.items())
    text = f"{what}: {text}"
    if all(isinstance(failure, OSError) for failure in failures.values()):
        return OSError(f"{text}; older checkpoints are as they were")
    return (ValueError if all(isinstance(f, ValueError) for f in failures.values()) else RuntimeError)(text)


def rng_state(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The states of the generators of Python, torch, and `device` where it has its own, as text that JSON holds."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": to_text(torch.get_rng_state())}
    if torch.device(device).type == "cuda":
        state["cuda"] = to_text(torch.cuda.get_rng_state(device))
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | str = "cpu") -> None:
    """Restore what `rng_state` returned, else a ValueError; the state of a GPU is ignored on a CPU."""
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


def check_state(extra: dict[str, Any]) -> None:
    """`ValueError` unless `extra` holds all that a run saves besides tensors."""
    scaler = dict.fromkeys(torch.amp.GradScaler("cpu").state_dict(), is_number) if extra.get("scaler") else {}
    expected = {"data": {}, "rng": {}, "scaler": scaler, "seconds": is_number}
    expected |= dict.fromkeys(("ranks", "skipped", "tokens_per_step"), is_natural)
    expected["loss_start"] = lambda value: value is None or is_number(value)
    # Earlier versions did not save the number of tokens.
    check_json({"tokens_per_step": 0, **extra}, expected)


def unsharded(model: nn.Module) -> LM | None:
    """The whole model on rank 0, None on the others; on the CPU if it is sharded. Every rank calls it."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    # The module may be a wrapper, or of a class that FSDP2 derived from LM.
    config = next(module.config for module in model.modules() if isinstance(module, LM))
    with torch.device("meta"):
        whole = LM(config)
    whole.load_state_dict(state, assign=True)
    return whole


def export(model: nn.Module, folder: Path, tokenizer: Tokenizer | None, step: int | None = None) -> Path:
    """Write the whole model with its config and tokenizer for `load_model`; the file of the parameters.

    Every rank calls it, rank 0 writes.
    """
    whole = unsharded(model)
    if whole is None:
        return folder
    if tokenizer is not None:
        tokenizer.save(folder)
    return save_model(whole, folder, step=step)
