"""Dense models of Transformers with NSA in place of their attention, and back."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nsa.config import NSAConfig, require, require_positive_int
from nsa.data.tokenizer import check_vocabulary, load_tokenizer
from nsa.export import require_empty, write_json
from nsa.files import make_folder
from nsa.model import llama
from nsa.tensor_file import write_tensors

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Without new parameters; with a phi and a gate that start almost as that; and with K/V of its own for each branch.
SHARED: dict[str, Any] = {"share_kv": True, "compress_rope": "before"}
RECIPES: dict[str, dict[str, Any]] = {
    "select": {**SHARED, "phi": "mean", "force_branch": "sel"},
    "gated": {**SHARED, "phi": "mlp", "gate": "softmax"},
    "full": {"share_kv": False, "compress_rope": "before", "phi": "mlp", "gate": "softmax"},
}
# Hyperparameters that a user may change.
CHANGEABLE = ("l", "d", "l_sel", "n_sel", "n_init", "n_local", "w", "compress_rope", "gate_hidden")
# Fields that the configs have in common.
SIZE_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads")
OTHER_FIELDS = ("hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters")
TOKEN_FIELDS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
COMMON = (*SIZE_FIELDS, *HEAD_FIELDS, *OTHER_FIELDS, *TOKEN_FIELDS)
POSITIVE_FIELDS = (*SIZE_FIELDS, *HEAD_FIELDS, "head_dim", "max_position_embeddings")
# How far the gate of each branch is open at the start, before the softmax: compressed, selected, sliding.
GATE_BIAS = (-4.0, 4.0, 0.0)
# Of a gate's last layer, relative to Xavier's: zeros would leave the first layer without a gradient.
GATE_SCALE = 0.01
ADDED_FILE, DENSE_FILE = "model-nsa.safetensors", "model-dense.safetensors"
# Files besides config and weights that belong to a model. No code.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
VOCABULARY_FILES = ("vocab.json", "merges.txt", "tokenizer.model")
COPIED = (*TOKENIZER_FILES, *VOCABULARY_FILES, "chat_template.jinja", "chat_template.json", "generation_config.json")


def convert_folder(source: Path, to: Path, recipe: str, changes: Mapping[str, Any] | None = None) -> NSAConfig:
    """Write a dense model with NSA in place of its attention.

    Args:
        source: The folder of a Llama, Mistral, Qwen2 or Qwen3 with a tokenizer.
        to: Created; must be empty.
        recipe: "select": no new parameter, equal to the dense model up to `n_sel * l_sel` tokens. "gated": a learned
            phi that starts as the mean and a learned gate that starts almost closed but for the selected branch.
            "full": that, with the dense K/V copied to each branch.
        changes: Hyperparameters of NSA in place of the defaults.

    Returns:
        The hyperparameters of the layers.

    Raises:
        ValueError: The folder is no such model, or is damaged; a hyperparameter is wrong. Nothing is written.
    """
    require(recipe in RECIPES, "recipe", recipe, f"one of {tuple(RECIPES)}")
    require_empty(to)
    fields = llama.read_fields(source)
    dense = dense_config(fields)
    new = new_fields(fields, dense, recipe, changes or {})
    attn = llama.attention_config(new)
    check_vocabulary(load_tokenizer(source), dense.vocab_size, name="vocab_size")
    weights = llama.read_weights(source)
    n_layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
    there = dense.num_hidden_layers == n_layers
    require(there, "num_hidden_layers", dense.num_hidden_layers, f"{n_layers}, as many as there are weights of")
    with torch.device("meta"):
        targets = AutoModelForCausalLM.from_config(dense).state_dict()
    llama.check_tensors({name: x.shape for name, x in targets.items()}, weights, source, tied=dense.tie_word_embeddings)
    kinds = {x.dtype for x in weights.values()}
    plain = kinds <= {torch.float32, torch.bfloat16, torch.float16}
    require(plain, f"dtypes in {source}", sorted(map(str, kinds)), "fp32, bf16 and fp16: not quantized")
    added = {} if recipe == "select" else new_tensors(attn, weights, dense.num_hidden_layers, recipe == "full")
    copy_model(source, to, weights, added)
    write_json(to / llama.CONFIG_FILE, new)
    return attn


def convert_back(source: Path, to: Path) -> None:
    """Write the dense model that `select` made `source` of, with the parameters of `source`; a ValueError if that is no
    folder of the recipe `select`, nor the export of a run that started from one."""
    require_empty(to)
    fields = llama.read_fields(source)
    nsa, kind = fields.get("nsa") or {}, fields.get("model_type")
    selected = kind == llama.MODEL_TYPE and all(nsa.get(name) == value for name, value in RECIPES["select"].items())
    accepted = "a folder of the recipe select: others have parameters that a dense model does not"
    require(selected, "folder", str(source), accepted)
    dense = fields.get("dense_config") or fields_without_nsa(fields)
    dense_config(dense)
    copy_model(source, to, llama.read_weights(source), {})
    write_json(to / llama.CONFIG_FILE, dense)


def fields_without_nsa(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the dense model, for a run that `nsa export` wrote: it knows nothing of the conversion."""
    extras = {name: bool(fields["nsa"].get(name)) for name in ("qkv_bias", "qk_norm")}
    require(not all(extras.values()), "nsa", extras, "one of them: no family has both")
    kind = "qwen2" if extras["qkv_bias"] else "qwen3" if extras["qk_norm"] else "llama"
    own = {name: value for name, value in fields.items() if name not in ("nsa", "dense_config", "layer_types")}
    return {**own, "model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}


def dense_config(fields: Mapping[str, Any]) -> Any:
    """The config of a dense model as transformers has it, with its defaults; a ValueError names the field for which NSA
    cannot replace the attention, and what is accepted."""
    kind = fields.get("model_type")
    require(kind in FAMILIES, "model_type", kind, f"one of {FAMILIES}")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        require(not fields.get(name), name, fields.get(name), "none: no mixture of experts")
    # Checked before transformers sees them: it would ignore some, and divide by others.
    llama.rope_fields(llama.saved_rope(fields))
    for name in POSITIVE_FIELDS:
        if fields.get(name) is not None:
            require_positive_int(name, fields[name])
    try:
        config = AutoConfig.for_model(kind, **{name: x for name, x in fields.items() if name != "model_type"})
    except (StrictDataclassError, TypeError, KeyError) as error:
        raise ValueError(f"the config is damaged: {shorten(str(error), 300)}") from error
    act = config.hidden_act
    require(act == "silu", "hidden_act", act, "'silu'")
    for name in ("mlp_bias", "attention_bias", "use_sliding_window"):
        value = getattr(config, name, False)
        require(not value, name, value, "False")
    window = getattr(config, "sliding_window", None)
    accepted = "none, or one that is not shorter than max_position_embeddings"
    require(window is None or window >= config.max_position_embeddings, "sliding_window", window, accepted)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    require(layers <= known, "layer_types", sorted(layers), "'full_attention'")
    llama.rope_fields(config.rope_parameters or {})
    return config


def new_fields(fields: Mapping[str, Any], dense: Any, recipe: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(changes) - set(CHANGEABLE))
    require(not unknown, "--set", unknown, f"only {CHANGEABLE}")
    nsa = {**RECIPES[recipe], **changes}
    if dense.model_type == "qwen2":
        nsa["qkv_bias"] = True
    if dense.model_type == "qwen3":
        nsa["qk_norm"] = True
    head_dim = getattr(dense, "head_dim", None) or dense.hidden_size // dense.num_attention_heads
    own = {"model_type": llama.MODEL_TYPE, "architectures": ["NSALlamaForCausalLM"], "head_dim": head_dim, "nsa": nsa}
    dtype = {name: fields[name] for name in ("dtype", "torch_dtype") if name in fields}
    return {**own, **{name: getattr(dense, name, None) for name in COMMON}, **dtype, "dense_config": dict(fields)}


def new_tensors(c: NSAConfig, weights: Mapping[str, Tensor], n_layers: int, own_kv: bool) -> dict[str, Tensor]:
    """The tensors that a dense model lacks: phi, gates, and with `own_kv` the K/V of the other two branches."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for index in range(n_layers):
        prefix = f"model.layers.{index}.self_attn."
        own = {**phi_as_mean("phi_k", c.d_k, c.l), **phi_as_mean("phi_v", c.d_v, c.l), **new_gate(c, generator)}
        if own_kv:
            for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
                if prefix + name in weights:
                    for branch in ("cmp", "win"):
                        own[name.replace("_proj", f"_{branch}_proj")] = weights[prefix + name]
        dtype = weights[f"{prefix}k_proj.weight"].dtype
        found |= {prefix + name: x.to(dtype) for name, x in own.items()}
    return found


def phi_as_mean(name: str, head_dim: int, block: int) -> dict[str, Tensor]:
    """An MLP that computes the mean of a block exactly: `silu(z) - silu(-z) = z`."""
    one = torch.eye(head_dim)
    mean = one.repeat(1, block) / block
    return {
        f"{name}.position": torch.zeros(block, head_dim),
        f"{name}.inner.weight": torch.cat([mean, -mean]),
        f"{name}.inner.bias": torch.zeros(2 * head_dim),
        f"{name}.outer.weight": torch.cat([one, -one], dim=1),
        f"{name}.outer.bias": torch.zeros(head_dim),
    }


def new_gate(c: NSAConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """A gate whose softmax starts at `GATE_BIAS` in every head."""
    hidden, n_out = c.gate_hidden or max(1, c.dim // 4), c.n_heads * len(GATE_BIAS)

    def uniform(bound: float, *shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) * bound

    return {
        "gate.inner.weight": uniform(c.dim**-0.5, hidden, c.dim),
        "gate.inner.bias": torch.zeros(hidden),
        "gate.outer.weight": uniform(GATE_SCALE * math.sqrt(6 / (hidden + n_out)), n_out, hidden),
        "gate.outer.bias": torch.tensor(GATE_BIAS).repeat(c.n_heads),
    }


def copy_model(source: Path, to: Path, weights: Mapping[str, Tensor], added: Mapping[str, Tensor]) -> None:
    """Copy the weights, bit by bit, and the tokenizer's files; write `added` to a file of its own."""
    make_folder(to)
    files = {name: path.name for name, path in llama.weight_files(source).items()}
    # Loaders prefer a lone file to an index.
    names = {name: DENSE_FILE if added and name == llama.WEIGHTS_FILE else name for name in set(files.values())}
    for name, copied in names.items():
        shutil.copyfile(source / name, to / copied)
    if added:
        write_tensors(to / ADDED_FILE, {name: x.contiguous() for name, x in added.items()})
        mapping = {name: names[file] for name, file in files.items()} | dict.fromkeys(added, ADDED_FILE)
        size = sum(x.numel() * x.element_size() for x in (*weights.values(), *added.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(mapping.items()))}
        write_json(to / llama.INDEX_FILE, index)
    elif (source / llama.INDEX_FILE).is_file():
        shutil.copyfile(source / llama.INDEX_FILE, to / llama.INDEX_FILE)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
