"""Models as Transformers has them on disk: Llama's names and config, read and written without that package.

A folder has `config.json` and `model.safetensors` (or shards and `model.safetensors.index.json`). Nothing else is
opened: neither pickles nor code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig, RopeScaling, require
from nsa.dtypes import dtype_name
from nsa.files import make_folder, read_json, replace_text
from nsa.model.checkpoint import load_parameters
from nsa.model.config import LMConfig
from nsa.model.transformer import LM
from nsa.tensor_file import read_tensors, write_tensors

MODEL_TYPE, DENSE_TYPE = "nsa_llama", "llama"
CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 2**26

# Llama's names of fields of an LMConfig, and of an NSAConfig.
LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden",
    "rms_norm_eps": "norm_eps",
}
LLAMA_HEADS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_groups",
    "head_dim": "d_k",
}
# Fields of an NSAConfig that Llama's config has in a form of its own.
LLAMA_FIELDS = (*LLAMA_HEADS.values(), "rope_theta", "rope_scaling", "qk_norm_eps")
# Parameters of Llama-3's RoPE.
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Which branch a projection belongs to, in the order of `NSAAttention.k_proj`.
BRANCH_NAMES = ("_cmp", "", "_win")


def attention_config(fields: Mapping[str, Any]) -> NSAConfig:
    """The hyperparameters of every layer, from the fields of a `config.json`; a ValueError names a wrong one."""
    nsa = fields.get("nsa") or {}
    require(isinstance(nsa, Mapping), "nsa", nsa, "hyperparameters by name")
    taken = sorted(set(LLAMA_FIELDS) & nsa.keys())
    require(not taken, "the keys of nsa", taken, "only hyperparameters that are not fields of Llama's config")
    own = values_of(fields, LLAMA_HEADS)
    own |= {"d_v": own["d_k"], "qk_norm_eps": fields.get("rms_norm_eps", 1e-6), **rope_fields(saved_rope(fields))}
    return NSAConfig.from_dict({**own, **nsa})


def values_of(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of Llama's fields, by our names; a ValueError if one is missing."""
    missing = [name for name in names if fields.get(name) is None]
    require(not missing, "the config", sorted(fields), f"a value for {missing}")
    return {own: fields[name] for name, own in names.items()}


def saved_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` of a `config.json`, which early versions saved as `rope_theta` and `rope_scaling`."""
    found = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    require(isinstance(found, Mapping), "rope_parameters", found, "parameters by name")
    named = {"rope_type" if name == "type" else name: value for name, value in found.items()}
    outside = {name: fields[name] for name in ("rope_theta", "partial_rotary_factor") if fields.get(name) is not None}
    return {**outside, **named}


def rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of an `NSAConfig`, from Transformers' `rope_parameters`; a ValueError if they are
    neither the default kind nor Llama-3's, or rotate a part of each head."""
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    require(kind in ("default", "llama3"), "rope_type", kind, "'default' or 'llama3'")
    unknown = sorted(map(str, rope.keys() - {"rope_type", "rope_theta", "partial_rotary_factor", *LLAMA3_FIELDS}))
    require(not unknown, "rope_parameters", dict(rope), f"one set of them for all layers, without {unknown}")
    require(part == 1.0, "partial_rotary_factor", part, "1.0: all of each head is rotated")
    scaling = None
    if kind == "llama3":
        missing = [name for name in LLAMA3_FIELDS if name not in rope]
        require(not missing, "rope_parameters", dict(rope), f"{missing} too, for 'llama3'")
        factor, low, high, length = (rope[name] for name in LLAMA3_FIELDS)
        scaling = RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_len=length)
    return {"rope_theta": rope.get("rope_theta", 10_000.0), "rope_scaling": scaling}


def rope_parameters(c: NSAConfig) -> dict[str, Any]:
    """The inverse of `rope_fields`."""
    if c.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": c.rope_theta}
    values = asdict(c.rope_scaling)
    length = values.pop("original_max_len")
    return {"rope_type": "llama3", "rope_theta": c.rope_theta, **values, "original_max_position_embeddings": length}


def llama_config(config: LMConfig) -> dict[str, Any]:
    """The `config.json` of a model with NSA, or dense attention, in every layer; a ValueError for others, or a dense
    head with values of another size than its keys."""
    c, kinds = config.attn, set(config.kinds)
    require(kinds in ({"nsa"}, {"dense"}), "attention", config.attention, "'nsa' or 'dense' in every layer")
    dense = kinds == {"dense"}
    require(not dense or c.d_k == c.d_v, "attn.d_v", c.d_v, f"attn.d_k = {c.d_k} for dense attention, as Llama's")
    fields: dict[str, Any] = {
        "model_type": DENSE_TYPE if dense else MODEL_TYPE,
        "architectures": ["LlamaForCausalLM" if dense else "NSALlamaForCausalLM"],
        **{name: getattr(config, own) for name, own in LLAMA_SIZES.items()},
        **{name: getattr(c, own) for name, own in LLAMA_HEADS.items()},
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_len,
        "rope_parameters": rope_parameters(c),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
    }
    if not dense:
        require(not c.qk_norm or c.qk_norm_eps == config.norm_eps, "attn.qk_norm_eps", c.qk_norm_eps, "norm_eps")
        # What runs the model is the machine's matter.
        left_out = {*LLAMA_FIELDS, "backend", "strict"} | ({"d_v"} if c.d_v == c.d_k else set())
        fields["nsa"] = {name: value for name, value in c.to_dict().items() if name not in left_out}
    return fields


def lm_config(fields: Mapping[str, Any], seq_len: int) -> LMConfig:
    """The inverse of `llama_config`, with the `seq_len` of the training; a ValueError names the field that is wrong."""
    kind, act = fields.get("model_type"), fields.get("hidden_act", "silu")
    require(kind in (MODEL_TYPE, DENSE_TYPE), "model_type", kind, f"{MODEL_TYPE!r}, or {DENSE_TYPE!r} if dense")
    require(act == "silu", "hidden_act", act, "'silu'")
    for name in ("mlp_bias", "attention_bias"):
        require(not fields.get(name), name, fields.get(name), "False")
    tied = bool(fields.get("tie_word_embeddings"))
    own = values_of(fields, LLAMA_SIZES) | {"seq_len": seq_len, "tie_embeddings": tied}
    return LMConfig(**own, attn=attention_config(fields), attention="nsa" if kind == MODEL_TYPE else "dense")


def llama_tensors(model: LM) -> dict[str, Tensor]:
    """The parameters of `model` by the names that Transformers gives them."""
    c, pinned = model.config, model.config.attn.force_branch is not None
    found = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    if model.head is not None:
        found["lm_head.weight"] = model.head.weight
    for index, layer in enumerate(model.blocks):
        own = {
            "input_layernorm.weight": layer.attention_norm.weight,
            "post_attention_layernorm.weight": layer.mlp_norm.weight,
            "mlp.down_proj.weight": layer.mlp.outer.weight,
        }
        own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"] = layer.mlp.inner.weight.chunk(2)
        for name, x in layer.attention.named_parameters():
            if c.kinds[index] == "nsa" and not c.attn.share_kv and name.startswith(("k_proj", "v_proj")):
                letter, kind = name[0], name.partition(".")[2]
                for branch, part in zip(BRANCH_NAMES, x.chunk(3), strict=True):
                    own[f"self_attn.{letter}{branch}_proj.{kind}"] = part
            elif not (pinned and name.startswith("gate.")):
                own[f"self_attn.{name}"] = x
        found |= {f"model.layers.{index}.{name}": x for name, x in own.items()}
    return {name: x.detach() for name, x in found.items()}


def load_llama_tensors(model: LM, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Copy `tensors` into the parameters of `model`; raises as `check_tensors`."""
    targets = llama_tensors(model)
    check_tensors({name: x.shape for name, x in targets.items()}, tensors, origin, tied=model.head is None)
    with torch.no_grad():
        # Views of the parameters, so that this writes to the model.
        for name, target in targets.items():
            target.copy_(tensors[name])


def check_tensors(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], origin: Path, *, tied: bool) -> None:
    """A `ValueError` that names `origin` where a tensor is missing, left over, or has another shape than `shapes`. A
    head that is `tied` to the embedding may be there or not, and so may buffers of early Llamas."""
    head = {"lm_head.weight"} if tied else set()
    ignored = head | {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    problems = [f"{name} is missing" for name in shapes.keys() - tensors.keys() - head]
    problems += [f"{name} is left over" for name in tensors.keys() - shapes.keys() - ignored]
    both = {name: (list(tensors[name].shape), list(shapes[name])) for name in shapes.keys() & tensors.keys()}
    problems += [f"{name} has shape {found}, not {needed}" for name, (found, needed) in both.items() if found != needed]
    if problems:
        raise ValueError(f"{origin} does not fit the model: {shorten('; '.join(sorted(problems)), 300)}")


def write_folder(folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    make_folder(folder)
    write_tensors(folder / WEIGHTS_FILE, {name: x.cpu().contiguous() for name, x in tensors.items()})
    dtypes = {dtype_name(x.dtype) for x in tensors.values()}
    values = {**fields, "dtype": dtypes.pop()} if len(dtypes) == 1 else fields
    replace_text(folder / CONFIG_FILE, json.dumps(values, indent=2) + "\n")


def read_fields(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; a ValueError if it is damaged, or names quantized weights or code."""
    path = folder / CONFIG_FILE
    require(path.is_file(), "folder", str(folder), f"a folder with {CONFIG_FILE}, as Transformers writes it")
    fields = read_json(path, MAX_JSON_BYTES)
    quantized = fields.get("quantization_config")
    require(not quantized, f"quantization_config in {path}", quantized, "none: weights in fp32, bf16 or fp16")
    code = fields.get("auto_map")
    require(not code, f"auto_map in {path}", code, "none: code in a folder is never run")
    return fields


def weight_files(folder: Path) -> dict[str, Path]:
    """Which file of a folder holds each tensor; a ValueError without safetensors, or with a damaged index."""
    if (folder / WEIGHTS_FILE).is_file():
        return dict.fromkeys(read_tensors(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)
    index = folder / INDEX_FILE
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    accepted = f"a folder with {WEIGHTS_FILE} or {INDEX_FILE}"
    require(not pickles or index.is_file(), "folder", str(folder), f"{accepted}; {pickles} may hold code")
    require(index.is_file(), "folder", str(folder), accepted)
    names = read_json(index, MAX_JSON_BYTES).get("weight_map")
    require(isinstance(names, dict) and bool(names), f"weight_map in {index}", names, "files by the names of tensors")
    assert isinstance(names, dict)
    for name in set(map(str, names.values())):
        inside = name.endswith(".safetensors") and Path(name).name == name and (folder / name).is_file()
        require(inside, f"a file in {index}", name, f"a .safetensors file in {folder}")
    found = {name: folder / str(file) for name, file in names.items()}
    for path in set(found.values()):
        there = read_tensors(path).keys()
        missing = sorted(name for name, file in found.items() if file == path and name not in there)
        require(not missing, f"tensors that {path} should hold", missing, "none missing")
    return found


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, as views of its mapped files; raises as `weight_files`."""
    files = weight_files(folder)
    opened = {path: read_tensors(path) for path in set(files.values())}
    return {name: opened[path][name] for name, path in files.items()}


def load_initial(model: LM, folder: Path) -> None:
    """Copy the parameters of a Transformers folder, or of a run or its export, into a model that has the same ones; a
    ValueError names the file that is missing, damaged, or does not fit."""
    if (folder / CONFIG_FILE).is_file():
        load_llama_tensors(model, read_weights(folder), folder)
    else:
        load_parameters(model, folder)
