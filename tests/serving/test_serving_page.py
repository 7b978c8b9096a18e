"""What docs/serving.md and the transcript of docs/transformers.md show: clients and curl get such answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from docs_pages import ROOT, fenced
from live_server import serve, tiny_folder
from waiting import PATIENCE_S

ADDRESS = "127.0.0.1:8000"
KEY = "Authorization: Bearer secret-key"


class Request(NamedTuple):
    """A request of a transcript, and the answer below it."""

    command: str
    answer: str


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def requests(name: str) -> list[Request]:
    (transcript,) = fenced(page(name), "")
    found = []
    for part in transcript.replace("\\\n", " ").split("\n$ curl ")[1:]:
        line, _, answer = part.partition("\n")
        found.append(Request(f"curl {line}", answer.partition("\n\n")[0].partition("\n$ ")[0]))
    return found


def test_the_client_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = fenced(page("serving"), "python")
    assert ADDRESS in block
    with serve(tiny_folder(tmp_path / "demo"), "--max-tokens", "4") as live:
        exec(block.replace(f"http://{ADDRESS}", live.url), {})
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("name", "count"), [("serving", 5), ("transformers", 2)])
def test_the_requests_of_a_transcript_are_answered(tmp_path: Path, name: str, count: int) -> None:
    assert len(requests(name)) == count
    api_key = KEY.split()[-1] if name == "serving" else None
    with serve(tiny_folder(tmp_path / "demo"), "--max-tokens", "64", api_key=api_key) as live:
        for request in requests(name):
            if "429" in request.answer:
                # Two others would have to run.
                continue
            command = request.command.replace(ADDRESS, live.url)
            got = subprocess.run(
                ["bash", "-c", f"KEY='{KEY}'; {command}"], capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert got.returncode == 0, command
            if request.answer.startswith("data: "):
                assert got.stdout.rstrip().endswith("data: [DONE]")
            elif '"error"' in request.answer:
                assert json.loads(got.stdout) == json.loads(request.answer)
            else:
                assert json.loads(got.stdout).keys() == json.loads(request.answer).keys()
