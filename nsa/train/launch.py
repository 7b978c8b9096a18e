"""Start a run in this process, which may be one of several ranks, and report how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nsa.progress import say, warn_on_first_rank
from nsa.train.config import TrainConfig
from nsa.train.distributed import Ranks, from_first, ranks
from nsa.train.guards import RunStopped, Signals, StopRequested, Watchdog
from nsa.train.loop import Trainer
from nsa.train.preflight import check_capacity
from nsa.train.run_folder import WATCHDOG

# In messages of gloo and NCCL when another process has ended.
LOST = ("closed by peer", "Connection reset", "remote process exited", "Broken pipe")


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
            doing = "the run has not started: it is opening its data or building its model"
            saved = "no checkpoint: no step is done yet"
            callbacks = {"describe": lambda: doing, "rescue": lambda: saved}
            watchdog = Watchdog(config.out / WATCHDOG, config.watchdog_s, **callbacks)
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
