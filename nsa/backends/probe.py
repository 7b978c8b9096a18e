"""Try a native library in a process of its own before this one trusts it, and remember the verdict.

A floating point exception, an illegal access or a hang inside a library takes its process along; nothing can be caught.
So the first use on a machine runs in a child, case by case: the child says which case it begins and how it ended, and
where it dies or goes silent the parent knows the case, writes it down and starts another child on those that are left.
Verdicts are JSON in the user's cache folder: a folder for each library, its version, the GPU and the driver, in it a
file for each kind of problem, so that processes that probe at the same time lose nothing of each other's. What may be
otherwise a minute later, as memory that was full, is no verdict and is not kept. A library that takes its process along
while it is loaded fails every case.

What a case does is the child's business; this module knows commands, time limits and files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa import settings

log = logging.getLogger("nsa")

# Loading torch and a GPU takes seconds, a case milliseconds.
START_SECONDS = 120.0
CASE_SECONDS = 30.0
END_SECONDS = 10.0
# The status by which a child says: the last case is answered, the others need a new one.
RESTART = 75
NOT_STARTED = "did not start"
HUNG = "hung"
# Of what a child prints, the end is kept: as much as a pipe holds.
KEPT_BYTES = 65_536
LONGEST_LIST = 64
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
    # Which code made the cases: of other ones this verdict says nothing.
    cases: str

    @classmethod
    def here(cls, library: str, version: str, device: str, cases: str = "any") -> Subject:
        on_gpu = device == "cuda" and torch.cuda.is_available()
        return cls(
            library=library,
            version=version,
            gpu=torch.cuda.get_device_name() if on_gpu else device,
            driver=nvidia_driver() if on_gpu else "none",
            torch=str(torch.__version__),
            cuda=torch.version.cuda or "none",
            cases=cases,
        )

    @property
    def name(self) -> str:
        return file_name("_".join(asdict(self).values()))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended. `problem`: None when it was right. `call`: what was being computed. `transient`: it says
    something about this moment, nothing about the library."""

    case: str
    feature: str
    problem: str | None = None
    call: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    transient: bool = False


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", text)


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel module says its own version; elsewhere than on Linux nobody is asked."""
    if not path.is_file():
        return "unknown"
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return found.group(1) if found else "unknown"


def cache_folder() -> Path | None:
    return settings.expand_home(CACHE_FOLDER)


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of one subject, kind of problem by kind of problem, each in a file of its own under `folder`.

    Without a folder, or in one that cannot be written, a verdict holds for this process and is found anew by the next.
    """

    folder: Path | None
    subject: Subject

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder / self.subject.name

    def read(self) -> list[list[Outcome]]:
        """Every kind's."""
        found = [] if self.path is None else map(read_outcomes, sorted(self.path.glob("*.json")))
        return [outcomes for outcomes in found if outcomes is not None]

    def get(self, kind: str) -> list[Outcome] | None:
        return None if self.path is None else read_outcomes(self.path / f"{file_name(kind)}.json")

    def put(self, kind: str, outcomes: Sequence[Outcome]) -> None:
        """Many processes of one run may finish at once: each writes a file of its own and puts it in place."""
        content = {
            "subject": asdict(self.subject),
            "kind": kind,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        if self.path is None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path, suffix=".tmp", delete=False) as file:
                json.dump(content, file, indent=1)
            Path(file.name).replace(self.path / f"{file_name(kind)}.json")
        except OSError as error:
            log.warning("nsa: the verdict on %s cannot be kept in %s: %s", self.subject.library, self.folder, error)

    def forget(self) -> None:
        try:
            for file in [] if self.path is None else self.path.glob("*.json"):
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("nsa: the verdict on %s in %s stays: %s", self.subject.library, self.folder, error)


def read_outcomes(path: Path) -> list[Outcome] | None:
    """A file that is not there, or not ours, says nothing."""
    try:
        return [Outcome(**outcome) for outcome in json.loads(path.read_text())["outcomes"]]
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None


def run_cases(
    command: Sequence[str],
    cases: Sequence[Mapping[str, Any]],
    *,
    start_seconds: float = START_SECONDS,
    case_seconds: float = CASE_SECONDS,
) -> list[Outcome]:
    """The cases' outcomes, in children started as `command` and the path of a file for their answers.

    A crash or a hang settles the verdict on its feature: what is left of that is not tried and has no outcome.

    A case has a `name` of its own and a `feature`. A child reads one JSON case a line and appends answers,
    one JSON object a line with that name as `case`: `{"stage": ..., "call": ...}` when it begins a part of it, and
    `{"problem": null}` or what was wrong at its end. Before the first case a stage without a name says that from here
    on the library's code runs.
    """
    found: dict[str, Outcome] = {}
    left = list(cases)
    while left:
        try:
            outcomes, settled = run_child(command, left, start_seconds, case_seconds)
        except OSError as error:
            # No process, or no folder for its answers.
            outcomes, settled = not_started(left, str(error)), None
        found |= {outcome.case: outcome for outcome in outcomes}
        left = [case for case in left if case["name"] not in found and case["feature"] != settled]
        if any(outcome.transient for outcome in outcomes):
            # Another child would fare no better.
            found |= {case["name"]: outcome_of(case, "was not tried", transient=True) for case in left}
            left = []
    return [found[case["name"]] for case in cases if case["name"] in found]


def run_child(
    command: Sequence[str], cases: Sequence[Mapping[str, Any]], start_seconds: float, case_seconds: float
) -> tuple[list[Outcome], str | None]:
    """The outcomes up to the first case that the child does not survive, that one included; and its feature."""
    with tempfile.TemporaryDirectory() as folder:
        requests, answers = Path(folder) / "requests", Path(folder) / "answers"
        requests.write_text("".join(json.dumps(case) + "\n" for case in cases))
        answers.touch()
        with requests.open() as given:
            child = subprocess.Popen(
                [*command, str(answers)],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # A group of its own, so that what it has started ends with it.
                start_new_session=True,
                env=settings.child_environment(PYTHONPATH=python_path()),
            )
        try:
            ended, printed = wait(child, answers, start_seconds, case_seconds)
        finally:
            end(child)
        said = answers_in(answers.read_text(errors="replace"))

    # Nobody but the system's guard of its memory sends this.
    full = child.returncode == -signal.SIGKILL and not ended.startswith(HUNG)
    if not names_a_case(said):
        why = why_it_ended(ended, printed, said[-1] if said else {})
        died = ended.startswith(HUNG) or child.returncode < 0
        if said and died and not full:
            return [outcome_of(case, why) for case in cases], None
        return not_started(cases, why), None

    outcomes = []
    for case in cases:
        own = [answer for answer in said if answer.get("case") == case["name"]]
        call = next((answer["call"] for answer in reversed(own) if "call" in answer), "")
        last = own[-1] if own else {}
        if "problem" in last:
            outcomes.append(outcome_of(case, last["problem"], call, transient=last.get("transient", False)))
        elif child.returncode == RESTART and outcomes:
            break
        else:
            outcomes.append(outcome_of(case, why_it_ended(ended, printed, last), call, transient=full))
            return outcomes, case["feature"]
    return outcomes, None


def python_path() -> str:
    """Where the child looks for modules: this very package first, then where this process would find the library."""
    package = Path(__file__).parents[2]
    # An empty entry is the working directory; import passes over what is no string.
    entries = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
    return os.pathsep.join(dict.fromkeys([str(package), *entries]))


def names_a_case(said: Sequence[Mapping[str, Any]]) -> bool:
    return any(answer.get("case") for answer in said)


def why_it_ended(ended: str, printed: str, last: Mapping[str, Any]) -> str:
    """`last`: the answer that tells how far it had got."""
    stage = f" in {last['stage']}" if "stage" in last else ""
    return ": ".join([ended + stage, *printed.strip().splitlines()[-1:]])


def not_started(cases: Sequence[Mapping[str, Any]], why: str) -> list[Outcome]:
    return [outcome_of(case, f"{NOT_STARTED}: {why}", transient=True) for case in cases]


def answers_in(text: str) -> list[dict[str, Any]]:
    """The child's answers; the last line may be half of one."""
    found = []
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            found.append(answer)
    return found


def outcome_of(case: Mapping[str, Any], problem: str | None, call: str = "", *, transient: bool = False) -> Outcome:
    return Outcome(
        case=case["name"],
        feature=case["feature"],
        problem=problem,
        call=call,
        request=dict(case) if problem else {},
        transient=transient,
    )


def wait(child: subprocess.Popen[bytes], answers: Path, start_seconds: float, case_seconds: float) -> tuple[str, str]:
    """How the child ended: by itself, by a signal, or because it gave no answer for too long. And what it printed."""
    assert child.stderr is not None
    pipe = child.stderr.fileno()
    os.set_blocking(pipe, False)
    size, since, printed = 0, time.monotonic(), b""
    allowed = start_seconds
    while child.poll() is None:
        printed = (printed + read_now(pipe))[-KEPT_BYTES:]
        now = answers.stat().st_size
        if now > size:
            size, since = now, time.monotonic()
            started = names_a_case(answers_in(answers.read_text(errors="replace")))
            allowed = case_seconds if started else start_seconds
        if time.monotonic() - since > allowed:
            end(child)
            return f"{HUNG}: no answer in {allowed:g} s", printed.decode(errors="replace")
        time.sleep(0.02)
    printed = (printed + read_now(pipe))[-KEPT_BYTES:]
    return how_it_ended(child.returncode), printed.decode(errors="replace")


def read_now(pipe: int) -> bytes:
    try:
        return os.read(pipe, KEPT_BYTES)
    except BlockingIOError:
        return b""


def how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    # Real-time signals have no names.
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


def end(child: subprocess.Popen[bytes]) -> None:
    """The child and everything that it has started."""
    # Often nothing of it is left.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # What waits inside the driver outlives even that, and nobody should wait for it.
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=END_SECONDS)
    if child.stderr is not None:
        child.stderr.close()


def listed(values: Sequence[int]) -> str:
    """A list as a report can show it."""
    shown = str(list(values[:LONGEST_LIST]))
    return shown if len(values) <= LONGEST_LIST else f"{shown[:-1]}, ... {len(values)} in all]"


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
            lines.append(f"    lengths {listed(values)}")
    return "\n".join(lines)
