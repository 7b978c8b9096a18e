"""Saved caches: what is loaded continues as what was saved, and a file that is not one is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caching import NSA_FORMS, assert_equal, feed, layer, new_cache, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from nsa import NSACache
from nsa.cache import PagedNSACache, read_saved
from nsa.tensor_file import read_tensors_and_metadata, write_tensors

every_form = pytest.mark.parametrize("options", NSA_FORMS.values(), ids=NSA_FORMS.keys())
every_quantization = pytest.mark.parametrize("quantize", [None, "fp8"])
LENGTHS = [40, 0, 23]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved cache of three rows."""
    attn = layer()
    cache = attn.new_cache(3, 48)
    attn(tokens(40, batch=3), cache=cache, attention_mask=torch.arange(40) < torch.tensor(LENGTHS)[:, None])
    cache.save(tmp_path / "saved.safetensors", tokens=[list(range(n)) for n in LENGTHS])
    return tmp_path / "saved.safetensors"


@every_form
@every_quantization
def test_what_is_loaded_continues_as_what_was_saved(
    options: dict[str, Any], quantize: str | None, tmp_path: Path
) -> None:
    """Into either form, longer or not, and with another rollback."""
    attn = layer()
    cache = new_cache(attn, 3, 60, max_rollback=5, quantize=quantize, **options)
    attn(tokens(40, batch=3), cache=cache, attention_mask=torch.arange(40) < torch.tensor(LENGTHS)[:, None])
    cache.save(tmp_path / "saved")
    new = tokens(15, batch=3, seed=1)
    expected = feed(attn, cache, new, [1, 14])
    for other in ({}, {"max_len": 90}, {"max_rollback": 0}, {"max_rollback": 20, "max_len": 55, "static": True}):
        assert_equal(feed(attn, NSACache.load(tmp_path / "saved", attn.config, **other), new, [1, 14]), expected)
    paged = PagedNSACache.load(tmp_path / "saved", attn.config, page_size=12)
    assert [len(pages) for pages in paged.pages] == [4, 0, 2]
    paged.allocate(60)
    assert_equal(feed(attn, paged, new, [14, 1]), expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_loaded_cache_can_be_cropped_as_far_as_the_saved(data: st.DataObject, tmp_path: Path) -> None:
    """A crop is refused by both or by neither, unless less was taken over; what is not refused is right."""
    attn = layer()
    length, max_rollback = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))
    x = tokens(length)
    cache = attn.new_cache(1, 50, max_rollback=max_rollback)
    attn(x, cache=cache)
    first = data.draw(st.integers(0, min(max_rollback, length)))
    cache.crop(-first)
    cache.save(tmp_path / "saved")
    loaded = NSACache.load(tmp_path / "saved", attn.config, max_rollback=data.draw(st.integers(0, 12)))
    n = data.draw(st.integers(1, 12))
    try:
        loaded.crop(-n)
    except ValueError:
        if loaded.max_rollback >= max_rollback:
            with pytest.raises(ValueError, match="lengths"):
                copy.deepcopy(cache).crop(-n)
        return
    kept = length - first - n
    new = tokens(9, seed=1)
    assert_equal(attn(new, cache=loaded), attn(torch.cat([x[:, :kept], new], dim=1))[:, kept:])


def test_a_longer_rollback_takes_nothing_from_a_row(tmp_path: Path) -> None:
    """It lengthens the tail's ring, but the window's only to max_len: what one holds says nothing of the other."""
    attn = layer(w=24)
    x, new = tokens(26), tokens(4, seed=1)
    cache = attn.new_cache(1, 30, max_rollback=1)
    attn(x, cache=cache)
    for turn in range(3):
        cache.save(tmp_path / str(turn))
        cache = NSACache.load(tmp_path / str(turn), attn.config, max_rollback=20)
        with pytest.raises(ValueError, match="lengths"):
            copy.deepcopy(cache).crop(23)
        cropped = copy.deepcopy(cache)
        cropped.crop(25)
        assert_equal(attn(new, cache=cropped), attn(torch.cat([x[:, :25], new], dim=1))[:, 25:])


def test_rows_and_parts_of_rows_can_be_taken(path: Path) -> None:
    attn = layer()
    cache = attn.new_cache(3, 60)
    read_saved(path).restore(cache, 0, rows=[2, 0, 0], lengths=[23, 30, 40])
    x, new = tokens(40, batch=3), tokens(7, batch=3, seed=1)
    y = attn(new, cache=cache)
    for row, (source, n) in enumerate([(2, 23), (0, 30), (0, 40)]):
        assert_equal(y[row], attn(torch.cat([x[source, :n], new[row]])[None])[0, n:])
    with pytest.raises(ValueError, match=r"lengths.*max_rollback = 32"):
        read_saved(path).restore(attn.new_cache(1, 60), 0, rows=[0], lengths=[1])


def test_other_readers_of_the_format_can_read_it(path: Path) -> None:
    with safe_open(path, "pt") as file:
        assert file.get_tensor("layers.0.lengths").tolist() == LENGTHS
        assert json.loads(file.metadata()["about"])["caches"][0]["kind"] == "nsa"
    assert read_saved(path).tokens() == [list(range(n)) for n in LENGTHS]


def test_only_what_is_in_use_is_saved(path: Path, tmp_path: Path) -> None:
    cache = layer().new_cache(3, 100_000)
    read_saved(path).restore(cache, 0)
    cache.save(tmp_path / "again")
    assert (tmp_path / "again").stat().st_size < 2 * path.stat().st_size


def test_tokens_of_other_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokens is \[1\].*\[0\]"):
        layer().new_cache(1, 8).save(tmp_path / "x", tokens=[[5]])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("token", [1.5, -1, True], ids=str)
def test_what_is_no_token_id_is_not_saved(token: Any, tmp_path: Path) -> None:
    """It would be read back as another one, or as the end of the row."""
    attn = layer()
    cache = new_cache(attn, 1, 8)
    attn(tokens(2), cache=cache)
    with pytest.raises(ValueError, match=rf"tokens\[0\] is \[3, {token}\]"):
        cache.save(tmp_path / "x", tokens=[[3, token]])
    assert not (tmp_path / "x").exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_value_error_that_names_the_file(data: st.DataObject, path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        NSACache.load(damaged, layer().config)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors, metadata = read_tensors_and_metadata(path)
    change(metadata)
    write_tensors(path, {name: x.clone() for name, x in tensors.items()}, metadata)


FOREIGN: dict[str, Callable[[dict[str, Any]], None]] = {
    "no_metadata": lambda metadata: metadata.clear(),
    "another_format": lambda metadata: metadata.update(format="pt"),
    "no_checksum": lambda metadata: metadata.pop("sha256"),
    "another_description": lambda metadata: metadata.update(about=metadata["about"].replace('"l": 8', '"l": 16')),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_file_of_something_else_is_refused_by_name(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rewritten(path, change)
    with pytest.raises(ValueError, match=r"saved\.safetensors"):
        NSACache.load(path, layer().config)


@pytest.mark.parametrize(
    ("changes", "name"), [({"l": 16}, "l in"), ({"d_v": 4}, "d_v in"), ({"rope_theta": 5.0}, "rope_theta in")]
)
def test_a_cache_of_another_config_is_refused_by_field(path: Path, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        NSACache.load(path, layer(**changes).config)


def test_a_cache_goes_to_a_layer_with_another_backend(path: Path) -> None:
    config = replace(layer().config, backend="reference", strict=True)
    assert NSACache.load(path, config).lengths.tolist() == LENGTHS


def test_rows_longer_than_the_new_cache_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"40.*max_len = 39"):
        NSACache.load(path, layer().config, max_len=39)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NSACache.load(tmp_path / "nothing", layer().config)
