"""Config files: whatever is in one, it is read or refused in one line that names it."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa import cli
from nsa.settings import Settings
from nsa.train.config import flat, load_config, merged, parse_set, read_config, to_tree
from nsa.train.yaml_file import MAX_YAML_BYTES, parse_yaml, read_yaml

PLAIN = Settings.load(environ={})


def bomb(first: str, again: str, levels: int = 40) -> str:
    """Each level holds the one before it twice, or more."""
    lines = [f"a0: &a0 {first}"]
    return "\n".join([*lines, *(f"a{i}: &a{i} {again.replace('X', f'*a{i - 1}')}" for i in range(1, levels))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3\nlr: 1\nsteps: 4\n", "'steps' .* lines 1 and 3"),
        ("model: {n_layers: 2, n_layers: 3}", "'n_layers'"),
        ("model:\n  attn: {w: 1}\n  hidden: 3\n  attn: {w: 2}\n", "'attn' .* lines 2 and 4"),
        (bomb("[x, x]", "[X, X]"), "values"),
        (bomb("{k: 1}", "{<<: [X, X]}"), "values"),
        ("a: &a [*a]", "alias"),
        ("a: &a {b: *a}", "alias"),
        ("[" * 100_000, "nested|YAML"),
        ("{a: " * 100_000, "nested|YAML"),
        ("- " * 50_000 + "x", "nested|YAML"),
        ("steps: " + "9" * 5000, "4300"),
        ("date: 2020-13-45", "month"),
        ("gc: !!bool maybe", "maybe"),
        ("lr: !!float ''", "value"),
        ("date: !!timestamp now", "value"),
        ("? [a, b]\n: 3", "YAML"),
        ("1: 2", "'1'"),
        ("on: true", "'True'"),
        ("model: {3: 4}", r"'model\.3'"),
        ("", "nothing"),
        ("# a remark\n", "nothing"),
        ("- 1", "list"),
        ("just text", "str"),
        ("a: 1\n---\nb: 2", "YAML"),
        ("a: \x00", "YAML"),
        ("a: @", r"line 1, column 4"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_bad_file_is_one_line_with_its_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    begin = time.process_time()
    with pytest.raises(ValueError, match=message) as refused:
        load_config(path, env=PLAIN)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 2000
    assert time.process_time() - begin < 20


def test_a_file_that_is_no_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_bytes(b"x" * (MAX_YAML_BYTES + 1))
    with pytest.raises(ValueError, match=rf"data\.yaml .*: {MAX_YAML_BYTES + 1:,} bytes"):
        read_yaml(path)
    path.write_bytes(b"steps: \xff\xfe")
    with pytest.raises(ValueError, match=r"data\.yaml .*UTF-8.* byte 7"):
        read_yaml(path)


def test_an_alias_that_stays_small_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fine.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\nlist: [*base, *base]")
    assert read_yaml(path)["other"] == {"a": 1, "b": 3}


@given(st.text() | st.text(alphabet="abc.:[]{}&*<!?#|>-'\" \n0", max_size=60))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    with suppress(ValueError):
        parse_yaml(text, "WHERE")
        return
    with pytest.raises(ValueError, match="WHERE") as refused:
        parse_yaml(text, "WHERE")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["steps=[", "steps={a: 1, a: 2}", "=3", "steps", "steps=" + "[" * 5000])
def test_a_bad_assignment_is_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--device", "cpu", "--set", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 2000


def test_an_integer_too_long_to_spell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--device", "cpu", "--set", "lr=0x" + "f" * 4000]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"\blr is .*16000 bits", line)


# Dotted keys.


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"model.attn.w": 64}, {"model": {"attn": {"w": 64}}}),
        ({"model": {"attn.w": 64, "hidden": 3}}, {"model": {"attn": {"w": 64}, "hidden": 3}}),
        ({"model.attn": {"w": 1}, "model": {"hidden": 2}}, {"model": {"attn": {"w": 1}, "hidden": 2}}),
    ],
)
def test_a_dotted_key_in_a_file_is_a_nested_one(tree: dict[str, Any], expected: dict[str, Any]) -> None:
    assert to_tree(dict(flat(tree))) == expected


def test_a_config_with_dotted_keys_loads(tmp_path: Path) -> None:
    tiny = to_tree(read_config(Path(cli.__file__).parent / "configs" / "tiny.yaml"))
    tiny["model"]["attn"].pop("w")
    path = tmp_path / "dotted.yaml"
    import yaml

    path.write_text(yaml.safe_dump({**tiny, "model.attn.w": 64}))
    assert load_config(path, env=PLAIN).model.attn.w == 64


@pytest.mark.parametrize(
    "text", ["data: {pack: true}\ndata.pack: true", "data.pack: true\ndata: {pack: true}", "data: 1\ndata.pack: true"]
)
def test_a_key_that_is_both_dotted_and_nested_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"data\.pack in .*a\.yaml"):
        read_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"lr": {}}, r"lr is \{\}"),
        ({"model": {"foo": {}}}, r"'model\.foo' is not "),
        ({"data": {"pack": {}}}, r"data\.pack is \{\}"),
        ({"model.attn.rope_scaling": {}}, r"lacks \['model\.attn\.rope_scaling\.factor'\]"),
        ({"model.attn.rope_scaling.low_freq_factor": 2.0}, r"lacks \['model\.attn\.rope_scaling\.factor'\]"),
    ],
)
def test_an_empty_mapping_is_not_ignored(override: dict[str, Any], message: str, tmp_path: Path) -> None:
    import yaml

    tiny = Path(cli.__file__).parent / "configs" / "tiny.yaml"
    with pytest.raises(ValueError, match=message):
        load_config(tiny, override, env=PLAIN)
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(to_tree(merged(read_config(tiny), dict(flat(override))))))
    with pytest.raises(ValueError, match=message):
        load_config(path, env=PLAIN)


def test_an_empty_group_changes_nothing(tmp_path: Path) -> None:
    whole, empty = (load_config("tiny", {"out": tmp_path, **more}, env=PLAIN) for more in ({}, {"model": {"attn": {}}}))
    assert empty == whole


def test_an_error_names_where_the_value_comes_from(tmp_path: Path) -> None:
    text = (Path(cli.__file__).parent / "configs" / "tiny.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("batch_size: 4", "batch_size: -4").replace("preset: tiny", "preset: tiny, color: red"))
    with pytest.raises(ValueError, match=r"'model\.color'.*mine\.yaml"):
        load_config(path, env=PLAIN)
    path.write_text(text.replace("batch_size: 4", "batch_size: -4"))
    with pytest.raises(ValueError, match=r"batch_size is -4.*mine\.yaml"):
        load_config(path, env=PLAIN)
    path.write_text(text.replace("preset: tiny", "preset: tiny, attn: {n_sel: 1}"))
    with pytest.raises(ValueError, match=r"model\.attn\.n_sel is 1.*mine\.yaml"):
        load_config(path, env=PLAIN)
    with pytest.raises(ValueError, match=r"model\.seq_len is .*NSA_SEQ_LEN"):
        load_config("tiny", env=Settings.load(environ={"NSA_SEQ_LEN": str(2**63)}))
    with pytest.raises(ValueError, match="steps is 0") as typed:
        load_config("tiny", {"steps": 0}, env=PLAIN)
    assert "tiny.yaml" not in str(typed.value)


def test_values_are_shown_short() -> None:
    shared: list[Any] = ["x"] * 10
    for _ in range(30):
        shared = [shared] * 10
    with pytest.raises(ValueError, match="steps is ") as refused:
        load_config("tiny", {"steps": shared}, env=PLAIN)
    assert len(str(refused.value)) < 2000


def test_the_last_assignment_of_a_key_wins() -> None:
    assert parse_set(["steps=3", "steps=4"]) == {"steps": 4}


@pytest.mark.parametrize("value", ["~/corpus", "~/corpus/**/*.txt"])
def test_the_home_folder_is_expanded_in_a_config(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"data.source": "text", "data.path": value, "data.tokenizer": "~/tokenizer.json", "out": "~/run"}
    config = load_config("tiny", {"device": "cpu", **given}, env=PLAIN)
    assert config.data.path == value.replace("~", str(tmp_path))
    assert config.data.tokenizer == f"{tmp_path}/tokenizer.json"
    assert config.out == tmp_path / "run"
    (tmp_path / "mine.yaml").write_text((Path(cli.__file__).parent / "configs" / "tiny.yaml").read_text())
    assert load_config("~/mine.yaml", {"device": "cpu"}, env=PLAIN).steps == 180
