"""`nsa` commands that run side by side until a deadline, the most important first."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nsa

# Seconds between two polls of the processes, and between two lines of progress.
POLL_S = 0.2
LINE_EVERY_S = 20.0


def environment() -> dict[str, str]:
    """Of processes that import this `nsa`. Many compile at once, so that each takes one thread for it."""
    paths = [str(Path(nsa.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Job:
    """One command of the queue."""

    name: str
    # The words after `nsa`, computed when it could start; None: it cannot run; none: there is nothing to do.
    words: Callable[[], Sequence[str] | None]
    # Called after status 0; returns whether there is a result.
    finish: Callable[[], bool] = lambda: True
    # Jobs that end before it starts, whether or not they succeed.
    after: tuple[str, ...] = ()
    # Seconds without which it does not start.
    seconds: Callable[[], float] = lambda: 0.0


class Queue:
    """Runs jobs until the deadline.

    Args:
        work: The folder in which the commands run; their output goes to `logs/` in it.
        deadline: By `time.monotonic()`.
        grace_s: Seconds that the commands get to save after the deadline.
        slots: How many may run at once.
        saved: Called after each job that has a result.
    """

    def __init__(
        self, work: Path, deadline: float, grace_s: float, slots: int, saved: Callable[[], None] = lambda: None
    ) -> None:
        self.work, self.deadline, self.grace_s, self.slots, self.saved = work, deadline, grace_s, slots, saved
        self.running: dict[Job, subprocess.Popen[bytes]] = {}
        # By name, why a job has no result.
        self.left_out: dict[str, str] = {}

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[study] {self.left:.0f} s left: {text}", flush=True)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run the jobs, in order where there is a choice; returns when all have ended or the time is up."""
        waiting, shown = list(jobs), time.monotonic()
        try:
            while (waiting or self.running) and self.left > 0:
                waiting = [job for job in waiting if not self.begin(job, {job.name for job in waiting})]
                self.collect()
                if time.monotonic() - shown > LINE_EVERY_S:
                    shown = time.monotonic()
                    self.say(f"running {', '.join(job.name for job in self.running)}")
                time.sleep(POLL_S if self.running else 0)
        finally:
            self.stop()
        for job in waiting:
            self.leave(job, "the time is up")

    def begin(self, job: Job, waiting: set[str]) -> bool:
        """Start a job if it can start now; returns whether it waits no longer."""
        pending = waiting | {other.name for other in self.running}
        if any(name in pending for name in job.after) or len(self.running) >= self.slots:
            return False
        words = job.words()
        if words is None:
            self.leave(job, "what it needs is missing")
        elif words and self.left < job.seconds():
            self.leave(job, f"it takes about {job.seconds():.0f} s")
        elif words:
            self.say(f"nsa {shlex.join(words)}")
            self.running[job] = self.start(job.name, words)
        return True

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log_of(name).open("ab") as log:
            # In the folder of the runs, so that no path of this machine is part of a result.
            return subprocess.Popen(
                [sys.executable, "-m", "nsa", *words],
                cwd=self.work,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log_of(self, name: str) -> Path:
        folder = self.work / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{name.replace(' ', '-')}.log"

    def collect(self) -> None:
        """Take the jobs that have ended from those that run."""
        for job, process in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[job]
            if status == 0 and job.finish():
                self.say(f"{job.name} is done")
                self.saved()
                continue
            self.leave(job, f"it ended with status {status}")
            with suppress(FileNotFoundError):
                print(*self.log_of(job.name).read_text(errors="replace").splitlines()[-15:], sep="\n  ", flush=True)

    def leave(self, job: Job, reason: str) -> None:
        self.left_out[job.name] = reason
        self.say(f"without {job.name}: {reason}")

    def stop(self) -> None:
        """Let what still runs save, then end it."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.grace_s
        while self.running and time.monotonic() < end:
            time.sleep(POLL_S)
            self.collect()
        for job, process in self.running.items():
            process.kill()
            process.wait()
            self.leave(job, "it did not stop in time")
        self.running.clear()
