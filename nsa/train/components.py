"""The parts of a run besides its steps: log, validation, samples, statistics, the check of its speed, and checkpoints.

After each step the trainer calls `run` of the components that are `due`, in order. Every rank runs the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from nsa.config import require
from nsa.data import Batch
from nsa.files import LOCK, locked
from nsa.generate import generate
from nsa.model import LM
from nsa.progress import Progress, progress, say
from nsa.train.checkpoint import Checkpoints, check_state, rng_state, set_rng_state, unsharded
from nsa.train.config import prefix_errors
from nsa.train.distributed import all_finite, any_rank, from_all, mean_over_ranks
from nsa.train.guards import RunStopped, StopRequested, branch_profile
from nsa.train.preflight import min_tokens_per_s
from nsa.train.run_folder import CHECKPOINTS, CONFIG, RUN_INFO, RunLog
from nsa.train.run_info import read_run_info, save_run_info
from nsa.train.run_stats import GpuNumbers, attention_stats, fallbacks, log_line, peak_flops
from nsa.train.step import autocast, shares, to_device
from nsa.train.storage import INDEX

if TYPE_CHECKING:
    from nsa.train.loop import Trainer

# Timed steps after which the speed is compared with `min_tokens_per_s`.
SMOKE_STEPS = 10


def every(step: int, interval: int) -> bool:
    """Whether `step` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0


class Component:
    """Something that a run does after some of its steps; by default at intervals, except after the last step, because
    the end of a run validates, saves and samples anyway."""

    interval: str  # the key of the config that holds the interval in steps

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def due(self, step: int) -> bool:
        """Whether to run after the first `step` steps."""
        c = self.trainer.config
        return step < c.steps and every(step, getattr(c, self.interval))

    def run(self) -> object:
        raise NotImplementedError


class Logger(Component):
    """A component whose `run` reads back the steps since it last ran, which waits for the device, and logs them."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.files: RunLog | None = None
        self.progress: Progress | None = None
        self.gpu = GpuNumbers(trainer.device, self.log0)
        # The lock of the run's folder, and whether the folder is still the one that was locked.
        self.locks = ExitStack()
        self.in_place: Callable[[], bool] = lambda: True
        # The record of the start that this one resumes from, and whether the record of this one is written.
        self.last_start: dict[str, Any] | None = None
        self.info_saved = False

    def log0(self, text: str) -> None:
        """Print on rank 0."""
        if self.trainer.ranks.first:
            say(text)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line of metrics."""
        if self.files is not None:
            self.files.write(kind, **values)

    def lock_folder(self) -> None:
        if self.trainer.ranks.first:
            self.in_place = self.locks.enter_context(locked(self.trainer.config.out, "out"))

    def open_files(self) -> None:
        """Once the run knows which step it resumes from."""
        began = self.trainer.began
        if began == 0:
            self.save_run_info()
        if self.trainer.ranks.first:
            self.files = RunLog(self.trainer.config.out, resume=began > 0)
            if began == 0:
                # A run may outlive the folder that its tokenizer comes from.
                self.trainer.loader.tokenizer.save(self.trainer.config.out)

    def show_progress(self) -> None:
        self.progress = progress(self.trainer.config.steps) if self.trainer.ranks.first else None

    def close_progress(self) -> None:
        if self.progress is not None:
            self.progress.close()
            self.progress = None

    def close_files(self) -> None:
        if self.files is not None:
            self.files.close()
            self.files = None

    def save_run_info(self) -> None:
        """Write config and environment; a resumed run does so after a step, so that no failed start is resumed."""
        t = self.trainer
        if t.ranks.first and not self.info_saved:
            save_run_info(t.config, step=t.began, ranks=t.ranks, before=self.last_start)
        self.info_saved = True

    def check_in_place(self) -> None:
        """Stop the run, with its progress saved, if its folder was deleted, moved or replaced; restore single files."""
        t, out = self.trainer, self.trainer.config.out
        missing = any_rank(not self.in_place(), t.device)
        taken = missing and any_rank(t.ranks.first and (out / LOCK).exists(), t.device)
        what = f"{out} was deleted, moved or replaced during the run"
        if taken:
            raise RunStopped(f"{what}, or its {LOCK} was; another run may use it: step {t.done} is not saved")
        # A folder that holds the open metrics is the run's own.
        if missing and not any_rank(self.files is not None and self.files.in_place(), t.device):
            self.info_saved = False
            self.save_run_info()
            saved = t.checkpointer.save_if_finite()
            command = f"nsa train --resume {shlex.quote(str(out))}"
            raise RunStopped(f"{what}; created again, without metrics: {saved}. Resume with: {command}")
        if missing:
            self.lock_folder()
            self.log0(f"[log] {out / LOCK} was deleted: the folder is locked again")
        # Without them the run could not be resumed. A resumed run has not written them before its first step.
        lost = [out / name for name in (RUN_INFO, CONFIG) if not (out / name).is_file()]
        if t.ranks.first and self.info_saved and lost:
            self.info_saved = False
            self.save_run_info()
            self.log0(f"[log] {' and '.join(map(str, lost))} was deleted: written again")
        for path in self.files.reopen() if self.files is not None else ():
            self.log0(f"[log] {path} was deleted or replaced: lines from step {t.done} on are in a new file")

    def due(self, step: int) -> bool:
        """Due at every log interval, at the end, and after the warm-up, which is not timed."""
        t = self.trainer
        return every(step, t.config.log_every) or step in (t.config.steps, t.began + t.warmup_steps)

    def run(self) -> None:
        self.flush_metrics(timed=self.trainer.done > self.trainer.began + self.trainer.warmup_steps)

    def flush_metrics(self, *, timed: bool) -> None:
        """Log the pending steps, and stop the run if too many in a row were skipped."""
        t = self.trainer
        self.check_in_place()
        outcomes = t.pending.wait()
        t.clock.end(len(outcomes), len(outcomes) * t.tokens_per_step, t.loader.waited, timed=timed)
        too_many: tuple[int, int] | None = None
        for step, loss, grad_norm, saved in outcomes:
            skipped = {} if saved is None else {"skipped": True}
            self.write("step", step=step + 1, loss=loss, grad_norm=grad_norm, lr=t.lr(step), **skipped)
            t.skips.count(saved is not None)
            if saved is not None:
                self.log0(f"[skip] step {step + 1}: loss {loss}, gradient norm {grad_norm}; {saved}")
            if t.skips.in_a_row >= t.skips.limit:
                too_many = (t.skips.in_a_row, step + 1)
        self.save_run_info()
        self.report(loss, grad_norm)
        if too_many is not None:
            # Only now: the steps after them are part of what is saved, and of its metrics.
            in_a_row, last = too_many
            what = f"the loss or the gradients of {in_a_row} steps in a row were not finite, up to step {last}"
            saved = t.checkpointer.save_if_finite()
            raise RunStopped(f"{what}: {saved}; {t.skips.folder} has their batches. A lower --lr may help")

    def report(self, loss: float, grad_norm: float) -> None:
        """Log the speed and the newest step to the metrics, the heartbeat and the terminal."""
        t, c = self.trainer, self.trainer.config
        peak, failed = peak_flops(t.device), fallbacks()
        at_peak = None if peak is None else t.flops_per_token / (peak * t.ranks.size)
        speed = self.gpu.numbers() | t.clock.numbers(at_peak, c.price_per_hour)
        if speed:
            self.write("speed", step=t.done, **speed)
        if failed:
            self.write("fallbacks", step=t.done, counts=failed)
        if self.files is not None:
            counts = {"skipped": t.skips.total, "fallbacks": sum(failed.values()), "stand_ins": t.loader.stand_ins}
            self.files.heartbeat(t.done, loss=loss, grad_norm=grad_norm, **counts, **speed)
        if self.progress is not None:
            text = log_line(loss, t.lr(t.done - 1), speed, c.steps - t.done, t.skips.total)
            self.progress.show(t.done, text if t.done < c.steps else f"{text}  then {t.remaining}")


class SpeedCheck(Component):
    """Stops a run that is slower than `min_tokens_per_s` in its first steps."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.min_tokens_per_s = min_tokens_per_s(trainer.config, ranks=trainer.ranks.size)

    def due(self, step: int) -> bool:
        """Due after `SMOKE_STEPS` timed steps, or at the end of a run with fewer."""
        timed = step - self.trainer.began - self.trainer.warmup_steps
        last = step == self.trainer.config.steps and 0 < timed < SMOKE_STEPS
        return self.min_tokens_per_s > 0 and (timed == SMOKE_STEPS or last)

    def run(self) -> None:
        t, least, rate = self.trainer, self.min_tokens_per_s, self.trainer.clock.mean_rate
        if any_rank(rate is not None and rate < least, t.device):
            profile = branch_profile(t.update.module, to_device(t.validator.batches[0], t.device), t.dtype)
            slow = f"{rate:,.0f} tokens/s in the first steps, where at least {least:,.0f} are expected"
            raise RunStopped(f"{slow}; --min-tokens-per-s 0 accepts any speed\n{profile}")


class StatsWriter(Component):
    """Logs what the gates and the selection do in each layer."""

    def due(self, step: int) -> bool:
        return every(step, self.trainer.config.stats_every)

    def run(self) -> None:
        t = self.trainer
        for kind, values in attention_stats(t.model, to_device(t.validator.batches[0], t.device), t.dtype).items():
            t.logger.write(kind, step=t.done, **values)


class Validator(Component):
    """The validation loss, of the same few batches every time."""

    def __init__(self, trainer: Trainer, batches: list[Batch]) -> None:
        super().__init__(trainer)
        self.batches = batches
        self.last: tuple[int, float] | None = None  # the step and the loss of the last validation

    def due(self, step: int) -> bool:
        """Due also before a checkpoint: without a loss it could not be the best one. The end of a run validates
        anyway."""
        c = self.trainer.config
        return step < c.steps and (every(step, c.eval_every) or every(step, c.save_every))

    def run(self) -> float:
        """Validate and log the loss; raises `StopRequested` on a signal, because it may take minutes."""
        t = self.trainer
        loss = mean_loss(t.model, self.batches, t.dtype, t.stop_requested)
        self.last = (t.done, loss)
        t.logger.write("eval", step=t.done, loss=loss)
        if not math.isfinite(loss):
            kept = "good checkpoints are kept until it recovers"
            t.logger.log0(f"[eval] step {t.done}: the validation loss is {loss}; {kept}")
        return loss

    @property
    def loss(self) -> float | None:
        """The validation loss of the current step, if it was computed."""
        return self.last[1] if self.last and self.last[0] == self.trainer.done else None

    def has_finite_loss(self) -> bool:
        """Whether the parameters give a finite loss: an update can break the model before steps that are skipped."""
        # One batch is enough, and a run that is about to stop has no time for more.
        t, loss = self.trainer, self.loss
        return math.isfinite(mean_loss(t.model, self.batches[:1], t.dtype) if loss is None else loss)


@torch.no_grad()
def mean_loss(model: LM, batches: list[Batch], dtype: torch.dtype, stop: Callable[[], bool] = lambda: False) -> float:
    """The mean loss of all ranks' `batches` by token; every rank calls it. `stop` is called before each batch."""
    device, moved, losses = model.head_weight.device, [], []
    for batch in batches:
        if stop():
            raise StopRequested
        moved.append(to_device(batch, device))
        with autocast(device, dtype):
            losses.append(model(moved[-1].tokens, moved[-1].targets, cu_seqlens=moved[-1].cu_seqlens))
    return mean_over_ranks((torch.stack(losses) * shares(moved)).sum()).item()


def validation_id(batches: list[Batch], seq_len: int) -> str:
    """A hash of all ranks' batches: the same for the same sequences, however they are divided among ranks."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()

    rows = torch.cat([torch.stack([b.tokens, b.targets], dim=-1).view(-1, seq_len, 2) for b in batches])
    return digest(sorted(from_all([digest(sequence.tolist()) for sequence in rows])))[:16]


class Sampler(Component):
    """Text that the model generates."""

    interval = "sample_every"

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        prompt, tokenizer = trainer.config.sample_prompt, trainer.loader.tokenizer
        # Now, because a run samples at its end.
        self.prompt = tokenizer.encode(prompt)
        require(bool(self.prompt), "sample_prompt", prompt, f"text of at least one token of {tokenizer.name}")

    def run(self) -> None:
        t = self.trainer
        if not t.validator.has_finite_loss():
            t.logger.log0(f"[sample] none at step {t.done}: the parameters give no finite loss")
            return
        model = unsharded(t.model) if t.config.parallel == "fsdp" else t.model
        if model is not None and t.ranks.first:
            text = self.generate(model.to(t.device))
            # A text that was cut short is not what this step would have generated.
            if t.signals.received is None:
                t.logger.write("sample", step=t.done, text=text)

    def generate(self, model: LM) -> str:
        """The configured prompt with its continuation, which a signal cuts short."""
        t, c = self.trainer, self.trainer.config
        how = {"temperature": 0.8, "seed": c.seed, "cuda_graph": False}
        new = generate(model, [self.prompt], c.sample_tokens, **how, stop=lambda: t.signals.received is not None)
        return c.sample_prompt + t.loader.tokenizer.decode(new[0].tolist())


class Checkpointer(Component):
    """Saves and restores the state of the run."""

    interval = "save_every"

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        c = trainer.config
        data = validation_id(trainer.validator.batches, c.model.seq_len)
        self.checkpoints = Checkpoints(c.out / CHECKPOINTS, keep=c.keep, validation_id=data)
        # Held while parameters change or are copied, so that the watchdog never saves half a step.
        self.changing = threading.Lock()

    def run(self) -> None:
        self.save_if_finite(wait=False)

    def retry_failed_save(self) -> None:
        """Save again if a save in the background has failed meanwhile."""
        error = self.checkpoints.failed_save()
        if error is not None:
            self.trainer.logger.log0(f"[save] {error}: {self.save_if_finite()}")

    def save_if_finite(self, *, wait: bool = True) -> str:
        """Save, and return what can be resumed from. A state whose loss or gradients are not finite may recover: it is
        saved, but not in place of a good one; one whose parameters are not is not saved."""
        t = self.trainer
        finite = all_finite(t.model.parameters(), t.device)
        good = finite and self.has_finite_gradients() and t.validator.has_finite_loss()
        if finite:
            with self.changing:
                self.save(wait=wait, good=good)
        text = self.checkpoints.describe(t.done, saved=finite, good=good)
        if not good and not wait:
            t.logger.log0(f"[save] {text}")
        return text

    def has_finite_gradients(self) -> bool:
        """Whether the newest step whose result is known was not skipped."""
        t = self.trainer
        if t.pending.outcomes:
            return t.pending.outcomes[-1].saved is None
        if t.done == t.began > 0:
            # Those of the step that was saved.
            return self.checkpoints.is_good(t.done)
        return t.skips.in_a_row == 0

    def save(self, *, wait: bool, good: bool) -> None:
        """Called with `changing` held."""
        t = self.trainer
        extra = {"data": t.position, "ranks": t.ranks.size, "tokens_per_step": t.tokens_per_step}
        extra |= {"rng": rng_state(t.device), "scaler": t.update.scaler.state_dict()}
        extra |= {"skipped": t.skips.total, "seconds": t.clock.total}
        extra["loss_start"] = t.loss_start if math.isfinite(t.loss_start or 0.0) else None
        self.checkpoints.save(t.done, t.model, t.update.optimizer, extra, loss=t.validator.loss, good=good, wait=wait)

    def rescue(self) -> str:
        """Save the last finished step from another thread, if no step is in progress; returns what was saved."""
        t = self.trainer
        if t.ranks.size > 1:
            return "no checkpoint: the other ranks would have to take part"
        if not self.changing.acquire(blocking=False):
            return "no checkpoint: the step in progress has changed part of the state"
        try:
            # A forward may be what hangs, so no loss is computed.
            if not all(bool(p.isfinite().all()) for p in t.model.parameters()):
                return "no checkpoint: the parameters are not finite"
            self.save(wait=True, good=self.has_finite_gradients())
        except (OSError, RuntimeError, ValueError) as error:
            return f"no checkpoint: {error}"
        finally:
            self.changing.release()
        return f"step {t.done} is saved in {self.checkpoints.folder}"

    def resume(self) -> int:
        """Restore the newest intact checkpoint and return its step, 0 if there is none; `changing` is held."""
        t, c = self.trainer, self.trainer.config
        found = self.checkpoints.load(t.model, t.update.optimizer)
        if found is None:
            return 0
        step, extra = found
        with prefix_errors(f"the run cannot resume from {self.checkpoints.path(step) / INDEX}: "):
            check_state(extra)
            t.loader.load_state_dict(extra["data"])
            set_rng_state(extra["rng"], t.device)
        t.done = t.began = step
        # Read now: a damaged file must not end a run that has gone on.
        t.logger.last_start = read_run_info(c.out)
        require(step <= c.steps, "steps", c.steps, f"at least the {step} that the run in {c.out} has done")
        t.position = extra["data"]
        # Empty where the run did not scale its losses so far.
        if extra["scaler"]:
            t.update.scaler.load_state_dict(extra["scaler"])
        t.skips.total, t.clock.earlier, t.loss_start = extra["skipped"], extra["seconds"], extra["loss_start"]
        t.logger.log0(f"[resume] step {step} of {c.out}")
        for key, (then, now) in t.changed.items():
            t.logger.log0(f"[resume] {key}: {then!r} -> {now!r}")
        then, now = extra.get("tokens_per_step", t.tokens_per_step), t.tokens_per_step
        if then != now:
            change = f"{then:,} on {extra['ranks']} ranks -> {now:,} on {t.ranks.size}"
            t.logger.log0(f"[resume] tokens per step: {change}; --accum-batches and --batch-size can keep them")
        return step
