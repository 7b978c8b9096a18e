"""Output that cannot be written never ends a run: it trains to the end, saves and exports."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import config_file, lines_of, small_run
from waiting import PATIENCE_S, wait_until

from nsa.progress import Bar, Lines, progress, say
from nsa.train import Trainer


def start(folder: Path, words: str = "", *, steps: int = 6, **how: Any) -> subprocess.Popen[bytes]:
    """`nsa train`, through a shell that adds `words`."""
    file = config_file(folder, small_run(folder / "run", steps=steps, log_every=1))
    line = f"exec {sys.executable} -m nsa.cli train --config {file} --out {folder / 'run'} {words}"
    return subprocess.Popen(["bash", "-c", line], **how)


def complete(folder: Path, steps: int = 6) -> bool:
    """The last checkpoint, the export and every line of the metrics are there."""
    run = folder / "run"
    return (
        (run / "checkpoints" / f"step_{steps}").is_dir()
        and (run / "model.json").is_file()
        and [line["step"] for line in lines_of(run, "step")] == list(range(1, steps + 1))
        and len(lines_of(run, "end")) == 1
    )


def steps_done(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count('"kind": "step"') if metrics.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [">&-", "0<&- >&- 2>&-", "> /dev/full 2>&1"])
def test_streams_that_take_nothing(words: str, tmp_path: Path) -> None:
    start(tmp_path, words).wait(timeout=PATIENCE_S)
    assert complete(tmp_path)


@pytest.mark.slow
def test_closed_output_pipe_loses_nothing_but_the_output(tmp_path: Path) -> None:
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"[boot]")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=PATIENCE_S) == 0
    assert complete(tmp_path)


def on_a_terminal(folder: Path, *, ignoring: bool) -> tuple[subprocess.Popen[bytes], int]:
    """The run in the foreground of a terminal of its own, and the descriptor whose closing closes the terminal."""
    ours, theirs = pty.openpty()

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignoring else signal.SIG_DFL)
        os.login_tty(theirs)

    process = start(folder, steps=200, preexec_fn=prepare, pass_fds=(theirs,))
    os.close(theirs)
    return process, ours


def drained(terminal: int) -> None:
    """A terminal that nobody reads blocks who writes to it."""
    os.set_blocking(terminal, False)
    try:
        while os.read(terminal, 65536):
            pass
    except BlockingIOError:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("ignoring", [True, False])
def test_a_closed_terminal(ignoring: bool, tmp_path: Path) -> None:
    """Under nohup the run goes on to its end; otherwise it saves and stops."""
    process, terminal = on_a_terminal(tmp_path, ignoring=ignoring)

    def begun() -> bool:
        drained(terminal)
        return steps_done(tmp_path) >= 3

    wait_until(begun)
    os.close(terminal)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert complete(tmp_path, steps=200) == ignoring
    assert (tmp_path / "run" / "checkpoints" / f"step_{steps_done(tmp_path)}").is_dir()


def test_no_file_gets_the_descriptor_of_a_closed_stream() -> None:
    """What native code prints would end up in it."""
    code = "from nsa.progress import open_closed_descriptors as o; o(); assert open('/dev/null').fileno() > 2"
    line = f'exec {sys.executable} -c "{code}" 0<&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line], check=False).returncode == 0


class Broken(io.StringIO):
    """A terminal that is gone."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("stream", [Broken(), None, "closed"])
def test_nothing_of_the_progress_raises(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    shown = progress(3)
    assert isinstance(shown, Bar if isinstance(stream, Broken) else Lines)
    for step in (1, 2):
        shown.show(step, "text")
        say("a line")
        say("a line", error=True)
    shown.close()
    assert sys.stdout is stream


def test_characters_that_the_terminal_does_not_have_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    say("caf\u00e9")
    assert written.getvalue() == b"caf\\xe9\n"


def test_a_run_whose_terminal_goes_away_ends_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken())
    assert Trainer(small_run(tmp_path, log_every=1)).train() is not None
    assert (tmp_path / "model.json").is_file()
