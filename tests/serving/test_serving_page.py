"""What docs/serving.md shows: the client's lines run, and the requests of the transcript get such answers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from docs_pages import ROOT, fenced
from live_server import httpx, serve, tiny_folder

PAGE = (ROOT / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


class Request(NamedTuple):
    """A request of the transcript, and the answer below it."""

    path: str
    body: str | None
    answer: str


def requests() -> list[Request]:
    (transcript,) = fenced(PAGE, "")
    found = []
    for part in transcript.replace("\\\n", " ").split("\n$ curl ")[1:]:
        line, _, answer = part.partition("\n")
        words = shlex.split(line, comments=True)
        (path,) = (re.sub(r"^[\d.:]+", "", word) for word in words if word.startswith("127."))
        body = words[words.index("-d") + 1] if "-d" in words else None
        found.append(Request(path, body, answer.partition("\n\n")[0].partition("\n$ ")[0]))
    return found


def test_the_client_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = fenced(PAGE, "python")
    assert ADDRESS in block
    with serve(tiny_folder(tmp_path / "demo"), "--max-tokens", "4") as live:
        exec(block.replace(ADDRESS, live.url), {})
    assert capsys.readouterr().out


def test_the_requests_of_the_transcript_are_answered(tmp_path: Path) -> None:
    assert len(requests()) == 5
    headers = {"Authorization": "Bearer secret-key"}
    with serve(tiny_folder(tmp_path / "demo"), "--max-tokens", "64", api_key="secret-key") as live:
        for request in requests():
            if "429" in request.answer:
                # Two others would have to run.
                continue
            method = "GET" if request.body is None else "POST"
            got = httpx.request(method, live.url + request.path, content=request.body, headers=headers, timeout=60)
            if request.answer.startswith("data: "):
                assert got.text.rstrip().endswith("data: [DONE]")
            elif '"error"' in request.answer:
                assert got.json() == json.loads(request.answer)
            else:
                assert got.status_code == 200
                assert got.json().keys() == json.loads(request.answer).keys()
