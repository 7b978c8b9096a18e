"""The order of batches: shuffled by seed, shared by the ranks, gone back to exactly; and the borders of documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import pytest
import torch
from data_standins import Memory, Numbers, memory_loader
from hypothesis import given
from hypothesis import strategies as st

from nsa.data import Batch, DataConfig, Loader, open_loader
from nsa.data.pools import TextPools
from nsa.data.shuffle import Permutation, mix

PLACE = {"epoch": 0, "chunk": 0, "document": 0, "token": 0, "bookmark": None}
LENGTHS = st.lists(st.integers(1, 30), min_size=10, max_size=30)


def equal(a: Batch, b: Batch) -> bool:
    borders = a.cu_seqlens is b.cu_seqlens is None or (
        a.cu_seqlens is not None and b.cu_seqlens is not None and torch.equal(a.cu_seqlens, b.cu_seqlens)
    )
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) and borders


def windows_of(batches: Sequence[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.tolist()]


def take(loader: Loader, count: int) -> list[Batch]:
    return list(islice(loader, count))


# The shuffle.


@given(n=st.integers(0, 300), key=st.integers(0, 2**64))
def test_a_permutation_has_every_item_once(n: int, key: int) -> None:
    order = Permutation(n, key)
    assert sorted(order[index] for index in range(n)) == list(range(n))


def test_permutation_depends_on_its_key_but_not_on_the_machine() -> None:
    orders = [list(Permutation(100, *key)) for key in ((1,), (2,), (1, 0), (0, 1))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    # The first output of the published splitmix64 for the seed 0.
    assert mix(0) == 0xE220A8397B1DCDAF
    with pytest.raises(IndexError):
        Permutation(3, 0)[3]


def test_a_permutation_leaves_no_pattern() -> None:
    """Neighbors go far apart: the mean distance of a random order is a third of its length."""
    n = 3000
    places = torch.tensor(list(Permutation(n, 7))).double()
    assert (places.diff().abs().mean() / n - 1 / 3).abs() < 0.02
    correlation = torch.corrcoef(torch.stack([places, torch.arange(n).double()]))[0, 1]
    assert correlation.abs() < 0.06


# Windows.


@given(lengths=LENGTHS, seq_len=st.integers(1, 9), shuffle_tokens=st.integers(1, 200), doc_batch=st.integers(1, 5))
def test_epoch_has_each_token_once_but_for_a_last_partial_window(
    lengths: list[int], seq_len: int, shuffle_tokens: int, doc_batch: int
) -> None:
    documents = Memory(lengths)
    loader = memory_loader(documents, seq_len=seq_len, shuffle_tokens=shuffle_tokens, doc_batch=doc_batch)
    everything = documents.training_tokens()
    count = (len(everything) - 1) // seq_len
    for _ in range(2):
        seen = [token for row in windows_of(take(loader, count)) for token in row]
        assert len(seen) == len(set(seen)) == count * seq_len
        assert set(seen) <= everything


def test_targets_are_the_next_tokens() -> None:
    documents = Memory([11] * 25)
    following: dict[int, int] = {}
    for text in documents.texts:
        row = [int(word) for word in text.split()]
        following |= dict(zip(row, [*row[1:], -row[-1]], strict=True))
    for tokens, targets, cu_seqlens in take(memory_loader(documents, batch_size=3), 20):
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.shape == targets.shape == (3, 4)
        assert tokens.is_contiguous()
        assert targets.is_contiguous()
        assert cu_seqlens is None
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        for token, target in zip(tokens.flatten().tolist(), targets.flatten().tolist(), strict=True):
            # After the end of a document another one begins.
            assert following[token] == target if token > 0 else target > 0


def test_tokens_and_targets_share_no_memory() -> None:
    tokens, targets, _ = next(memory_loader(Memory([11] * 25)))
    before = tokens.clone()
    targets.fill_(0)
    assert torch.equal(tokens, before)


def test_the_seed_and_the_epoch_decide_the_order() -> None:
    documents = Memory([7] * 40)
    count = (len(documents.training_tokens()) - 1) // 4
    first, again, other = (windows_of(take(memory_loader(documents, seed=seed), 2 * count)) for seed in (0, 0, 1))
    assert first == again
    assert first[:count] != other[:count]
    assert first[:count] != first[count:]


def test_every_pool_has_an_order_of_its_own() -> None:
    pools = islice(memory_loader(Memory([7] * 60), shuffle_tokens=80).pools.pools(None), 4)
    orders = [tuple(pool.order) for pool in pools]
    assert {len(order) for order in orders} == {20}
    assert len(set(orders)) == 4


def test_validation_has_other_documents_than_training() -> None:
    seen = {}
    for split in ("train", "valid"):
        with open_loader(DataConfig(), split=split, batch_size=4, seq_len=64, seed=0) as loader:
            seen[split] = {tuple(row) for row in windows_of(take(loader, 200))}
    assert not seen["train"] & seen["valid"]


# Ranks.


def interleaved(loaders: Sequence[Loader], steps: int) -> list[list[int]]:
    return [row for _ in range(steps) for loader in loaders for row in windows_of([next(loader)])]


def ranks(documents: Memory, world_size: int, **values: object) -> list[Loader]:
    return [memory_loader(documents, rank=rank, world_size=world_size, **values) for rank in range(world_size)]


@given(lengths=LENGTHS, world_size=st.integers(1, 5), batch_size=st.integers(1, 4), shuffle_tokens=st.integers(1, 64))
def test_ranks_share_the_sequence_that_one_rank_has(
    lengths: list[int], world_size: int, batch_size: int, shuffle_tokens: int
) -> None:
    documents = Memory(lengths)
    values = {"shuffle_tokens": shuffle_tokens}
    together = interleaved(ranks(documents, world_size, batch_size=batch_size, **values), 6)
    alone = windows_of(take(memory_loader(documents, **values), 6 * world_size * batch_size))
    assert together == alone


def test_ranks_are_disjoint_and_cover_all() -> None:
    documents = Memory([9] * 41)
    everything = documents.training_tokens()
    count = (len(everything) - 1) // 4
    world_size = 3
    seen = [
        {token for row in windows_of(take(loader, count // world_size)) for token in row}
        for loader in ranks(documents, world_size)
    ]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
    # The windows that do not divide among the ranks come in the next step, and the rest of the epoch is no window.
    assert len(everything - set.union(*seen)) <= 4 * (world_size - 1) + 4


# Resume.


def saved(loader: Loader) -> dict[str, object]:
    return json.loads(json.dumps(loader.state_dict()))


@given(data=st.data(), lengths=LENGTHS, pack=st.booleans())
def test_resume_at_any_position_equals_an_uninterrupted_run(
    data: st.DataObject, lengths: list[int], pack: bool
) -> None:
    documents = Memory(lengths)
    world_size = data.draw(st.integers(1, 3))
    values: dict[str, object] = {
        "seq_len": data.draw(st.integers(1, 9)),
        "batch_size": data.draw(st.integers(1, 3)),
        "world_size": world_size,
        "rank": data.draw(st.integers(0, world_size - 1)),
        "shuffle_tokens": data.draw(st.integers(1, 64)),
        "pack": pack,
    }
    whole = memory_loader(documents, **values)
    for _ in range(data.draw(st.integers(0, 40))):
        next(whole)
    resumed = memory_loader(documents, **values)
    resumed.load_state_dict(saved(whole))
    assert resumed.state_dict() == whole.state_dict()
    for a, b in zip(take(whole, 8), take(resumed, 8), strict=True):
        assert equal(a, b)


@given(data=st.data(), lengths=LENGTHS)
def test_a_run_goes_on_with_other_ranks_and_another_batch_size(data: st.DataObject, lengths: list[int]) -> None:
    documents = Memory(lengths)
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
    legs = data.draw(st.lists(sizes, min_size=2, max_size=4))
    seen: list[list[int]] = []
    state = None
    for world_size, batch_size, steps in legs:
        loaders = ranks(documents, world_size, batch_size=batch_size)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        seen += interleaved(loaders, steps)
        states = [saved(loader) for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == windows_of(take(memory_loader(documents), len(seen)))


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
@pytest.mark.parametrize("pack", [False, True])
def test_resume_behind_the_prefetching_thread(source: str, pack: bool) -> None:
    """The state is of what was returned, not of what the thread has made by then."""
    config = DataConfig(source=source, pack=pack, shuffle_tokens=4096)

    def opened() -> Loader:
        return open_loader(config, split="train", batch_size=2, seq_len=64, seed=3)

    with opened() as whole, opened() as resumed:
        for steps in (0, 1, 5, 40):
            take(whole, steps)
            resumed.load_state_dict(saved(whole))
            for a, b in zip(take(whole, 3), take(resumed, 3), strict=True):
                assert equal(a, b)


def test_validation_batches_repeat_from_the_first_state() -> None:
    with open_loader(DataConfig(), split="valid", batch_size=2, seq_len=64, seed=0) as loader:
        first = loader.state_dict()
        before = take(loader, 3)
        loader.load_state_dict(first)
        assert all(equal(a, b) for a, b in zip(before, take(loader, 3), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed .*is 0; accepted: 1"),
        ({"seq_len": 32}, "seq_len .*is 64; accepted: 32"),
        ({"tokenizer": "BPE-1"}, "tokenizer .*is 'bytes'; accepted: 'BPE-1'"),
        ({"fingerprint": "x"}, "fingerprint .*is '.*'; accepted: 'x'"),
        ({"used": -1}, "used .*state is -1"),
        ({"used": 10**30}, "used .*state is 1000"),
        ({"extra": 1}, "keys .*state is .*'extra'"),
        ({7: 1}, r"keys .*state is .*\b7\b"),
        ({"pool": []}, r"pool .*state is \[\]"),
        ({"pool": "x"}, "pool .*state is 'x'"),
        ({"pool": {"epoch": 0}}, "pool .*state is {'epoch': 0}"),
        ({"pool": {**PLACE, "more": 1}}, "pool .*state is .*'more'"),
        ({"pool": {**PLACE, "chunk": -1}}, "pool.chunk .*state is -1"),
        ({"pool": {**PLACE, "token": "0"}}, "pool.token .*state is '0'"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, object], message: str) -> None:
    with open_loader(DataConfig(), split="train", batch_size=1, seq_len=64, seed=0) as loader:
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict({**loader.state_dict(), **change})
        assert next(loader).tokens.shape == (1, 64)


class SmallVocabulary(Numbers):
    """Smaller than the numbers that it makes."""

    vocab_size = 270


def test_a_token_beyond_the_vocabulary_is_found_where_it_is_made() -> None:
    config = DataConfig(doc_batch=2, shuffle_tokens=16)
    pools = TextPools(Memory([11] * 25), SmallVocabulary(), config, split="train", seq_len=4, seed=0)
    with pytest.raises(ValueError, match=r"token of .*numbers is 27\d; accepted: .*270"):
        list(islice(pools.pools(None), 200))


# Packing.


def documents_in(batch: Batch) -> Iterator[tuple[list[int], list[int]]]:
    assert batch.cu_seqlens is not None
    borders = batch.cu_seqlens.tolist()
    for begin, end in pairwise(borders):
        yield batch.tokens[0, begin:end].tolist(), batch.targets[0, begin:end].tolist()


@given(lengths=LENGTHS, batch_size=st.integers(1, 4), seq_len=st.integers(1, 12), shuffle_tokens=st.integers(1, 200))
def test_packed_documents_do_not_touch(lengths: list[int], batch_size: int, seq_len: int, shuffle_tokens: int) -> None:
    values = {"batch_size": batch_size, "seq_len": seq_len, "shuffle_tokens": shuffle_tokens}
    packed = memory_loader(Memory(lengths), pack=True, **values)
    plain = memory_loader(Memory(lengths), pack=False, **values)
    for batch, same in zip(take(packed, 12), take(plain, 12), strict=True):
        assert batch.tokens.shape == batch.targets.shape == (1, batch_size * seq_len)
        assert torch.equal(batch.tokens.view(-1), same.tokens.view(-1))
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == batch_size * seq_len
        assert (batch.cu_seqlens.diff() > 0).all()
        assert batch.cu_seqlens.diff().max() <= seq_len
        for tokens, targets in documents_in(batch):
            # Within a document numbers go up by one, and only its last token is its end.
            assert all(b in (a + 1, -a) for a, b in pairwise(tokens))
            assert all(token > 0 for token in tokens[:-1])
            assert targets[:-1] == tokens[1:]
            last, target = tokens[-1], targets[-1]
            assert target == -100 if last < 0 else target in (last + 1, -last)


def test_packing_keeps_the_position() -> None:
    """The windows are the same, so a run may start to pack where another stopped."""
    documents = Memory([8] * 30)
    plain, packed = memory_loader(documents), memory_loader(documents, pack=True)
    take(plain, 9)
    packed.load_state_dict(plain.state_dict())
    assert torch.equal(next(plain).tokens, next(packed).tokens)


# Synthetic.


def test_synthetic_phrases_are_said_twice() -> None:
    with open_loader(DataConfig(source="synthetic"), split="train", batch_size=4, seq_len=64, seed=0) as loader:
        tokens = torch.cat([batch.tokens for batch in take(loader, 80)])
    assert torch.equal(tokens[:, :32], tokens[:, 32:])
    assert len(tokens.unique(dim=0)) == 320
    assert tokens.min() == 0
    assert tokens.max() == 255


# Arguments.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "wikipedia"}, "data.source is 'wikipedia'; accepted: .*'stdlib'.* or 'hf:NAME'"),
        ({"source": "hf:"}, "data.source is 'hf:'"),
        ({"source": "text"}, "data.path is None; accepted: for text"),
        ({"path": "x"}, "data.path is 'x'; accepted: None"),
        ({"name": "x"}, "data.name is 'x'; accepted: None"),
        ({"on_stall": "wait"}, "data.on_stall is 'wait'"),
        ({"stall_timeout_s": 0}, "data.stall_timeout_s is 0"),
        ({"queue": 0}, "data.queue is 0"),
        ({"pack": 1}, "data.pack is 1"),
        ({"tokenizer": ""}, "data.tokenizer is ''"),
    ],
)
def test_a_wrong_config_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2; accepted: below world_size = 2"),
        ({"vocab_size": 255}, "model.vocab_size is 255; accepted: .*256, .*tokenizer bytes"),
    ],
)
def test_a_wrong_argument_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_loader(DataConfig(), **{"split": "train", "batch_size": 1, "seq_len": 8, "seed": 0, **values})
