"""A checkpoint that is not what was saved is refused in one line, whatever was done to it."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import assert_same, make, train, whole
from training import small_run

from nsa import cli
from nsa.model import load_model, save_model
from nsa.tensor_file import read_tensors, write_tensors
from nsa.train import Trainer, storage
from nsa.train.checkpoint import Checkpoints
from nsa.train.storage import Damaged, Index, TensorChunk, covers

FILE = "rank_00000.safetensors"


def read_body(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text().partition("\n")[2])


def write_body(folder: Path, body: Any) -> None:
    """With the right checksum, as somebody who knows the format would."""
    text = json.dumps(body) if not isinstance(body, str) else body
    (folder / "index.json").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run of two steps, with a checkpoint of each."""
    trainer = Trainer(small_run(tmp_path_factory.mktemp("saved"), steps=2, save_every=1))
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(make()[0], folder)
    return folder


def test_a_folder_that_was_copied_or_renamed_is_refused(tmp_path: Path) -> None:
    run = make()
    checkpoints = Checkpoints(tmp_path)
    states = {}
    for step in (5, 7):
        train(*run)
        checkpoints.save(step, *run, {}, wait=True)
        states[step] = whole(*run)
    shutil.copytree(tmp_path / "step_5", tmp_path / "step_9")
    fresh = make(seed=1)
    with pytest.warns(RuntimeWarning, match="step_9 is damaged .*step 5"):
        assert Checkpoints(tmp_path).load(*fresh) == (7, {})
    assert_same(whole(*fresh), states[7])
    # Swapped: neither can be trusted.
    shutil.rmtree(tmp_path / "step_9")
    for old, new in (("step_5", "x"), ("step_7", "step_5"), ("x", "step_7")):
        (tmp_path / old).rename(tmp_path / new)
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match=r"\[5, 7\]"):
        Checkpoints(tmp_path).load(*make())


def test_tensors_of_another_step_are_refused(tmp_path: Path) -> None:
    run = make()
    for step in (5, 7):
        train(*run)
        Checkpoints(tmp_path).save(step, *run, {}, wait=True)
    shutil.copy(tmp_path / "step_5" / FILE, tmp_path / "step_7" / FILE)
    with pytest.warns(RuntimeWarning, match="checksum"):
        assert Checkpoints(tmp_path).load(*make()) == (5, {})


def boxes(draw: st.DrawFn, offsets: tuple[int, ...], sizes: tuple[int, ...], cuts: int) -> Iterator[TensorChunk]:
    """A box cut in two, and each half again."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not cuts or not dims:
        yield TensorChunk(offsets, sizes, FILE, "key")
        return
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, sizes[dim] - 1))
    yield from boxes(draw, offsets, (*sizes[:dim], at, *sizes[dim + 1 :]), cuts - 1)
    later = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    yield from boxes(draw, later, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :]), cuts - 1)


@given(st.data())
def test_only_boxes_that_cover_every_element_once_are_a_tensor(data: st.DataObject) -> None:
    size = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    chunks = data.draw(st.permutations(list(boxes(data.draw, (0,) * len(size), size, cuts=3))))
    assert covers(chunks, size)
    wrong = list(chunks)
    at = data.draw(st.integers(0, len(wrong) - 1))
    what = data.draw(st.sampled_from(["missing", "twice", "another in its place"]))
    if what == "missing":
        del wrong[at]
    elif what == "twice":
        wrong.append(wrong[at])
    else:
        other = data.draw(st.integers(0, len(wrong) - 1))
        wrong[at] = wrong[other]
        if other == at:
            return
    assert not covers(wrong, size)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*path, key))


JUNK = st.one_of(
    st.sampled_from([None, True, -1, 0, 10**30, 2**63, -(10**400), 1.5, float("nan"), "", "x", "\ud800", "../x"]),
    st.sampled_from([[], {}, [[]], [[0]], [None] * 4, {"": 0}, [2**62] * 9, [10**4000]]),
)


def spoiled(data: st.DataObject, tree: Any) -> Any:
    """The tree with one of its entries removed, added to or replaced by junk."""
    tree = copy.deepcopy(tree)
    path = data.draw(st.sampled_from(sorted(places(tree), key=lambda path: (len(path), str(path)))))
    junk = data.draw(JUNK)
    if not path:
        return junk
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    what = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "remove":
        del parent[path[-1]]
    elif what == "replace":
        parent[path[-1]] = junk
    elif isinstance(parent, dict):
        parent["added"] = junk
    else:
        parent.append(junk)
    return tree


def refusal(read: Callable[[], object]) -> str:
    """Reading works, or is refused in one line: any other exception is an error of the test."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


def resume(trainer: Trainer) -> None:
    trainer.checkpoints.rejected.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert trainer.checkpointer.resume() in (1, 2)


def assert_resumes_or_refuses(trainer: Trainer) -> None:
    message = refusal(lambda: resume(trainer))
    assert "\n" not in message


@settings(max_examples=80)
@given(st.data())
def test_an_index_with_anything_in_it_is_read_or_refused(saved: Trainer, data: st.DataObject) -> None:
    folder = saved.checkpoints.path(2)
    before = (folder / "index.json").read_bytes()
    body = read_body(folder)
    # The long lists would take all the attempts.
    body["extra"][0]["rng"]["python"][1] = body["extra"][0]["rng"]["python"][1][:2]
    try:
        write_body(folder, spoiled(data, body))
        assert_resumes_or_refuses(saved)
    finally:
        (folder / "index.json").write_bytes(before)


def test_a_tensor_in_a_file_that_is_not_listed_is_named(saved: Trainer) -> None:
    body = read_body(saved.checkpoints.path(2))
    body["tensors"]["model.norm.weight"][2][0][2] = "rank_00007.safetensors"
    with pytest.raises(ValueError, match=r"rank_00007\.safetensors' .*'model\.norm\.weight' .*listed"):
        Index.parse(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rng", {}),
        ("rng", {"python": [3, [1, 2], None], "torch": ""}),
        ("rng", {"python": "x", "torch": "x"}),
        ("rng", 1),
        ("data", {}),
        ("data", {"added": 1}),
        ("data", None),
        ("scaler", 1),
    ],
)
def test_a_wrong_state_in_an_index_is_named_with_its_file(
    name: str, value: Any, saved: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved.checkpoints.path(2)
    before = (folder / "index.json").read_bytes()
    body = read_body(folder)
    body["extra"][0][name] = value
    try:
        write_body(folder, body)
        assert cli.main(["train", "--resume", str(saved.config.out)]) == 2
    finally:
        (folder / "index.json").write_bytes(before)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(folder / "index.json") in error
    assert name in error


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"step":' * 50_000,
        '{"step": 1' + "0" * 5000 + "}",
        "NaN",
        "",
        '"x"',
        '{"files": {"\\ud800": 1}}',
    ],
)
def test_an_index_that_is_hardly_json_is_refused(text: str, saved: Trainer) -> None:
    folder = saved.checkpoints.path(2)
    before = (folder / "index.json").read_bytes()
    try:
        write_body(folder, text)
        with pytest.raises(Damaged, match=r"index\.json"):
            Index.read(folder)
        assert_resumes_or_refuses(saved)
    finally:
        (folder / "index.json").write_bytes(before)


def test_an_index_over_the_limit_is_not_read(saved: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_INDEX_BYTES", 100)
    with pytest.raises(Damaged, match="at most 100"):
        Index.read(saved.checkpoints.path(2))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(7), "c": torch.zeros(0, 3)}


@settings(max_examples=80)
@given(st.data())
def test_a_tensor_file_with_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    write_tensors(path, TENSORS)
    header, content = header_of(path)
    write_header(path, spoiled(data, header), content)
    message = refusal(lambda: read_tensors(path))
    assert message == "" or str(path) in message
    assert "\n" not in message


def test_a_tensor_file_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"x\.safetensors is damaged"):
            read_tensors(path)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"\xff" * 50, b"{", b'{"a":' * 10_000])
def test_a_header_that_is_hardly_json_is_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_header(path, header, b"")
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged"):
        read_tensors(path)


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    """With metadata, and tensors that are not aligned."""
    path = tmp_path / "x.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    values = torch.tensor([1.5, -2.0])
    write_header(path, header, b"\x05" + bytes(values.view(torch.uint8).tolist()))
    assert_same(read_tensors(path), {"a": values, "b": torch.tensor([5], dtype=torch.uint8)})


@settings(max_examples=80)
@given(st.data())
def test_a_model_with_anything_in_its_config_is_read_or_refused(exported: Path, data: st.DataObject) -> None:
    path = exported / "model.json"
    before = path.read_text()
    path.write_text(json.dumps(spoiled(data, json.loads(before))))
    message = refusal(lambda: load_model(exported))
    path.write_text(before)
    assert message == "" or str(exported) in message
    assert "\n" not in message


def test_layers_that_the_file_does_not_hold_are_not_built(tmp_path: Path) -> None:
    model, _ = make()
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(config | {"n_layers": 10**9}))
    with pytest.raises(ValueError, match=f"{10**9}"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [{1: torch.zeros(2)}, {"a": 1}, [torch.zeros(2)], torch.zeros(2), "x"])
def test_a_model_pt_without_tensors_by_name_is_refused(content: Any, tmp_path: Path) -> None:
    model, _ = make()
    save_model(model, tmp_path).unlink()
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt is damaged"):
        load_model(tmp_path)


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path) -> None:
    model, _ = make()
    path = save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert_same(loaded.state_dict(), model.state_dict())
