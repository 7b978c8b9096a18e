"""The run, from its first line of output to a sample and a report of what it learned.

A step never waits for the device. What it computed is looked at every `log_every` steps, and there the run is timed,
written down, and stopped if it has to be.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from nsa.backends.routing import counts_so_far
from nsa.config import require
from nsa.data import Batch, Loader, open_loader
from nsa.data.config import Split
from nsa.generate import generate
from nsa.model import LM, load_model
from nsa.train.boot import backends, boot_line, check_folder, check_ranks, record_of, write_down
from nsa.train.checkpoint import Checkpoints, check_state, export, put_together, restoring, rng_state, set_rng_state
from nsa.train.clock import Clock
from nsa.train.config import TrainConfig
from nsa.train.distributed import Ranks, Vote, all_finite, any_rank, parallelize
from nsa.train.guards import LOCK, WATCHDOG, Asked, RunStopped, Signals, Skips, Watchdog, branch_profile, only_writer
from nsa.train.metrics import RunLog
from nsa.train.pending import PendingSteps
from nsa.train.progress import Progress, log_line, open_closed_descriptors, progress, say
from nsa.train.report import write_report
from nsa.train.run_folder import CHECKPOINTS
from nsa.train.sight import GpuNumbers, attention_stats, fallbacks, peak_flops
from nsa.train.speed import least_tokens_per_s
from nsa.train.step import DTYPES, StepResult, TrainStep, learning_rate, to_device
from nsa.train.summary import Summary
from nsa.train.validation import fingerprint, mean_loss
from nsa.train.warmup import warm_up

# Steps that are timed before `min_tokens_per_s` is held against them.
SMOKE_STEPS = 10
# A launcher passes a signal on within this time.
ECHO_S = 2.0
# Ranks that wait for the same data give up within this time of each other.
MEET_S = 30.0


class Trainer:
    """`train()` runs it all; `step()` is one update."""

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
        self.model = LM(c.model).to(self.device)
        self.model.recompute = c.gc
        # Before anything is sharded: then each rank would count its own part.
        self.boot = boot_line(c, self.model, self.loader.source, self.ranks)
        self.say(self.boot)
        # The same few batches every time; held, because a stream would have to be opened again.
        with self.open_data("valid") as loader:
            self.valid = list(islice(loader, c.eval_batches))
        self.flops_per_token = self.model.flops_per_token(c.model.seq_len)
        self.min_tokens_per_s = least_tokens_per_s(c, ranks=self.ranks.size)
        module = parallelize(
            self.model,
            parallel=c.parallel,
            device=self.device,
            dtype=self.dtype,
            compile=c.compile,
            grad_compression=c.grad_compression,
        )
        self.update = TrainStep(
            self.model,
            module=module,
            dtype=self.dtype,
            compile=c.compile and c.parallel != "fsdp",
            cuda_graphs=c.cuda_graphs,
            weight_decay=c.weight_decay,
            grad_clip=c.grad_clip,
        )
        self.checkpoints = Checkpoints(c.out / CHECKPOINTS, keep=c.keep, judge=fingerprint(self.valid, c.model.seq_len))
        self.skips = Skips(c.out / "skipped", c.max_skips, rank=self.ranks.rank)
        # Whether the run's folder is still the one that it locked.
        self.locks = ExitStack()
        self.in_place: Callable[[], bool] = lambda: True
        self.log: RunLog | None = None
        self.written = False
        self.shown: Progress | None = None
        # What a checkpoint would hold besides parameters: the steps done, and where the data stood after them.
        self.done = 0
        # The step that this process went on from, and what was written down at the start that did it.
        self.began = 0
        self.last_start: dict[str, Any] | None = None
        self.position = self.loader.state_dict()
        self.loss_start: float | None = None
        # The last validation, as (step, loss).
        self.validated: tuple[int, float] | None = None
        # Held while parameters change or are copied, so that the watchdog never saves half a step.
        self.changing = threading.Lock()
        self.pending = PendingSteps(self.device, self.skips.keep)
        # The batches of the newest step.
        self.fetched: list[Batch] = []
        self.clock = Clock()
        self.signals = listen(self.ranks)
        self.vote = Vote()
        # The error that ends the run, once what was done before it is saved.
        self.failure: Exception | None = None
        self.gpu = GpuNumbers(self.device, self.say)

    def open_data(self, split: Split) -> Loader:
        c = self.config
        data = c.data
        if split == "valid" and data.on_stall == "synthetic":
            # A loss on noise would say nothing, for the whole run.
            data = replace(data, on_stall="retry")
        return open_loader(
            data,
            split=split,
            batch_size=c.batch_size,
            seq_len=c.model.seq_len,
            seed=c.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            vocab_size=c.model.vocab_size,
        )

    # The run.

    def train(self, signals: Signals | None = None) -> Summary | None:
        """None where a signal ended it before its last step. `signals`: those of a caller that already listens."""
        c = self.config
        self.signals = self.signals if signals is None else signals
        listening = self.signals if signals is None else nullcontext()
        watchdog = Watchdog(c.out / WATCHDOG, c.watchdog_s, describe=self.describe, rescue=self.rescue)
        try:
            with listening, self.locks, watchdog:
                if self.ranks.first:
                    self.in_place = self.locks.enter_context(only_writer(c.out))
                with self.changing:
                    self.resume()
                watchdog.beat()
                if self.began == 0:
                    self.write_down()
                if self.ranks.first:
                    self.log = RunLog(c.out, resume=self.began > 0)
                try:
                    return self.run(watchdog)
                except Exception as error:
                    self.save_before(error)
                    if type(error) is Exception:
                        # Tokenizers raise it for text they cannot take: nobody needs to see the code that passed it on.
                        raise RunStopped(f"{error!r} after step {self.done}") from error
                    raise
        finally:
            self.close_progress()
            self.loader.close()
            self.checkpoints.close()
            if self.log is not None:
                self.log.close()

    def run(self, watchdog: Watchdog) -> Summary | None:
        c = self.config
        with suppress(Asked):
            self.run_steps(watchdog)
            if self.done == c.steps:
                self.close_progress()
                watchdog.beat()
                return self.finish()
        kept = self.keep_what_is_done()
        self.close_progress()
        asked = self.signals.asked or ("the launcher is gone" if self.ranks.orphaned else "another rank")
        self.say(f"[stop] {asked}: {kept}")
        self.say(f"go on with: nsa train --resume {c.out}")
        return None

    def run_steps(self, watchdog: Watchdog) -> None:
        """Until the last step, or until a signal asks to stop."""
        c = self.config
        warm_up(c, self.valid[0], self.device, self.dtype, self.say)
        watchdog.beat()
        if self.loss_start is None or self.began == 0:
            self.loss_start = self.evaluate()
        elif self.done < c.steps and self.due(c.eval_every) and self.checkpoints.loss(self.done) is None:
            # It was cut short by the signal that ended the last start.
            self.evaluate()
        if self.began == 0 and c.save_every:
            # A run that cannot save should not find out hours later. Waited for: metrics of steps without a checkpoint
            # are those of a run that has lost it.
            self.save_if_finite()
        self.shown = progress(c.steps) if self.ranks.first else None
        watchdog.beat()
        first = self.done
        # The first step compiles; graphs are recorded in the two after it.
        warmup = 3 if c.cuda_graphs else 1
        self.clock.begin(self.loader.waited)
        while self.done < c.steps:
            self.advance(self.fetch())
            watchdog.beat()
            ran, last = self.done - first, self.done == c.steps
            # A short run is judged at its end.
            judged = ran == warmup + SMOKE_STEPS or (last and warmup < ran < warmup + SMOKE_STEPS)
            smoke = self.min_tokens_per_s > 0 and judged
            looks = self.due(c.log_every) or last or ran == warmup
            stops = self.stops()
            if not (
                looks
                or smoke
                or stops
                or any(map(self.due, (c.eval_every, c.sample_every, c.stats_every, c.save_every)))
            ):
                continue
            self.look(timed=ran > warmup)
            lost = self.checkpoints.look()
            if lost is not None:
                self.say(f"[save] {lost}: {self.save_if_finite()}")
            if smoke:
                self.check_speed()
            if self.due(c.stats_every):
                self.write_stats()
            if not last:
                self.look_closer()
                if stops:
                    return
            watchdog.beat()
            self.clock.begin(self.loader.waited)

    def stops(self) -> bool:
        """Whether a rank was asked to stop; the same on every rank."""
        return self.vote(self.signals.asked is not None or self.ranks.orphaned)

    def due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def look_closer(self) -> None:
        """What the end of a run does anyway."""
        c = self.config
        saves, samples = self.due(c.save_every), self.due(c.sample_every)
        if saves or self.due(c.eval_every):
            # Without a loss a checkpoint could not be the best one.
            self.evaluate()
        # Every rank takes part in this.
        if samples and not self.is_good():
            self.say(f"[sample] none at step {self.done}: the parameters give no finite loss")
        elif samples:
            # Of a model in parts every rank gives its own.
            model = put_together(self.model) if c.parallel == "fsdp" else self.model
            if model is not None and self.ranks.first:
                text = self.sample(model.to(self.device))
                # One that was cut short is not what this step would have written.
                if self.signals.asked is None:
                    self.write_sample(text)
        if saves:
            self.save_if_finite(wait=False)

    def fetch(self) -> list[Batch]:
        """The batches of a step; raises `Asked` where a signal came before they did."""
        try:
            with nullcontext() if self.ranks.size > 1 else self.signals.waiting():
                self.fetched = list(islice(self.loader, self.config.accum))
        except Asked:
            raise
        except Exception as error:
            # The data is lost, the run need not be. All ranks read the same, so they lose it at the same step.
            self.save_before(error, "no data")
            raise
        return self.fetched

    def save_before(self, error: Exception, reason: str = "") -> None:
        """Save what is done before `error` ends the run, and print where it is."""
        if self.done == self.began or error is self.failure or isinstance(error, RunStopped):
            return
        self.failure = error
        if self.update.begun != self.done - self.began:
            kept = "no checkpoint: the step under way has changed part of the state"
        elif not self.ranks.all_come(MEET_S):
            kept = "no checkpoint: the other ranks would have to take part"
        else:
            try:
                kept = self.keep_what_is_done()
            except (OSError, RuntimeError, ValueError):
                # The metrics or the forward, which may be what failed, are not needed for a checkpoint.
                kept = self.rescue()
        self.close_progress()
        self.say(f"[stop] {reason or ' '.join(str(error).split()) or type(error).__name__}: {kept}")

    def keep_what_is_done(self) -> str:
        if self.pending:
            self.look(timed=False)
        return self.save_if_finite()

    def advance(self, batches: list[Batch]) -> None:
        with self.changing:
            result = self.step(self.done, batches)
            self.done += 1
            self.position = self.loader.state_dict()
        self.pending.add(self.done - 1, result, batches)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        return self.update([to_device(batch, self.device) for batch in batches], self.lr(step))

    def lr(self, step: int) -> float:
        c = self.config
        return learning_rate(
            step, c.steps, peak=c.lr, warmup=c.warmup, floor=c.lr_floor, schedule=c.schedule, decay=c.decay
        )

    # Looking: the only times that the device is waited for.

    def look(self, *, timed: bool) -> None:
        """Read back the steps that wait, write them down, and stop the run if too many of them were not finite.

        What a process does to warm up is not `timed`.
        """
        self.check_in_place()
        outcomes = self.pending.wait()
        steps = len(outcomes)
        self.clock.end(steps, steps * self.tokens_per_step, self.loader.waited, timed=timed)
        too_many: tuple[int, int] | None = None
        for step, loss, grad_norm, kept in outcomes:
            record = {"step": step + 1, "loss": loss, "grad_norm": grad_norm, "lr": self.lr(step)}
            self.write("step", **record, **({} if kept is None else {"skipped": True}))
            self.skips.note(kept is not None)
            if kept is not None:
                self.say(f"[skip] step {step + 1}: loss {loss}, gradient norm {grad_norm}; {kept}")
            if self.skips.too_many:
                too_many = (self.skips.in_a_row, step + 1)
        self.write_down()
        self.show(loss, grad_norm)
        if too_many is not None:
            # Only now: the steps after them are part of what is saved, and of its curves.
            in_a_row, last = too_many
            raise RunStopped(
                f"the loss or the gradients of {in_a_row} steps in a row were not finite, up to step {last}: "
                f"{self.save_if_finite()}; {self.skips.folder} has their batches. A lower --lr may help"
            )

    def is_good(self) -> bool:
        """Steps without a finite gradient change nothing, but the last one that did may have been what broke the model:
        such a state is nothing to go on from, nor to sample from."""
        if self.validated is not None and self.validated[0] == self.done:
            return math.isfinite(self.validated[1])
        # One batch tells, and a run that was asked to stop has no time for more.
        return math.isfinite(mean_loss(self.model, self.valid[:1], self.dtype).item())

    def save_if_finite(self, *, wait: bool = True) -> str:
        """Save, unless the parameters are not finite; where the run can be resumed from, in words.

        A state whose loss or gradients are not finite may recover, so it is saved, but not in place of a good one.
        """
        finite = all_finite(self.model.parameters(), self.device)
        good = finite and self.skips.in_a_row == 0 and self.is_good()
        if finite:
            with self.changing:
                self.save(wait=wait, good=good)
        text = self.checkpoints.describe(self.done, saved=finite, good=good)
        if not good and not wait:
            self.say(f"[save] {text}")
        return text

    def check_in_place(self) -> None:
        """Stop the run, with what is done saved, if its folder was deleted, moved or replaced; mend single files."""
        out = self.config.out
        missing = any_rank(not self.in_place(), self.device)
        taken = missing and any_rank(self.ranks.first and (out / LOCK).exists(), self.device)
        what = f"{out} was deleted, moved or replaced during the run"
        if taken:
            raise RunStopped(f"{what}, or its {LOCK} was; another run may use it: step {self.done} is not saved")
        # A folder that holds the open metrics is the run's own.
        if missing and not any_rank(self.log is not None and self.log.in_place(), self.device):
            self.written = False
            self.write_down()
            kept = self.save_if_finite()
            raise RunStopped(f"{what}; created again, without metrics: {kept}. Go on with: nsa train --resume {out}")
        if missing and self.ranks.first:
            self.in_place = self.locks.enter_context(only_writer(out))
            self.say(f"[log] {out / LOCK} was deleted: the folder is locked again")
        for path in self.log.reopen() if self.log is not None else ():
            self.say(f"[log] {path} was deleted or replaced: what is written from step {self.done} on is in a new one")

    def write_down(self) -> None:
        """The config and the environment. A run that goes on writes them once it has gone on: a start that fails must
        not be what the next one takes for the run."""
        if self.ranks.first and not self.written:
            write_down(self.config, step=self.began, ranks=self.ranks, before=self.last_start)
        self.written = True

    def show(self, loss: float, grad_norm: float) -> None:
        """One look for the screen, the metrics and whoever watches from outside."""
        c = self.config
        peak = peak_flops(self.device)
        at_peak = None if peak is None else self.flops_per_token / (peak * self.ranks.size)
        speed = self.gpu.numbers() | self.clock.numbers(at_peak, c.price_per_hour)
        if speed:
            self.write("speed", step=self.done, **speed)
        failed = fallbacks()
        if failed:
            self.write("fallbacks", step=self.done, counts=failed)
        if self.log is not None:
            beat = {
                "loss": loss,
                "grad_norm": grad_norm,
                "skipped": self.skips.total,
                "fallbacks": sum(failed.values()),
                "stand_ins": self.loader.stand_ins,
            }
            self.log.heartbeat(self.done, **beat, **speed)
        if self.shown is not None:
            text = log_line(loss, self.lr(self.done - 1), speed, c.steps - self.done, self.skips.total)
            self.shown.show(self.done, text if self.done < c.steps else f"{text}  then {self.what_is_left}")

    def check_speed(self) -> None:
        """The smoke phase's verdict."""
        least, rate = self.min_tokens_per_s, self.clock.mean_rate
        slow = rate is not None and rate < least
        if any_rank(slow, self.device):
            batch = to_device(self.valid[0], self.device)
            profile = branch_profile(self.update.module, batch, self.dtype)
            raise RunStopped(
                f"{rate:,.0f} tokens/s in the first steps, where at least {least:,.0f} are expected; "
                f"--min-tokens-per-s 0 accepts any speed\n{profile}"
            )

    def evaluate(self) -> float:
        """Raises `Asked` where the run is to stop: a validation may take minutes."""

        def until_stopped() -> Iterator[Batch]:
            for batch in self.valid:
                if self.stops():
                    raise Asked
                yield batch

        loss = mean_loss(self.model, until_stopped(), self.dtype).item()
        self.validated = (self.done, loss)
        self.write("eval", step=self.done, loss=loss)
        if not math.isfinite(loss):
            self.say(
                f"[eval] step {self.done}: the validation loss is {loss}; good checkpoints are kept until it recovers"
            )
        return loss

    def write_stats(self) -> None:
        found = attention_stats(self.model, to_device(self.valid[0], self.device), self.dtype)
        if found is not None:
            gates, distances = found
            self.write("gates", step=self.done, **gates)
            self.write("distances", step=self.done, **distances)

    def sample(self, model: LM) -> str:
        c, tokenizer = self.config, self.loader.tokenizer
        generator = torch.Generator(self.device).manual_seed(c.seed)
        prompt = tokenizer.encode(c.sample_prompt)
        new = generate(
            model,
            [prompt],
            c.sample_tokens,
            temperature=0.8,
            generator=generator,
            stop=lambda: self.signals.asked is not None,
        )
        return c.sample_prompt + tokenizer.decode(new[0].tolist())

    def write_sample(self, text: str) -> str:
        self.write("sample", step=self.done, text=text)
        return text

    # Keeping.

    def save(self, *, wait: bool, good: bool) -> None:
        """Called with `changing` held."""
        validated = self.validated[1] if self.validated and self.validated[0] == self.done else None
        extra = {
            "data": self.position,
            "ranks": self.ranks.size,
            "tokens_per_step": self.tokens_per_step,
            "rng": rng_state(self.device),
            "scaler": self.update.scaler.state_dict(),
            "skipped": self.skips.total,
            "loss_start": self.loss_start if math.isfinite(self.loss_start or 0.0) else None,
            "seconds": self.clock.total,
        }
        self.checkpoints.save(self.done, self.model, self.update.optimizer, extra, loss=validated, good=good, wait=wait)

    def resume(self) -> int:
        """Go on from the newest intact checkpoint of the run's folder; the step it is of, 0 if there is none."""
        c = self.config
        found = self.checkpoints.load(self.model, self.update.optimizer)
        if found is None:
            return 0
        self.done, extra = found
        with restoring(self.checkpoints.path(self.done)):
            check_state(extra)
            self.loader.load_state_dict(extra["data"])
            set_rng_state(extra["rng"], self.device)
        self.began = self.done
        # Read now: a file that is damaged must not end a run that has gone on.
        self.last_start = record_of(c.out)
        require(self.done <= c.steps, "steps", c.steps, f"at least the {self.done} that the run in {c.out} has done")
        self.position = extra["data"]
        # Empty where the run did not scale its losses so far.
        if extra["scaler"]:
            self.update.scaler.load_state_dict(extra["scaler"])
        self.skips.total = extra["skipped"]
        self.loss_start = extra["loss_start"]
        self.clock.earlier = extra["seconds"]
        self.say(f"[resume] step {self.done} of {c.out}")
        for key, (then, now) in self.changed.items():
            self.say(f"[resume] {key}: {then!r} -> {now!r}")
        now = self.tokens_per_step
        then = extra.get("tokens_per_step", now)
        if then != now:
            self.say(
                f"[resume] tokens a step: {then:,} on {extra['ranks']} ranks -> {now:,} on {self.ranks.size}; "
                "--accum-batches and --batch-size can keep them"
            )
        return self.done

    def rescue(self) -> str:
        """Save the last finished step from another thread, if no step is under way."""
        if self.ranks.size > 1:
            return "no checkpoint: the other ranks would have to take part"
        if not self.changing.acquire(blocking=False):
            return "no checkpoint: the step under way has changed part of the state"
        try:
            # A forward may be what hangs, so no loss is asked for.
            if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
                return "no checkpoint: the parameters are not finite"
            self.save(wait=True, good=self.skips.in_a_row == 0)
        except (OSError, RuntimeError, ValueError) as error:
            return f"no checkpoint: {error}"
        finally:
            self.changing.release()
        return f"step {self.done} is saved in {self.checkpoints.folder}"

    def describe(self) -> str:
        """For the watchdog: what was asked of the machine last, and who serves it."""
        shapes = [
            {name: tuple(x.shape) for name, x in batch._asdict().items() if x is not None} for batch in self.fetched
        ]
        return "\n".join(
            [
                f"steps done: {self.done}, not looked at yet: {len(self.pending)}",
                f"data: {self.loader}",
                f"last batches: {shapes}",
                f"routes: {backends(self.config)}",
                f"calls and failures: {counts_so_far().as_dict()}",
            ]
        )

    @property
    def what_is_left(self) -> str:
        """Which may take longer than the steps did."""
        return f"validation ({len(self.valid)} batches), export, sample ({self.config.sample_tokens} tokens)"

    def finish(self) -> Summary:
        c = self.config
        if self.done == self.began:
            self.say(f"[end] no step is left: {self.what_is_left}")
        loss_end = self.evaluate()
        # Before anything is written into a folder that is not the run's any more.
        self.check_in_place()
        kept = self.save_if_finite()
        if not math.isfinite(loss_end):
            raise RunStopped(f"all steps are done, and nothing is exported: {kept}. A lower --lr may help")
        checkpoint = export(self.model, c.out, self.loader.tokenizer)
        # What speaks is what others will load.
        sample = self.write_sample(self.sample(load_model(c.out, self.device))) if self.ranks.first else ""
        # What came after the last step may have taken as long as many of them did.
        self.check_in_place()
        rate = self.clock.mean_rate
        assert self.loss_start is not None
        stood_in = self.loader.stand_ins
        served = counts_so_far().as_dict()["calls"]
        summary = Summary(
            self.loss_start, loss_end, rate, self.skips.total, stood_in, served, fallbacks(), sample, checkpoint, None
        )
        self.write("end", **summary.to_dict())
        if self.log is not None:
            self.log.close()
            self.log = None
            summary.report = write_report(c.out)
        return summary

    # Speaking, which one rank does for all.

    @property
    def tokens_per_step(self) -> int:
        return self.config.accum * self.config.tokens_per_batch * self.ranks.size

    def write(self, kind: str, **values: Any) -> None:
        if self.log is not None:
            self.log.write(kind, **values)

    def say(self, text: str) -> None:
        if self.ranks.first:
            say(text)

    def close_progress(self) -> None:
        if self.shown is not None:
            self.shown.close()
            self.shown = None


def listen(ranks: Ranks) -> Signals:
    return Signals(echo_s=ECHO_S if ranks.size > 1 else 0.0)
