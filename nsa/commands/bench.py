"""The flags of `nsa bench`, suite by suite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nsa.commands.types import path
from nsa.model.config import ATTENTION_KINDS, PRESETS

NSA = ("nsa-triton", "nsa-sdpa")
IMPLEMENTATIONS = (*NSA, "dense-fa2", "dense-cudnn", "dense-sdpa", "dense-flex", "fla-nsa")
# Of the selected branch alone.
SELECTED_IMPLEMENTATIONS = ("flex-selected", "fla-selected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser`."""
    parser.description = "Run a benchmark suite, or plot its rows. `nsa bench SUITE --help` explains one suite."
    parser.epilog = "example: nsa bench train --preset 125m --seq-len 2048 --batch-size 8"
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, (summary, add) in (SUITES | ROW_COMMANDS).items():
        add(suites.add_parser(name, help=summary))


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the file of rows and for the commit that they record where there is no git."""
    parser.add_argument("--out", type=path, help="append the rows to this CSV file")
    parser.add_argument("--commit", help="the commit to record (default: this checkout's)")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time the trainer's step (forward, backward, optimizer) on synthetic tokens."
    parser.epilog = "example: nsa bench train --preset 125m --seq-len 2048 32768 --tokens 65536 --attention nsa dense"
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="the model of that config (default: 125m on a GPU, else tiny)"
    )
    parser.add_argument("--attention", nargs="+", choices=ATTENTION_KINDS, default=["nsa"])
    parser.add_argument("--backend", default="auto", help="of NSA; a named one never falls back")
    parser.add_argument("--seq-len", nargs="+", type=int, help="tokens per sequence (default: the preset's)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch-size", nargs="+", type=int, help="(default: 8 on a GPU, else 4)")
    size.add_argument("--tokens", type=int, help="tokens per batch, for any sequence length")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the measured ones")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="(default: bfloat16 on a GPU, else float32)")
    add_device(parser)
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    parser.add_argument("--compile", **switch, default=False, help="torch.compile the model")
    parser.add_argument("--cuda-graphs", **switch, help="replay each pass as one graph (default: on a GPU)")
    parser.add_argument("--gc", **switch, default=False, help="activation checkpointing")
    parser.add_argument("--check-sync", action="store_true", help="only check that no step synchronizes the device")
    add_output(parser)


def add_attention(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time attention from q, k, v and gates to o, next to dense attention and others' NSA. What cannot run on this "
        "machine is left out, with the reason."
    )
    parser.epilog = "example: nsa bench attention --heads 64/4/128 --lengths 8192 65536 --branches"
    heads = "heads/groups/head_dim (default: 64/4/128; 8/2/32 without a GPU)"
    parser.add_argument("--heads", nargs="+", metavar="H/G/D", help=heads)
    parser.add_argument("--lengths", nargs="+", type=int, help="(default: 8192 32768; 512 2048 without a GPU)")
    parser.add_argument("--batch-size", type=int, default=1)
    names = (*IMPLEMENTATIONS, *SELECTED_IMPLEMENTATIONS)
    parser.add_argument("--impl", nargs="+", choices=names, metavar="I", help=f"of {', '.join(names)} (default: all)")
    add_device(parser)
    parser.add_argument("--branches", action="store_true", help="time the stages of NSA too")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay CUDA graphs: the GPU's time alone")
    parser.add_argument("--smooth", type=float, default=0.0, help="correlation of neighboring queries, in [0, 1)")
    add_output(parser)


def add_decode(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time the attention of one decode step as a CUDA graph, beside dense attention, on this GPU."
    parser.epilog = "example: nsa bench decode --heads 64/4/128 --lengths 65536 --tokens 1 4"
    heads = ["64/4/128", "32/8/128", "12/2/64"]
    parser.add_argument("--heads", nargs="+", default=heads, metavar="H/G/D", help="heads/groups/head_dim")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 65536, 131072], help="tokens in the cache")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4], help="new tokens per row")
    parser.add_argument("--gib", type=float, default=4.0, help="K/V of one branch, all rows: decides the batch size")
    parser.add_argument("--smooth", type=float, default=0.0, help="likeness of a step's queries, in [0, 1)")
    add_output(parser)


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time decode steps of a model as CUDA graphs, beside its dense twin, and prefill, on this GPU."
    parser.epilog = "example: nsa bench generate --batch-size 32 --lengths 2048 32768 --prefill 65536"
    parser.add_argument("--preset", choices=sorted(PRESETS), default="125m")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[32])
    parser.add_argument("--lengths", nargs="*", type=int, default=[2048, 32768, 131072], help="tokens in the cache")
    parser.add_argument("--prefill", nargs="*", type=int, default=[], metavar="LENGTH", help="prompts, one row each")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per chunk of a prompt")
    add_output(parser)


def add_host(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time how long the CPU takes to issue an eager call, next to dense attention; count launches."
    parser.epilog = "example: nsa bench host --heads 12/2/64 --lengths 2048 8192"
    heads = "heads/groups/head_dim (default: 12/2/64; 4/2/32 without a GPU)"
    parser.add_argument("--heads", nargs="+", metavar="H/G/D", help=heads)
    parser.add_argument("--lengths", nargs="+", type=int, help="(default: 2048; 512 without a GPU)")
    parser.add_argument("--batch-size", type=int, default=1)
    add_device(parser)
    parser.add_argument("--backend", default="auto", help="of NSA; a named one never falls back")
    add_output(parser)


def add_trained(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time the attention of a trained model's middle layer on its own data and on noise."
    parser.epilog = "example: nsa bench trained --run runs/125m --lengths 2048 32768 --cuda-graphs"
    parser.add_argument("--run", type=path, required=True, help="a folder that `nsa train` wrote")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 32768])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--impl", nargs="+", choices=NSA, default=["nsa-triton"])
    parser.add_argument("--cuda-graphs", action="store_true", help="replay CUDA graphs: the GPU's time alone")
    add_output(parser)


def add_flash(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time the compressed and the sliding branch in every backend, and write routes by length."
    parser.epilog = "example: nsa bench flash --out flash.csv --plot flash.png --write configs/routes.json"
    parser.add_argument("--head-dims", "--widths", dest="head_dims", nargs="+", type=int, default=[64, 96, 128, 192])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[4, 16], help="query heads per group")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192, 65536])
    parser.add_argument("--windows", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--documents", type=int, default=8, help="per varlen batch, which is timed too")
    parser.add_argument("--rows", type=path, help="read the rows of this CSV file instead of measuring")
    parser.add_argument("--plot", type=path, help="plot the rows into this file")
    parser.add_argument("--write", type=path, help="write the routes here; auto reads configs/routes.json")
    add_output(parser)


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure the Triton kernels' tiles on this GPU and write the fastest into a file."
    parser.epilog = "example: nsa bench tune --kernels selected-backward --heads 64/4/128"
    parser.add_argument("--kernels", nargs="+", metavar="K", help="(default: all; a wrong name lists them)")
    heads = "heads/groups/head_dim; the last one of a head_dim counts"
    parser.add_argument("--heads", nargs="+", metavar="H/G/D", help=heads)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--smooth", type=float, default=0.0, help="correlation of neighboring queries, in [0, 1)")
    parser.add_argument("--out", type=path, help="the file to write (default: the user's own, NSA_TUNED_TILES)")
    parser.add_argument("--commit", help="the commit to record (default: this checkout's)")


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.description = "Plot benchmark rows: one panel per op, mode and head shape, one line per implementation."
    parser.epilog = "example: nsa bench plot --rows benchmarks/results/h200/attention.csv --out docs/attention.png"
    parser.add_argument("--rows", type=path, nargs="+", required=True, help="CSV files written by nsa bench")
    parser.add_argument("--out", type=path, required=True, help="the picture, PNG or SVG by its suffix")


def add_cpu(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time attention, its branches and training steps on the CPU."
    parser.epilog = "example: nsa bench cpu --out cpu.csv && nsa bench report cpu.csv"
    add_output(parser)


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw rows on one page that needs no network: speedups and break-even lengths, memory, time by branch, and the "
        "share of the matmul and bandwidth ceilings."
    )
    parser.epilog = "example: nsa bench report benchmarks/results -o bench.html"
    default = "CSV files or folders (default: benchmarks/results)"
    parser.add_argument("rows", type=path, nargs="*", metavar="ROWS", help=default)
    parser.add_argument("-o", "--out", type=path, default=Path("bench.html"), help="the page (default: %(default)s)")


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the rows that two files or folders have in common. A row is slower if its p50 is higher by more than "
        "--bound and its p20 is above the other's p80, over all runs of a commit. A row of A is gone if B has rows of "
        "its suite and shape but not this one; rows of shapes that B does not have are not measured, which is no "
        "regression. The exit status is 1 if a row is slower, needs more memory or is gone."
    )
    parser.epilog = "example: nsa bench compare before.csv after.csv --bound 0.03"
    parser.add_argument("before", type=path, metavar="A", help="a CSV file or a folder")
    parser.add_argument("after", type=path, metavar="B", help="a CSV file or a folder")
    parser.add_argument("--bound", type=float, default=0.05, help="as a fraction (default: %(default)s)")


# By name: what it measures, and its flags.
SUITES = {
    "train": ("throughput of the training step", add_train),
    "attention": ("attention, whole and by branch, next to dense", add_attention),
    "branches": ("the stages of NSA one by one, and its selected branch by others", add_attention),
    "decode": ("a decode step over a cache, next to dense and the bytes limit", add_decode),
    "generate": ("decode steps and prefill of a whole model, next to dense", add_generate),
    "host": ("host time and launches of an eager call of attention and of a layer", add_host),
    "trained": ("attention on the tensors of a trained model, next to noise", add_trained),
    "flash": ("where FlashAttention is faster, and the routes file from that", add_flash),
    "tune": ("tune the tiles of the kernels, and write the fastest into a file", add_tune),
}
# What runs others of them, or reads their rows.
ROW_COMMANDS = {
    "cpu": ("small attention and training benchmarks that run anywhere", add_cpu),
    "plot": ("plot the rows of the other suites", add_plot),
    "report": ("draw the rows of the other suites on one page", add_report),
    "compare": ("two files of rows: what became slower or needs more memory", add_compare),
}
