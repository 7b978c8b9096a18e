"""Checkpoints: what is read is what was saved, on any number of ranks, and nothing costs the one before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import Fork, rank_variables
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from waiting import wait_until

from nsa import NSAConfig, files
from nsa.model import LM, LMConfig, load_model
from nsa.tensor_file import Written, read_tensors, write_tensors
from nsa.train import storage
from nsa.train.checkpoint import Checkpoints, export, rng_state, set_rng_state, state_of
from nsa.train.storage import Damaged, Index

VOCABULARY = 64


def config(hidden: int = 24) -> LMConfig:
    # An odd vocabulary and 1-wide parameters make shards of unequal size, some of them empty.
    attn = NSAConfig(dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=8)
    return LMConfig(vocab_size=VOCABULARY + 1, n_layers=1, hidden=hidden, seq_len=16, attn=attn)


def make(wrap: str = "plain", *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = LM(config())
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    if wrap == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        # From the global generator: a resumed run continues the same draws only if their state came back.
        window = torch.randint(VOCABULARY, (2, 17))
        loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the full tensors, whoever holds them."""
    state = state_of(model, optimizer)
    full = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
    return {name: x.detach().clone() for name, x in full.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    train(model, optimizer, 2)
    return model, optimizer


Pair = tuple[nn.Module, torch.optim.Optimizer]


def test_what_is_read_is_what_was_saved(tmp_path: Path, trained: Pair) -> None:
    extra = {"data": {"position": 7, "seen": [1, 2]}, "none": None, "rate": 0.1}
    Checkpoints(tmp_path).save(2, *trained, extra, wait=True)
    fresh = make(seed=1)
    assert Checkpoints(tmp_path).load(*fresh) == (2, extra)
    assert_same(whole(*fresh), whole(*trained))


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    run = make()
    train(*run, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, *run, {"rng": rng_state()})
    going_on = train(*run, 3)
    checkpoints.wait()
    resumed = make(seed=1)
    found = Checkpoints(tmp_path).load(*resumed)
    assert found is not None
    set_rng_state(found[1]["rng"])
    assert train(*resumed, 3) == going_on
    assert_same(whole(*resumed), whole(*run))


def test_random_states_are_json_and_come_back() -> None:
    state = json.loads(json.dumps(rng_state()))
    drawn = (random.random(), torch.rand(3).tolist())
    set_rng_state(state)
    assert (random.random(), torch.rand(3).tolist()) == drawn


def test_the_state_is_copied_before_save_returns(
    tmp_path: Path, trained: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    real = storage.write_tensors
    monkeypatch.setattr(storage, "write_tensors", lambda *given: may_write.wait(10) and real(*given))
    checkpoints, before = Checkpoints(tmp_path), whole(*trained)
    extra = {"position": 1}
    checkpoints.save(2, *trained, extra)
    extra["position"] = 2
    train(*trained, 1)
    assert checkpoints.steps() == [], "nothing has its name before it is whole"
    may_write.set()
    checkpoints.wait()
    assert checkpoints.steps()[-1] == 2
    fresh = make(seed=1)
    assert checkpoints.load(*fresh) == (2, {"position": 1})
    assert_same(whole(*fresh), before)


def test_a_state_before_the_first_step_has_no_optimizer(tmp_path: Path) -> None:
    run = make()
    Checkpoints(tmp_path).save(0, *run, {}, wait=True)
    fresh = make(seed=1)
    assert Checkpoints(tmp_path).load(*fresh) == (0, {})
    torch.manual_seed(3)
    first = train(*run, 2)
    torch.manual_seed(3)
    assert train(*fresh, 2) == first


def test_the_configuration_owns_the_hyperparameters(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
    model, optimizer = make()
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.3)
    Checkpoints(tmp_path).load(model, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.3)


def test_nothing_there_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "not" / "yet")
    assert checkpoints.load(*make()) is None
    assert checkpoints.steps() == []
    assert not (tmp_path / "not").exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path, trained: Pair) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, loss in enumerate([3.0, 1.0, None, 2.0, float("nan"), 2.5], start=1):
        checkpoints.save(step, *trained, {}, loss=loss)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best() == 2
    # The same from the disk alone.
    again = Checkpoints(tmp_path, keep=1)
    assert again.best() == 2
    again.save(7, *trained, {}, loss=0.5, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_7"]


def test_losses_of_other_data_are_not_compared(tmp_path: Path, trained: Pair) -> None:
    easy, hard = (Checkpoints(tmp_path, keep=1, validation_id=judge) for judge in ("easy", "hard"))
    easy.save(1, *trained, {}, loss=1.0, wait=True)
    hard.save(2, *trained, {}, loss=3.0, wait=True)
    hard.save(3, *trained, {}, loss=4.0, wait=True)
    assert hard.best() == 2
    assert hard.steps() == [2, 3], "the best of other data goes like any other"


def test_the_same_step_again(tmp_path: Path, trained: Pair) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, *trained, {"time": 1}, wait=True)
    checkpoints.save(2, *trained, {"time": 2}, wait=True)
    assert checkpoints.load(*make()) == (2, {"time": 1}), "what was just written is not written again"
    checkpoints.save(2, *trained, {"time": 3}, loss=1.0, wait=True)
    assert Checkpoints(tmp_path).load(*make()) == (2, {"time": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_replacement_that_was_cut_short_is_undone(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
    (tmp_path / "step_2").rename(tmp_path / "step_2.replaced.tmp")
    (tmp_path / "step_2.tmp").mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(*make()) == (2, {})
    checkpoints.save(3, *trained, {}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


def damage(kind: str, folder: Path) -> None:
    data = folder / "rank_00000.safetensors"
    if kind == "a flipped bit":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif kind == "a short file":
        os.truncate(data, data.stat().st_size - 1)
    elif kind == "no file":
        data.unlink()
    elif kind == "a folder":
        data.unlink()
        data.mkdir()
    elif kind == "no index":
        (folder / "index.json").unlink()
    elif kind == "a torn index":
        os.truncate(folder / "index.json", 200)
    elif kind == "an edited index":
        index = folder / "index.json"
        index.write_text(index.read_text().replace('"step":3', '"step":4'))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a flipped bit", "rank_00000.safetensors .*checksum"),
        ("a short file", r"rank_00000.safetensors has [\d,]+ bytes "),
        ("no file", "rank_00000.safetensors is missing"),
        ("a folder", "rank_00000.safetensors .*: Is a directory"),
        ("no index", "index.json is missing"),
        ("a torn index", "index.json .*checksum"),
        ("an edited index", "index.json .*checksum"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    kind: str, said: str, tmp_path: Path, trained: Pair
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(2, *trained, {}, wait=True)
    before = whole(*trained)
    train(*trained, 1)
    checkpoints.save(3, *trained, {}, wait=True)
    damage(kind, tmp_path / "step_3")
    fresh = make(seed=1)
    again = Checkpoints(tmp_path, keep=1)
    with pytest.warns(RuntimeWarning, match=f"step_3 is damaged .{said}"):
        assert again.load(*fresh) == (2, {})
    assert_same(whole(*fresh), before)
    # It no longer counts as the newest: with one to keep, it would cost the next.
    again.save(4, *fresh, {}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_3", "step_4"]


def test_the_same_step_may_be_damaged_twice(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
    for _ in range(2):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(3, *trained, {}, wait=True)
        damage("a flipped bit", tmp_path / "step_3")
        again = Checkpoints(tmp_path)
        with pytest.warns(RuntimeWarning, match="step_3 is damaged"):
            again.load(*make(seed=1))
        again.save(3, *trained, {}, wait=True)
    assert {"damaged_step_3", "damaged_step_3_2", "step_3"} <= {path.name for path in tmp_path.iterdir()}


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path: Path, trained: Pair) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder = tmp_path / "checkpoints"
    for name in ("step_1.tmp", "step_2.removed.tmp", "mine.tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "step_3.tmp").symlink_to(elsewhere)
    (folder / "notes.tmp").touch()
    Checkpoints(folder).save(1, *trained, {}, wait=True)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.tmp", "notes.tmp", "step_1"]
    assert (elsewhere / "kept").exists()


def test_a_checkpoint_that_is_a_link_loses_the_link_alone(tmp_path: Path, trained: Pair) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, *trained, {}, wait=True)
    (folder / "step_1").rename(tmp_path / "step_1")
    (folder / "step_1").symlink_to(tmp_path / "step_1")
    checkpoints.save(2, *trained, {}, wait=True)
    assert checkpoints.steps() == [2]
    Index.read(tmp_path / "step_1").check(tmp_path / "step_1", ["rank_00000.safetensors"])


def test_no_intact_one_left_is_an_error_not_a_new_start(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
    damage("no file", tmp_path / "step_2")
    said = r"all of \[2\] are damaged .step_2: rank_00000\.safetensors"
    with pytest.warns(RuntimeWarning, match="damaged"), pytest.raises(ValueError, match=said):
        Checkpoints(tmp_path).load(*make())


def test_another_model_is_named(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
    wide = LM(config(hidden=32))
    with pytest.raises(ValueError, match=r"step_2 .*another model: .*model\.layers\.0\.mlp\.inner\.weight \[48, 16\]"):
        Checkpoints(tmp_path).load(wide, torch.optim.AdamW(wide.parameters()))
    shared = LM(config())
    shared.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"without model.extra.bias"):
        Checkpoints(tmp_path).load(shared, torch.optim.AdamW(shared.parameters()))


def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "sync", full)


def test_a_disk_that_is_full_for_a_moment_costs_one_checkpoint(
    tmp_path: Path, trained: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        fail_to_write(patch)
        checkpoints.save(2, *trained, {})
        wait_until(checkpoints.pending[1].done)
        assert "step 2" in str(checkpoints.failed_save())
        assert checkpoints.failed_save() is None, "said once"
        checkpoints.save(3, *trained, {})
        with suppress(CheckpointException):
            checkpoints.pending[1].result()
    with pytest.warns(RuntimeWarning, match="step 3 .* failed: .*step 4"):
        checkpoints.save(4, *trained, {})
    assert checkpoints.steps()[-1] == 4, "after a failure the next one is waited for"


def test_an_index_of_another_version_is_no_traceback(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(1, *trained, {}, loss=1.0, wait=True)
    Checkpoints(tmp_path).save(2, *trained, {}, loss=1.0, wait=True)
    for step, without in ((1, "judge"), (2, "files")):
        path = tmp_path / f"step_{step}" / "index.json"
        body = json.loads(path.read_text().partition("\n")[2])
        del body[without]
        text = json.dumps(body)
        path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")
    with pytest.warns(RuntimeWarning, match="step_2 is damaged .*version"):
        assert Checkpoints(tmp_path).load(*make()) == (1, {})


@pytest.mark.parametrize("call", ["wait", "load"])
def test_full_disk_is_raised_by_the_next_call_and_loses_nothing(
    call: str, tmp_path: Path, trained: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, *trained, {}, wait=True)
    with monkeypatch.context() as patch:
        fail_to_write(patch)
        checkpoints.save(2, *trained, {})
        calls = {"wait": checkpoints.wait, "load": lambda: checkpoints.load(*make())}
        with pytest.raises(OSError, match=r"step 2 in .* failed: .*No space left on device.*; older"):
            calls[call]()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"], "what was half written gives its space back"
    # Said once; the next save is a new try.
    checkpoints.save(4, *trained, {}, wait=True)
    assert Checkpoints(tmp_path).load(*make()) == (4, {})


def test_a_path_that_is_no_folder_is_named(tmp_path: Path, trained: Pair) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match=r"folder is '.*file'"):
        Checkpoints(file)
    checkpoints = Checkpoints(file / "below")
    with pytest.raises(OSError, match=r"step 1 in .*below failed: .*Not a directory"):
        checkpoints.save(1, *trained, {}, wait=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_folder_that_may_not_be_read_or_written_is_an_error(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(1, *trained, {}, wait=True)
    try:
        tmp_path.chmod(0o500)
        with pytest.raises(OSError, match="Permission denied"):
            Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
        (tmp_path / "step_1").chmod(0)
        with pytest.raises(OSError, match="Permission denied"):
            Checkpoints(tmp_path).load(*make())
    finally:
        tmp_path.chmod(0o700)
        (tmp_path / "step_1").chmod(0o700)


def test_a_state_that_is_not_json_is_refused(tmp_path: Path, trained: Pair) -> None:
    with pytest.raises(ValueError, match=r"extra .*JSON"):
        Checkpoints(tmp_path).save(1, *trained, {"model": trained[0]})


def test_no_pickle_is_written(tmp_path: Path, trained: Pair) -> None:
    Checkpoints(tmp_path).save(2, *trained, {}, wait=True)
    assert sorted(path.name for path in (tmp_path / "step_2").iterdir()) == ["index.json", "rank_00000.safetensors"]


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "counts": torch.arange(7),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    assert_same(read_tensors(tmp_path / "x.safetensors"), tensors)
    library = pytest.importorskip("safetensors.torch")
    assert_same(library.load_file(tmp_path / "x.safetensors"), tensors)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    Index(1, None, "", [{}], {"../secret": Written(1, "0" * 64)}, {}).write(tmp_path / "step_1" / "index.json")
    with pytest.raises(Damaged, match=r"\.\./secret"):
        Index.read(tmp_path / "step_1")


class Words:
    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_an_export_is_what_load_model_reads(tmp_path: Path, trained: Pair) -> None:
    for _ in range(2):
        path = export(trained[0], tmp_path, Words())
    assert path.is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["model.json", path.name, "tokenizer.json"])
    assert_same(load_model(tmp_path).state_dict(), trained[0].state_dict())


# In forks: processes of their own, which need not import torch again.


def start(worker: Callable[[Path], None], folder: Path, printed: str = "printed", **environment: str) -> Fork:
    return Fork(lambda: worker(folder) or 0, folder / printed, **environment)


def finish(process: Fork) -> str:
    status, printed = process.wait()
    assert status == 0, printed
    return printed


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """The worker has saved step 1, trained, and hangs with half of step 2 on the disk."""
    process = start(worker_hang, tmp_path)
    wait_until(lambda: any((tmp_path / "run" / "step_2.tmp").glob(".rank_00000.safetensors.*")))
    process.kill()
    process.wait()
    run = make(seed=1)
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.load(*run) == (1, {"step": 1})
    checkpoints.save(2, *run, {}, wait=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step_1", "step_2"]


@pytest.mark.slow
def test_killed_anywhere(tmp_path: Path) -> None:
    """Eight children, each going on from what the one before left, each killed at a random moment."""
    reached = [int(line) for line in finish(start(worker_killed, tmp_path)).splitlines()]
    assert reached == sorted(reached), "what was there stays there"
    assert reached[-1] > 0


@pytest.mark.slow
def test_two_ranks_save_and_one_reads_and_back(tmp_path: Path) -> None:
    """Replicated (DDP) and sharded (FSDP2) alike."""
    single = make()
    torch.manual_seed(1)
    train(*single, 2)
    Checkpoints(tmp_path / "single").save(2, *single, {"rank": 0}, wait=True)
    variables = enumerate(rank_variables(2))
    for process in [start(worker_ranks, tmp_path, f"printed-{rank}", **given) for rank, given in variables]:
        finish(process)
    for wrap in ("ddp", "fsdp"):
        truth = read_tensors(tmp_path / f"{wrap}-truth.safetensors")
        fresh = make(seed=1)
        assert Checkpoints(tmp_path / wrap).load(*fresh) == (5, {"rank": 0})
        assert_same(whole(*fresh), truth)
        files = sorted(path.name for path in (tmp_path / wrap / "step_5").iterdir())
        assert files == ["index.json", "rank_00000.safetensors", "rank_00001.safetensors"], "both ranks wrote"
        assert_same(load_model(tmp_path / f"{wrap}-export").state_dict(), fresh[0].state_dict())
        # And what one rank had saved is what both read.
        assert_same(read_tensors(tmp_path / f"{wrap}-from-single.safetensors"), whole(*single))


def worker_hang(folder: Path) -> None:
    run = make()
    checkpoints = Checkpoints(folder / "run")
    train(*run)
    checkpoints.save(1, *run, {"step": 1}, wait=True)
    train(*run)
    files.sync = lambda descriptor: time.sleep(3600)
    checkpoints.save(2, *run, {"step": 2}, wait=True)


def worker_killed(folder: Path) -> None:
    chance = random.Random(5)
    begun, begins = os.pipe()
    for _ in range(8):
        child = os.fork()
        if child == 0:
            run, checkpoints = make(), Checkpoints(folder / "run", keep=1)
            found = checkpoints.load(*run)
            step = found[0] if found else 0
            while True:
                with torch.no_grad():
                    for x in run[0].parameters():
                        x.fill_(step)
                os.write(begins, b".")
                checkpoints.save(step, *run, {"step": step}, loss=0.0)
                step += 1
        for _ in range(chance.randint(2, 6)):
            os.read(begun, 1)
        time.sleep(chance.random() / 50)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        run = make()
        found = Checkpoints(folder / "run").load(*run)
        step = found[0] if found else 0
        if found:
            assert found[1] == {"step": step}
            assert all((x == step).all() for x in run[0].parameters())
        print(step)


def worker_ranks(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for wrap in ("ddp", "fsdp"):
        run = make(wrap)
        torch.manual_seed(1)
        checkpoints = Checkpoints(folder / wrap)
        train(*run, 2)
        checkpoints.save(5, *run, {"rank": rank})
        truth = whole(*run)
        train(*run, 1)
        checkpoints.wait()
        assert checkpoints.load(*run) == (5, {"rank": rank}), "each its own"
        assert all(torch.equal(x, truth[name]) for name, x in whole(*run).items())
        export(run[0], folder / f"{wrap}-export", None)
        again = make(wrap, seed=3)
        assert Checkpoints(folder / "single").load(*again) == (2, {"rank": 0})
        single = whole(*again)
        # The training goes on with the same numbers in both.
        assert len(train(*again, 1)) == 1
        if rank == 0:
            write_tensors(folder / f"{wrap}-truth.safetensors", truth)
            write_tensors(folder / f"{wrap}-from-single.safetensors", single)
    dist.destroy_process_group()
