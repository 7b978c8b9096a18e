"""`NAME_flags(parser)` for each command; the larger ones have modules of their own."""

from __future__ import annotations

import argparse

from nsa.commands.bench import add_arguments as bench_flags  # noqa: F401
from nsa.commands.doctor import add_arguments as doctor_flags  # noqa: F401
from nsa.commands.train import add_arguments as train_flags  # noqa: F401
from nsa.commands.types import DTYPE_NAMES, add_config_arguments, add_device_arguments, folder, path, set_help
from nsa.data.config import HUB, SOURCES

MATMUL_DTYPE = "of matmuls (default: bfloat16 on a GPU, else float32)"


def report_flags(parser: argparse.ArgumentParser) -> None:
    text = "Draw a run, finished or still going, on one page that needs no network; or compare several."
    set_help(parser, text, "nsa report runs/demo", "nsa report runs/nsa runs/dense -o compare.html")
    parser.add_argument("runs", type=path, nargs="+", metavar="RUN", help="folders that `nsa train` writes")
    default = "(default: report.html in the run; compare.html beside the first)"
    parser.add_argument("-o", "--out", type=path, metavar="PAGE", help=default)


def plan_flags(parser: argparse.ArgumentParser) -> None:
    set_help(
        parser,
        "Memory, step time, total time and cost of a run, from the model and from measured rates. The last line of the "
        "output is the same as JSON.",
        "nsa plan --config 125m --gpu H200 --price 2.0",
        "nsa plan --config 1b --gpu H200 H100 --gpus 8 --set parallel=fsdp --set gc=true",
    )
    add_config_arguments(parser, default="125m")
    parser.add_argument("--gpu", nargs="+", default=["H200"], help="such as H200 or A100, or several (default: H200)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of them (default: %(default)s)")
    parser.add_argument("--price", type=float, help="of one GPU for an hour (default: no cost is shown)")
    parser.add_argument("--results", type=folder, help="the folder of measurements (default: this checkout's)")


def generate_flags(parser: argparse.ArgumentParser) -> None:
    text = "Continue prompts with a model that `nsa train` wrote. Text goes to stdout, speeds to stderr."
    set_help(parser, text, 'nsa generate --run runs/tiny-nsa --prompt "def main(" --temperature 0.8 --top-k 40')
    parser.add_argument("--run", type=folder, help="the run's folder (default: the newest under runs/)")
    add_device_arguments(parser, "of the model (default: as saved)")

    prompts = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    prompt = "text to continue; repeat for a batch (default: 'def ')"
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help=prompt)
    file = "one prompt, all of it; repeat for a batch; -: stdin"
    prompts.add_argument("--prompt-file", action="append", metavar="FILE", help=file)
    prompts.add_argument("--prompts", metavar="FILE", help="a batch, one prompt per line; -: stdin")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: 0.8)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens that sum to P")
    min_p = "sample from tokens at least P times as likely as the likeliest"
    sampling.add_argument("--min-p", type=float, metavar="P", help=min_p)
    penalty = "above 1: make tokens seen before less likely"
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    sampling.add_argument("--seed", type=int, default=0, help="row b of a batch draws from seed + b")

    end = parser.add_argument_group("length")
    end.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="per prompt (default: 200)")
    end.add_argument("--max-len", type=int, metavar="N", help="end a row at N tokens, its prompt included")
    end.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    end.add_argument("--ignore-end", action="store_true", help="continue after the token that ends a document")

    speed = parser.add_argument_group("speed")
    lookup = "speculate up to N tokens from the text so far; 0: off; the decode kernels take up to 7"
    speed.add_argument("--prompt-lookup", type=int, default=0, metavar="N", help=lookup)
    speed.add_argument("--lookup-ngram", type=int, default=3, metavar="N", help="tokens that must repeat (default: 3)")
    speed.add_argument("--prefill-chunk", type=int, default=8192, metavar="N", help="prompt tokens per prefill step")
    add_cuda_graph(speed)
    caches = parser.add_argument_group("caches")
    caches.add_argument("--save-cache", type=path, metavar="FILE", help="save the processed prompts")
    caches.add_argument("--load-cache", type=path, metavar="FILE", help="start from saved prompts; give new ones whole")
    caches.add_argument("--quantize", choices=("fp8",), help="store keys and values in fp8")
    caches.add_argument("--page-size", type=int, metavar="N", help="paged caches with N tokens per page")
    parser.add_argument("--hide-prompt", action="store_true", help="print the new text alone")


def add_cuda_graph(parser: argparse._ActionsContainer) -> None:
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--cuda-graph", action=switch, default=True, help="on a GPU, replay a step as a graph")


def eval_flags(parser: argparse.ArgumentParser) -> None:
    examples = (
        "nsa eval loss runs/demo --seq-len 2048",
        "nsa eval needle runs/nsa runs/dense --lengths 4096 16384 65536 --depths 11 --samples 10",
        "nsa eval recall runs/nsa runs/dense --keys 1 8 32 --hops 1 2 4 --out results/recall",
        "nsa eval lm-eval models/nsa models/dense --tasks niah_single_1 vt --lengths 4096 8192",
    )
    set_help(parser, "Evaluate trained models side by side. `nsa eval COMMAND --help` explains one command.", *examples)
    commands = parser.add_subparsers(dest="eval_command", required=True, metavar="COMMAND")

    def new_command(name: str, summary: str) -> argparse.ArgumentParser:
        """A parser with the flags that all commands share."""
        command: argparse.ArgumentParser = commands.add_parser(name, help=summary)
        set_help(command, f"{summary[0].upper()}{summary[1:]}.", *examples)
        runs = "the folder of a run or of one of its checkpoints; for lm-eval a Transformers folder"
        command.add_argument("runs", type=folder, nargs="+", metavar="RUN", help=runs)
        command.add_argument("--out", type=path, help="folder of results (default: eval/ in the first run's folder)")
        add_device_arguments(command, MATMUL_DTYPE)
        return command

    loss = new_command("loss", "the validation loss, and the loss by position")
    loss.add_argument("--seq-len", type=int, metavar="N", help="tokens in a window (default: the model's)")
    loss.add_argument("--windows", type=int, default=16, metavar="N", help="of validation text (default: %(default)s)")
    loss.add_argument("--dataset", help="stdlib, text, jsonl, parquet or shards (default: the run's own data)")
    loss.add_argument("--data-path", help="a file, a folder or a pattern, for the sources that read files")
    needle = new_command("needle", "find one note in a haystack: accuracy by depth and length")
    needle.add_argument("--depths", type=int, default=11, metavar="N", help="from start to end (default: %(default)s)")
    recall = new_command("recall", "find one of many keys, and follow links from key to key")
    recall.add_argument("--keys", type=int, nargs="*", default=[1, 4, 16], metavar="N", help="(default: 1 4 16)")
    recall.add_argument("--hops", type=int, nargs="*", default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    for command in (needle, recall):
        lengths = "tokens per prompt (default: up to the model's)"
        command.add_argument("--lengths", type=int, nargs="+", metavar="N", help=lengths)
        command.add_argument("--samples", type=int, default=8, metavar="N", help="per cell (default: %(default)s)")
        haystack = "a text file (default: Python's standard library)"
        command.add_argument("--haystack", type=path, metavar="FILE", help=haystack)
    for command in (loss, needle, recall):
        chunk = "tokens per forward pass; longer prompts go in chunks (default: 65536 on a GPU, else 8192)"
        command.add_argument("--chunk", type=int, metavar="N", help=chunk)
    harness = new_command("lm-eval", "RULER's synthetic tasks by lm-eval-harness, of Transformers folders")
    tasks = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    shown = f"(default: {' '.join(tasks)}, all that need no network)"
    harness.add_argument("--tasks", nargs="+", default=tasks, metavar="TASK", help=shown)
    tokens = "tokens of prompt and answer (default: 4096)"
    harness.add_argument("--lengths", type=int, nargs="+", default=[4096], metavar="N", help=tokens)
    samples = "per task and length, at most 500 (default: %(default)s)"
    harness.add_argument("--samples", type=int, default=50, metavar="N", help=samples)
    harness.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at once (default: 8)")


def inspect_flags(parser: argparse.ArgumentParser) -> None:
    set_help(
        parser,
        "Show what a trained NSA model attends to in a text: selected blocks, window, compressed attention and gates "
        "of every token, on one page that needs no network.",
        "nsa inspect runs/demo --text nsa/attention.py -o page.html",
        'nsa inspect runs/demo --prompt "def main():" --json - | python -m json.tool',
    )
    parser.add_argument("run", type=folder, metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="a text file; -: stdin")
    source.add_argument("--prompt", metavar="TEXT", help="the text itself")
    parser.add_argument("-o", "--out", type=path, metavar="PAGE", help="write the page here")
    parser.add_argument("--json", type=path, metavar="FILE", help="write everything as JSON; -: stdout")
    parser.add_argument("--max-tokens", type=int, default=32768, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--top", type=int, default=4, metavar="N", help="compression blocks per token (default: 4)")
    add_device_arguments(parser, "of matmuls (default: as saved)")


def export_flags(parser: argparse.ArgumentParser) -> None:
    set_help(
        parser,
        "Write a trained model as a Transformers folder: safetensors, config, tokenizer, generation config. NSA "
        "becomes NSALlamaForCausalLM (import nsa.hf loads it), dense attention LlamaForCausalLM.",
        "nsa export runs/demo --to models/demo --dtype bfloat16",
    )
    parser.add_argument("run", type=folder, metavar="RUN", help="the run's folder")
    parser.add_argument("--to", type=path, metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of the parameters (default: as saved)")


def convert_flags(parser: argparse.ArgumentParser) -> None:
    set_help(
        parser,
        "Turn a dense Llama, Mistral, Qwen2 or Qwen3 in a Transformers folder into a model with NSA, and print how far "
        "its logits and its perplexity are from the dense model's. Recipes: select has no new parameters and equals "
        "the dense model up to n_sel * l_sel tokens; gated adds a phi that starts as the mean and a gate, for "
        "continued training; full also gives each branch a copy of K/V; dense turns a model of select back.",
        "nsa convert --from models/llama --to models/llama-nsa",
        "nsa convert --from models/llama --to models/llama-gated --recipe gated --set n_sel=32",
        "nsa convert --from models/llama-nsa --to models/back --recipe dense",
    )
    parser.add_argument("--from", dest="source", type=folder, metavar="DIR", required=True, help="the dense model")
    parser.add_argument("--to", type=path, metavar="DIR", required=True, help="a new folder")
    recipes = ("select", "gated", "full", "dense")
    parser.add_argument("--recipe", choices=recipes, default="select", help="(default: select)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a hyperparameter: n_sel=32")
    compare = parser.add_argument_group("comparison")
    lengths = [512, 1024, 2048, 4096]
    shown = "compare over so many tokens (default: 512 1024 2048 4096; none: do not compare)"
    compare.add_argument("--lengths", type=int, nargs="*", default=lengths, metavar="N", help=shown)
    compare.add_argument("--text", type=path, metavar="FILE", help="the text (default: Python's standard library)")
    compare.add_argument("--device", default="cpu", help="(default: cpu)")
    compare.add_argument("--dtype", choices=DTYPE_NAMES, help="of both models (default: as saved)")


def serve_flags(parser: argparse.ArgumentParser) -> None:
    set_help(
        parser,
        "Serve a model of `nsa export` or `nsa convert` with OpenAI's API: /v1/chat/completions, /v1/completions, "
        "/v1/models, and /health.",
        "nsa serve models/demo",
        "nsa serve models/demo --host 0.0.0.0 --api-key-file key.txt --slots 32 --max-len 32768",
    )
    parser.add_argument("model", type=folder, metavar="DIR", help="a Transformers folder")
    parser.add_argument("--name", help="of the model, for clients (default: the folder's)")
    add_device_arguments(parser, "(default: as saved)")
    add_cuda_graph(parser)
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
    new = "new ones per request (default: 1024)"
    limits.add_argument("--max-tokens", type=int, default=1024, metavar="N", help=new)
    timeout = "seconds per request, waiting included (default: 600)"
    limits.add_argument("--timeout", type=float, default=600, metavar="S", help=timeout)
    chunk = "most prompt tokens between two decode steps (default: 2048)"
    limits.add_argument("--prefill-chunk", type=int, default=2048, metavar="N", help=chunk)


def data_flags(parser: argparse.ArgumentParser) -> None:
    examples = (
        "nsa data prepare --source text --path books/ --out data/books",
        "nsa data prepare --source jsonl --path wiki.jsonl --train-bpe 16384 --out data/wiki",
        "nsa data prepare --source fineweb_edu --tokenizer tokenizer.json --limit-tokens 1000000000 --out data/fwe",
        "nsa data prepare --source text --path 'src/**/*.py' --on-bad skip --out data/src",
        "nsa data check data/books",
    )
    set_help(parser, "Prepare training data. `nsa data COMMAND --help` explains one command.", *examples)
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    make = commands.add_parser("prepare", help="tokenize a corpus into files that training reads")
    set_help(make, "Tokenize a corpus into files that training reads.", *examples)
    sources = ", ".join(name for name in SOURCES if name not in ("shards", "synthetic"))
    make.add_argument("--source", default="text", help=f"{sources} or {HUB}NAME (default: text)")
    make.add_argument("--path", help="a file, a folder or a pattern such as 'src/**/*.py'")
    make.add_argument("--name", help="the configuration of a data set of the hub")
    make.add_argument("--text-key", default="text", help="the field or column with the text (default: text)")
    make.add_argument("--tokenizer", help="bytes (the default), a tokenizer.json, or a folder with one")
    make.add_argument("--train-bpe", type=int, metavar="N", help="train a BPE of N tokens on this corpus, and use it")
    make.add_argument("--shard-tokens", type=int, default=2**27, help="tokens in a file (default: %(default)s)")
    make.add_argument("--limit-tokens", type=int, help="stop after about so many (default: the whole corpus)")
    make.add_argument("--doc-batch", type=int, default=256, help="documents tokenized at once (default: %(default)s)")
    bad = "a document that cannot be read: stop, or list it in skipped.jsonl and continue (default: %(default)s)"
    make.add_argument("--on-bad", choices=("stop", "skip"), default="stop", help=bad)
    make.add_argument("--out", type=path, required=True, help="the folder to write")
    check = commands.add_parser("check", help="compare a prepared folder, every token of it, with what was written")
    check.add_argument("folder", type=path)
    manifest = "for a folder that an older version wrote: list its files, as they are now, in manifest.json"
    check.add_argument("--write-manifest", action="store_true", help=manifest)
