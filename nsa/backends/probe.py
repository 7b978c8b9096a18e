"""Try a native library in a process of its own before this one trusts it, and remember the verdict.

A floating point exception, an illegal access or a hang inside a library takes its process along; nothing can be caught.
So the first use on a machine runs in a child, case by case: the child says which case it begins and how it ended, and
where it dies or goes silent the parent knows the case, writes it down and starts another child on those that are left.
Verdicts are JSON in the user's cache folder, one file for each library, its version, the GPU and the driver.

What a case does is the child's business; this module knows commands, time limits and files.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa import settings

log = logging.getLogger("nsa")

# Loading torch and a GPU takes seconds, a case milliseconds.
START_SECONDS = 120.0
CASE_SECONDS = 30.0
# The status by which a child says: the last case is answered, the others need a new one.
RESTART = 75
NOT_STARTED = "did not start"
CACHE_FOLDER = "~/.cache/nsa/probe"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is tried, and where: a verdict holds for exactly this."""

    library: str
    version: str
    gpu: str
    driver: str
    torch: str
    cuda: str

    @classmethod
    def here(cls, library: str, version: str, device: str) -> Subject:
        on_gpu = device == "cuda" and torch.cuda.is_available()
        return cls(
            library=library,
            version=version,
            gpu=torch.cuda.get_device_name() if on_gpu else device,
            driver=nvidia_driver() if on_gpu else "none",
            torch=str(torch.__version__),
            cuda=torch.version.cuda or "none",
        )

    @property
    def file_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9.+]+", "-", "_".join(asdict(self).values())) + ".json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended. `problem`: None when it was right. `call`: what was being computed."""

    case: str
    feature: str
    backward: bool
    problem: str | None = None
    call: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel module says its own version; elsewhere than on Linux nobody is asked."""
    if not path.is_file():
        return "unknown"
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return found.group(1) if found else "unknown"


def cache_folder() -> Path | None:
    return settings.user_path(CACHE_FOLDER)


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of one subject, kind of problem by kind of problem, in one file of `folder`.

    Without a folder, or in one that cannot be written, a verdict holds for this process and is found anew by the next.
    """

    folder: Path | None
    subject: Subject

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder / self.subject.file_name

    def read(self) -> dict[str, list[Outcome]]:
        """A file that is not there, or not ours, says nothing."""
        if self.path is None:
            return {}
        try:
            kinds = json.loads(self.path.read_text())["kinds"]
            return {kind: [Outcome(**outcome) for outcome in outcomes] for kind, outcomes in kinds.items()}
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return {}

    def get(self, kind: str) -> list[Outcome] | None:
        return self.read().get(kind)

    def put(self, kind: str, outcomes: Sequence[Outcome]) -> None:
        """Many processes of one run may finish at once: each writes a file of its own and puts it in place."""
        kinds = {**self.read(), kind: list(outcomes)}
        content = {
            "subject": asdict(self.subject),
            "kinds": {name: [asdict(outcome) for outcome in found] for name, found in kinds.items()},
        }
        if self.folder is None or self.path is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".tmp", delete=False) as file:
                json.dump(content, file, indent=1)
            Path(file.name).replace(self.path)
        except OSError as error:
            log.warning("nsa: the verdict on %s cannot be kept in %s: %s", self.subject.library, self.folder, error)

    def forget(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def run_cases(
    command: Sequence[str],
    cases: Sequence[Mapping[str, Any]],
    *,
    start_seconds: float = START_SECONDS,
    case_seconds: float = CASE_SECONDS,
) -> list[Outcome]:
    """Every case's outcome, in children started as `command`. A case has a `name`, a `feature` and `backward`.

    A child reads one JSON request a line and answers each with two: `{"call": ...}` before it computes, and
    `{"problem": null}` or what was wrong after.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        outcomes += run_child(command, cases[len(outcomes) :], start_seconds, case_seconds)
    return outcomes


def run_child(
    command: Sequence[str], cases: Sequence[Mapping[str, Any]], start_seconds: float, case_seconds: float
) -> list[Outcome]:
    """The outcomes up to the first case that the child does not survive, that one included."""
    with tempfile.TemporaryDirectory() as folder:
        answers, errors = Path(folder) / "answers", Path(folder) / "errors"
        with answers.open("w") as out, errors.open("w") as err:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True)
            assert child.stdin is not None
            try:
                child.stdin.write("".join(json.dumps(case) + "\n" for case in cases))
                child.stdin.close()
            except BrokenPipeError:
                # It died before it read; how is asked below.
                pass
            ended = wait(child, answers, start_seconds, case_seconds)
        lines = answers_in(answers.read_text())
        calls = [line["call"] for line in lines if "call" in line]
        problems = [line["problem"] for line in lines if "problem" in line]
        finished = [outcome_of(case, p, c) for case, p, c in zip(cases, problems, calls, strict=False)]
        if len(finished) == len(cases) or (finished and child.returncode == RESTART):
            return finished
        why = ": ".join([ended, *errors.read_text().strip().splitlines()[-1:]])
        if not calls:
            # Another child would fare no better.
            return [outcome_of(case, f"{NOT_STARTED}: {why}", "") for case in cases]
        return [*finished, outcome_of(cases[len(finished)], why, calls[-1])]


def answers_in(text: str) -> list[dict[str, Any]]:
    """The child's answers among whatever else the library printed."""
    found = []
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            found.append(answer)
    return found


def outcome_of(case: Mapping[str, Any], problem: str | None, call: str) -> Outcome:
    return Outcome(
        case=case["name"],
        feature=case["feature"],
        backward=case["backward"],
        problem=problem,
        call=call,
        request=dict(case) if problem else {},
    )


def wait(child: subprocess.Popen[str], answers: Path, start_seconds: float, case_seconds: float) -> str:
    """How the child ended: by itself, by a signal, or because it said nothing for too long."""
    size, since = 0, time.monotonic()
    while child.poll() is None:
        now = answers.stat().st_size
        if now > size:
            size, since = now, time.monotonic()
        allowed = case_seconds if size else start_seconds
        if time.monotonic() - since > allowed:
            child.kill()
            child.wait()
            return f"hung: no answer in {allowed:g} s"
        time.sleep(0.02)
    if child.returncode < 0:
        return f"killed by {signal.Signals(-child.returncode).name}"
    return f"ended with status {child.returncode}"


def report(subject: Subject, outcomes: Sequence[Outcome]) -> str:
    """What went wrong and where, complete enough to be sent to someone."""
    wrong = [outcome for outcome in outcomes if outcome.problem]
    where = ", ".join(
        f"{name} {value}" for name, value in asdict(subject).items() if name not in ("library", "version")
    )
    lines = [f"{subject.library} {subject.version} on {where}: {len(wrong)} of {len(outcomes)} cases failed"]
    for outcome in wrong:
        lines += [f"  {outcome.case}: {outcome.problem}", f"    {outcome.call or 'before the call'}"]
        values = outcome.request.get("lengths")
        if values is not None:
            lines.append(f"    lengths {values}")
    return "\n".join(lines)
