"""OpenAI's requests and answers: what is accepted, and the JSON that is sent."""

from __future__ import annotations

import json
import time
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa.serving.errors import bad_request

# Fields that would change the answer and are not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}

MAX_STOPS, MAX_STOP_LENGTH = 16, 256

AnyRequest = TypeVar("AnyRequest", bound="SamplingRequest")


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """The fields that both endpoints take; `top_k` and `min_p` are not OpenAI's. Fields without effect here are
    ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    # Of torch's generator.
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def stop_strings(self) -> list[str]:
        """Few and short ones: all are looked for after each token, while the other requests wait."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(found) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in found):
            raise bad_request(f"stop: accepted: up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        return found

    def sampling(self) -> dict[str, Any]:
        """Arguments of `Options`. Greedy decoding takes no filters, and OpenAI's default is temperature 1."""
        if self.temperature == 0:
            return {"temperature": 0}
        top_p = None if self.top_p == 1 else self.top_p
        temperature = 1.0 if self.temperature is None else self.temperature
        return {"temperature": temperature, "top_p": top_p, "top_k": self.top_k, "min_p": self.min_p}


class TextPart(BaseModel):
    """A part of a message."""

    type: str
    text: str = ""


class Message(BaseModel):
    """One turn of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None

    def plain(self) -> dict[str, str]:
        """The message as a dict, which chat templates take."""
        if self.tool_calls:
            raise bad_request("tool_calls of a message are not supported; accepted: none", "unsupported_value")
        if not isinstance(self.content, list):
            return {"role": self.role, "content": self.content or ""}
        other = sorted({part.type for part in self.content} - {"text"})
        if other:
            raise bad_request(f"the type of a message's part is {other[0]!r}; accepted: 'text'")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(SamplingRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


class CompletionRequest(SamplingRequest):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def single(self) -> str | list[int]:
        found = self.prompt
        if isinstance(found, list) and found and not isinstance(found[0], int):
            if len(found) > 1:
                raise bad_request(f"prompt is a list of {len(found)} prompts; accepted: one prompt per request")
            return found[0]
        return found  # type: ignore[return-value]


def parse_body(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A request from JSON; a ServingError 400 where it is no such request, or asks for what is not supported."""
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise bad_request(f"{where}: {first['msg']}") from None
    for name, neutral in UNSUPPORTED.items():
        value = (found.model_extra or {}).get(name)
        # By type too: to ask for 0 log-probabilities is to ask for that of the token itself.
        if value is not None and (type(value), value) not in [(type(x), x) for x in neutral]:
            accepted = " or ".join(map(json.dumps, neutral)) or "none"
            raise bad_request(f"{name} is not supported; accepted: {accepted}", "unsupported_value")
    return found


class Answer:
    """The JSON of the answer to one request, whole or in chunks."""

    def __init__(self, identifier: str, model: str, *, chat: bool, n_prompt: int) -> None:
        self.chat, self.n_prompt = chat, n_prompt
        kind = "chatcmpl" if chat else "cmpl"
        self.head = {"id": f"{kind}-{identifier}", "created": int(time.time()), "model": model}

    def usage(self, n_tokens: int) -> dict[str, int]:
        total = self.n_prompt + n_tokens
        return {"prompt_tokens": self.n_prompt, "completion_tokens": n_tokens, "total_tokens": total}

    def whole(self, text: str, finish: str, n_tokens: int) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": [choice], "usage": self.usage(n_tokens)}

    def chunk(self, text: str, finish: str | None, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        content = {"delta": delta} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self.head, "object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self, n_tokens: int) -> dict[str, Any]:
        """The last event of a stream, where it was requested."""
        return {**self.head, "object": self.chunk_kind, "choices": [], "usage": self.usage(n_tokens)}

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"


def event(data: dict[str, Any] | str) -> str:
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"
