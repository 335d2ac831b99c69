"""The body of `/v1/responses`, and its translation to a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from npu_sim.serving.http.schemas import (
    Array,
    Body,
    ChatRequest,
    Function,
    FunctionCall,
    Message,
    NonEmpty,
    ToolCall,
    parse,
)


class _Part(Body):
    """A part of an item's content that is a text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(Body):
    """Base of input items. Its fields are present in items copied from an earlier response, and are ignored."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """An input item that is a message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Array[_Part]
    phase: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class CallItem(_Item):
    """An input item that is a function call which the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: NonEmpty
    arguments: str


class ResultItem(_Item):
    """An input item that is the result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Array[_Part]

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


InputItem = MessageItem | CallItem | ResultItem


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(Body):
    """A `tool_choice` that names the function which the model has to call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The format of the reply: plain text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The options of the reply's text: its format."""

    format: TextFormat | None = None


class Reasoning(Body):
    """The effort of reasoning, for chat templates with such a variable."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesRequest(Body):
    """The body of `/v1/responses`."""

    model: str
    input: str | Array[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Array[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _input_is_some(self) -> ResponsesRequest:
        if not self.input:
            raise ValueError("'input' is empty; give a text or at least one item")
        return self

    @property
    def messages(self) -> list[Message]:
        """The input as messages of a chat; consecutive function calls become one message."""
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[Message] = []
        for item in items:
            if isinstance(item, CallItem):
                add_call(messages, item.call_id, item.name, item.arguments)
            elif isinstance(item, ResultItem):
                messages.append(Message(role="tool", content=item.text, tool_call_id=item.call_id))
            else:
                messages.append(Message(role=item.role, content=item.text))
        return messages

    def chat(self, earlier: Sequence[Message]) -> ChatRequest:
        """The request as a request of the chat endpoint.

        Args:
            earlier: Messages of the conversation that the request continues.

        Raises:
            APIError: the request's parameters contradict each other.
        """
        system = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        choice = self.tool_choice
        fields = {
            "model": self.model,
            "messages": [message.model_dump() for message in (*system, *earlier, *self.messages)],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._format(),
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_choice(choice) if isinstance(choice, FunctionChoice) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        return parse(ChatRequest, {name: value for name, value in fields.items() if value is not None})

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        schema = {"name": form.name or "reply", "schema": form.schema_ or {}, "strict": form.strict}
        return {"type": form.type, "json_schema": schema}


def add_call(messages: list[Message], identity: str, name: str, arguments: str) -> None:
    """Add a function call to the last message if that is the model's, else as a new message."""
    call = ToolCall(id=identity, function=FunctionCall(name=name, arguments=arguments))
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        messages.append(last.model_copy(update={"tool_calls": [*(last.tool_calls or []), call]}))
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_choice(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def characters(messages: Sequence[Message]) -> int:
    """Length of messages as JSON, which is about the memory that they take."""
    return sum(len(json.dumps(message.model_dump(), ensure_ascii=False)) for message in messages)
