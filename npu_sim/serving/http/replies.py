"""HTTP responses with generated text: a single JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from npu_sim.serving.http.body import wait_for_disconnect
from npu_sim.serving.http.choices import Choices
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.middleware import CallRecord
from npu_sim.serving.request import Update, Usage

Result = TypeVar("Result")


class Writer(Protocol):
    """An interface: puts the engine's updates into the form of one of the API's endpoints.

    Attributes:
        done: Bytes that end a stream that has not failed.
    """

    done: bytes

    @property
    def prompts(self) -> Sequence[int]:
        """Number of the first choice of each prompt, so that a prompt's tokens are counted once."""

    def begin(self) -> Iterable[dict[str, Any]]:
        """The first chunks (JSON objects) of a stream."""

    def chunks(self, choice: int, update: Update) -> Iterable[dict[str, Any]]:
        """The chunks for an update of a choice.

        Also called for a reply that is not streamed, which `whole` then returns.
        """

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the token counts, which ends a stream if the client asked for it."""

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The reply as one JSON object, from all updates so far."""

    def failure(self, error: APIError) -> dict[str, Any]:
        """The chunk that ends a stream which has failed."""


class ChunkWriter:
    """The common part of the writers for `/v1/chat/completions` and `/v1/completions`: how streams end."""

    done = b"data: [DONE]\n\n"

    def failure(self, error: APIError) -> dict[str, Any]:
        return error.content


def usage_of(usages: Sequence[Usage], prompts: Sequence[int]) -> dict[str, Any]:
    """Token counts in OpenAI's form. A prompt counts once, whatever its number of choices."""
    prompt = sum(usages[choice].prompt_tokens for choice in prompts)
    new = sum(usage.new_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(usages[choice].cached_tokens for choice in prompts)},
    }


async def reply(
    request: Request, start: Callable[[], Choices], writer: Writer, *, stream: bool, with_usage: bool
) -> Response:
    """Compute the response to a request, streamed or whole.

    Args:
        start: Hands the request to the engine and returns its choices, which are closed however the request ends.

    Raises:
        APIError: the generation failed before its response began.
    """
    call: CallRecord = request.scope["state"]["call"]
    choices = start()
    if stream:
        return _EventStream(choices, writer, call, with_usage)
    try:
        await until_disconnect(request, _collect(choices, writer))
        return JSONResponse(writer.whole(usage_of(choices.usages, writer.prompts)))
    finally:
        choices.close()
        _note(call, choices)


async def _collect(choices: Choices, writer: Writer) -> None:
    async for choice, update in choices.updates():
        for _ in writer.chunks(choice, update):
            pass


async def until_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """The result of an awaitable, which is cancelled if the client disconnects. Raises `APIError` (499) then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request))
    try:
        done, _ = await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working not in done:
            raise APIError(499, "the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _EventStream(StreamingResponse):
    """A response of chunks as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    media_type = "text/event-stream"

    def __init__(self, choices: Choices, writer: Writer, call: CallRecord, with_usage: bool) -> None:
        self._choices, self._call = choices, call
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(choices, writer, call, with_usage), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Also where the client is gone before the first event, so that the events' own `finally` would never run.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.close()
            _note(self._call, self._choices)


async def _events(choices: Choices, writer: Writer, call: CallRecord, with_usage: bool) -> AsyncIterator[bytes]:
    for chunk in writer.begin():
        yield _event(chunk)
    try:
        async for choice, update in choices.updates():
            for chunk in writer.chunks(choice, update):
                yield _event(chunk)
    except APIError as error:
        call.fields["error"] = error.message
        yield _event(writer.failure(error))
        return
    if with_usage:
        yield _event(writer.usage_chunk(usage_of(choices.usages, writer.prompts)))
    yield writer.done


def _event(chunk: dict[str, Any]) -> bytes:
    """The bytes of a chunk as an event, with the type of the chunk if it has one."""
    name = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    return name + b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _note(call: CallRecord, choices: Choices) -> None:
    """Add the token counts to the request's log entry."""
    usages = choices.usages
    call.fields["prompt_tokens"] = max((usage.prompt_tokens for usage in usages), default=0)
    call.fields["cached_tokens"] = max((usage.cached_tokens for usage in usages), default=0)
    call.fields["new_tokens"] = sum(usage.new_tokens for usage in usages)
