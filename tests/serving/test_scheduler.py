"""Requests that fail, leave or run out of time, and what becomes of the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_server import tiny_lm
from waiting import PATIENCE_S, wait_until

from nsa.data.tokenizer import load_tokenizer
from nsa.generate import generate
from nsa.generation.options import Options
from nsa.generation.text import TextStream
from nsa.serving.batch import SlotBatch
from nsa.serving.errors import ServingError
from nsa.serving.scheduler import Job, Scheduler, Update

BYTES = load_tokenizer("bytes")


class Recorded:
    """A job and its updates."""

    def __init__(self, text: str = "hello", n: int = 8, *, timeout_s: float = PATIENCE_S, **options: Any) -> None:
        self.updates: list[Update] = []
        self.prompt = BYTES.encode(text)
        self.options = Options(**{"max_new_tokens": n, "temperature": 0, **options})
        self.stream = TextStream(BYTES, self.prompt)
        self.job = Job(self.prompt, self.options, self.stream, time.monotonic() + timeout_s, self.updates.append)

    @property
    def done(self) -> bool:
        return bool(self.updates) and (self.updates[-1].finish is not None or self.updates[-1].error is not None)

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    def result(self) -> str | int:
        """The text, or the status it failed with."""
        wait_until(lambda: self.done)
        error = self.updates[-1].error
        return self.text if error is None else error.status

    def expected(self, scheduler: Scheduler) -> str:
        o = self.options
        kwargs = {"temperature": o.temperature, "top_p": o.top_p, "top_k": o.top_k, "seed": o.seed}
        (row,) = generate(scheduler.batch.model, [self.prompt], o.max_new_tokens, **kwargs).tolist()
        stream = TextStream(BYTES, self.prompt)
        return "".join(stream.push([token]) for token in row) + stream.close()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(SlotBatch(tiny_lm(), 3, 256), ends=(), max_waiting=4, prefill_chunk=16)
    yield made
    made.close()


def submit(scheduler: Scheduler, *jobs: Recorded) -> None:
    for job in jobs:
        scheduler.submit(job.job)


def test_more_requests_than_slots_all_get_their_own_text(scheduler: Scheduler) -> None:
    asked = [
        Recorded("a", 20),
        Recorded("b" * 70, 5, temperature=1.0, seed=3),
        Recorded("c" * 17, 9, temperature=0.7, top_p=0.9, seed=4),
        Recorded("d" * 33, 12, temperature=0.7, top_p=0.9, seed=5),
        Recorded("e", 1),
        Recorded("f" * 16, 7, temperature=1.0, top_k=5, seed=6),
    ]
    submit(scheduler, *asked)
    assert [job.result() for job in asked] == [job.expected(scheduler) for job in asked]
    assert all(job.updates[-1].finish == "length" for job in asked)
    wait_until(lambda: not scheduler.jobs())
    assert scheduler.n_running == 0


def test_an_end_token_ends_an_answer_and_is_not_shown(scheduler: Scheduler) -> None:
    first = Recorded(n=6)
    submit(scheduler, first)
    text = str(first.result())
    tokens = generate(scheduler.batch.model, [first.prompt], 6, temperature=0)[0].tolist()
    scheduler.ends = frozenset([tokens[3]])
    cut = tokens.index(tokens[3])
    again = Recorded(n=6)
    submit(scheduler, again)
    assert text.startswith(str(again.result()).rstrip("\N{REPLACEMENT CHARACTER}"))
    assert again.updates[-1].finish == "stop"
    assert again.job.n_tokens == cut


def test_a_prompt_that_fails_ends_no_other(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = scheduler.batch.extend_prompt

    def crash(tokens: list[int]) -> torch.Tensor:
        if ord("!") in tokens:
            raise RuntimeError("an illegal prompt")
        return extend(tokens)

    monkeypatch.setattr(scheduler.batch, "extend_prompt", crash)
    asked = [Recorded("x", 30), Recorded("!"), Recorded("y" * 20, 10), Recorded("y" * 20 + "!"), Recorded("z", 5)]
    submit(scheduler, *asked)
    expected = [500 if "!" in BYTES.decode(job.prompt) else job.expected(scheduler) for job in asked]
    assert [job.result() for job in asked] == expected
    assert scheduler.healthy
    assert sorted(scheduler.free) == [0, 1, 2]


def test_text_that_cannot_be_decoded_ends_no_other(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Recorded("x", 20), Recorded("y", 20), Recorded("z", 20)]
    pushes = iter(range(100))

    def crash(tokens: list[int]) -> str:
        if next(pushes) == 7:
            raise ValueError("not a token of this tokenizer")
        return ""

    monkeypatch.setattr(asked[1].stream, "push", crash)
    submit(scheduler, *asked)
    assert [job.result() for job in asked] == [asked[0].expected(scheduler), 500, asked[2].expected(scheduler)]


def test_logits_that_are_not_finite_fail_their_request(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = scheduler.batch.extend_prompt
    monkeypatch.setattr(
        scheduler.batch, "extend_prompt", lambda tokens: extend(tokens) * (float("nan") if tokens == [1] else 1.0)
    )
    spoiled, fine = Recorded("\x01"), Recorded("fine", 12)
    submit(scheduler, spoiled, fine)
    assert (spoiled.result(), fine.result()) == (500, fine.expected(scheduler))


def test_a_failed_step_is_followed_by_good_ones(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    step, failures = scheduler.batch.step, iter([True])

    def crash(tokens: dict[int, int]) -> torch.Tensor:
        if next(failures, False):
            raise RuntimeError("out of memory")
        return step(tokens)

    monkeypatch.setattr(scheduler.batch, "step", crash)
    lost = Recorded("lost")
    submit(scheduler, lost)
    assert lost.result() == 500
    later = [Recorded("later", 9), Recorded("last", 7)]
    submit(scheduler, *later)
    assert [job.result() for job in later] == [job.expected(scheduler) for job in later]
    assert scheduler.failed_steps == 0


def test_a_lost_device_makes_the_server_unhealthy(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(tokens: dict[int, int]) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(scheduler.batch, "step", crash)
    for _ in range(3):
        asked = Recorded("x")
        submit(scheduler, asked)
        assert asked.result() == 500
    wait_until(lambda: not scheduler.thread.is_alive())
    with pytest.raises(ServingError) as refused:
        submit(scheduler, Recorded("x"))
    assert refused.value.status == 503


def test_an_error_outside_requests_answers_all_of_them(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(BaseException):
        pass

    def crash(tokens: dict[int, int]) -> torch.Tensor:
        raise Lost

    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    monkeypatch.setattr(scheduler.batch, "step", crash)
    asked = [Recorded("x"), Recorded("y")]
    submit(scheduler, *asked)
    assert asked[0].result() == 503
    wait_until(lambda: not scheduler.thread.is_alive())
    assert not scheduler.healthy


def test_a_full_queue_refuses_with_429_and_then_recovers(scheduler: Scheduler) -> None:
    asked = [Recorded("x" * (i + 1), 12) for i in range(7)]
    submit(scheduler, *asked)
    with pytest.raises(ServingError) as refused:
        submit(scheduler, Recorded("one too many"))
    assert (refused.value.status, refused.value.retry_after) == (429, 1)
    assert [job.result() for job in asked] == [job.expected(scheduler) for job in asked]
    after = Recorded("after")
    submit(scheduler, after)
    assert after.result() == after.expected(scheduler)


def test_a_cancelled_request_frees_its_slot(scheduler: Scheduler) -> None:
    endless, other = Recorded("endless", 240), Recorded("other", 30)
    submit(scheduler, endless, other)
    wait_until(lambda: bool(endless.updates))
    endless.job.cancel()
    wait_until(lambda: endless.job not in scheduler.jobs())
    seen = endless.job.n_tokens
    assert other.result() == other.expected(scheduler)
    assert endless.job.n_tokens == seen < 240
    assert not endless.done


def test_time_runs_out_for_requests_that_run_or_wait(scheduler: Scheduler) -> None:
    running = [Recorded(str(i), 250, timeout_s=0.5) for i in range(3)]
    waiting = Recorded("waits", 5, timeout_s=0.3)
    submit(scheduler, *running, waiting)
    assert [job.result() for job in (*running, waiting)] == [504] * 4
    after = Recorded("after")
    submit(scheduler, after)
    assert after.result() == after.expected(scheduler)


def test_closing_answers_what_is_left_with_503(scheduler: Scheduler) -> None:
    asked = [Recorded(str(i), 240) for i in range(6)]
    submit(scheduler, *asked)
    scheduler.close()
    assert [job.result() for job in asked] == [503] * 6
    with pytest.raises(ServingError):
        submit(scheduler, Recorded("late"))
