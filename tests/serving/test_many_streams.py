"""64 clients at once: every one gets its own answer, some crash or leave, and memory stays as it was."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_server import Live, openai, serve, tiny_folder, tiny_lm
from waiting import PATIENCE_S, wait_until

from nsa.data.tokenizer import load_tokenizer
from nsa.generate import generate
from nsa.generation.text import TextStream
from nsa.serving.scheduler import Job

N_STREAMS = 64
CRASHING, LEAVING = {5, 40}, {17, 50}
MIB = 2**20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "tiny")
    with serve(folder, "--slots", "32", "--max-waiting", "32", "--prefill-chunk", "64") as server:
        yield server


def prompt(i: int) -> str:
    return f"{i}: " + "abcdefgh"[i % 8] * (i % 40) + ("!" if i in CRASHING else "")


def n_tokens(i: int) -> int:
    return 4 + i % 13


async def ask(client: openai.AsyncOpenAI, i: int, *, limit: int) -> str:
    """The text of stream `i`, or the name of the error."""
    text = ""
    try:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt(i),
            max_tokens=min(limit, n_tokens(i)),
            temperature=0 if i % 2 else 0.9,
            seed=i,
            stream=True,
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            if i in LEAVING:
                await stream.close()
                return "left"
    except openai.APIError as error:
        return type(error).__name__
    return text


async def ask_all(url: str, *, limit: int = 100) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(ask(client, i, limit=limit) for i in range(N_STREAMS)))


def crash_prompts(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = live.scheduler.batch.extend_prompt

    def crash(tokens: list[int]) -> torch.Tensor:
        if ord("!") in tokens:
            raise RuntimeError("an illegal prompt")
        return extend(tokens)

    monkeypatch.setattr(live.scheduler.batch, "extend_prompt", crash)


def texts_alone(temperature: float) -> list[str]:
    """What `nsa generate` answers; row `i` draws from seed `i`."""
    tokenizer = load_tokenizer("bytes")
    prompts = [tokenizer.encode(prompt(i)) for i in range(N_STREAMS)]
    rows = generate(tiny_lm(), prompts, 20, temperature=temperature, seed=0, end=0).tolist()
    texts = []
    for i, row in enumerate(rows):
        stream = TextStream(tokenizer, prompts[i])
        texts.append(stream.push([token for token in row[: n_tokens(i)] if token >= 0]) + stream.close())
    return texts


def test_no_answer_of_64_streams_is_mixed_up(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_prompts(live, monkeypatch)
    found = asyncio.run(ask_all(live.url))
    expected = {temperature: texts_alone(temperature) for temperature in (0, 0.9)}
    for i, text in enumerate(found):
        if i in CRASHING:
            assert text == "InternalServerError", i
        elif i in LEAVING:
            assert text == "left", i
        else:
            assert text == expected[0 if i % 2 else 0.9][i], i
    assert len(set(found)) > N_STREAMS // 2, "the answers differ"
    wait_until(live.idle)
    assert live.scheduler.healthy


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux's /proc")
def test_memory_is_steady_over_rounds_of_64(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_prompts(live, monkeypatch)
    # pytest keeps the tracebacks of what is logged, and these their requests.
    monkeypatch.setattr("nsa.serving.scheduler.log.exception", lambda *arguments: None)

    def one_round() -> tuple[int, int, int]:
        asyncio.run(ask_all(live.url, limit=2))
        wait_until(live.idle)
        gc.collect()
        found = gc.get_objects()
        return resident_bytes(), sum(type(x) is Job for x in found), sum(type(x) is torch.Tensor for x in found)

    one_round()
    first, *_, last = [one_round() for _ in range(3)]
    assert last[1] <= first[1] <= 1, "requests that have ended are kept"
    assert last[2] <= first[2] + 4, "tensors of requests that have ended are kept"
    assert last[0] - first[0] < 16 * MIB
