"""`nsa eval lm-eval`: lm-eval-harness drives Transformers folders on the tasks of RULER that need no network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nsa.config import require, require_positive_int
from nsa.files import read_json
from nsa.model.llama import CONFIG_FILE, MAX_JSON_BYTES, read_fields, weight_files
from nsa.progress import LINE_EVERY_S, progress
from nsa.train.run_folder import run_names

# Names of the harness by our names.
TASKS = {name: name for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")}
TASKS |= {name: f"ruler_{name}" for name in ("vt", "cwe", "fwe")}
# What the others read from the network.
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
DOWNLOADS = dict.fromkeys(ESSAYS, "Paul Graham's essays") | {"ruler_qa_squad": "SQuAD", "ruler_qa_hotpot": "HotpotQA"}
HARNESS_PACKAGES = ("lm_eval", "nltk", "scipy", "transformers", "wonderwords")
# Beyond the length of a prompt with its answer: the harness would cut what exceeds the sum.
SPARE = 256


def harness_rows(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The accuracy of each folder in `args.runs` on each task at each length; a ValueError if a package is missing, a
    folder is no Transformers folder or holds code, a task is unknown or needs the network, or a length is too short."""
    missing = [name for name in HARNESS_PACKAGES if find_spec(name) is None]
    require(not missing, "packages", f"without {missing}", "pip install 'nsa[eval]'")
    check_tasks(args.tasks)
    flags = {"--samples": [args.samples], "--lengths": args.lengths, "--batch-size": [args.batch_size]}
    for flag, values in flags.items():
        for value in values:
            require_positive_int(flag, value)
    for folder in args.runs:
        check_no_code(folder)
    rows: list[dict[str, Any]] = []
    total = len(args.runs) * len(args.tasks) * len(args.lengths)
    with closing(progress(total, unit="cell", every_s=LINE_EVERY_S)) as shown:
        for folder, name in zip(args.runs, run_names(args.runs), strict=True):
            model = open_folder(folder, args, device)
            for task in args.tasks:
                for length in args.lengths:
                    rows.append({"run": name, "task": task, "length": length})
                    rows[-1] |= evaluate(model, folder, task, length, args.samples)
                    shown.show(len(rows), f"{name}: {task}, {length:,} tokens")
    return rows


def check_tasks(tasks: Sequence[str]) -> None:
    for task in tasks:
        why = f"; {task} downloads {DOWNLOADS[task]}" if task in DOWNLOADS else ""
        require(task in TASKS, "--tasks", task, f"tasks that need no network: {', '.join(TASKS)}{why}")


def check_no_code(folder: Path) -> None:
    """`ValueError` unless `folder` holds a model, and no code or pickle: the harness trusts its tokenizer's code."""
    accepted = f"a folder with {CONFIG_FILE}; `nsa export {folder} --to DIR` makes one of a run"
    require((folder / CONFIG_FILE).is_file(), "DIR", str(folder), accepted)
    read_fields(folder)
    weight_files(folder)
    path = folder / "tokenizer_config.json"
    require(path.is_file(), "DIR", str(folder), f"a folder with {path.name}")
    code = read_json(path, MAX_JSON_BYTES).get("auto_map")
    require(not code, f"auto_map in {path}", code, "none: code in a folder is never run")


def open_folder(folder: Path, args: argparse.Namespace, device: torch.device) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import nsa.hf  # noqa: F401  registers the model type

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype=dtype, **options).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    for task in args.tasks:
        for length in args.lengths:
            check_length(task, length, tokenizer)
    sizes: dict[str, Any] = {"batch_size": args.batch_size, "max_length": max(args.lengths) + SPARE}
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", **sizes)


def check_length(task: str, length: int, tokenizer: Any) -> None:
    """`ValueError` where the shortest prompt of a task does not fit: two generators of the harness would never end."""

    def tokens(text: str) -> int:
        return len(tokenizer(text).input_ids)

    if task == "vt":
        from lm_eval.tasks.ruler import vt_utils

        # An example of 500 tokens with the fewest lines that are tried, then the question itself.
        example = tokens(vt_utils.generate_input_output(5, 1, 4, is_icl=True)[0]) + 60
        accepted = "a tokenizer with which vt's example has at most 500 tokens, a BPE and not bytes"
        require(example <= 500, f"the tokens of vt's example with {type(tokenizer).__name__}", example, accepted)
        least = 500 + tokens(vt_utils.generate_input_output(10, 1, 4)[0]) + 60
    elif task == "cwe":
        from lm_eval.tasks.ruler import cwe_utils

        # Of random words: the longest of some prompts.
        least = max(tokens(" ".join(cwe_utils.generate_input_output(10, length)[:2])) for _ in range(16)) + 240
    else:
        least = 512
    require(length >= least, "--lengths", length, f"at least {least} for {task} with this tokenizer")


def evaluate(model: Any, folder: Path, task: str, length: int, samples: int) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    name = TASKS[task]
    # One length per call: the samples of a call are its first ones, and those of the first length come first.
    options: dict[str, Any] = {"metadata": {"max_seq_lengths": [length], "tokenizer": str(folder)}, "limit": samples}
    found = simple_evaluate(model=model, tasks=[name], **options, bootstrap_iters=0, log_samples=False)
    assert found is not None
    return {"accuracy": found["results"][name][f"{length},none"], "samples": found["n-samples"][name]["effective"]}
