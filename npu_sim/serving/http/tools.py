r"""Tool calls: how a model is told of the functions that it may call, writes a call, and how its text is parsed.

A model's own chat template says how it writes calls. There are two forms among the supported families:

- Hermes, which Qwen models use: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, as often as there
  are calls, in the middle of text (https://github.com/NousResearch/Hermes-Function-Calling);
- Llama 3: the whole reply is `{"name": ..., "parameters": {...}}`
  (https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md).

For a template that does not handle tools, the Hermes form is explained to the model in a system message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_sim.serving.http.grammar import call_rules
from npu_sim.serving.http.schemas import Function, Message

_BEGIN, _END = "<tool_call>", "</tool_call>"
_EXPLANATION = """\
You may call one or more functions to assist with the user query. Here are their signatures, as JSON schemas:
<tools>
{tools}
</tools>
For each function call, write a JSON object with the function's name and arguments within XML tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


@dataclass(frozen=True)
class ParsedCall:
    """A function call in a model's reply: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model writes function calls.

    Attributes:
        begin: Text before a call; "" if a call has to be the whole reply.
        end: Text after a call.
        arguments: Key of the arguments in a call's JSON.
        native: Whether the chat template itself tells the model of functions.
    """

    begin: str
    end: str
    arguments: str
    native: bool

    def rules(self, functions: Sequence[Function], *, several: bool) -> str:
        """The grammar of a reply that calls one of the functions or, if `several`, any number of them."""
        calls = [
            (f'{self.begin}{{"name": "{function.name}", "{self.arguments}": ', function.parameters, f"}}{self.end}")
            for function in functions
        ]
        return call_rules(calls, separator="\n" if several and self.end else None)

    def read(self, text: str, names: Sequence[str]) -> ParsedCall | None:
        """The call that a text consists of; None if it is not a call of one of the functions `names`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(data, dict) or data.get("name") not in names:
            return None
        arguments = data.get(self.arguments, {})
        return ParsedCall(data["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def format_of(template: str | None) -> ToolFormat:
    """The format in which a chat template writes calls; the Hermes format if it does not handle tools.

    None stands for a model without a template.
    """
    text = template or ""
    if "tools" in text and _BEGIN in text:
        return ToolFormat(f"{_BEGIN}\n", f"\n{_END}", "arguments", native=True)
    if "tools" in text and '"parameters"' in text:
        return ToolFormat("", "", "parameters", native=True)
    return ToolFormat(f"{_BEGIN}\n", f"\n{_END}", "arguments", native=False)


def template_messages(
    messages: Sequence[Message], functions: Sequence[Function], form: ToolFormat
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and tools to hand to the chat template.

    If it does not handle tools, the tools are None and the messages describe them.
    """
    tools = [{"type": "function", "function": function.model_dump(exclude_none=True)} for function in functions]
    if form.native:
        return [_native(message) for message in messages], tools or None
    plain = [_plain(message) for message in messages]
    if tools:
        text = _EXPLANATION.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
        if plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain, None


def _native(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {"role": _role(message), "content": message.text}
    if message.tool_calls:
        result["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": name, "arguments": _arguments(text)}}
            for call in message.tool_calls
            for name, text in [(call.function.name, call.function.arguments)]
        ]
    optional: Mapping[str, str | None] = {"name": message.name, "tool_call_id": message.tool_call_id}
    return {**result, **{key: value for key, value in optional.items() if value is not None}}


def _plain(message: Message) -> dict[str, Any]:
    """A message with calls and results written as text, for a template that does not handle tools."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    calls = [
        f'{_BEGIN}\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n{_END}'
        for call in message.tool_calls or ()
    ]
    return {"role": _role(message), "content": "\n".join([*([message.text] if message.text else []), *calls])}


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _arguments(text: str) -> Any:
    """A call's arguments as an object, since templates write it as JSON themselves; the text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class CallParser:
    """Separates the function calls in a streamed reply from its text.

    Args:
        form: Format of the model's calls.
        names: The names of the functions that the model may call. If there are none, everything is text.
        only_calls: Whether the reply must consist of calls; then an incomplete call at its end is dropped, not returned
            as text.
    """

    def __init__(self, form: ToolFormat, names: Sequence[str], *, only_calls: bool = False) -> None:
        self._form = form
        self._names = names
        self._only_calls = only_calls
        self._held = ""
        self._text_seen = False
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Take new text; return the text that is certainly not part of a call, and the calls that are complete."""
        if not self._names:
            return text, []
        self._held += text
        shown, calls = self._whole_reply() if not self._form.end else self._tagged()
        return "" if self._only_calls else shown, calls

    def flush(self) -> tuple[str, list[ParsedCall]]:
        """Return the rest at the end of the reply; an incomplete call counts as text unless `only_calls`."""
        shown, calls = self._rest()
        return "" if self._only_calls else shown, calls

    def _rest(self) -> tuple[str, list[ParsedCall]]:
        held, self._held = self._held, ""
        if not self._names:
            return held, []
        body = held.strip().removeprefix(_BEGIN).removesuffix(_END)
        if (not self._form.end or held.lstrip().startswith(_BEGIN)) and (call := self._form.read(body, self._names)):
            self.calls += 1
            return "", [call]
        return ("" if self.calls and not held.strip() else held), []

    def _whole_reply(self) -> tuple[str, list[ParsedCall]]:
        start = self._held.lstrip()
        if self._text_seen or (start and not start.startswith("{")):
            self._text_seen = True
            text, self._held = self._held, ""
            return text, []
        return "", []

    def _tagged(self) -> tuple[str, list[ParsedCall]]:
        shown = ""
        calls: list[ParsedCall] = []
        while True:
            before, begin, rest = self._held.partition(_BEGIN)
            if not begin:
                safe = len(self._held) - _overlap(self._held, _BEGIN)
                # White space may be what separates text from a call, or two calls.
                safe = len(self._held[:safe].rstrip())
                shown, self._held = shown + self._held[:safe], self._held[safe:]
                return shown, calls
            body, end, after = rest.partition(_END)
            if not end:
                shown, self._held = shown + before.rstrip(), begin + rest
                return shown, calls
            call = self._form.read(body, self._names)
            if call is None:
                shown += f"{before}{begin}{body}{end}"
            else:
                shown += before.rstrip()
                calls.append(call)
                self.calls += 1
            self._held = after


def _overlap(text: str, word: str) -> int:
    """The length of the longest end of `text` with which `word` begins."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)
