"""Generation from caches equals generation without them, for one prompt and for many of different lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpora import TEXTS, needs_tokenizers
from torch import Tensor

from nsa import NSAConfig, cli, generate
from nsa.data import train_bpe
from nsa.generate import newest_run, pick
from nsa.machine import usable_device
from nsa.model import LM, LMConfig, save_model

KINDS = ("nsa", "dense")


def small_model(kind: str, vocab_size: int = 64) -> LM:
    torch.manual_seed(0)
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)
    config = LMConfig(vocab_size=vocab_size, n_layers=2, hidden=64, seq_len=64, attn=attn, attention=kind)
    model = LM(replace(config, tie_embeddings=False))
    # Fresh layers add little to the residual stream: with larger weights the next token depends on the whole past.
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model.double().eval()


def greedy_without_cache(model: LM, tokens: Tensor, n_new: int) -> Tensor:
    for _ in range(n_new):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return tokens[:, -n_new:]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_from_caches_equals_greedy_without(kind: str) -> None:
    model = small_model(kind)
    prompt = torch.randint(64, (2, 19))
    expected = greedy_without_cache(model, prompt, 20)
    assert torch.equal(generate.generate(model, prompt, 20, temperature=0), expected)
    assert len(expected.unique()) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_different_lengths_do_not_disturb_each_other(kind: str) -> None:
    model = small_model(kind)
    prompts = [torch.randint(64, (length,)).tolist() for length in (3, 17, 1, 30)]
    together = generate.generate(model, prompts, 12, temperature=0)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[None], greedy_without_cache(model, torch.tensor([prompt]), 12))


@pytest.mark.parametrize("length", [1, 5, 12])
def test_generation_can_be_stopped_after_any_token(length: int) -> None:
    model = small_model("nsa")
    prompt = torch.randint(64, (2, 5))
    calls: list[bool] = []

    def stop() -> bool:
        calls.append(True)
        return len(calls) == length

    whole = generate.generate(model, prompt, 12, temperature=0)
    assert torch.equal(generate.generate(model, prompt, 12, temperature=0, stop=stop), whole[:, :length])


def test_sampling_repeats_with_its_seed() -> None:
    model = small_model("dense")
    prompt = torch.randint(64, (2, 5))

    def sample(seed: int) -> Tensor:
        return generate.generate(model, prompt, 16, temperature=2.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_top_k_samples_among_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).repeat(200, 1)
    assert set(pick(logits, 5.0, 2, None).flatten().tolist()) == {1, 2}
    assert set(pick(logits, 5.0, None, None).flatten().tolist()) == {0, 1, 2, 3}
    assert set(pick(logits, 5.0, 1, None).flatten().tolist()) == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-320}, "temperature is 1e-320"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 65}, "top_k is 65"),
        ({"prompts": [[1], []]}, "prompts is"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 2, **changes}
    with pytest.raises(ValueError, match=message):
        generate.generate(small_model("dense"), **arguments)


def test_the_command_continues_every_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(small_model("nsa", vocab_size=256).float(), tmp_path / "run")
    assert newest_run(tmp_path) == tmp_path / "run"
    words = ["--run", str(tmp_path / "run"), "--prompt", "def f(", "--prompt", "import", "--max-new-tokens", "4"]
    assert generate.run(cli.parser_of("generate").parse_args([*words, "--device", "cpu"])) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("def f(")
    assert "\nimport" in printed


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_gives_no_text_and_a_status(
    value: float, temperature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model("nsa", vocab_size=256).float()
    model.layers[1].mlp.outer.weight.data[3, 5] = value
    save_model(model, tmp_path)
    words = ["--run", str(tmp_path), "--device", "cpu", "--max-new-tokens", "4", "--temperature", temperature]
    assert cli.main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path) in err
    assert "layers.1.mlp.outer.weight" in err


def test_a_row_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    model = small_model("dense")
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = generate.generate(model, prompts, 6, temperature=0)
    row = int(torch.tensor([t for t in range(64) if t not in {*prompts[0].tolist(), *expected[0].tolist()}])[0])
    prompts[1, 0] = row
    model.embedding.weight.data[row] = float("nan")
    new = generate.generate(model, prompts, 6, temperature=0)
    assert torch.equal(new[0], expected[0])
    assert (new[1] == -1).all()


@needs_tokenizers
def test_a_tokenizer_larger_than_the_model_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(small_model("dense", vocab_size=256).float(), tmp_path)
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(tmp_path)
    assert cli.main(["generate", "--device", "cpu", "--run", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in (str(tmp_path), "256", str(tokenizer.vocab_size)))


def test_a_wrong_value_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(small_model("dense", vocab_size=256).float(), tmp_path / "empty").unlink()
    save_model(small_model("dense", vocab_size=256).float(), tmp_path / "run")
    wrong = [
        (["--run", str(tmp_path / "nowhere")], "a folder with model.json"),
        (["--run", str(tmp_path / "empty")], "a folder with model.safetensors or model.pt"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--seed", "-1"], "--seed is -1"),
        (["--run", str(tmp_path / "run"), "--prompt", ""], "--prompt is ''"),
        (["--run", str(tmp_path / "run"), "--prompt", "a\udcff"], r"--prompt is 'a\udcff'"),
        (["--seed", str(2**70)], f"--seed is {2**70}"),
    ]
    if not torch.cuda.is_available():
        wrong.append((["--device", "cuda"], "device is 'cuda'; accepted: 'cpu', because torch sees no GPU here"))
    for words, message in wrong:
        assert cli.main(["generate", "--device", "cpu", *words]) == 2
        line = capsys.readouterr().err
        assert line.startswith("nsa generate: error: ")
        assert message in line
        assert line.count("\n") == 1


def test_a_damaged_model_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model("dense", vocab_size=256).float()
    safe, plain, config = (tmp_path / name for name in ("model.safetensors", "model.pt", "model.json"))

    def check(path: Path, data: bytes, what: str = "is damaged") -> None:
        before = path.read_bytes()
        path.write_bytes(data)
        assert cli.main(["generate", "--device", "cpu", "--run", str(tmp_path)]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"nsa generate: error: {path} {what}: ")
        assert line.count("\n") == 1
        path.write_bytes(before)

    save_model(model, tmp_path)
    for data in (b"", b"{", b"\xff", b"[]", b'{"layers": 1}'):
        check(config, data)
    if safe.is_file():
        whole = safe.read_bytes()
        other = save_model(small_model("nsa", vocab_size=256).float(), tmp_path / "other").read_bytes()
        for data in (b"", whole[: len(whole) // 2]):
            check(safe, data)
        check(safe, other, "does not fit model.json")
        safe.unlink()
    torch.save(model.state_dict(), plain)
    whole = plain.read_bytes()
    for data in (b"", b"no model", whole[: len(whole) // 2]):
        check(plain, data)


def test_no_run_to_generate_from_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trained model"):
        newest_run(tmp_path)


@pytest.mark.parametrize("device", ["meta", "xpu", "mps"])
def test_a_device_that_is_neither_cpu_nor_cuda_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}'"):
        usable_device(device)
