"""`nsa serve`: a model behind OpenAI's HTTP API, on this machine unless --host says otherwise."""

from __future__ import annotations

import argparse
import ipaddress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nsa.config import require, require_positive_int, require_positive_number
from nsa.progress import say

PACKAGES = ("transformers", "fastapi", "uvicorn")
DEFAULT_MAX_LEN = 8192
# Seconds that running requests have left once the server is to stop.
GRACE_S = 30


def run(args: argparse.Namespace) -> int:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    require(not missing, "missing packages", missing, "none: pip install 'nsa[serve]'")
    import uvicorn

    require(0 <= args.port < 2**16, "--port", args.port, "0 to 65535")
    api_key = None if args.api_key_file is None else read_key(args.api_key_file)
    app = application(args, api_key)
    if api_key is None and not is_loopback(args.host):
        say(f"nsa serve: warning: {args.host} can be reached by others, and there is no --api-key-file", error=True)
    server = uvicorn.Server(uvicorn.Config(app, args.host, args.port, timeout_graceful_shutdown=GRACE_S))
    # A signal is raised again once the server has stopped.
    server.run()
    return 0 if server.started else 1


def application(args: argparse.Namespace, api_key: str | None = None) -> Any:
    """The ASGI application for the flags of `nsa serve`, with the model loaded and its caches allocated; a ValueError
    if a flag or the folder is wrong."""
    import torch

    from nsa.generate import MIB
    from nsa.machine import usable_device
    from nsa.serving.app import Limits, make_app
    from nsa.serving.batch import SlotBatch
    from nsa.serving.loading import PromptEncoder, load_folder
    from nsa.serving.scheduler import Scheduler

    require_positive_int("--slots", args.slots)
    require_positive_int("--max-tokens", args.max_tokens)
    require_positive_number("--timeout", args.timeout)
    device = usable_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_folder(args.model, device, None if args.dtype is None else getattr(torch, args.dtype))
    max_len = min(model.config.seq_len, DEFAULT_MAX_LEN) if args.max_len is None else args.max_len
    accepted = f"2 to {model.config.seq_len}, the model's max_position_embeddings"
    require(2 <= max_len <= model.config.seq_len, "--max-len", max_len, accepted)
    encoder = PromptEncoder(args.model, model.config.vocab_size)
    batch = SlotBatch(model, args.slots, max_len, cuda_graph=args.cuda_graph)
    name = args.name or args.model.resolve().name
    caches = f"{batch.bytes_used() / MIB:,.0f} MiB of caches"
    say(f"{name}: {args.slots} slots of {max_len:,} tokens, {caches}, on {device}", error=True)
    sizes = {"max_waiting": args.max_waiting, "prefill_chunk": args.prefill_chunk}
    scheduler = Scheduler(batch, ends=encoder.ends, hidden=encoder.hidden, **sizes)
    limits = Limits(max_tokens=args.max_tokens, timeout_s=args.timeout)
    return make_app(name, encoder, scheduler, limits, api_key=api_key)


def read_key(file: Path) -> str:
    """The API key in a file; a ValueError if it is empty."""
    key = file.read_text().strip()
    require(bool(key), "--api-key-file", str(file), "a file with a key")
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
