"""Try a native library in a child process before this process trusts it, and keep the verdict.

A floating-point exception, an illegal access or a hang inside a library takes its process down and cannot be caught. So
before its first use, one child runs the cases of one layout: it reports each case that it begins and how it ended, and
where it dies or stops answering the parent knows the case. The verdict on that layout is then settled, and the cases
after it are not run.

Verdicts are JSON in the user's cache folder: a folder per library, version, GPU and driver, with a file per kind of
problem, so that concurrent processes do not overwrite each other's. What may be different a minute later, such as full
memory, is `transient` and not kept. What a case does is up to the child; this module knows commands, time limits and
files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa import settings
from nsa.backends.gpu import gpu_name, nvidia_driver
from nsa.files import make_folder, replace_text

log = logging.getLogger("nsa")

# Loading torch and a GPU context takes seconds, a case milliseconds.
START_SECONDS = 120.0
CASE_SECONDS = 30.0
END_SECONDS = 10.0
# Exit status of a child that answered its last case and runs no more of them.
STOPPED = 75
NOT_STARTED = "did not start"
HUNG = "hung"
# Of what a child prints to its standard error, the last line is kept, up to so many bytes.
KEPT_BYTES = 4096
LONGEST_LIST = 64
CACHE_FOLDER = "~/.cache/nsa/probe"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a probe, what was tried and where: a verdict holds for exactly this. `cases`: the version of the
    cases' code."""

    library: str
    version: str
    gpu: str
    driver: str
    torch: str
    cuda: str
    cases: str

    @classmethod
    def here(cls, library: str, version: str, device: str, cases: str = "any") -> Subject:
        on_gpu = device == "cuda" and torch.cuda.is_available()
        gpu, driver = (gpu_name(), nvidia_driver()) if on_gpu else (device, "none")
        versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda or "none", "cases": cases}
        return cls(library=library, version=version, gpu=gpu, driver=driver, **versions)

    @property
    def name(self) -> str:
        return file_name("_".join(asdict(self).values()))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended. `problem`: what was wrong, if anything; `call`: what was being computed; `transient`: it is
    about this moment, not about the library."""

    case: str
    layout: str
    problem: str | None = None
    call: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    transient: bool = False


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", text)


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on one subject, one file per kind of problem under `folder`. Without one, or if it cannot be
    written, a verdict holds for this process only."""

    folder: Path | None
    subject: Subject

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder / self.subject.name

    def read(self) -> list[list[Outcome]]:
        found = [] if self.path is None else map(read_outcomes, sorted(self.path.glob("*.json")))
        return [outcomes for outcomes in found if outcomes is not None]

    def get(self, kind: str) -> list[Outcome] | None:
        return None if self.path is None else read_outcomes(self.path / f"{file_name(kind)}.json")

    def put(self, kind: str, outcomes: Sequence[Outcome]) -> None:
        """Write one verdict, atomically: processes of one run may finish at once."""
        content = {"subject": asdict(self.subject), "kind": kind, "outcomes": [asdict(one) for one in outcomes]}
        if self.path is None:
            return
        try:
            make_folder(self.path)
            replace_text(self.path / f"{file_name(kind)}.json", json.dumps(content, indent=1))
        except OSError as error:
            log.warning("nsa: cannot save the verdict on %s in %s: %s", self.subject.library, self.folder, error)

    def forget(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


def read_outcomes(path: Path) -> list[Outcome] | None:
    """The outcomes in a file; None if the file is missing or not ours."""
    try:
        return [Outcome(**outcome) for outcome in json.loads(path.read_text())["outcomes"]]
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def run_cases(
    command: Sequence[str],
    cases: Sequence[Mapping[str, Any]],
    *,
    start_seconds: float = START_SECONDS,
    case_seconds: float = CASE_SECONDS,
) -> list[Outcome]:
    """Run the cases in one child process; the outcomes up to the first that it did not survive.

    `command` gets the path of a file for the child's answers appended, and one case per line on its standard input:
    JSON objects with a unique `name` and a `layout`. It may be silent for `start_seconds` before its first case and for
    `case_seconds` after that. It answers with one JSON object per line: `{"case": name, "stage": ..., "call": ...}`
    when it begins a part of a case, `{"case": name, "problem": ...}` at its end. Before the first case, a stage without
    a name says that the library's code runs from here on.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            requests, path = Path(folder) / "requests", Path(folder) / "answers"
            requests.write_text("".join(json.dumps(case) + "\n" for case in cases))
            path.touch()
            environment = settings.child_environment(PYTHONPATH=python_path())
            with requests.open() as given:
                streams: dict[str, Any] = {"stdin": given, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
                # A process group, so that whatever it starts ends with it.
                child = subprocess.Popen([*command, str(path)], **streams, start_new_session=True, env=environment)
            lines: deque[bytes] = deque(maxlen=1)
            reader = threading.Thread(target=keep_last_line, args=(child, lines), daemon=True)
            reader.start()
            try:
                ended = wait(child, path, start_seconds, case_seconds)
            finally:
                end(child)
            reader.join(timeout=1.0)
            answers = answers_in(path)
    except OSError as error:
        return [outcome_of(cases[0], f"{NOT_STARTED}: {error}", transient=True)]

    # Only the out-of-memory killer sends this.
    hung = ended.startswith(HUNG)
    out_of_memory = child.returncode == -signal.SIGKILL and not hung
    if not names_a_case(answers):
        why = why_it_ended(ended, lines, answers[-1] if answers else {})
        loading = bool(answers) and not out_of_memory and (hung or child.returncode < 0)
        return [outcome_of(cases[0], why if loading else f"{NOT_STARTED}: {why}", transient=not loading)]

    outcomes: list[Outcome] = []
    for case in cases:
        own = [answer for answer in answers if answer.get("case") == case["name"]]
        call = next((answer["call"] for answer in reversed(own) if "call" in answer), "")
        last = own[-1] if own else {}
        if "problem" in last:
            outcomes.append(outcome_of(case, last["problem"], call, transient=last.get("transient", False)))
        elif child.returncode == STOPPED and outcomes:
            return outcomes
        else:
            why = why_it_ended(ended, lines, last)
            return [*outcomes, outcome_of(case, why, call, transient=out_of_memory)]
    return outcomes


def python_path() -> str:
    """The child's search path for modules: this package first, then where this process would find the library."""
    package = Path(__file__).parents[3]
    # An empty entry is the working directory.
    entries = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
    return os.pathsep.join(dict.fromkeys([str(package), *entries]))


def names_a_case(answers: Sequence[Mapping[str, Any]]) -> bool:
    return any(answer.get("case") for answer in answers)


def why_it_ended(ended: str, lines: Iterable[bytes], last: Mapping[str, Any]) -> str:
    """How the child ended, the stage it was in and the last line that it printed."""
    stage = f" in {last['stage']}" if "stage" in last else ""
    return ": ".join([ended + stage, *(line.decode(errors="replace").strip() for line in lines)])


def answers_in(path: Path) -> list[dict[str, Any]]:
    """The child's answers; the last line may be incomplete."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [answer for answer in found if isinstance(answer, dict)]


def outcome_of(case: Mapping[str, Any], problem: str | None, call: str = "", *, transient: bool = False) -> Outcome:
    what = {"case": case["name"], "layout": case["layout"], "request": dict(case) if problem else {}}
    return Outcome(**what, problem=problem, call=call, transient=transient)


def keep_last_line(child: subprocess.Popen[bytes], lines: deque[bytes]) -> None:
    """Read the child's standard error to its end, so that it never blocks on a full pipe."""
    assert child.stderr is not None
    with child.stderr as pipe:
        lines.extend(line for line in iter(lambda: pipe.readline(KEPT_BYTES), b"") if line.strip())


def wait(child: subprocess.Popen[bytes], answers: Path, start_seconds: float, case_seconds: float) -> str:
    """How the child ended: by itself, by a signal, or because it did not answer in time."""
    size, since, allowed = 0, time.monotonic(), start_seconds
    while child.poll() is None:
        now = answers.stat().st_size
        if now > size:
            size, since = now, time.monotonic()
            allowed = case_seconds if names_a_case(answers_in(answers)) else start_seconds
        if time.monotonic() - since > allowed:
            return f"{HUNG}: no answer in {allowed:g} s"
        time.sleep(0.02)
    if child.returncode >= 0:
        return f"ended with status {child.returncode}"
    # Real-time signals have no names.
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(-child.returncode, f'signal {-child.returncode}')}"


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # A process that waits inside the driver survives even that.
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=END_SECONDS)


def shown_list(values: Sequence[int]) -> str:
    shown = str(list(values[:LONGEST_LIST]))
    return shown if len(values) <= LONGEST_LIST else f"{shown[:-1]}, ... {len(values)} in all]"


def report(subject: Subject, outcomes: Sequence[Outcome]) -> str:
    """A report of what went wrong and where, complete enough for a bug report."""
    wrong = [outcome for outcome in outcomes if outcome.problem]
    where = ", ".join(f"{name} {value}" for name, value in list(asdict(subject).items())[2:])
    lines = [f"{subject.library} {subject.version} on {where}: {len(wrong)} of {len(outcomes)} cases failed"]
    for outcome in wrong:
        lines += [f"  {outcome.case}: {outcome.problem}", f"    {outcome.call or 'before the call'}"]
        if "lengths" in outcome.request:
            lines.append(f"    lengths {shown_list(outcome.request['lengths'])}")
    return "\n".join(lines)
