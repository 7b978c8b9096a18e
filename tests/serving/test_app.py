"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, http, openai, serve, tiny_folder, tiny_lm
from starlette.requests import Request
from waiting import wait_until

from nsa.data.tokenizer import load_tokenizer
from nsa.generate import generate_text
from nsa.serving.app import read_body
from nsa.serving.errors import ServingError
from nsa.serving.scheduler import Job

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
RENDERED = "system: be brief\nuser: hello\nassistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with serve(folder, "--slots", "4", "--max-waiting", "2", "--max-tokens", "300", "--max-len", "400") as server:
        yield server
        wait_until(server.idle)


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return live.client()


def alone(prompt: str, n: int, **options: Any) -> str:
    """What `nsa generate` answers."""
    return generate_text(tiny_lm(), load_tokenizer("bytes"), [prompt], n, **{"temperature": 0, "end": 0, **options})[0]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_a_completion_is_that_of_generate(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="def main(", max_tokens=12, temperature=0)
    assert found.choices[0].text == alone("def main(", 12)
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (9, 12, 21)


def test_token_ids_are_a_prompt_too(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt=list(b"def"), max_tokens=6, temperature=0)
    assert found.choices[0].text == alone("def", 6)


def test_a_chat_goes_through_the_template(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=10, temperature=0)
    assert found.choices[0].message.content == alone(RENDERED, 10)
    assert found.choices[0].message.role == "assistant"
    parts = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=10, temperature=0)
    assert again.choices[0].message.content == found.choices[0].message.content


@pytest.mark.parametrize("seed", [3, 4])
def test_samples_depend_on_the_seed_alone(client: openai.OpenAI, seed: int) -> None:
    asked = {"model": "tiny", "prompt": "seed", "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": seed}
    texts = [client.completions.create(**asked).choices[0].text for _ in range(2)]
    assert texts == [alone("seed", 8, temperature=0.8, top_p=0.9, seed=seed)] * 2


def test_streams_are_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": True}
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=CHAT, stream_options=usage, **asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == alone(RENDERED, 12)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    pieces = [c.choices[0].text for c in client.completions.create(prompt="abc", **asked)]
    assert "".join(pieces) == alone("abc", 12)
    assert len(pieces) > 3


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    whole = alone("stop here", 30)
    stop = whole[6:8]
    found = client.completions.create(model="tiny", prompt="stop here", max_tokens=30, temperature=0, stop=stop)
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_tokens": 301}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": "x" * 400}, "400"),
        ({"prompt": "x" * 200, "max_tokens": 300}, "400"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 256]}, "255"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": ["", "a"]}, "stop"),
        ({"n": 2}, "n is"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"extra_body": {"prompt": {"a": 1}}}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "tiny", "prompt": "x", **fields})
    assert names in refused.value.body["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "alien", "content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}, {"role": "user", "content": "hi"}],
    ],
)
def test_chats_that_cannot_be_rendered_are_refused(client: openai.OpenAI, messages: list[Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=messages)


def test_wrong_models_bodies_and_paths_are_refused(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    url = f"{live.url}/v1/completions"
    nan, surrogate = b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}'
    for body in (b"{not json", b"[]", nan, surrogate, b'{"prompt": "\xff"}', b"[" * 10**5):
        assert http.post(url, content=body).status_code == 400, body
    assert http.post(url, content=b"x" * (2**24 + 1)).status_code == 413
    assert http.get(f"{live.url}/docs").status_code == 404


def test_health_counts_requests(live: Live) -> None:
    wait_until(live.idle)
    found = http.get(f"{live.url}/health")
    assert found.status_code == 200
    assert found.json() == {"status": "ok", "running": 0, "waiting": 0, "slots": 4}


def test_more_requests_than_the_limit_get_429(live: Live) -> None:
    url, body = f"{live.url}/v1/completions", {"prompt": "x", "max_tokens": 300, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        requests = [http.build_request("POST", url, json={**body, "stream": True}) for _ in range(4)]
        streams = [http.send(request, stream=True) for request in requests]
        assert [stream.status_code for stream in streams] == [200] * 4
        waiting = [pool.submit(http.post, url, json={**body, "max_tokens": 2}) for _ in range(2)]
        wait_until(lambda: len(live.scheduler.waiting) == 2)
        refused = http.post(url, json=body)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            live.client().completions.create(model="tiny", prompt="x")
        for stream in streams:
            stream.close()
        assert [found.result().status_code for found in waiting] == [200, 200]
    wait_until(live.idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(live: Live, stream: bool) -> None:
    body = {"prompt": "leave", "max_tokens": 300, "temperature": 0, "stream": stream}
    connection = HTTPConnection(live.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body))
    jobs: list[Job] = []
    wait_until(lambda: jobs or jobs.extend(live.scheduler.jobs()))
    connection.close()
    wait_until(live.idle)
    assert jobs[0].cancelled
    assert jobs[0].n_tokens < 300


def test_time_runs_out_with_504_or_an_event(folder: Path) -> None:
    with serve(folder, "--slots", "2", "--timeout", "0.6") as live:
        body = {"prompt": "slow", "max_tokens": 500, "temperature": 0}
        assert http.post(f"{live.url}/v1/completions", json=body).status_code == 504
        with pytest.raises(openai.APIError, match="time"):
            list(live.client().completions.create(model="tiny", stream=True, **body))
        wait_until(live.idle)


def test_an_api_key_is_asked_for(folder: Path) -> None:
    with serve(folder, api_key="secret") as live:
        assert http.get(f"{live.url}/health").status_code == 200
        for key in ("wrong", "secre", "secrét"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert http.get(f"{live.url}/v1/models", headers=headers).status_code == 401
        assert http.post(f"{live.url}/v1/completions", json={"prompt": "x"}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            live.client().models.list()
        client = live.client(api_key="secret")
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2, temperature=0).choices[0].text


def test_a_key_is_compared_by_its_bytes_after_bearer(folder: Path) -> None:
    with serve(folder, api_key="secrét") as live:
        for given, status in (("Bearer secrét", 200), ("bearer secrét", 200), ("secrét", 401), ("Basic secrét", 401)):
            headers = {"Authorization": given.encode()}
            assert http.get(f"{live.url}/v1/models", headers=headers).status_code == status, given


def test_a_client_may_leave_in_the_middle_of_its_body() -> None:
    """It is no failure of the server, whose log would fill with it."""
    parts = iter([{"type": "http.request", "body": b'{"prompt"', "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(parts)

    with pytest.raises(ServingError) as left:
        asyncio.run(read_body(Request({"type": "http"}, receive), 5))
    assert left.value.status == 499


def test_a_model_without_a_template_completes_only(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain, ignore=shutil.ignore_patterns("*.jinja"))
    with serve(plain, "--name", "org/plain") as live:
        client = live.client()
        assert client.models.retrieve("org/plain").id == "org/plain"
        with pytest.raises(openai.BadRequestError, match="template"):
            client.chat.completions.create(model="org/plain", messages=CHAT)
        assert client.completions.create(model="org/plain", prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_events_are_as_the_standard_has_them(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0, "stream": True}
    response = http.post(f"{live.url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["object"] == "text_completion"
