"""`nsa serve` as a process of its own, and what it refuses before it listens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import http, tiny_folder, tiny_lm
from waiting import PATIENCE_S

from nsa.cli import main
from nsa.data.tokenizer import load_tokenizer
from nsa.export import export_run
from nsa.model import save_model
from nsa.serving import is_loopback


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.usefixtures("children_find_the_stand_ins")
def test_a_process_serves_this_machine_until_a_signal(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    command = [sys.executable, "-m", "nsa", "serve", str(folder), "--port", "0", "--api-key-file", str(key)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        assert address.startswith("http://127.0.0.1:")
        body = {"prompt": "x", "max_tokens": 4}
        assert http.post(f"{address}/v1/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        found = http.post(f"{address}/v1/completions", json=body, headers=headers)
        assert found.json()["usage"]["completion_tokens"] <= 4
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        # 0 where this process was started with SIGINT ignored.
        assert process.wait(timeout=PATIENCE_S) in (0, 128 + signal.SIGINT)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--slots 0", "--slots"),
        ("--max-tokens 0", "--max-tokens"),
        ("--max-len 513", "512"),
        ("--max-len 0", "--max-len"),
        ("--max-len 1", "--max-len"),
        ("--timeout -1", "--timeout"),
        ("--timeout nan", "--timeout"),
        ("--port 70000", "--port"),
        ("--device tpu", "device"),
        ("--max-waiting -1", "max_waiting"),
        ("--prefill-chunk 0", "prefill_chunk"),
    ],
)
def test_impossible_flags_are_refused(folder: Path, flags: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--device", "cpu", *flags.split()]) == 2
    assert names in capsys.readouterr().err


def test_a_run_is_to_be_exported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tiny_lm(), tmp_path / "run")
    assert main(["serve", str(tmp_path / "run")]) == 2
    assert "nsa export" in capsys.readouterr().err


def test_an_empty_key_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("\n")
    assert main(["serve", str(folder), "--api-key-file", str(key)]) == 2
    assert "--api-key-file" in capsys.readouterr().err


def test_a_missing_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_run(tiny_lm(), load_tokenizer("bytes"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert main(["serve", str(tmp_path / "model"), "--device", "cpu"]) == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_addresses_of_this_machine_are_known(host: str, inside: bool) -> None:
    assert is_loopback(host) == inside
