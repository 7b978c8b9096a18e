"""The HTTP side: routes, limits, and requests whose clients leave."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from nsa.generation.options import Options
from nsa.generation.text import TextStream
from nsa.serving.errors import ServingError, bad_request
from nsa.serving.loading import PromptEncoder
from nsa.serving.protocol import Answer, ChatRequest, CompletionRequest, SamplingRequest, event, parse_body
from nsa.serving.scheduler import Job, Scheduler, Update

MAX_BODY_BYTES = 2**24
# How often a request checks whether its client is still connected, in seconds.
DISCONNECT_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one request."""

    max_tokens: int  # most new tokens, and the default
    timeout_s: float  # from its arrival to its last token


def make_app(
    name: str, encoder: PromptEncoder, scheduler: Scheduler, limits: Limits, *, api_key: str | None = None
) -> FastAPI:
    """An application for an ASGI server; its shutdown closes the scheduler, which is its `state.scheduler`. `name`: of
    the model, for clients; `api_key`: what `Authorization: Bearer` must say, but for /health."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(scheduler.close)

    app = FastAPI(title="nsa serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.scheduler = scheduler
    started = int(time.time())
    card = {"id": name, "object": "model", "created": started, "owned_by": "nsa", "max_model_len": scheduler.max_len}

    async def authorize(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1, whatever they are.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), api_key.encode()):
            raise ServingError(401, "invalid_api_key", "the API key is missing or wrong: Authorization: Bearer KEY")

    @app.exception_handler(ServingError)
    async def refuse(request: Request, error: ServingError) -> JSONResponse:
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return JSONResponse(error.body(), error.status, headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        healthy = scheduler.healthy
        counts = {"running": scheduler.n_running, "waiting": len(scheduler.waiting), "slots": scheduler.batch.n_slots}
        return JSONResponse({"status": "ok" if healthy else "unavailable", **counts}, 200 if healthy else 503)

    @app.get("/v1/models", dependencies=[Depends(authorize)])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", dependencies=[Depends(authorize)])
    async def model_card(model: str) -> dict[str, Any]:
        check_model(model)
        return card

    @app.post("/v1/chat/completions", dependencies=[Depends(authorize)])
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatRequest, await read_body(request, limits.timeout_s))
        messages = [message.plain() for message in body.messages]
        return await answer(request, body, lambda: encoder.encode_chat(messages), chat=True)

    @app.post("/v1/completions", dependencies=[Depends(authorize)])
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionRequest, await read_body(request, limits.timeout_s))
        prompt = body.single()
        return await answer(request, body, lambda: encoder.encode_text(prompt), chat=False)

    def check_model(requested: str | None) -> None:
        if requested not in (None, name):
            raise ServingError(404, "model_not_found", f"the model {requested!r} is not served; accepted: {name!r}")

    async def answer(
        request: Request, body: SamplingRequest, encode: Callable[[], list[int]], *, chat: bool
    ) -> Response:
        deadline = time.monotonic() + limits.timeout_s
        check_model(body.model)
        # In a thread: a long prompt must not hold up the streams of others.
        prompt = await asyncio.to_thread(encode)
        options = options_of(body, len(prompt), scheduler.max_len, limits)
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()

        def deliver(update: Update) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, update)

        job = Job(prompt, options, TextStream(encoder.decoder, prompt, body.stop_strings()), deadline, deliver)
        scheduler.submit(job)
        found = follow_job(request, job, updates)
        form = Answer(secrets.token_hex(12), name, chat=chat, n_prompt=len(prompt))
        if not body.stream:
            return await whole_answer(found, job, form)
        # Its failure still has a status of its own.
        first = await anext(found, None)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(events(first, found, job, form, usage=usage), media_type="text/event-stream")

    return app


def options_of(body: SamplingRequest, n_prompt: int, max_len: int, limits: Limits) -> Options:
    """How a request is sampled; a ServingError 400 for an impossible value, or a prompt or answer that is too long."""
    space = max_len - n_prompt
    if space < 1:
        message = f"the prompt has {n_prompt} tokens; accepted: less than {max_len}, the context length"
        raise bad_request(message, "context_length_exceeded")
    wanted = body.max_completion_tokens or body.max_tokens
    if wanted is not None and wanted > limits.max_tokens:
        raise bad_request(f"max_tokens is {wanted}; accepted: at most {limits.max_tokens} per request")
    if wanted is not None and wanted > space:
        message = f"{n_prompt} prompt tokens and max_tokens = {wanted} exceed {max_len}, the context length"
        raise bad_request(message, "context_length_exceeded")
    try:
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        return Options(max_new_tokens=wanted or min(limits.max_tokens, space), seed=seed, **body.sampling())
    except ValueError as error:
        raise bad_request(str(error)) from None


async def read_body(request: Request, timeout_s: float) -> bytes:
    """A request's body; a ServingError 413 if it is too large, 408 if it takes too long, 499 if the client leaves."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ServingError(413, "body_too_large", f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        # The response is not read, as below.
        raise ServingError(499, "client_left", "the body is not complete") from None
    except TimeoutError:
        raise ServingError(408, "timeout", f"the body did not arrive within {timeout_s:g} s") from None
    return bytes(body)


async def follow_job(request: Request, job: Job, updates: asyncio.Queue[Update]) -> AsyncIterator[Update]:
    """The updates of a job until it ends, fails with a ServingError, or its client leaves: it is cancelled then."""
    next_check = time.monotonic() + DISCONNECT_POLL_S
    try:
        while True:
            try:
                async with asyncio.timeout(DISCONNECT_POLL_S):
                    update = await updates.get()
            except TimeoutError:
                update = Update()
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + DISCONNECT_POLL_S
                if await request.is_disconnected():
                    return
            if update.error is not None:
                raise update.error
            if update.text or update.finish is not None:
                yield update
            if update.finish is not None:
                return
    finally:
        job.cancel()


async def whole_answer(updates: AsyncIterator[Update], job: Job, form: Answer) -> Response:
    texts = []
    async for update in updates:
        texts.append(update.text)
        if update.finish is not None:
            return JSONResponse(form.whole("".join(texts), update.finish, job.n_tokens))
    # The response is not read: the client has disconnected.
    return Response(status_code=499)


async def events(
    first: Update | None, rest: AsyncIterator[Update], job: Job, form: Answer, *, usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; a failure in the middle is one more event, because the status is out already."""
    try:
        if first is not None:
            yield event(form.chunk(first.text, first.finish, first=True))
        async for update in rest:
            yield event(form.chunk(update.text, update.finish, first=False))
        if usage:
            yield event(form.usage_chunk(job.n_tokens))
        yield event("[DONE]")
    except ServingError as error:
        yield event(error.body())
    finally:
        job.cancel()
