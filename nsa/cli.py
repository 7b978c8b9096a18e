"""The `nsa` command: a table of sub-commands, each imported only when it runs.

    nsa doctor --seq-len 8192
    nsa train --help

A command is a module with `add_arguments(parser)`, which declares its flags and shows an example in `parser.epilog`,
and `run(args)`, which does the work and returns the exit status. A `ValueError` or `OSError` from it is shown as one
line, with status 2.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import nsa

# Name: where it is, what it does.
COMMANDS = {
    "train": ("nsa.train", "train a language model"),
    "plan": ("nsa.train.plan", "memory, time and cost of a run before it starts"),
    "generate": ("nsa.generate", "continue a prompt with a trained model"),
    "bench": ("nsa.bench", "measure training and attention on this machine, and plot it"),
    "data": ("nsa.data.prepare", "turn text into shards of tokens"),
    "doctor": ("nsa.doctor", "check this machine: versions, settings, routes, and whether every backend is right"),
}


def make_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="nsa",
        description=f"Native sparse attention.\n\ncommands:\n{commands}",
        epilog="examples:\n  nsa doctor\n  nsa train --config tiny --steps 50\n  nsa generate --prompt 'import '\n\n"
        "`nsa COMMAND --help` explains one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nsa {nsa.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    # Only the first word is read here: the flags after it are the command's own, and known once it is imported.
    name = make_parser().parse_args(argv[:1]).command
    command = import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"nsa {name}")
    command.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    try:
        return command.run(args)
    except (ValueError, OSError) as error:
        # A wrong value or a file that is not there is the caller's to mend: the sentence helps, a traceback does not.
        print(f"nsa {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"nsa {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
