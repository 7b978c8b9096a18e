"""The run: a loop over training steps and components, from the boot line to the export, a sample and the report.

A step never waits for the device. At log steps (`log_every`) the results of the steps since the last one are read back,
logged and timed, and there the run stops if it has to.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nsa.backends.routing import counts_so_far
from nsa.data import Batch, Loader
from nsa.data.config import Split
from nsa.dtypes import DTYPES
from nsa.model import LM, load_model
from nsa.model.llama import load_initial
from nsa.progress import open_closed_descriptors, say, warn_on_first_rank
from nsa.train.checkpoint import export
from nsa.train.components import Checkpointer, Component, Logger, Sampler, SpeedCheck, StatsWriter, Validator
from nsa.train.config import TrainConfig
from nsa.train.distributed import Ranks, Vote, from_first, parallelize, ranks
from nsa.train.guards import RunStopped, Signals, Skips, StopRequested, Watchdog
from nsa.train.preflight import check_capacity
from nsa.train.report import write_report
from nsa.train.run_folder import CHECKPOINTS, WATCHDOG, saved_steps
from nsa.train.run_info import Summary, backends, boot_line, check_folder, check_ranks, open_data
from nsa.train.run_stats import Clock, fallbacks
from nsa.train.step import PendingSteps, StepResult, TrainStep, learning_rate, to_device
from nsa.train.warmup import warm_up

# Ranks that wait for the same data give up within this time of each other.
MEET_S = 30.0
# In messages of gloo and NCCL when another process has ended.
LOST = ("closed by peer", "Connection reset", "remote process exited", "Broken pipe")


class Trainer:
    """A run: `train()` runs it all, `step()` is one update.

    Args:
        config: the run.
        ranks: this process among those of the run (default: one process).

    Raises:
        ValueError: the ranks, the run's folder or the data do not fit the config.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks | None = None) -> None:
        open_closed_descriptors()
        self.config = c = config
        self.ranks = ranks or Ranks(torch.device(c.device))
        self.device = self.ranks.device
        self.dtype = DTYPES[c.dtype]
        check_ranks(c)
        self.changed = check_folder(c)
        self.loader = self.open_data("train")
        check_ranks(c, self.loader.state_dict())
        torch.manual_seed(c.seed)
        self.model = LM(c.model)
        if c.init is not None and not saved_steps(c.out / CHECKPOINTS):
            # Every rank reads them; a run that is resumed has its own.
            load_initial(self.model, Path(c.init))
        self.model.to(self.device)
        self.model.recompute = c.gc
        # Before the model is sharded: each rank would count its own part.
        self.boot = boot_line(c, self.model, self.loader.source, self.ranks)
        self.logger = Logger(self)
        self.logger.log0(self.boot)
        self.flops_per_token = self.model.flops_per_token(c.model.seq_len)
        # Kept in memory, because a stream would have to be opened again.
        with self.open_data("valid") as loader:
            self.validator = Validator(self, list(islice(loader, c.eval_batches)))
        module = parallelize(self.model, c, self.device)
        options = {name: getattr(c, name) for name in ("cuda_graphs", "grad_clip", "weight_decay", "gate_decay")}
        compiled = c.compile and c.parallel != "fsdp"
        self.update = TrainStep(self.model, module=module, dtype=self.dtype, compile=compiled, **options)
        self.sampler, self.checkpointer = Sampler(self), Checkpointer(self)
        self.checkpoints = self.checkpointer.checkpoints
        periodic: tuple[Component, ...] = (self.validator, self.sampler, self.checkpointer)
        self.components = (SpeedCheck(self), StatsWriter(self), *periodic)
        self.clock, self.vote = Clock(), Vote()
        self.signals = Signals(forwarded=self.ranks.size > 1)
        self.skips = Skips(c.out / "skipped", c.max_skips, rank=self.ranks.rank)
        self.pending = PendingSteps(self.device, self.skips.save)
        # Steps done, where the data stood after them, and the batches of the newest step.
        self.done = 0
        self.position = self.loader.state_dict()
        self.fetched: list[Batch] = []
        self.began = 0  # the step that this process started from
        self.loss_start: float | None = None
        self.failure: Exception | None = None  # the error that ends the run, once what was done before it is saved
        # The first step compiles; CUDA graphs are captured in the two after it.
        self.warmup_steps = 3 if c.cuda_graphs else 1

    def open_data(self, split: Split) -> Loader:
        c, data = self.config, self.config.data
        if split == "valid" and data.on_stall == "synthetic":
            # The loss on random tokens would be meaningless, for the whole run.
            data = replace(data, on_stall="retry")
        return open_data(replace(c, data=data), split, rank=self.ranks.rank, world_size=self.ranks.size)

    @property
    def tokens_per_step(self) -> int:
        return self.config.accum * self.config.tokens_per_batch * self.ranks.size

    def train(self, signals: Signals | None = None) -> Summary | None:
        """Train to the last step, from the newest checkpoint if there is one.

        Args:
            signals: those of a caller that already handles signals.

        Returns:
            The results; None where a signal ended the run before its last step.

        Raises:
            RunStopped: a guard ended the run.
        """
        c = self.config
        handling = nullcontext() if signals else self.signals
        self.signals = signals or self.signals
        watchdog = Watchdog(c.out / WATCHDOG, c.watchdog_s, describe=self.describe, rescue=self.checkpointer.rescue)
        try:
            with handling, self.logger.locks, watchdog:
                self.logger.lock_folder()
                with self.checkpointer.changing:
                    self.checkpointer.resume()
                watchdog.beat()
                self.logger.open_files()
                try:
                    return self.run(watchdog)
                except Exception as error:
                    self.save_before(error)
                    if type(error) is Exception:
                        # Tokenizers raise it for text they cannot encode: no traceback is needed.
                        raise RunStopped(f"{error!r} after step {self.done}") from error
                    raise
        finally:
            self.logger.close_progress()
            self.loader.close()
            self.checkpoints.wait()
            self.logger.close_files()

    def run(self, watchdog: Watchdog) -> Summary | None:
        c = self.config
        with suppress(StopRequested):
            self.run_steps(watchdog)
            if self.done == c.steps:
                self.logger.close_progress()
                watchdog.beat()
                return self.finish()
        saved = self.save_progress()
        self.logger.close_progress()
        reason = self.signals.received or ("the launcher is gone" if self.ranks.orphaned else "another rank")
        self.logger.log0(f"[stop] {reason}: {saved}")
        self.logger.log0(f"resume with: nsa train --resume {shlex.quote(str(c.out))}")
        return None

    def run_steps(self, watchdog: Watchdog) -> None:
        """Run steps and components until the last step, or until a signal."""
        c = self.config
        warm_up(c, self.validator.batches[0], self.device, self.dtype, self.logger.log0)
        watchdog.beat()
        if self.loss_start is None or self.began == 0:
            self.loss_start = self.validator.run()
        elif self.checkpoints.loss(self.done) is None:
            # The validation of this step was cut short by the signal that ended the last start, if it was due.
            for missed in (self.validator, self.checkpointer):
                if missed.due(self.done):
                    missed.run()
        if self.began == 0 and c.save_every:
            # A run that cannot save should fail now. It waits, so that no metrics are newer than the checkpoint.
            self.checkpointer.save_if_finite()
        self.logger.show_progress()
        watchdog.beat()
        self.clock.begin(self.loader.waited)
        while self.done < c.steps:
            self.advance(self.fetch())
            watchdog.beat()
            stop = self.stop_requested()
            due = [component for component in self.components if component.due(self.done)]
            if due or stop or self.logger.due(self.done):
                self.logger.run()
                self.checkpointer.retry_failed_save()
                for component in due:
                    component.run()
                if stop:
                    return
                watchdog.beat()
                self.clock.begin(self.loader.waited)

    def stop_requested(self) -> bool:
        """Whether any rank received a signal or lost its launcher; the same on every rank."""
        return self.vote(self.signals.received is not None or self.ranks.orphaned)

    def fetch(self) -> list[Batch]:
        """The batches of a step; raises `StopRequested` if a signal arrives before they do."""
        try:
            with nullcontext() if self.ranks.size > 1 else self.signals.waiting():
                self.fetched = list(islice(self.loader, self.config.accum))
        except StopRequested:
            raise
        except Exception as error:
            # All ranks read the same data, so they all fail at the same step and can save together.
            self.save_before(error, "no data")
            raise
        return self.fetched

    def advance(self, batches: list[Batch]) -> None:
        """Run one step and count it."""
        with self.checkpointer.changing:
            result = self.step(self.done, batches)
            self.done += 1
            self.position = self.loader.state_dict()
        self.pending.add(self.done - 1, result, batches)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """One update.

        Args:
            step: Counted from 0; decides the learning rate.
            batches: Of this rank, `accum` of them.

        Returns:
            Loss, gradient norm and whether the update was skipped, on the device.
        """
        return self.update([to_device(batch, self.device) for batch in batches], self.lr(step))

    def lr(self, step: int) -> float:
        c = self.config
        shape: dict[str, Any] = {"floor": c.lr_floor, "schedule": c.schedule, "decay": c.decay}
        return learning_rate(step, c.steps, peak=c.lr, warmup=c.warmup, **shape)

    def finish(self) -> Summary:
        """Validate, save, export, sample and write the report."""
        c = self.config
        if self.done == self.began:
            self.logger.log0(f"[end] no step is left: {self.remaining}")
        loss_end = self.validator.run()
        self.logger.check_in_place()
        saved = self.checkpointer.save_if_finite()
        if not math.isfinite(loss_end):
            raise RunStopped(f"all steps are done, and nothing is exported: {saved}. A lower --lr may help")
        exported, sample = export(self.model, c.out, self.loader.tokenizer, self.done), ""
        if self.ranks.first:
            # From the export: that is what others load.
            sample = self.sampler.generate(load_model(c.out, self.device))
            self.logger.write("sample", step=self.done, text=sample)
        # Validation, export and sample may have taken long.
        self.logger.check_in_place()
        assert self.loss_start is not None
        rate, served = self.clock.mean_rate, counts_so_far().as_dict()["calls"]
        counts = (self.skips.total, self.loader.stand_ins, served, fallbacks())
        summary = Summary(self.loss_start, loss_end, rate, *counts, sample, exported, report=None)
        self.logger.write("end", **summary.to_dict())
        if self.ranks.first:
            self.logger.close_files()
            summary.report = write_report(c.out)
        return summary

    def save_before(self, error: Exception, reason: str = "") -> None:
        """Save what is done before `error` ends the run, and print what was saved."""
        if self.done == self.began or error is self.failure or isinstance(error, RunStopped):
            return
        self.failure = error
        if self.update.begun != self.done - self.began:
            saved = "no checkpoint: the step in progress has changed part of the state"
        elif not self.ranks.all_come(MEET_S):
            saved = "no checkpoint: the other ranks would have to take part"
        else:
            try:
                saved = self.save_progress()
            except (OSError, RuntimeError, ValueError):
                # The log or the forward may be what failed, and a checkpoint needs neither.
                saved = self.checkpointer.rescue()
        self.logger.close_progress()
        self.logger.log0(f"[stop] {reason or ' '.join(str(error).split()) or type(error).__name__}: {saved}")

    def save_progress(self) -> str:
        """Log the pending steps and save; returns what was saved."""
        if self.pending:
            self.logger.flush_metrics(timed=False)
        return self.checkpointer.save_if_finite()

    @property
    def remaining(self) -> str:
        """Names the work after the last step, which may take longer than the steps did."""
        batches = len(self.validator.batches)
        return f"validation ({batches} batches), export, sample ({self.config.sample_tokens} tokens)"

    def describe(self) -> str:
        """Describe the newest batches and which backends run them, for the watchdog."""
        named = [batch._asdict() for batch in self.fetched]
        shapes = [{name: tuple(x.shape) for name, x in batch.items() if x is not None} for batch in named]
        lines = [f"steps done: {self.done}, not logged yet: {len(self.pending)}", f"data: {self.loader}"]
        lines += [f"last batches: {shapes}", f"routes: {backends(self.config)}"]
        return "\n".join([*lines, f"calls and failures: {counts_so_far().as_dict()}"])


def launch(config: TrainConfig) -> int:
    """Train, and return the exit status: 0, or 1 where the run stopped itself."""
    if config.device.startswith("cuda"):
        # The host computes only batches, for which torch would wake a thread on every core.
        torch.set_num_threads(1)
    try:
        with ranks(config.device, config.parallel) as own:
            # The default folder's name has the time and a random part in it.
            config = replace(config, out=Path(from_first(str(config.out))))
            check_capacity(config, own.size)
            # For the time before the run has a watchdog of its own.
            watchdog = Watchdog(
                config.out / WATCHDOG,
                config.watchdog_s,
                describe=lambda: "the run has not started: it is opening its data or building its model",
                rescue=lambda: "no checkpoint: no step is done yet",
            )
            with Signals(forwarded=own.size > 1) as signals, report_lost_ranks(own, config.out):
                with signals.waiting(), watchdog, warn_on_first_rank():
                    trainer = Trainer(config, own)
                summary = trainer.train(signals)
            if summary is not None and own.first:
                say(str(summary))
                say(f'generate with: nsa generate --run {shlex.quote(str(config.out))} --prompt "import "')
    except StopRequested:
        say("[stop] stopped before the first step: nothing to save")
    except RunStopped as stopped:
        say(f"nsa train: stopped: {stopped}", error=True)
        return 1
    return 0


@contextmanager
def report_lost_ranks(own: Ranks, out: Path) -> Iterator[None]:
    """Print what to do at once: torchrun kills all ranks soon after one is gone."""
    try:
        yield
    except RuntimeError as error:
        if own.size == 1 or not any(word in str(error) for word in LOST):
            raise
        gone = "another rank is gone; its error, if it printed one, is above"
        say(f"nsa train: {gone}. Resume with the same command and --out {out}", error=True)
        raise SystemExit(1) from error
