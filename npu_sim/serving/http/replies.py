"""How a generation becomes an HTTP response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from npu_sim.serving.http.body import wait_for_disconnect
from npu_sim.serving.http.choices import Generation
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.gate import Call
from npu_sim.serving.request import Update, Usage

_DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """Puts updates into the form of one of the API's endpoints."""

    @property
    def prompts(self) -> Sequence[int]:
        """The first choice of each prompt, since a prompt's tokens count once."""

    def begin(self) -> Iterable[dict[str, Any]]:
        """What a stream begins with."""

    def chunks(self, choice: int, update: Update) -> Iterable[dict[str, Any]]:
        """What a stream says of an update; also called for a whole reply, which `whole` then returns."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """What a stream ends with, if the client asked for it."""

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The reply, from all chunks so far."""


def usage_of(usages: Sequence[Usage], prompts: Sequence[int]) -> dict[str, Any]:
    """Token counts in OpenAI's form; each prompt counts once, whatever its number of choices."""
    prompt = sum(usages[choice].prompt_tokens for choice in prompts)
    new = sum(usage.new_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(usages[choice].cached_tokens for choice in prompts)},
    }


async def reply(
    request: Request, start: Callable[[], Generation], writer: Writer, *, stream: bool, with_usage: bool
) -> Response:
    """The response to a request.

    Args:
        start: Hands the request to the engine. What it returns is closed, however the request ends.

    Raises:
        APIError: the generation failed before its response began.
    """
    call: Call = request.scope["state"]["call"]
    generation = start()
    if stream:
        return _EventStream(generation, writer, call, with_usage)
    try:
        await _until_disconnect(request, _collect(generation, writer))
        return JSONResponse(writer.whole(usage_of(generation.usages, writer.prompts)))
    finally:
        generation.close()
        _note(call, generation)


async def _collect(generation: Generation, writer: Writer) -> None:
    async for choice, update in generation.updates():
        for _ in writer.chunks(choice, update):
            pass


async def _until_disconnect(request: Request, work: Awaitable[None]) -> None:
    """Do the work, but not for a client who is gone. Raises `APIError` (499) then."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] not in done:
            raise APIError(499, "the client closed the connection")
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _EventStream(StreamingResponse):
    """Chunks as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: Writer, call: Call, with_usage: bool) -> None:
        self._generation, self._call = generation, call
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(generation, writer, call, with_usage), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Also where the client is gone before the first event, so that the events' own `finally` would never run.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
            _note(self._call, self._generation)


async def _events(generation: Generation, writer: Writer, call: Call, with_usage: bool) -> AsyncIterator[bytes]:
    for chunk in writer.begin():
        yield _event(chunk)
    try:
        async for choice, update in generation.updates():
            for chunk in writer.chunks(choice, update):
                yield _event(chunk)
    except APIError as error:
        call.fields["error"] = error.message
        yield _event(error.content)
        return
    if with_usage:
        yield _event(writer.usage_chunk(usage_of(generation.usages, writer.prompts)))
    yield _DONE


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _note(call: Call, generation: Generation) -> None:
    """Token counts for the log."""
    usages = generation.usages
    call.fields["prompt_tokens"] = max((usage.prompt_tokens for usage in usages), default=0)
    call.fields["cached_tokens"] = max((usage.cached_tokens for usage in usages), default=0)
    call.fields["new_tokens"] = sum(usage.new_tokens for usage in usages)
