"""The log of a run: what it writes to its folder and prints, at log steps and in between. Rank 0 does so for all."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nsa.files import LOCK, locked
from nsa.progress import Progress, progress, say
from nsa.train.distributed import any_rank
from nsa.train.guards import RunStopped
from nsa.train.run_folder import CONFIG, RUN_INFO, RunLog
from nsa.train.run_info import save_run_info
from nsa.train.run_stats import GpuNumbers, fallbacks, log_line, peak_flops

if TYPE_CHECKING:
    from nsa.train.loop import Trainer


def every(step: int, interval: int) -> bool:
    """Whether `step` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0


class Logger:
    """A component whose `run` reads back the steps since it last ran, which waits for the device, and logs them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
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
        """At every log interval, at the end, and after the warm-up, which is not timed."""
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
