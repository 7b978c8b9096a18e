"""The keys of a config, and hints for unknown names: the key that replaces one, or the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

# By the name that other trainers use, our key.
ALIASES = {
    alias: key
    for key, aliases in {
        "gc": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing checkpoint_activations "
        "recompute remat",
        "accum": "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation grad_accum "
        "grad_accum_steps accumulation_steps accum_steps accum_batches",
        "lr": "learning_rate max_lr peak_lr base_lr",
        "lr_floor, a fraction of lr": "min_lr min_learning_rate lr_min final_lr",
        "dtype (bfloat16, float16 or float32)": "precision mixed_precision torch_dtype amp use_amp bf16 fp16 fp32 half",
        "parallel (ddp, fsdp or none; under torchrun ddp is the default)": "ddp fsdp strategy distributed deepspeed "
        "zero_stage distributed_backend devices gpus n_gpus num_gpus num_nodes",
        "steps": "max_steps train_steps num_steps n_steps total_steps num_train_steps num_training_steps max_iters "
        "iterations epochs num_epochs max_epochs num_train_epochs",
        "warmup": "warmup_steps num_warmup_steps warmup_iters warmup_ratio lr_warmup_steps",
        "decay": "decay_steps lr_decay_steps lr_decay_iters cooldown cooldown_steps",
        "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
        "batch_size": "per_device_train_batch_size micro_batch_size train_batch_size global_batch_size "
        "device_batch_size local_batch_size bs",
        "grad_clip": "max_grad_norm gradient_clip_val gradient_clipping clip_grad clip_grad_norm max_norm clip",
        "weight_decay": "wd",
        "out": "output_dir out_dir output save_dir run_dir log_dir default_root_dir",
        "log_every": "logging_steps log_interval log_freq log_every_n_steps",
        "eval_every": "eval_steps eval_interval val_check_interval val_every validation_every",
        "eval_batches": "eval_iters limit_val_batches max_eval_steps",
        "save_every": "save_steps save_interval checkpoint_every checkpoint_interval ckpt_every ckpt_interval",
        "keep": "save_total_limit save_top_k keep_checkpoints keep_last",
        "device": "accelerator",
        "compile": "torch_compile use_compile compile_cmp_win",
        "model.seq_len": "seq_length sequence_length max_seq_len max_seq_length max_length max_len context_length "
        "context_len ctx_len n_ctx block_size max_position_embeddings",
        "model.n_layers": "num_layers n_layer num_hidden_layers layers depth",
        "model.attn.dim": "hidden_size d_model n_embd embed_dim embedding_dim width",
        "model.hidden": "intermediate_size ffn_dim ffn_hidden_size d_ff mlp_dim hidden_dim",
        "model.attn.n_heads": "num_heads n_head num_attention_heads heads nhead",
        "model.attn.n_kv_groups": "num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_heads groups",
        "model.attn.d_k and model.attn.d_v": "head_dim d_head dim_head",
        "model.attn": "nsa",
        "model.attn.w (NSA) or model.window (the others)": "window window_size sliding_window attention_window",
        "model.attn.n_sel": "top_k topk n_select num_selected block_count block_counts",
        "model.attn.l_sel": "sel_block select_block_size selection_block_size",
        "model.vocab_size": "vocab n_vocab vocabulary_size",
        "seed": "seed_everything random_seed manual_seed",
        "model.attn.rope_theta": "rope_base theta",
        "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon eps",
        "model.tie_embeddings": "tie_word_embeddings weight_tying",
        "model.attention": "attention_type attn_type",
        "model.attn.backend": "attn_implementation attn_impl use_flash_attn use_flash_attention flash_attention "
        "use_flash use_triton_sel sel_triton_min_l fa2_enabled",
        "model.attn.backend, or NSA_FA2_MIN_LEN_WIN in the environment": "fa2_min_len_win",
        "model.attn.backend, or NSA_FA2_MIN_LEN_CMP in the environment": "fa2_min_len_cmp",
        "data.source": "dataset dataset_name train_data train_dataset",
        "data.path": "data_dir data_path dataset_path train_file local_path",
        "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
        "data.pack": "packing pack_sequences",
        "data.on_stall (synthetic, retry or abort)": "synthetic_on_fail",
        "data.stall_timeout_s": "loader_timeout",
        "data.queue and data.prefetch": "prefetch_factor num_workers dataloader_num_workers",
    }.items()
    for alias in aliases.split()
}

# Names of models that there is no config for.
MODEL_FAMILIES = ("llama", "mistral", "mixtral", "qwen", "gpt", "deepseek", "gemma", "phi", "olmo", "pythia", "falcon")
FROM_SCRATCH = "these are sizes to train from scratch, not pretrained models: write a .yaml file with its dimensions"

# Names that nothing replaces, and why.
ABSENT = {
    name: why
    for why, names in {
        "the optimizer is always AdamW": "optimizer optim adam_beta1 adam_beta2 betas adam_epsilon",
        "nsa train --resume RUN resumes a run": "resume_from_checkpoint resume_from ckpt_path load_checkpoint",
        "--config has the size of a model, and --init the parameters to start from": "model_name model_name_or_path "
        "model_type pretrained",
        "there is no dropout": "dropout attention_dropout attn_dropout hidden_dropout",
        "metrics go to metrics.jsonl and TensorBoard in the run's folder": "wandb use_wandb report_to",
        "the keys of a run are at the top level of a config": "train runtime",
        "the loader logs no counts of documents": "fwe_report_docs",
    }.items()
    for name in names.split()
}


@cache
def keys_of(cls: Any, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Every dotted key of a config, with the types of its value."""
    keys: dict[str, tuple[Any, ...]] = {}
    for key, hint in get_type_hints(cls).items():
        keys[f"{prefix}{key}"] = kinds = get_args(hint) or (hint,)
        groups: list[Any] = [kind for kind in kinds if is_dataclass(kind)]
        for group in groups:
            keys |= keys_of(group, f"{prefix}{key}.")
    return keys


def replacement(name: str, keys: Iterable[str]) -> str:
    """A hint at what replaces `name`, which is not one of `keys`, as the second half of a sentence.

    In this order: the key for another trainer's name, keys with the same last part, a hint for a model's name, the
    nearest key by spelling, all keys of the same group.
    """
    keys = [key for key in keys if key != name]
    group, _, leaf = name.lower().replace("-", "_").rpartition(".")
    if leaf in ABSENT:
        return f"nothing replaces it: {ABSENT[leaf]}"
    if leaf in ALIASES:
        return f"use {ALIASES[leaf]}"
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"use {' or '.join(same_leaf)}"
    if group in ("", "model") and leaf.startswith(MODEL_FAMILIES):
        return f"nothing replaces it: {FROM_SCRATCH}"
    beside = [key for key in keys if key.rpartition(".")[0] == group]
    # The last part is compared; all of it only where there is no such group.
    prefix = f"{group}." if beside and group else ""
    candidates = [key.removeprefix(prefix) for key in beside or keys]
    close = difflib.get_close_matches(leaf if beside else name, candidates, n=1, cutoff=0.65)
    if close:
        return f"the nearest is {prefix}{close[0]}"
    return f"accepted: {', '.join(beside or [key for key in keys if '.' not in key])}"
