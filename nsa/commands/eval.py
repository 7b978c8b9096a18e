"""The flags of `nsa eval`."""

from __future__ import annotations

import argparse

from nsa.commands.types import add_device_arguments, folder, path

EVAL_EXAMPLES = """examples:
  nsa eval loss runs/demo --seq-len 2048
  nsa eval needle runs/nsa runs/dense --lengths 4096 16384 65536 --depths 11 --samples 10
  nsa eval recall runs/nsa runs/dense --keys 1 8 32 --hops 1 2 4 --out results/recall
  nsa eval lm-eval models/nsa models/dense --tasks niah_single_1 vt --lengths 4096 8192
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Evaluate trained models side by side. `nsa eval COMMAND --help` explains one command."
    parser.epilog = EVAL_EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="eval_command", required=True, metavar="COMMAND")

    loss = new_command(commands, "loss", "the validation loss, and the loss by position")
    loss.add_argument("--seq-len", type=int, metavar="N", help="tokens in a window (default: the model's)")
    loss.add_argument("--windows", type=int, default=16, metavar="N", help="of validation text (default: %(default)s)")
    loss.add_argument("--dataset", help="stdlib, text, jsonl, parquet or shards (default: the run's own data)")
    loss.add_argument("--data-path", help="a file, a folder or a pattern, for the sources that read files")

    needle = new_command(commands, "needle", "find one note in a haystack: accuracy by depth and length")
    needle.add_argument("--depths", type=int, default=11, metavar="N", help="from start to end (default: %(default)s)")
    recall = new_command(commands, "recall", "find one of many keys, and follow links from key to key")
    recall.add_argument("--keys", type=int, nargs="*", default=[1, 4, 16], metavar="N", help="(default: 1 4 16)")
    recall.add_argument("--hops", type=int, nargs="*", default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    for command in (needle, recall):
        command.add_argument(
            "--lengths", type=int, nargs="+", metavar="N", help="tokens per prompt (default: up to the model's)"
        )
        command.add_argument("--samples", type=int, default=8, metavar="N", help="per cell (default: %(default)s)")
        haystack = "a text file (default: Python's standard library)"
        command.add_argument("--haystack", type=path, metavar="FILE", help=haystack)
    for command in (loss, needle, recall):
        chunk = "tokens per forward pass; longer prompts go in chunks (default: 65536 on a GPU, else 8192)"
        command.add_argument("--chunk", type=int, metavar="N", help=chunk)

    harness = new_command(commands, "lm-eval", "RULER's synthetic tasks by lm-eval-harness, of Transformers folders")
    tasks = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    shown = f"(default: {' '.join(tasks)}, all that need no network)"
    harness.add_argument("--tasks", nargs="+", default=tasks, metavar="TASK", help=shown)
    tokens = "tokens of prompt and answer (default: 4096)"
    harness.add_argument("--lengths", type=int, nargs="+", default=[4096], metavar="N", help=tokens)
    samples = "per task and length, at most 500 (default: %(default)s)"
    harness.add_argument("--samples", type=int, default=50, metavar="N", help=samples)
    harness.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at once (default: 8)")


def new_command(commands: argparse._SubParsersAction, name: str, summary: str) -> argparse.ArgumentParser:
    """A sub-command with the flags that all share."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=EVAL_EXAMPLES
    )
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    runs = "the folder of a run or of one of its checkpoints; for lm-eval a Transformers folder"
    command.add_argument("runs", type=folder, nargs="+", metavar="RUN", help=runs)
    command.add_argument("--out", type=path, help="folder of results (default: eval/ in the first run's folder)")
    add_device_arguments(command, "of matmuls (default: bfloat16 on a GPU, else float32)")
    return command
