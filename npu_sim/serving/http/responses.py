"""`/v1/responses`: OpenAI's Responses API on top of the chat endpoint, with responses kept to be continued later.

Its stream is a sequence of events, each with a type and a number
(https://platform.openai.com/docs/api-reference/responses-streaming).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.response_schemas import ResponsesRequest, add_call, characters
from npu_sim.serving.http.schemas import ChatRequest, Message
from npu_sim.serving.http.service import Service
from npu_sim.serving.http.tools import CallParser, ParsedCall
from npu_sim.serving.request import Update

MOST_KEPT = 1024
MOST_CHARACTERS = 32 << 20


@dataclass(frozen=True)
class KeptResponse:
    """A response that a later request may continue.

    Attributes:
        messages: The conversation including this response, without instructions, which hold for a single response.
        reply: The response as JSON.
    """

    messages: tuple[Message, ...]
    reply: Mapping[str, Any]
    size: int


class KeptResponses:
    """Responses by id, each visible only to the API key that made it. Several threads may use it at once.

    Beyond a number of responses or of characters, the least recently used ones are dropped. Messages shared by several
    responses of a conversation are counted for each.

    Args:
        most: Maximum number of responses.
        characters: Maximum total number of characters.
    """

    def __init__(self, most: int = MOST_KEPT, characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, characters
        self._kept: OrderedDict[tuple[str, str], KeptResponse] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def keep(self, tenant: str, identity: str, messages: Sequence[Message], reply: Mapping[str, Any]) -> None:
        """Keep a response until it has to make room for others."""
        kept = KeptResponse(tuple(messages), reply, characters(messages))
        with self._lock:
            self._kept[tenant, identity] = kept
            self._characters += kept.size
            while self._kept and (len(self._kept) > self._most or self._characters > self._most_characters):
                self._characters -= self._kept.popitem(last=False)[1].size

    def find(self, tenant: str, identity: str, param: str | None = None) -> KeptResponse:
        """The kept response with that id. Raises `APIError` (404) if there is none.

        `param` names the wrong parameter in that error; None: no parameter.
        """
        with self._lock:
            if (tenant, identity) not in self._kept:
                message = f"there is no response '{identity}' here; it was not stored, or dropped for later ones"
                raise APIError(404, message, param=param, code="response_not_found")
            self._kept.move_to_end((tenant, identity))
            return self._kept[tenant, identity]

    def drop(self, tenant: str, identity: str) -> None:
        """Forget a response. Raises `APIError` (404) if it is not kept."""
        self.find(tenant, identity)
        with self._lock:
            if dropped := self._kept.pop((tenant, identity), None):
                self._characters -= dropped.size


class ResponseWriter:
    """The `Writer` of `/v1/responses`.

    Args:
        earlier: Messages of the conversation that the response continues.
    """

    done = b""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        chat: ChatRequest,
        earlier: Sequence[Message],
        kept: KeptResponses,
        tenant: str,
    ) -> None:
        self._body, self._earlier, self._kept, self._tenant = body, earlier, kept, tenant
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        names = [function.name for function in chat.offered]
        self._parser = CallParser(service.model.text.tool_format, names, only_calls=chat.must_call)
        self._output: list[dict[str, Any]] = []  # items that have ended
        self._message: str | None = None  # the id of the message that is being written
        self._text: list[str] = []  # its pieces
        self._reason: str | None = None
        self._events = 0
        self.prompts: Sequence[int] = (0,)

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def chunks(self, choice: int, update: Update) -> Iterator[dict[str, Any]]:
        content, calls = self._parser.push(update.text)
        if update.finish_reason is not None:
            rest, last = self._parser.flush()
            content, calls, self._reason = content + rest, calls + last, update.finish_reason
        if content or (update.finish_reason is not None and not calls and not self._output):
            yield from self._write(content)
        for call in calls:
            yield from self._end_message()
            yield from self._call(call)
        if update.finish_reason is not None:
            yield from self._end_message()

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        reply = self.whole(usage)
        return self._event(f"response.{reply['status']}", response=reply)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        reply = self._response("incomplete" if self._reason == "length" else "completed", usage)
        if self._body.store is not False:
            messages = [*self._earlier, *self._body.messages]
            for item in self._output:
                if item["type"] == "message":
                    messages.append(Message(role="assistant", content=item["content"][0]["text"]))
                else:
                    add_call(messages, item["call_id"], item["name"], item["arguments"])
            self._kept.keep(self._tenant, self._id, messages, reply)
        return reply

    def failure(self, error: APIError) -> dict[str, Any]:
        failed = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": failed})

    def _write(self, content: str) -> Iterator[dict[str, Any]]:
        """The events for new text. They begin a message unless one has begun."""
        if self._message is None:
            self._message, self._text = f"msg_{uuid.uuid4().hex}", []
            item = {**self._message_item("in_progress"), "content": []}
            yield self._of_item("response.output_item.added", item=item)
            yield self._of_part("response.content_part.added", part=_part(""))
        if content:
            self._text.append(content)
            yield self._of_part("response.output_text.delta", delta=content, logprobs=[])

    def _end_message(self) -> Iterator[dict[str, Any]]:
        if self._message is None:
            return
        item = self._message_item("incomplete" if self._reason == "length" else "completed")
        part = item["content"][0]
        yield self._of_part("response.output_text.done", text=part["text"], logprobs=[])
        yield self._of_part("response.content_part.done", part=part)
        yield self._of_item("response.output_item.done", item=item)
        self._output.append(item)
        self._message = None

    def _call(self, call: ParsedCall) -> Iterator[dict[str, Any]]:
        """The events for a function call, which is written all at once."""
        identity = f"fc_{uuid.uuid4().hex}"
        item = {"id": identity, "type": "function_call", "call_id": call.id, "name": call.name}
        yield self._of_item("response.output_item.added", item={**item, "arguments": "", "status": "in_progress"})
        place = {"item_id": identity, "output_index": len(self._output)}
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._of_item("response.output_item.done", item=item)
        self._output.append(item)

    def _message_item(self, status: str) -> dict[str, Any]:
        content = [_part("".join(self._text))]
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": content}

    def _of_item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._output), item=item)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._message, "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response as JSON in its present state."""
        body = self._body
        given = body.model_dump(by_alias=True, exclude={"input", "stream"})
        defaults = {
            "parallel_tool_calls": True,
            "store": True,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
        }
        return {
            **given,
            **{name: value for name, value in defaults.items() if given[name] is None},
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [*self._output],
            "usage": None if usage is None else _usage(usage),
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Token counts under the names that the Responses API uses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
