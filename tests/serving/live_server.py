"""A server in a thread, over a tiny model. Importing this skips a test file where a package is not installed."""

# ruff: noqa: E402  what is missing is named before it is imported

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("transformers", "fastapi", "uvicorn", "openai", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'nsa[serve]' openai")

import httpx
import openai
import transformers
import uvicorn
from waiting import PATIENCE_S, wait_until

from nsa import NSAConfig
from nsa.cli import parser_of
from nsa.data.tokenizer import load_tokenizer
from nsa.export import export_run
from nsa.model import LM, LMConfig
from nsa.serving import application
from nsa.serving.scheduler import Scheduler

__all__ = ["TEMPLATE", "Live", "http", "httpx", "openai", "serve", "tiny_folder", "tiny_lm", "transformers"]

# Its own patience would be 5 s.
http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_lm(kind: str = "nsa") -> LM:
    """Of bytes; its next token depends on the whole past."""
    torch.manual_seed(0)
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)
    sizes = {"vocab_size": 256, "n_layers": 2, "hidden": 64, "seq_len": 512}
    model = LM(LMConfig(**sizes, attn=attn, attention=kind, tie_embeddings=False))
    # Fresh layers add little to the residual stream.
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model.eval()


def tiny_folder(folder: Path, kind: str = "nsa") -> Path:
    """A Transformers folder with a chat template."""
    export_run(tiny_lm(kind), load_tokenizer("bytes"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@dataclass
class Live:
    """A server that listens."""

    url: str
    scheduler: Scheduler

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def idle(self) -> bool:
        return not self.scheduler.jobs() and self.scheduler.n_running == 0


@contextmanager
def serve(folder: Path, *flags: str, api_key: str | None = None) -> Iterator[Live]:
    """`nsa serve FOLDER FLAGS` in a thread of this process, on a free port."""
    app = application(parser_of("serve").parse_args([str(folder), "--device", "cpu", *flags]), api_key)
    scheduler = app.state.scheduler
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Live(f"http://127.0.0.1:{port}", scheduler)
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()
    assert not scheduler.thread.is_alive()
