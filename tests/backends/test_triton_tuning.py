"""The file of tiles: what a GPU gets, whose file wins, what a broken one says; and how `nsa bench tune` selects."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import bench, cli
from nsa.backends.triton import tuning
from nsa.backends.triton.tuning import (
    DTYPE_CLASSES,
    HEAD_DIM_CLASSES,
    KERNELS,
    PACKAGED,
    THRESHOLDS,
    Key,
    Tuned,
    TunedTile,
)
from nsa.bench.attention import AttentionShape
from nsa.bench.tune import (
    Candidates,
    TileTime,
    Tuner,
    crossover,
    error_ratio,
    fastest,
    last_faster_size,
    render_tiles,
    try_tiles,
)

# What CI compiles for (tests/kernels/compiling.py), and relatives nobody has compiled for.
SERVED = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
UNSEEN = [(8, 7), (10, 3), (11, 0), (12, 1)]


@dataclass(frozen=True)
class Tile:
    """As simple as a tile can be."""

    rows: int
    fast: bool = False
    limit: int | None = None


def tuned(**rows: int) -> Tuned:
    """`tuned(sm_90_128=4)`: the half-precision tiles of `scores`, by family and head_dim."""
    tiles = {}
    for name, value in rows.items():
        family, head_dim = name.removeprefix("sm_").split("_")
        tiles[Key((int(family[:-1]), int(family[-1])), "scores", "half", int(head_dim))] = entry(rows=value)
    return Tuned(tiles, {})


def entry(**fields: Any) -> TunedTile:
    return TunedTile(fields, None, Path("tiles.json"))


def rows_of(table: Tuned, gpu: tuple[int, int], head_dim: int) -> int:
    return table.tile("scores", Tile, gpu, head_dim, "half").rows


def test_a_gpu_has_its_own_tile_else_its_nearest_relatives() -> None:
    table = tuned(sm_86_128=86, sm_90_128=90, sm_100_128=100)
    expected = {(8, 6): 86, (8, 0): 86, (8, 9): 86, (12, 0): 86, (9, 0): 90, (10, 0): 100, (10, 3): 100, (11, 0): 100}
    assert {gpu: rows_of(table, gpu, 128) for gpu in expected} == expected


def test_the_same_major_number_is_nearer_than_a_near_number() -> None:
    assert tuning.relatives((10, 9), [(11, 0), (10, 0)]) == [(10, 0), (11, 0)]


def test_what_fits_a_large_gpu_is_never_given_to_another() -> None:
    with pytest.raises(LookupError, match="sm_89 scores half 128"):
        rows_of(tuned(sm_90_128=90), (8, 9), 128)


def test_exact_head_dim_of_a_related_gpu_beats_a_larger_one() -> None:
    table = tuned(sm_90_64=1, sm_90_256=4, sm_100_128=2)
    assert [rows_of(table, (9, 0), head_dim) for head_dim in HEAD_DIM_CLASSES] == [1, 2, 4, 4]


@pytest.mark.parametrize(
    ("d_k", "d_v", "head_dim"),
    [(16, 16, 64), (64, 64, 64), (80, 64, 128), (64, 128, 128), (192, 128, 192), (128, 256, 192), (192, 144, 256)],
)
def test_head_dims_fall_into_classes(d_k: int, d_v: int, head_dim: int) -> None:
    assert tuning.head_dim_class(d_k, d_v) == head_dim


def test_thresholds_come_from_the_nearest_relative_too() -> None:
    table = Tuned({}, {((9, 0), "query_from_heads"): 32, ((8, 6), "query_from_heads"): 16})
    found = [table.threshold("query_from_heads", gpu) for gpu in ((9, 0), (10, 0), (8, 0), (12, 0))]
    assert found == [32, 32, 16, 16]


def write(path: Path, rows: int, **more: Any) -> None:
    tile = {"block_m": rows, "block_n": 64, "num_warps": 4, "num_stages": 2}
    path.write_text(json.dumps({"sm_90": {"tiles": {"scores": {"half": {"128": {"tile": tile}}}}, **more}}))


def test_the_users_file_wins_entry_by_entry(environment: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    environment(NSA_TUNED_TILES=str(file))
    packaged = tuning.tuned()
    assert packaged == tuning.read_tuned(PACKAGED)
    write(file, 16, thresholds={"query_from_heads": 8})
    environment(NSA_TUNED_TILES=str(file))
    both = tuning.tuned()
    changed = Key((9, 0), "scores", "half", 128)
    assert both.tiles[changed].tile["block_m"] == 16
    assert {key: both.tiles[key] for key in both.tiles if key != changed} == {
        key: packaged.tiles[key] for key in packaged.tiles if key != changed
    }
    assert both.threshold("query_from_heads", (9, 0)) == 8


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiles.json"
    packaged = tuning.read_tuned(PACKAGED)
    tuning.write_tuned(path, packaged)
    assert path.read_text() == PACKAGED.read_text(), "the packaged file is as `write` makes it"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_the_fields_former_names_builds_every_tile(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the tiles are the kernels' own")
    from nsa.backends.triton.tile_types import check_file

    text = PACKAGED.read_text()
    for old, new in tuning.RENAMED.items():
        assert f'"{new}":' in text
        text = text.replace(f'"{new}":', f'"{old}":')
    path = tmp_path / "older.json"
    path.write_text(text)
    check_file(path)
    older = {key: entry.tile for key, entry in tuning.read_tuned(path).tiles.items()}
    assert older == {key: entry.tile for key, entry in tuning.read_tuned(PACKAGED).tiles.items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", r"file is \[\]; accepted: "),
        ('{"hopper": {}}', "file has 'hopper'; accepted: .*sm_90"),
        ('{"sm_90": {"tile": {}}}', "sm_90 has 'tile'; accepted: thresholds, tiles"),
        ('{"sm_90": {"thresholds": {"heads": 1}}}', "sm_90 thresholds has 'heads'; accepted: query_from_heads, dense"),
        ('{"sm_90": {"thresholds": {"query_from_heads": true}}}', "query_from_heads is True; accepted: an integer"),
        ('{"sm_90": {"tiles": {"score": {}}}}', "sm_90 tiles has 'score'; accepted: compressed-forward, "),
        ('{"sm_90": {"tiles": {"scores": {"bf16": {}}}}}', "sm_90 scores has 'bf16'; accepted: half, fp32"),
        ('{"sm_90": {"tiles": {"scores": {"half": {"96": {}}}}}}', "scores half has '96'; accepted: 64, 128, 192, 256"),
        ('{"sm_90": {"tiles": {"scores": {"half": {"64": {}}}}}}', "scores half 64 tile is None; accepted: "),
        ('{"sm_90": {"tiles": {"scores": {"half": {"64": {"ms": 1}}}}}}', "64 has 'ms'; accepted: tile, measured"),
    ],
)
def test_broken_file_error_names_file_entry_and_accepted_values(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        tuning.read_tuned(path)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} .*Is a directory"):
        tuning.read_tuned(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 1, "columns": 2}, "has .*'columns'; accepted: rows, fast, limit"),
        ({"rows": True}, "has rows = True; accepted: int"),
        ({"rows": "64"}, "has rows = '64'; accepted: int"),
        ({"rows": 1, "limit": 1.5}, "has limit = 1.5; accepted: int or null"),
        ({"fast": True}, "has only fast; accepted: at least rows"),
    ],
)
def test_a_tile_with_wrong_fields_is_an_error(fields: dict[str, Any], message: str) -> None:
    key = Key((9, 0), "scores", "half", 64)
    with pytest.raises(ValueError, match=f"tiles.json: sm_90 scores half 64 {message}"):
        tuning.build(Tile, key, entry(**fields))
    assert tuning.build(Tile, key, entry(rows=1, limit=None)) == Tile(1)


@pytest.fixture
def kinds() -> dict[str, type]:
    pytest.importorskip("triton", reason="the tiles are the kernels'")
    from nsa.backends.triton.tile_types import TILE_TYPES

    return TILE_TYPES


def test_every_packaged_tile_is_one(kinds: dict[str, type]) -> None:
    """`tests/kernels/test_compile.py` compiles what the launchers pick from these."""
    assert tuple(kinds) == KERNELS
    for key, found in tuning.read_tuned(PACKAGED).tiles.items():
        tile = tuning.build(kinds[key.kernel], key, found)
        assert asdict(tile) == found.tile, "every field is spelled out"
        assert key.kernel == f"selected-forward-{getattr(tile, 'method', None)}" or not hasattr(tile, "method")


@pytest.mark.parametrize("gpu", SERVED + UNSEEN, ids=tuning.family_name)
def test_every_gpu_has_a_tile_for_everything(gpu: tuple[int, int], kinds: dict[str, type]) -> None:
    packaged = tuning.read_tuned(PACKAGED)
    for kernel in KERNELS:
        for dtype in DTYPE_CLASSES:
            for head_dim in HEAD_DIM_CLASSES:
                packaged.tile(kernel, kinds[kernel], gpu, head_dim, dtype)
    for name in THRESHOLDS:
        assert packaged.threshold(name, gpu) > 0


def test_provenance_is_whole_or_absent() -> None:
    for key, found in tuning.read_tuned(PACKAGED).tiles.items():
        if found.measured is not None:
            assert set(found.measured) == {"shape", "ms", "gpu", "torch", "triton", "commit", "date"}, key


def test_each_tile_is_measured_once_and_the_one_in_use_first(kinds: dict[str, type]) -> None:
    from nsa.bench.kernels import is_used, tile_in_use, tiles_to_measure

    packaged = tuning.read_tuned(PACKAGED)
    for gpu in SERVED:
        for shape in (
            AttentionShape(1, 64, 64, 4, 128),
            AttentionShape(1, 64, 8, 2, 64),
            AttentionShape(1, 64, 16, 2, 256),
        ):
            used = [kernel for kernel in KERNELS if is_used(kernel, shape)]
            assert len(used) == len(KERNELS) - 1, "one of the two kinds of scores"
            for kernel in used:
                tiles = tiles_to_measure(kernel, shape, gpu, packaged)
                assert tiles[0] == tile_in_use(kernel, shape, gpu, packaged)
                assert len(set(tiles)) == len(tiles)
                assert all(type(tile) is kinds[kernel] for tile in tiles)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "shape", [AttentionShape(1, 64, 64, 4, 128), AttentionShape(1, 64, 12, 2, 64)], ids=["128", "64"]
)
def test_a_tile_that_was_measured_would_be_again(kernel: str, shape: AttentionShape, kinds: dict[str, type]) -> None:
    from nsa.bench.kernels import is_used, kernel_candidates, tile_in_use

    current = tile_in_use(kernel, shape, (9, 0), tuning.read_tuned(PACKAGED))
    if is_used(kernel, shape):
        assert current in kernel_candidates(kernel, shape, (9, 0), current)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [("block_m", "x", "int"), ("block_n", 48, "power of"), ("num_warps", 3, "power of"),
     ("num_stages", -1, "0 or more"), ("gone", True, "`nsa bench tune` writes it")],
)  # fmt: skip
def test_a_file_of_tiles_that_no_kernel_takes_is_refused_whole(
    field: str, value: object, accepted: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="the kinds of tiles are the kernels'")
    from nsa.backends.triton.tile_types import check_file

    tile = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    path = tmp_path / "tiles.json"
    for given in (tile, tile | {field: value}):
        entry = {"tile": given, "measured": None}
        path.write_text(json.dumps({"sm_90": {"tiles": {"sliding-forward": {"half": {"64": entry}}}}}))
        if given is tile:
            check_file(path)
    with pytest.raises(ValueError, match=f"sm_90 sliding-forward half 64 has .*{field}.*{accepted}"):
        check_file(path)


# Which tile is selected. Tiles are numbers here: the milliseconds that they take.

RIGHT = torch.arange(1.0, 9.0)


def attempt(tiles: list[float], results: dict[float, Tensor | Exception]) -> list[TileTime]:
    """Tiles without a result of their own give the right one."""

    def run(tile: float) -> tuple[Tensor]:
        result = results.get(tile, RIGHT)
        if isinstance(result, Exception):
            raise result
        return (result,)

    return try_tiles(tiles, run, lambda call: [call.args[0]] * 5, lambda tile: None)


def test_the_fastest_tile_wins() -> None:
    outcomes = attempt([3.0, 2.0, 5.0], {})
    assert [outcome.ms for outcome in outcomes] == [3.0, 2.0, 5.0]
    best = fastest(outcomes)
    assert best is not None
    assert best.tile == 2.0


@pytest.mark.parametrize(
    "wrong", [RIGHT * 1.05, RIGHT + torch.eye(8)[3], RIGHT.log() / 0, torch.full((8,), torch.nan)], ids=str
)
def test_a_wrong_tile_is_reported_and_never_selected(wrong: Tensor) -> None:
    outcomes = attempt([3.0, 1.0, 2.0], {1.0: wrong})
    assert [outcome.ms for outcome in outcomes] == [3.0, None, 2.0]
    assert outcomes[1].note.startswith("wrong: ")
    best = fastest(outcomes)
    assert best is not None
    assert best.tile == 2.0


def test_a_tile_that_does_not_run_is_reported_and_skipped() -> None:
    refusal = RuntimeError("out of shared memory\nRequired: 300000")
    outcomes = attempt([1.0, 2.0], {1.0: refusal})
    failed, ran = outcomes
    assert (failed.tile, failed.ms, ran) == (1.0, None, TileTime(2.0, 2.0))
    assert failed.note.endswith(": out of shared memory"), "only the first line"
    assert fastest(attempt([1.0], {1.0: refusal})) is None


def test_a_bug_in_the_tuner_is_not_a_refusal() -> None:
    with pytest.raises(TypeError, match="a bug"):
        attempt([1.0], {1.0: TypeError("a bug")})


def test_nan_of_the_tile_in_use_is_nobodys_measure() -> None:
    outcomes = attempt([3.0, 1.0], {3.0: torch.full((8,), torch.nan)})
    assert [outcome.ms for outcome in outcomes] == [None, 1.0]


def test_rounding_errors_and_queries_without_keys_are_accepted() -> None:
    nothing = torch.tensor([-torch.inf, 1.0, 2.0])
    assert error_ratio([RIGHT * (1 + 2**-8), nothing], [RIGHT, nothing]) < 1
    assert error_ratio([nothing], [torch.tensor([0.0, 1.0, 2.0])]) == torch.inf


def test_a_selection_may_differ_in_a_row_of_thousands() -> None:
    expected = torch.zeros(5000, 4, dtype=torch.int32)
    actual = expected.clone()
    actual[:3, 0] = 1
    assert error_ratio([actual], [expected]) < 1
    actual[:10, 0] = 1
    assert error_ratio([actual], [expected]) > 1


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({8: (2.0, 1.0), 16: (1.0, 2.0), 32: (1.0, 2.0)}, 16),
        ({8: (2.0, 1.0), 16: (2.0, 1.0), 32: (2.0, 1.0)}, 33),
        ({8: (1.0, 2.0), 16: (2.0, 1.0), 32: (1.0, 2.0)}, 32),
        ({8: (1.0, 2.0), 16: (1.0, 2.0)}, 8),
    ],
)
def test_the_threshold_is_where_one_way_stays_ahead(times: dict[int, tuple[float, float]], expected: int) -> None:
    assert crossover(times) == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({2: (1.0, 2.0), 4: (1.0, 2.0), 8: (2.0, 1.0)}, 4),
        ({2: (2.0, 1.0), 4: (2.0, 1.0), 8: (2.0, 1.0)}, 0),
        ({2: (1.0, 2.0), 4: (2.0, 1.0), 8: (1.0, 2.0)}, 2),
        ({2: (1.0, 2.0), 4: (1.0, 2.0), 8: (1.0, 2.0)}, 8),
    ],
)
def test_the_threshold_is_up_to_where_one_way_stays_ahead(times: dict[int, tuple[float, float]], expected: int) -> None:
    assert last_faster_size(times) == expected


class Silent:
    def show(self, step: int, text: str) -> None:
        self.last = f"{step} {text}"

    def close(self) -> None: ...


def test_what_is_found_goes_into_the_file_over_what_was_there(tmp_path: Path) -> None:
    path, bar = tmp_path / "tiles.json", Silent()
    tuning.write_tuned(path, tuned(sm_90_128=1, sm_86_128=2))
    trial = Candidates("scores", AttentionShape(1, 64, 64, 4, 128), (Tile(3), Tile(4)))
    tuner = Tuner(path, (9, 0), {"gpu": "H200"}, bar, lambda call: [float(call.args[0].rows)] * 5)
    outcomes = tuner.measure(trial, lambda tile: (RIGHT,))
    assert bar.last == f"2 scores 64/4/128 B=1 S=64 {Tile(4)}"
    found = tuning.read_tuned(path)
    assert (rows_of(found, (9, 0), 128), rows_of(found, (8, 6), 128)) == (3, 2)
    measured = found.tiles[Key((9, 0), "scores", "half", 128)].measured
    assert measured == {"shape": "64/4/128 B=1 S=64", "ms": 3.0, "gpu": "H200"}
    lines = render_tiles({trial: [*outcomes, TileTime(Tile(5), None, "wrong: x")]}).splitlines()
    assert lines[1].startswith(">    3.000 ms")
    assert "in use" in lines[1]
    assert lines[3].endswith("wrong: x")


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("bench").parse_args(["tune", *words])


class NothingToRun:
    """A workbench whose calls only say what they are, and for which length."""

    def __init__(self, shape: AttentionShape, smooth: float) -> None:
        self.length = shape.length

    def run(self, kernel: str, tile: Any) -> tuple[int, str]:
        return self.length, kernel.removeprefix("selected-forward-")

    def select_densely(self) -> tuple[int, str]:
        return self.length, "dense"


def milliseconds(call: Callable[[], tuple[int, str]]) -> list[float]:
    """Reading all takes the square of the length; the others are level with it past six thousand tokens."""
    length, method = call()
    return [{"dense": length**2 / 6000, "query": 1.5 * length, "block": float(length)}[method]] * 5


@pytest.mark.usefixtures("kinds")
def test_up_to_which_length_every_block_is_read_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa.bench import kernels

    monkeypatch.setattr(kernels, "Workbench", NothingToRun)
    path, bar = tmp_path / "tiles.json", Silent()
    times = Tuner(path, (9, 0), {}, bar, milliseconds).compare_dense(0.0)
    # 16 blocks of 64 tokens are selected; the better of the two others counts.
    assert {blocks: other for blocks, (_, other) in times.items()} == {2: 2048.0, 4: 4096.0, 8: 8192.0}
    assert bar.last == "9 dense_up_to_blocks: selected-forward-block 64/4/128 B=1 S=8192"
    assert tuning.read_tuned(path).thresholds == {((9, 0), "dense_up_to_blocks"): 4}


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_threshold_alone_may_be_asked_for(
    threshold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa.bench import kernels, tune

    monkeypatch.setattr(kernels, "Workbench", NothingToRun)
    monkeypatch.setattr(tune.CudaClock, "times", lambda _, call: milliseconds(call))
    monkeypatch.setattr(tune.backend, "available", lambda: None)
    monkeypatch.setattr(tune, "origin_columns", lambda device, commit: {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    path = tmp_path / "tiles.json"
    assert bench.run(parse("--kernels", threshold, "--out", str(path))) == 0
    assert list(tuning.read_tuned(path).thresholds) == [((9, 0), threshold)]
    assert "selected forward, " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    with pytest.raises(ValueError, match=r"CUDA GPU|triton package"):
        bench.run(parse())


def test_the_interpreter_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        bench.run(parse())


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--kernels is 'score'; accepted: .*selected-backward"):
        bench.run(parse("--kernels", "score"))
