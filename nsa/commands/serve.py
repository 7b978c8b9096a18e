"""The flags of `nsa serve`."""

from __future__ import annotations

import argparse

from nsa.commands.types import add_device_arguments, folder, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a model of `nsa export` or `nsa convert` with OpenAI's API: /v1/chat/completions, /v1/completions, "
        "/v1/models, and /health."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  nsa serve models/demo\n"
        "  nsa serve models/demo --host 0.0.0.0 --api-key-file key.txt --slots 32 --max-len 32768"
    )
    parser.add_argument("model", type=folder, metavar="DIR", help="a Transformers folder")
    parser.add_argument("--name", help="of the model, for clients (default: the folder's)")
    add_device_arguments(parser, "(default: as saved)")
    parser.add_argument(
        "--cuda-graph", action=argparse.BooleanOptionalAction, default=True, help="on a GPU, replay a step as a graph"
    )

    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1, this machine alone)")
    server.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    server.add_argument("--api-key-file", type=path, metavar="FILE", help="clients must send the key in this file")

    limits = parser.add_argument_group("limits")
    limits.add_argument("--slots", type=int, default=8, metavar="N", help="requests that decode together (default: 8)")
    waiting = "more than N that wait get status 429 (default: 64)"
    limits.add_argument("--max-waiting", type=int, default=64, metavar="N", help=waiting)
    longest = "tokens per request with its prompt (default: the model's, up to 8192)"
    limits.add_argument("--max-len", type=int, metavar="N", help=longest)
    limits.add_argument(
        "--max-tokens", type=int, default=1024, metavar="N", help="new ones per request (default: 1024)"
    )
    timeout = "seconds per request, waiting included (default: 600)"
    limits.add_argument("--timeout", type=float, default=600, metavar="S", help=timeout)
    chunk = "most prompt tokens between two decode steps (default: 2048)"
    limits.add_argument("--prefill-chunk", type=int, default=2048, metavar="N", help=chunk)
