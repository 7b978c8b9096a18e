"""The `nsa` command: sub-commands whose flags are parsed before anything slow is imported.

    nsa doctor --seq-len 8192
    nsa train --help

The flags of a command are in `nsa.commands`; another module has `run(args)`, which does the work and returns the exit
status. A `ValueError` or `OSError` is printed as one line, with exit status 2.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, TextIO

import nsa
from nsa.progress import prepare_streams, say

# By name: the module that has `run`, what it does, and what needs less memory.
COMMANDS = {
    "train": (
        "nsa.train",
        "train a language model",
        "a smaller --batch-size with a larger --accum-batches, a smaller --seq-len, or --gc needs less",
    ),
    "report": ("nsa.train.report", "draw a run, or compare several, on one page", "fewer runs need less"),
    "plan": (
        "nsa.train.plan",
        "memory, time and cost of a run before it starts",
        "a smaller --set model.n_layers needs less",
    ),
    "generate": (
        "nsa.generate",
        "continue a prompt with a trained model",
        "a shorter --prompt, fewer of them, or fewer --max-new-tokens need less",
    ),
    "eval": (
        "nsa.evaluation.command",
        "loss by position, needle maps, recall and lm-eval-harness of trained models",
        "a smaller --chunk or shorter --lengths need less",
    ),
    "inspect": (
        "nsa.inspection.command",
        "show what a trained model attends to in a text",
        "a smaller --max-tokens needs less",
    ),
    "export": ("nsa.export", "write a run as a Transformers folder", "a smaller --dtype needs less"),
    "convert": (
        "nsa.convert",
        "turn a dense Transformers model into one with NSA",
        "fewer or shorter --lengths need less",
    ),
    "serve": ("nsa.serving", "serve a model with OpenAI's HTTP API", "fewer --slots or a smaller --max-len need less"),
    "bench": (
        "nsa.bench",
        "measure training and attention on this machine, and plot it",
        "a smaller --batch-size or shorter sequences need less",
    ),
    "data": ("nsa.data.prepare", "turn text into shards of tokens", "a smaller --doc-batch needs less"),
    "doctor": (
        "nsa.doctor",
        "check this machine: versions, settings, routes, and every backend against the reference",
        "a smaller --batch or --seq-len needs less",
    ),
}


class Parser(argparse.ArgumentParser):
    """Reports an unknown flag in one line, with the nearest known one."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the flags)\n")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        # argparse calls this one, not `parse_args`, for nested commands: `nsa eval loss`.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            hints = [f"{flag}: {hint}" for flag in flags if (hint := self.hint(flag))]
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))
        return parsed, unknown

    def hint(self, flag: str) -> str | None:
        known = re.findall(r"--[a-z][a-z-]+", self.format_help())
        name = flag.lstrip("-").replace("_", "-").lower()
        if f"--{name}" in known:
            return f"use --{name}"
        if "--set" in known:
            from nsa.commands.train import suggestion

            if (suggested := suggestion(name, known)) is not None:
                return suggested
        close = difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.7)
        return f"the nearest is {close[0]}" if close else None


def make_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{summary}" for name, (_, summary, _) in COMMANDS.items())
    parser = Parser(
        prog="nsa",
        description=f"Native sparse attention.\n\ncommands:\n{commands}",
        epilog="examples:\n  nsa doctor\n  nsa train --config tiny --steps 50\n  nsa generate --prompt 'import '\n\n"
        "`nsa COMMAND --help` explains one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nsa {nsa.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    return parser


def parser_of(name: str) -> Parser:
    """The parser of one command's flags."""
    parser = Parser(prog=f"nsa {name}")
    getattr(import_module("nsa.commands.flags"), f"{name}_flags")(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after `nsa`. Default: those of this process.

    Returns:
        The exit status: the command's own; 2 for a wrong argument; 1 if memory runs out; 128 plus the signal's number
        after SIGINT or SIGPIPE.
    """
    prepare_streams()
    try:
        try:
            return run_command(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Not at exit, where an error could no longer be caught, and would be the status.
            try:
                sys.stderr.flush()
            except OSError:
                # Messages that cannot be shown are no reason to fail.
                drop_output(sys.stderr)
            sys.stdout.flush()
    except SystemExit as stopped:
        # From --help or an error in the flags.
        return stopped.code if isinstance(stopped.code, int) else 2
    except OSError as error:
        # The output cannot be written: `nsa doctor | head -1`, or a full disk.
        drop_output(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        say(f"nsa: error: {error}", error=True)
        return 2


def drop_output(stream: TextIO) -> None:
    """Let what `stream` still holds go to /dev/null, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_command(argv: list[str]) -> int:
    # Only the first word: the flags after it are the command's own.
    name = make_parser().parse_args(argv[:1]).command
    args = parser_of(name).parse_args(argv[1:])
    module, _, memory_advice = COMMANDS[name]
    try:
        status: int = import_module(module).run(args)
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and output_is_closed():
            raise
        # A wrong value or a missing file is the user's to fix: one line helps, a traceback does not.
        say(f"nsa {name}: error: {error}", error=True)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).partition("\n")[0] or "the machine's memory is full"
        say(f"nsa {name}: out of memory: {first}; {memory_advice}", error=True)
        return 1
    except KeyboardInterrupt:
        say(f"nsa {name}: interrupted", error=True)
        return 128 + signal.SIGINT


def is_out_of_memory(error: BaseException) -> bool:
    """Python's error, torch's on a GPU, or that of its CPU allocator, which has no type of its own."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or ("DefaultCPUAllocator" in str(error) and "memory" in str(error))
    )


def output_is_closed() -> bool:
    """Whether stdout is a closed pipe: a BrokenPipeError may also come from a connection."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):
        # No stdout, or not a file.
        return False
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
