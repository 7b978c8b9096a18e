"""A run that cannot fit is refused from arithmetic, before anything of its size is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import small_run

from nsa import cli
from nsa.model import ATTENTION_KINDS, LM
from nsa.settings import Settings
from nsa.train import preflight
from nsa.train.config import load_config
from nsa.train.plan import GIB, estimate_memory, parameter_count
from nsa.train.preflight import check_capacity, ram, sample_bytes

PLAIN = Settings.load(environ={})


@given(kinds=st.lists(st.sampled_from(ATTENTION_KINDS), min_size=1, max_size=4), tied=st.booleans())
def test_parameters_are_counted_without_the_whole_model(kinds: list[Any], tied: bool) -> None:
    model = small_run(Path("out")).model
    model = replace(model, n_layers=len(kinds), attention=tuple(kinds), tie_embeddings=tied, window=64)
    with torch.device("meta"):
        assert parameter_count(model) == sum(LM(model).parameter_counts().values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.n_layers", 10**9),
        ("model.n_layers", 10**5),
        ("model.hidden", 10**12),
        ("model.vocab_size", 10**12),
        ("model.attn.phi_hidden", 10**12),
        ("model.attn.gate_hidden", 10**12),
        ("model.attn.n_sel", 10**9),
        ("batch_size", 10**9),
        ("model.seq_len", 10**12),
        ("accum", 10**12),
        ("eval_batches", 10**12),
        ("data.queue", 10**15),
        ("sample_tokens", 10**14),
    ],
)
def test_what_no_machine_has_is_refused_by_name_and_at_once(key: str, value: int) -> None:
    config = load_config("tiny", {"device": "cpu", key: value}, env=PLAIN)
    with pytest.raises(ValueError, match=f"lower .*{key} = {value}"):
        check_capacity(config)


@pytest.mark.parametrize("key", ["model.vocab_size", "model.attn.dim", "model.hidden"])
def test_a_tensor_beyond_64_bits_is_refused(key: str) -> None:
    config = load_config("tiny", {"device": "cpu", key: 2**61}, env=PLAIN)
    with pytest.raises(ValueError, match=f"{key.removeprefix('model.')} = {2**61}"):
        check_capacity(config)


@pytest.mark.parametrize("attention", ["nsa", ["nsa", "dense"]])
def test_memory_decides(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny", {"device": "cpu", "model.attention": attention}, env=PLAIN)
    needed = estimate_memory(config, 1).total
    monkeypatch.setattr(preflight, "ram", lambda: int(needed))
    check_capacity(config)
    monkeypatch.setattr(preflight, "ram", lambda: int(needed / 2))
    with pytest.raises(ValueError, match=rf" {needed / 2**30:.1f} GiB, .* {needed / 2 / 2**30:.1f};.*batch_size"):
        check_capacity(config)


@pytest.mark.parametrize("attention", ATTENTION_KINDS)
def test_a_sample_that_fits_is_not_refused(attention: Any) -> None:
    """The estimate is at most what the caches hold."""
    config = load_config("tiny", {"device": "cpu", "model.attention": attention, "model.window": 64}, env=PLAIN)
    with torch.device("meta"):
        caches = LM(config.model).new_cache(1, config.sample_tokens)
    stores = [x for cache in caches for x in cache.buffers()]
    held = sum(x.nbytes for x in stores)
    assert sample_bytes(config) - config.sample_tokens * preflight.TOKEN_BYTES <= held
    with pytest.raises(ValueError, match=f"sample_tokens = {10**14}"):
        check_capacity(replace(config, sample_tokens=10**14))


def test_on_a_gpu_its_own_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 * GIB, name="a GPU of 80 GiB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    config = load_config("1b", {"device": "cuda"}, env=PLAIN)
    check_capacity(config)
    with pytest.raises(ValueError, match="a GPU of 80 GiB has 80"):
        check_capacity(replace(config, batch_size=64))
    large = replace(config, model=replace(config.model, n_layers=200))
    with pytest.raises(ValueError, match=r"model\.n_layers = 200"):
        check_capacity(replace(large, gc=True))
    # Sharded over many ranks the same parameters fit.
    sharded = replace(large, gc=True, parallel="fsdp", cuda_graphs=False)
    check_capacity(sharded, ranks=64)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    physical = ram()
    for text, expected in (("1048576\n", 2**20), ("max\n", physical), (f"{2**63}\n", physical)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(preflight, "LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
        assert ram() == expected


def test_train_and_doctor_and_plan_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    huge = ["--set", "model.n_layers=1000000000"]
    assert cli.main(["train", "--device", "cpu", *huge]) == 2
    assert "model.n_layers = 1000000000" in capsys.readouterr().err
    assert cli.main(["doctor", "--config", "tiny", "--device", "cpu", *huge]) == 1
    assert "model.n_layers = 1000000000" in capsys.readouterr().out
    assert cli.main(["train", "--device", "cpu", "--set", f"sample_tokens={10**14}", "--set", "steps=1"]) == 2
    assert f"sample_tokens = {10**14}" in capsys.readouterr().err
    assert cli.main(["plan", *huge]) == 2
    assert "GiB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
