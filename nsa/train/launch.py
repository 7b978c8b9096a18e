"""Start a run in this process, which may be one of several ranks, and report how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nsa.train.capacity import check_capacity
from nsa.train.config import TrainConfig
from nsa.train.distributed import Ranks, from_first, ranks
from nsa.train.guards import WATCHDOG, Asked, RunStopped, Watchdog
from nsa.train.loop import Trainer, listen
from nsa.train.progress import say
from nsa.train.rank_log import one_voice

# How gloo and NCCL say that a process at the other end has ended.
LOST = ("closed by peer", "Connection reset", "remote process exited", "Broken pipe")


def launch(config: TrainConfig) -> int:
    """Train, and return the exit status: 0, or 1 where the run stopped itself."""
    if config.device.startswith("cuda"):
        # What little the host computes, batches and their shuffling, would wake a thread on every core.
        torch.set_num_threads(1)
    try:
        with ranks(config.device, config.parallel) as own:
            # A name with the time in it may differ from rank to rank.
            config = replace(config, out=Path(from_first(str(config.out))))
            check_capacity(config, own.size)
            with listen(own) as signals, telling_of_lost_ranks(own, config.out):
                # Nothing is done yet that would have to be kept.
                with signals.waiting(), starting(config), one_voice():
                    trainer = Trainer(config, own)
                summary = trainer.train(signals)
            if summary is not None and own.first:
                say(str(summary))
                say(f'go on with: nsa generate --run {config.out} --prompt "import "')
    except Asked:
        say("[stop] asked to before the first step: nothing was done")
    except RunStopped as stopped:
        say(f"nsa train: stopped: {stopped}", error=True)
        return 1
    return 0


def starting(config: TrainConfig) -> Watchdog:
    """For data that is opened and read before the run has a watchdog of its own."""
    return Watchdog(
        config.out / WATCHDOG,
        config.watchdog_s,
        describe=lambda: "the run has not begun: its data is opened, its model made",
        rescue=lambda: "no checkpoint: nothing is learned yet",
    )


@contextmanager
def telling_of_lost_ranks(own: Ranks, out: Path) -> Iterator[None]:
    """Says what to do, and at once: a launcher ends all ranks soon after one is gone."""
    try:
        yield
    except RuntimeError as error:
        if own.size == 1 or not any(word in str(error) for word in LOST):
            raise
        say(
            f"nsa train: another rank is gone; its own words, if it had any, are above. Go on with the same command "
            f"and --out {out}",
            error=True,
        )
        raise SystemExit(1) from error
