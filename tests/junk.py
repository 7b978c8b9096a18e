"""Files of a run and of prepared data, changed at random by somebody who knows their checksums."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from nsa.data.shards import HEADER_BYTES, Header, read_shard_header

RANK_FILE = "rank_00000.safetensors"

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 10**9, 10**30, 2**31, 2**63, -(10**400), 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "../x", "/etc/passwd", "\x00", "a\nb", "9" * 5000, [], {}, [[]], [[0]], [None] * 4, {"": 0}),
    *([2**62] * 9, [10**4000], {"a": {"b": {"c": [1, "x"]}}}),
)


def nested(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = [tree]
    return tree


def spoiled_tree(tree: Any, chance: Random) -> Any:
    """The tree with up to three entries removed, added or replaced."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        parent, key, place = None, None, tree
        while isinstance(place, dict | list) and place and (parent is None or chance.random() < 0.7):
            parent, key = place, chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place = parent[key]
        junk = nested(chance.choice((5, 200))) if chance.random() < 0.05 else chance.choice(VALUES)
        if parent is None:
            return junk
        what = chance.choice(("replace", "replace", "remove", "add"))
        if what == "replace":
            parent[key] = copy.deepcopy(junk)
        elif what == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            parent[chance.choice(("added", "", "0", "\ud800", "n_layers"))] = copy.deepcopy(junk)
        else:
            parent.append(copy.deepcopy(junk))
    return tree


def spoiled_bytes(data: bytes, chance: Random) -> bytes:
    """The bytes with a part removed, repeated or overwritten."""
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 8, 100, 10**9)))
    what = chance.choice(("remove", "repeat", "overwrite", "zeros"))
    middle = {"remove": b"", "repeat": data[at:end] * 2, "zeros": bytes(end - at)}.get(what)
    return data[:at] + (chance.randbytes(min(end - at, 4096)) if middle is None else middle) + data[end:]


# Each rewrites a file; the first argument is its path.


def any_bytes(path: Path, chance: Random) -> None:
    path.write_bytes(spoiled_bytes(path.read_bytes(), chance))


def json_file(path: Path, chance: Random) -> None:
    path.write_text(json.dumps(spoiled_tree(json.loads(path.read_text()), chance)))


def yaml_file(path: Path, chance: Random) -> None:
    tree = spoiled_tree(yaml.safe_load(path.read_text()), chance)
    # JSON is YAML, and some of what YAML can hold.
    path.write_text(json.dumps(tree) if chance.random() < 0.5 else yaml.safe_dump(tree))


def write_index(path: Path, body: Any) -> None:
    text = json.dumps(body)
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


def read_index(path: Path) -> Any:
    return json.loads(path.read_text().partition("\n")[2])


def index(path: Path, chance: Random) -> None:
    write_index(path, spoiled_tree(read_index(path), chance))


def tensor_header(path: Path, chance: Random) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(spoiled_tree(json.loads(data[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def sealed_tensors(path: Path, chance: Random) -> None:
    """With the size and checksum that the index lists."""
    chance.choice((tensor_header, any_bytes))(path, chance)
    body, data = read_index(path.parent / "index.json"), path.read_bytes()
    body["files"][path.name] = [len(data), hashlib.sha256(data).hexdigest()]
    write_index(path.parent / "index.json", body)


def shard_header(path: Path, chance: Random) -> None:
    """With the CRC of a header and, half of the time, as the manifest lists it."""
    data = path.read_bytes()
    with path.open("rb") as file:
        fields = read_shard_header(file.fileno(), path)._asdict()
    name = chance.choice([name for name in fields if name != "magic"])
    sizes = (0, 1, 2, 3, 4, 2**31, 2**32 - 1)
    fields[name] = chance.choice((b"bytes", b"\xff", b"x" * 32) if name == "tokenizer" else sizes)
    header = Header(**fields)
    path.write_bytes(header.pack() + data[HEADER_BYTES:])
    manifest = path.parent / "manifest.json"
    listed = json.loads(manifest.read_text())
    if chance.random() < 0.5:
        listed["files"][path.name] = {"bytes": len(data), "header_sha256": header.listed.header_sha256}
        manifest.write_text(json.dumps(listed))


class Target(NamedTuple):
    """A file to change, and the command that reads it; RUN, DATA and CONFIG in it are replaced by paths."""

    file: str
    spoil: Callable[[Path, Random], None]
    argv: tuple[str, ...]


RESUME, CHECK = ("train", "--resume", "RUN"), ("data", "check", "DATA")
TRAIN = ("train", "--config", "CONFIG", "--set", "model.vocab_size=260", "--steps", "1", "--out", "NEW")
TRAIN += ("--dataset", "shards", "--data-path", "DATA")
GENERATE = ("generate", "--run", "RUN", "--device", "cpu", "--prompt", "ab", "--max-new-tokens", "3")
DIFF, PLAN = ("train", "--config", "CONFIG", "--diff", "RUN"), ("plan", "--config", "CONFIG", "--set", "dtype=bfloat16")
LOAD_CACHE = (*GENERATE[:5], "--max-new-tokens", "3", "--load-cache", "CACHE")
INIT = ("train", "--init", "HF", "--config", "CONFIG", "--dataset", "synthetic", "--steps", "1", "--out", "NEW")
STEP = "run/checkpoints/step_2"
TARGETS = (
    *(
        Target("small.yaml", spoil, ("train", "--config", "CONFIG", "--diff", "RUN"))
        for spoil in (yaml_file, any_bytes)
    ),
    *(Target("small.yaml", yaml_file, ("plan", "--config", "CONFIG", "--set", "dtype=bfloat16")),),
    *(Target("run/run.json", spoil, RESUME) for spoil in (json_file, any_bytes)),
    *(Target(f"{STEP}/index.json", spoil, RESUME) for spoil in (index, index, index, any_bytes)),
    *(Target(f"{STEP}/{RANK_FILE}", sealed_tensors, RESUME) for _ in range(2)),
    *(Target("run/model.json", spoil, GENERATE) for spoil in (json_file, any_bytes)),
    *(Target("run/model.safetensors", spoil, GENERATE) for spoil in (tensor_header, any_bytes)),
    *(Target("run/tokenizer.json", spoil, GENERATE) for spoil in (json_file, json_file, any_bytes)),
    *(Target("cache.safetensors", spoil, LOAD_CACHE) for spoil in (tensor_header, any_bytes)),
    *(Target("hf/config.json", spoil, INIT) for spoil in (json_file, json_file, any_bytes)),
    *(Target("hf/model.safetensors", spoil, INIT) for spoil in (tensor_header, any_bytes)),
    *(Target("hf/tokenizer.json", spoil, INIT) for spoil in (json_file, any_bytes)),
    *(Target("data/manifest.json", spoil, command) for spoil in (json_file, any_bytes) for command in (CHECK, TRAIN)),
    *(Target("data/train-00000.tokens", spoil, c) for spoil in (shard_header, any_bytes) for c in (CHECK, TRAIN)),
    *(Target("data/tokenizer.json", spoil, c) for spoil in (json_file, any_bytes) for c in (CHECK, TRAIN)),
)
