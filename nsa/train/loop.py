"""The run, from its first line of output to a sample and a report of what it learned.

A step never waits for the device. What it computed is looked at every `log_every` steps, and there the run is timed,
written down, and stopped if it has to be.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.backends.routing import counts_so_far
from nsa.config import require
from nsa.data import Batch, Loader, open_loader
from nsa.data.config import Split
from nsa.generate import generate
from nsa.model import LM, load_model
from nsa.train.boot import backends, boot_line, check_folder, record_of, write_down
from nsa.train.checkpoint import Checkpoints, export, put_together, rng_state, set_rng_state
from nsa.train.clock import Clock, wait_asleep
from nsa.train.config import TrainConfig
from nsa.train.distributed import Ranks, Vote, any_rank, from_all, mean_over_ranks, parallelize
from nsa.train.guards import WATCHDOG, Asked, RunStopped, Signals, Skips, Watchdog, branch_profile, only_writer
from nsa.train.metrics import RunLog
from nsa.train.progress import Progress, progress
from nsa.train.report import write_report
from nsa.train.sight import attention_stats, fallbacks, machine_numbers, peak_flops
from nsa.train.speed import least_tokens_per_s
from nsa.train.step import DTYPES, StepResult, TrainStep, autocast, learning_rate, shares

# Steps that are timed before `min_tokens_per_s` is held against them.
SMOKE_STEPS = 10
# A launcher passes a signal on within this time.
ECHO_S = 2.0
# Ranks that wait for the same data give up within this time of each other.
MEET_S = 30.0


class Trainer:
    """`train()` runs it all; `step()` is one update."""

    def __init__(self, config: TrainConfig, ranks: Ranks | None = None) -> None:
        self.config = c = config
        self.ranks = ranks or Ranks(torch.device(c.device))
        self.device = self.ranks.device
        self.dtype = DTYPES[c.dtype]
        self.changed = check_folder(c)
        self.loader = self.open_data("train")
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
        self.checkpoints = Checkpoints(
            c.out / "checkpoints", keep=c.keep, judge=fingerprint(self.valid, c.model.seq_len)
        )
        self.skips = Skips(c.out / "skipped", c.max_skips, rank=self.ranks.rank)
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
        # Steps that were computed and not looked at yet, with the batches that they were computed from.
        self.waiting: list[tuple[int, StepResult, list[Batch]]] = []
        # The batches of the newest step.
        self.fetched: list[Batch] = []
        self.clock = Clock()

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
        listening = listen(self.ranks) if signals is None else nullcontext(signals)
        watchdog = Watchdog(c.out / WATCHDOG, c.watchdog_s, describe=self.describe, rescue=self.rescue)
        try:
            with listening as signals, only_writer(c.out) if self.ranks.first else nullcontext(), watchdog:
                with self.changing:
                    self.resume()
                watchdog.beat()
                if self.began == 0:
                    self.write_down()
                if self.ranks.first:
                    self.log = RunLog(c.out, resume=self.began > 0)
                if self.loss_start is None or self.began == 0:
                    self.loss_start = self.evaluate()
                if self.began == 0 and c.save_every and self.is_good():
                    # A run that cannot save should not find out hours later, and has something to go back to.
                    self.save()
                self.shown = progress(c.steps) if self.ranks.first else None
                watchdog.beat()
                self.run_steps(signals, watchdog)
                kept = self.keep_what_is_done() if self.done < c.steps else ""
                self.close_progress()
                watchdog.beat()
                if self.done < c.steps:
                    asked = signals.asked or ("the launcher is gone" if self.ranks.orphaned else "another rank")
                    self.say(f"[stop] {asked}: {kept}")
                    self.say(f"go on with: nsa train --resume {c.out}")
                    return None
                return self.finish()
        finally:
            self.close_progress()
            self.loader.close()
            self.checkpoints.close()
            if self.log is not None:
                self.log.close()

    def run_steps(self, signals: Signals, watchdog: Watchdog) -> None:
        """Until the last step, or until a signal asks to stop."""
        c = self.config
        first = self.done
        # The first step compiles; graphs are recorded in the two after it.
        warmup = 3 if c.cuda_graphs else 1
        self.clock.begin(self.loader.waited)
        vote = Vote()
        while self.done < c.steps:
            batches = self.fetch(signals)
            if batches is None:
                return
            self.advance(batches)
            watchdog.beat()
            ran, last = self.done - first, self.done == c.steps
            # A short run is judged at its end.
            judged = ran == warmup + SMOKE_STEPS or (last and warmup < ran < warmup + SMOKE_STEPS)
            smoke = self.min_tokens_per_s > 0 and judged
            looks = self.due(c.log_every) or last or ran == warmup
            stops = vote(signals.asked is not None or self.ranks.orphaned)
            if not (
                looks
                or smoke
                or stops
                or any(map(self.due, (c.eval_every, c.sample_every, c.stats_every, c.save_every)))
            ):
                continue
            try:
                self.look(timed=ran > warmup)
            except OSError as error:
                # What cannot be written down costs the run, not what it has learned.
                self.say(f"[stop] {error}: {self.rescue()}")
                raise
            lost = self.checkpoints.look()
            if lost is not None:
                self.say(f"[save] {lost}: {self.save_if_good()}")
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
        good = (saves or samples) and self.is_good()
        if samples and not good:
            self.say(f"[sample] none at step {self.done}: the parameters give no finite loss")
        elif samples:
            # Of a model in parts every rank gives its own.
            model = put_together(self.model) if c.parallel == "fsdp" else self.model
            if model is not None and self.ranks.first:
                self.write_sample(self.sample(model.to(self.device)))
        if saves and good:
            self.save()

    def fetch(self, signals: Signals | None = None) -> list[Batch] | None:
        """The batches of a step; None where a signal came while they did not."""
        try:
            with nullcontext() if signals is None or self.ranks.size > 1 else signals.waiting():
                self.fetched = list(islice(self.loader, self.config.accum))
        except Asked:
            return None
        except (OSError, RuntimeError, ValueError):
            # The data is lost, the run need not be. All ranks read the same, so they lose it at the same step.
            if self.ranks.all_come(MEET_S):
                self.say(f"[stop] no data: {self.keep_what_is_done()}")
            raise
        return self.fetched

    def keep_what_is_done(self) -> str:
        if self.waiting:
            self.look(timed=False)
        return self.save_if_good()

    def advance(self, batches: list[Batch]) -> None:
        with self.changing:
            self.waiting.append((self.done, self.step(self.done, batches), batches))
            self.done += 1
            self.position = self.loader.state_dict()

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        return self.update([self.to_device(batch) for batch in batches], self.lr(step))

    def lr(self, step: int) -> float:
        c = self.config
        return learning_rate(
            step, c.steps, peak=c.lr, warmup=c.warmup, floor=c.lr_floor, schedule=c.schedule, decay=c.decay
        )

    def to_device(self, batch: Batch) -> Batch:
        # Only from pinned memory can a copy go on behind the host's back.
        def move(x: Tensor) -> Tensor:
            return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

        cu_seqlens = None if batch.cu_seqlens is None else move(batch.cu_seqlens)
        return Batch(move(batch.tokens), move(batch.targets), cu_seqlens)

    # Looking: the only times that the device is waited for.

    def look(self, *, timed: bool) -> None:
        """Read back the steps that wait, write them down, and stop the run if too many of them were not finite.

        What a process does to warm up is not `timed`.
        """
        wait_asleep(self.device)
        values = torch.stack([torch.stack(result) for _, result, _ in self.waiting]).tolist()
        self.clock.end(len(self.waiting) * self.tokens_per_step, self.loader.waited, timed=timed)
        too_many: tuple[int, int] | None = None
        for (step, _, batches), (loss, grad_norm, skipped) in zip(self.waiting, values, strict=True):
            record = {"step": step + 1, "loss": loss, "grad_norm": grad_norm, "lr": self.lr(step)}
            self.write("step", **record, **({"skipped": True} if skipped else {}))
            kept = self.skips.note(step + 1, bool(skipped), batches)
            if kept is not None:
                self.say(f"[skip] step {step + 1}: loss {loss}, gradient norm {grad_norm}; {kept}")
            if self.skips.too_many:
                too_many = (self.skips.in_a_row, step + 1)
        self.waiting.clear()
        self.write_down()
        self.show(loss, grad_norm)
        if too_many is not None:
            # Only now: the steps after them are part of what is saved, and of its curves.
            in_a_row, last = too_many
            raise RunStopped(
                f"the loss or the gradients of {in_a_row} steps in a row were not finite, up to step {last}: "
                f"{self.save_if_good()}; {self.skips.folder} has their batches. A lower --lr may help"
            )

    def is_good(self) -> bool:
        """Steps without a finite gradient change nothing, but the last one that did may have been what broke the model:
        such a state is nothing to go on from, nor to sample from."""
        if self.validated is not None and self.validated[0] == self.done:
            return math.isfinite(self.validated[1])
        return math.isfinite(self.validation_loss())

    def save_if_good(self) -> str:
        """Where the run can be gone on from now, in words."""
        if self.is_good():
            self.save(wait=True)
            return f"step {self.done} is saved in {self.checkpoints.folder}"
        # One that is being written counts.
        self.checkpoints.wait()
        kept = self.checkpoints.latest()
        last = "no checkpoint was saved before that" if kept is None else f"the last good state is that of step {kept}"
        return f"step {self.done} is not saved, its parameters give no finite loss any more: {last}"

    def write_down(self) -> None:
        """The config and the environment. A run that goes on writes them once it has gone on: a start that fails must
        not be what the next one takes for the run."""
        if self.ranks.first and not self.written:
            write_down(self.config, step=self.began, ranks=self.ranks, before=self.last_start)
        self.written = True

    def show(self, loss: float, grad_norm: float) -> None:
        """One look for the screen, the metrics and whoever watches from outside."""
        c, clock = self.config, self.clock
        speed: dict[str, Any] = machine_numbers(self.device)
        text = f"loss {loss:.3f}  lr {self.lr(self.done - 1):.2e}"
        if clock.rate is not None:
            peak = peak_flops(self.device)
            speed["tokens_per_s"] = round(clock.rate, 1)
            speed["data_wait"] = round(clock.data_wait, 4)
            speed["cpu_cores"] = round(clock.cpu_cores, 2)
            text += f"  {clock.rate:,.0f} tokens/s"
            if peak is not None:
                speed["mfu"] = round(clock.rate * self.flops_per_token / (peak * self.ranks.size), 4)
                text += f"  MFU {speed['mfu']:.1%}"
            left = (c.steps - self.done) * self.tokens_per_step / clock.rate
            text += f"  ETA {duration(left)}"
        if c.price_per_hour:
            speed["cost"] = round(clock.total / 3600 * c.price_per_hour, 2)
            text += f"  cost {speed['cost']:.2f}"
        if self.skips.total:
            text += f"  skipped {self.skips.total}"
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
            self.shown.show(self.done, text)

    def check_speed(self) -> None:
        """The smoke phase's verdict."""
        least, rate = self.min_tokens_per_s, self.clock.mean_rate
        slow = rate is not None and rate < least
        if any_rank(slow, self.device):
            batch = self.to_device(self.valid[0])
            profile = branch_profile(self.update.module, batch, self.dtype)
            raise RunStopped(
                f"{rate:,.0f} tokens/s in the first steps, where at least {least:,.0f} are expected; "
                f"--min-tokens-per-s 0 accepts any speed\n{profile}"
            )

    def evaluate(self) -> float:
        loss = self.validation_loss()
        self.validated = (self.done, loss)
        self.write("eval", step=self.done, loss=loss)
        return loss

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean loss over the tokens of the same few validation batches every time."""
        batches = [self.to_device(batch) for batch in self.valid]
        with autocast(self.device, self.dtype):
            losses = [self.model(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens) for batch in batches]
        return mean_over_ranks((torch.stack(losses) * shares(batches)).sum()).item()

    def write_stats(self) -> None:
        found = attention_stats(self.model, self.to_device(self.valid[0]), self.dtype)
        if found is not None:
            gates, distances = found
            self.write("gates", step=self.done, **gates)
            self.write("distances", step=self.done, **distances)

    def sample(self, model: LM) -> str:
        c, tokenizer = self.config, self.loader.tokenizer
        generator = torch.Generator(self.device).manual_seed(c.seed)
        prompt = tokenizer.encode(c.sample_prompt)
        new = generate(model, [prompt], c.sample_tokens, temperature=0.8, generator=generator)
        return c.sample_prompt + tokenizer.decode(new[0].tolist())

    def write_sample(self, text: str) -> str:
        self.write("sample", step=self.done, text=text)
        return text

    # Keeping.

    def save(self, *, wait: bool = False) -> None:
        with self.changing:
            self.save_unlocked(wait=wait)

    def save_unlocked(self, *, wait: bool) -> None:
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
        self.checkpoints.save(self.done, self.model, self.update.optimizer, extra, loss=validated, wait=wait)

    def resume(self) -> int:
        """Go on from the newest intact checkpoint of the run's folder; the step it is of, 0 if there is none."""
        c = self.config
        found = self.checkpoints.load(self.model, self.update.optimizer)
        if found is None:
            return 0
        self.done, extra = found
        self.began = self.done
        # Read now: a file that is damaged must not end a run that has gone on.
        self.last_start = record_of(c.out)
        require(self.done <= c.steps, "steps", c.steps, f"at least the {self.done} that the run in {c.out} has done")
        self.loader.load_state_dict(extra["data"])
        self.position = extra["data"]
        set_rng_state(extra["rng"], self.device)
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
            self.save_unlocked(wait=True)
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
                f"steps done: {self.done}, not looked at yet: {len(self.waiting)}",
                f"data: {self.loader}",
                f"last batches: {shapes}",
                f"routes: {backends(self.config)}",
                f"calls and failures: {counts_so_far().as_dict()}",
            ]
        )

    def finish(self) -> Summary:
        c = self.config
        loss_end = self.evaluate()
        kept = self.save_if_good()
        if not math.isfinite(loss_end):
            raise RunStopped(f"all steps are done, and nothing is exported: {kept}. A lower --lr may help")
        checkpoint = export(self.model, c.out, self.loader.tokenizer)
        # What speaks is what others will load.
        sample = self.write_sample(self.sample(load_model(c.out, self.device))) if self.ranks.first else ""
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
            print(text, flush=True)

    def close_progress(self) -> None:
        if self.shown is not None:
            self.shown.close()
            self.shown = None


def fingerprint(batches: list[Batch], seq_len: int) -> str:
    """Of all ranks' batches together: the same where the same sequences are scored, whoever has which."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()

    rows = [torch.stack([batch.tokens, batch.targets], dim=-1).view(-1, seq_len, 2) for batch in batches]
    own = [digest(sequence.tolist()) for row in rows for sequence in row]
    return digest(sorted(from_all(own)))[:16]


def listen(ranks: Ranks) -> Signals:
    return Signals(echo_s=ECHO_S if ranks.size > 1 else 0.0)


@dataclass
class Summary:
    """What a run comes to."""

    loss_start: float
    loss_end: float
    # None for a run of one step, which is not timed.
    tokens_per_s: float | None
    skipped: int
    # Batches of noise that stood in for data that did not come.
    stand_ins: int
    # How often each backend was called for each op, by "op/backend"; a graph's replays are not calls.
    served: dict[str, int]
    fallbacks: dict[str, int]
    sample: str
    checkpoint: Path
    report: Path | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint), "report": str(self.report)}

    def __str__(self) -> str:
        failures = ", ".join(f"{reason} ({times} times)" for reason, times in self.fallbacks.items())
        served = ", ".join(f"{who} {times:,}" for who, times in self.served.items())
        rate = self.tokens_per_s
        return "\n".join(
            [
                f"validation loss {self.loss_start:.3f} -> {self.loss_end:.3f}",
                "speed not measured: the first step is not timed" if rate is None else f"{rate:,.0f} tokens/s",
                f"served by: {served or 'torch alone'}",
                f"fallbacks: {failures or 'none'}   skipped steps: {self.skipped}   stand-in batches: {self.stand_ins}",
                f"sample:\n{self.sample}",
                f"saved {self.checkpoint}",
                f"report {self.report}",
            ]
        )


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
