"""Losses are those of the model, an answer is right exactly if greedy decoding gives it, and results reach files."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from generating import small_model
from training import small_run

from nsa.cli import main
from nsa.data import DataConfig
from nsa.data.recall import NOTE_KEYS, NOTE_VALUES, make_chains, mixed_documents, python_files
from nsa.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from nsa.evaluation import command
from nsa.evaluation.forward import EvalModel
from nsa.evaluation.loss import bin_edges, evaluate_loss, token_losses
from nsa.evaluation.recall import Cell, Haystack, cell_prompt, check_cells, evaluate_cells, score_answers
from nsa.generate import generate
from nsa.model import LM, LMConfig, load_model, save_model
from nsa.train import Trainer

KINDS = ["nsa", "dense"]


def subject(kind: str = "nsa", chunk: int = 1000) -> EvalModel:
    return EvalModel(kind, Path("runs/x"), small_model(kind, 256), ByteTokenizer(), torch.float32, chunk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_token_losses_are_those_of_the_logits(kind: str, chunk: int) -> None:
    given = subject(kind, chunk)
    tokens = torch.randint(256, (2, 65))
    targets = tokens[:, 1:].clone()
    targets[0, 3] = -100
    with torch.no_grad():
        logits = given.model(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 64)
    found = token_losses(given, tokens[:, :-1], targets)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    assert found[0, 3] == 0


def test_the_loss_is_the_mean_over_its_bins() -> None:
    seen: list[int] = []
    loss, bins = evaluate_loss(subject(), DataConfig(source="synthetic"), seq_len=48, windows=3, progress=seen.append)
    assert seen == [1, 2, 3]
    assert [(b.begin, b.end) for b in bins][:2] == [(0, 1), (1, 2)]
    assert bins[-1].end == 48
    assert sum(b.tokens for b in bins) == 3 * 48
    assert loss == pytest.approx(sum(b.loss * b.tokens for b in bins) / (3 * 48), rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 100, 65536])
def test_bins_cover_every_position_once(length: int) -> None:
    edges = bin_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [16, 1000])
def test_an_answer_is_right_iff_greedy_decoding_gives_it(kind: str, chunk: int) -> None:
    given = subject(kind, chunk)
    prompts = torch.randint(256, (3, 40))
    continued = generate(given.model, prompts, 6, temperature=0.0)
    tokens = torch.cat([prompts, continued], dim=1)
    # The second row's last token is wrong; of the third, what is wrong is not part of its answer.
    tokens[1, -1] = (tokens[1, -1] + 1) % 256
    third = generate(given.model, tokens[2:, :42], 4, temperature=0.0)
    tokens[2, 42:] = third[0]
    right, losses = score_answers(given, tokens, [6, 6, 4])
    assert right.tolist() == [True, False, True]
    assert bool((losses > 0).all())


def haystack(n_tokens: int = 1000) -> Haystack:
    return Haystack(ByteTokenizer(), iter(["abcdefgh\n" * 10]), n_tokens)


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_a_needle_lies_at_its_depth(depth: float) -> None:
    tokens, n_answer = cell_prompt(haystack(), Cell("needle", 300, depth), 0)
    assert len(tokens) == 300
    text = bytes(tokens).decode()
    note = text.index("# note")
    key, value = text[note:].splitlines()[0].removeprefix("# note ").split()
    assert text.endswith(f"\n# recall {key} {value}")
    assert n_answer == len(f" {value}")
    filler = 300 - len(f"\n# note {key} {value}") - len(f"\n# recall {key} {value}")
    # After the line that ends there next; a line has 9 characters.
    assert 1 <= note - depth * filler < 11
    assert all(len(line) == 8 for line in text.splitlines()[1:] if not line.startswith("#")), "no line is cut"


def test_cells_are_checked_with_a_tokenizer_without_line_ends() -> None:
    class Printable(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("\n", ""))

    check_cells(Printable(), [Cell("needle", 64, 0.5)], 1)
    with pytest.raises(ValueError, match="length is 8;"):
        check_cells(Printable(), [Cell("needle", 8, 0.5)], 1)


def test_a_haystack_of_one_line_is_cut_anywhere() -> None:
    given = Haystack(ByteTokenizer(), iter(["hay " * 50]), 1000)
    places = [bytes(cell_prompt(given, Cell("needle", 300, depth), 0)[0]).index(b"# note") for depth in (0, 0.5, 1)]
    assert places[0] == 1
    assert 120 < places[1] < 150
    assert places[2] > 250


def line_patterns(tokenizer: Tokenizer, tokens: list[int]) -> set[tuple[object, ...]]:
    """The tokens of each note and question from the line break before it on, with names in place of words."""
    words = {tokenizer.encode(f" {key}")[0]: "key" for key in NOTE_KEYS}
    words |= {tokenizer.encode(f" {value}")[0]: "value" for value in NOTE_VALUES}
    starts = {tuple(tokenizer.encode(f"\n# {kind}")) for kind in ("note", "recall")}
    found = set()
    for at in range(len(tokens)):
        if tuple(tokens[at : at + 3]) in starts:
            names = takewhile(bool, (words.get(token) for token in tokens[at + 3 :]))
            found.add((*tokens[at : at + 3], *names))
    return found


@pytest.mark.slow
def test_prompts_have_the_tokens_of_training_documents() -> None:
    pytest.importorskip("tokenizers")
    files = python_files([Path(command.__file__).parents[1]])
    sizes = {"n_chars": 600_000, "recall_share": 0.6, "recall_chars": (50, 6000)}
    texts = list(mixed_documents(files, **sizes, seed=0))
    tokenizer = train_bpe(texts, 2048)
    trained = [tokenizer.encode(text) for text in texts]
    # Filler has tokens of its own.
    seen = set(chain.from_iterable([*trained, *(tokenizer.encode(path.read_text()) for path in files)]))
    patterns = set().union(*(line_patterns(tokenizer, tokens) for tokens in trained))
    given = Haystack(tokenizer, iter(path.read_text() for path in files), 20_000)
    cells = [Cell("needle", 1000, depth) for depth in (0.0, 0.5, 1.0)]
    for cell in [*cells, Cell("keys", 2000, 64), *(Cell("hops", 1000, hops) for hops in (1, 2, 3, 4))]:
        prompt, n_answer = cell_prompt(given, cell, 0)
        asked = line_patterns(tokenizer, prompt)
        assert len(asked) >= 2
        assert asked <= patterns
        assert set(prompt) <= seen
        assert n_answer == (cell.value if cell.task == "hops" else 1)
        # As the whole text would be encoded: nothing shows where it was put together.
        begin = next(at for at, token in enumerate(prompt) if tokenizer.decode([token]).startswith("\n"))
        assert tokenizer.encode(tokenizer.decode(prompt[begin:])) == prompt[begin:]


def test_keys_and_hops_are_as_many_as_asked() -> None:
    text = bytes(cell_prompt(haystack(), Cell("keys", 400, 5), 0)[0]).decode()
    assert text.count("# note") == 5
    text = bytes(cell_prompt(haystack(), Cell("hops", 600, 3), 1)[0]).decode()
    assert text.count("# note") == 3 + 4
    assert len(text.rsplit("# recall ", 1)[1].split()) == 1 + 3


def test_samples_differ_and_are_the_same_for_every_model() -> None:
    cell = Cell("keys", 300, 2)
    first, again, other = (cell_prompt(haystack(), cell, sample)[0] for sample in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_prompt_that_does_not_fit_names_the_length() -> None:
    (chain,) = make_chains(Random(0), [1])
    with pytest.raises(ValueError, match="length is 20"):
        haystack().prompt(Random(0), [(0.5, chain.notes[0])], chain, 20)


IMPOSSIBLE_CELLS = [Cell("needle", 100, 1.5), Cell("keys", 100, 0), Cell("keys", 9000, 101), Cell("hops", 9000, 197)]


@pytest.mark.parametrize("cell", [*IMPOSSIBLE_CELLS, Cell("other", 100, 1)])
def test_an_impossible_cell_is_an_error(cell: Cell) -> None:
    with pytest.raises(ValueError, match=r"^(depth|keys|hops|task) is .*accepted"):
        evaluate_cells(subject(), [cell], samples=1)


def test_cells_are_scored_in_batches_that_change_nothing() -> None:
    cells = [Cell("needle", 90, 0.5), Cell("keys", 200, 3)]

    def texts() -> Iterator[str]:
        return iter(["some text\n" * 5])

    whole = evaluate_cells(subject(chunk=1000), cells, samples=3, texts=texts)
    single = evaluate_cells(subject(chunk=90), cells, samples=3, texts=texts)
    assert [score.accuracy for score in whole] == [score.accuracy for score in single]
    assert [score.loss for score in whole] == pytest.approx([score.loss for score in single], rel=1e-4)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for kind in KINDS:
        save_model(small_model(kind, 256).float(), tmp_path / kind)
    return [str(tmp_path / kind) for kind in KINDS]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("loss --windows 2 --dataset synthetic --seq-len 32", 2 * (1 + len(bin_edges(32)) - 1)),
        ("needle --lengths 64 100 --depths 3 --samples 2 --chunk 64", 2 * 6),
        ("recall --lengths 300 --keys 1 2 --hops 2 --samples 1", 2 * 3),
    ],
)
def test_the_command_writes_json_csv_and_a_picture(
    words: str, rows: int, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = words.split()
    assert main(["eval", name, *runs, *flags, "--out", str(tmp_path / "out")]) == 0
    found = list(csv.DictReader((tmp_path / "out" / f"{name}.csv").open()))
    assert len(found) == rows
    assert {row["run"] for row in found} == set(KINDS)
    values = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert len(values["rows"]) == rows
    assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["mean"]) == set(KINDS)


def test_a_picture_without_matplotlib_is_left_out_and_named(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["eval", "needle", *runs, "--lengths", "64", "--depths", "1", "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"needle.json", "needle.csv"}
    *shown, last = capsys.readouterr().out.splitlines()
    assert any("matplotlib" in line for line in shown)
    assert len(json.loads(last)["out"]) == 2


def test_a_run_is_evaluated_once(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of one name twice would fill one column of the table, and count twice in the mean."""
    assert main(["eval", "needle", runs[0], runs[1], f"{runs[0]}/../{Path(runs[0]).name}", "--lengths", "64"]) == 2
    assert "runs is [" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-5"])
def test_a_window_has_at_least_one_token(wrong: str, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "loss", runs[0], "--dataset", "synthetic", "--seq-len", wrong]) == 2
    assert f"seq_len is {wrong}" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_still_json(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(Path(runs[0]))
    model.blocks[0].attention_norm.weight.data.fill_(torch.nan)
    save_model(model, Path(runs[0]))
    assert main(["eval", "loss", runs[0], "--dataset", "synthetic", "--seq-len", "8", "--windows", "1"]) == 0
    text = (Path(runs[0]) / "eval" / "loss.json").read_text()
    *shown, last = capsys.readouterr().out.splitlines()
    assert any("layers.0.attention_norm.weight" in line for line in shown)
    for given in (text, last):
        # NaN and Infinity are no JSON: other parsers refuse them.
        values = json.loads(given, parse_constant=lambda name: pytest.fail(name))
        assert values["mean"] == {"nsa": "nan"}


def test_a_model_that_gives_no_finite_loss_is_named(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise it would only seem to find nothing."""
    model = load_model(Path(runs[1]))
    model.blocks[0].attention_norm.weight.data.fill_(torch.nan)
    save_model(model, Path(runs[1]))
    assert main(["eval", "needle", *runs, "--lengths", "64", "--depths", "1", "--samples", "1"]) == 0
    named = [line for line in capsys.readouterr().out.splitlines() if "layers.0.attention_norm.weight" in line]
    assert [line.split()[0] for line in named] == ["dense"]


def test_runs_that_cannot_be_compared_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, vocab_size in (("bytes", 256), ("bpe", 300)):
        save_model(small_model("nsa", vocab_size).float(), tmp_path / name)
    train_bpe(["some text to merge\n" * 9], 300).save(tmp_path / "bpe")
    pair, flags = [str(tmp_path / "bytes"), str(tmp_path / "bpe")], ["--windows", "1", "--seq-len", "32"]
    for runs, expected in ((pair, 1), (pair[:1], 0)):
        assert main(["eval", "loss", *runs, *flags]) == 0
        *shown, last = capsys.readouterr().out.splitlines()
        found = json.loads(last)["not_comparable"]
        assert len(found) == expected
        assert json.loads((tmp_path / "bytes" / "eval" / "loss.json").read_text())["not_comparable"] == found
        table = next(at for at, line in enumerate(shown) if line.startswith("position"))
        assert all(any(difference in line for line in shown[:table]) for difference in found)


def test_runs_with_other_text_or_windows_are_reported(tmp_path: Path) -> None:
    for name, source, seq_len in (("a", "stdlib", 64), ("b", "synthetic", 64), ("c", "stdlib", 32)):
        save_model(LM(replace(LMConfig.preset("tiny"), seq_len=seq_len)), tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(f"data:\n  source: {source}\n")
        ByteTokenizer().save(tmp_path / name)
    for other in ("b", "c"):
        args = argparse.Namespace(eval_command="loss", dataset=None, data_path=None, seq_len=None)
        subjects = command.open_models([tmp_path / "a", tmp_path / other], device=torch.device("cpu"))
        assert len(list(command.mismatches(subjects, args))) == 1
        args.dataset, args.seq_len = "stdlib", 32
        assert not list(command.mismatches(subjects, args))


def test_a_haystack_of_ones_own_is_used(runs: list[str], tmp_path: Path) -> None:
    text = tmp_path / "hay.txt"
    text.write_text("hay " * 50)
    flags = ["--lengths", "64", "--depths", "1", "--samples", "1", "--haystack", str(text)]
    assert main(["eval", "needle", runs[0], *flags]) == 0
    assert (Path(runs[0]) / "eval" / "needle.csv").is_file()


def test_default_lengths_are_those_with_room_for_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of `make demo` has 512 tokens; with bytes, 16 notes do not fit into half of that."""
    save_model(LM(LMConfig.preset("tiny")), tmp_path)
    assert main(["eval", "recall", str(tmp_path), "--samples", "1"]) == 0
    rows = list(csv.DictReader((tmp_path / "eval" / "recall.csv").open()))
    assert [row["length"] for row in rows] == ["512"] * 6
    assert "length is 256" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    ["--lengths 300 20", *(f"--lengths 300 {x}" for x in ("--haystack {file}", "--out {file}", "--out /proc/x"))],
)
def test_what_cannot_work_is_refused_before_any_forward(
    wrong: str, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    monkeypatch.setattr(LM, "hidden", lambda *args, **kwargs: pytest.fail("computed"))
    words = wrong.format(file=tmp_path / "latin").split()
    assert main(["eval", "needle", runs[0], *words]) == 2
    named = "latin" if "{file}" in wrong else "--out is '/proc/x'" if "/proc" in wrong else "length is 20"
    assert named in capsys.readouterr().err


def test_the_loss_is_of_the_run_s_own_validation_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many windows as the trainer validates on, in the same order: its last validation loss."""
    run = small_run(tmp_path / "run", "nsa", data=DataConfig(source="stdlib", prefetch=False), eval_batches=2)
    summary = Trainer(run).train()
    assert summary is not None
    capsys.readouterr()
    assert main(["eval", "loss", str(run.out), "--windows", "4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["mean"]["run"]
    assert found == pytest.approx(summary.loss_end, abs=1e-3)
