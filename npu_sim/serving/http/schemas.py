"""The bodies of requests in OpenAI's API. Unknown parameters are refused unless the server is told to ignore them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from npu_sim.serving.http.errors import APIError, unsupported
from npu_sim.serving.request import SamplingSettings

NonEmpty = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
# A long array may be wrong at every place; the first says enough, and a report of millions would take minutes.
Array = Annotated[list[Item], Field(fail_fast=True)]
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
Bias = Annotated[float, Field(ge=-100, le=100)]

# Parameters that clients send by default, and the values that ask for nothing beyond what this server does.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "include": ([],),
    "background": (False,),
}


class Body(BaseModel):
    """A JSON object in which unknown fields are refused. An optional field that is None was not sent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool = False


class _Sampled(Body):
    """Fields that chats and completions share: how tokens are sampled and when a reply ends."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    stop_token_ids: Annotated[Array[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    guided_regex: NonEmpty | None = None
    guided_grammar: NonEmpty | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: NonEmpty | Annotated[Array[NonEmpty], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is for 'stream': true")
        if self.guided_regex is not None and self.guided_grammar is not None:
            raise ValueError("'guided_regex' and 'guided_grammar' exclude each other")
        if wrong := [token for token in self.logit_bias or () if not token.isascii() or not token.isdigit()]:
            raise ValueError(f"'logit_bias' names {wrong[0]!r:.40}, which is no token id")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """Whether a stream should end with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int, defaults: Mapping[str, float]) -> SamplingSettings:
        """The sampling settings of one choice. Each choice has another seed, so that replies differ.

        Args:
            defaults: Settings of the checkpoint's generation config, for those that the request leaves out.
        """

        def chosen(name: str, otherwise: Any = None) -> Any:
            own = getattr(self, name)
            return defaults.get(name, otherwise) if own is None else own

        top_p = chosen("top_p")
        return SamplingSettings(
            float(chosen("temperature", 1.0)),
            chosen("top_k"),
            None if top_p == 1 else top_p,
            None if self.seed is None else (self.seed + choice) % 2**64,
            self.repetition_penalty,
            self.presence_penalty or 0.0,
            self.frequency_penalty or 0.0,
            chosen("min_p"),
            chosen("typical_p"),
            tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            self.min_tokens or 0,
        )

    @property
    def ends(self) -> dict[str, Any]:
        """The fields of an engine's `Request` that say when the sequence ends."""
        return {
            "stop": self.stops,
            "stop_token_ids": frozenset(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
        }


class CompletionRequest(_Sampled):
    """The body of `/v1/completions`."""

    prompt: str | Array[str] | Array[int] | Array[Array[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _best_of_fits(self) -> CompletionRequest:
        if self.drawn < self.choices:
            raise ValueError("'best_of' must be at least 'n'")
        if self.drawn > self.choices and self.stream:
            raise ValueError("'best_of' needs whole replies; leave out 'stream'")
        return self

    @property
    def drawn(self) -> int:
        """Number of replies generated for each prompt; the `choices` most probable of them are returned."""
        return self.choices if self.best_of is None else self.best_of


class TokenizeRequest(Body):
    """The body of `/tokenize`: a plain text, or a chat to be written by the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Array[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Body):
    """The body of `/detokenize`: token ids."""

    model: str | None = None
    tokens: Array[Annotated[int, Field(ge=0)]]


class TextPart(Body):
    """A part of a message's content that is a text."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The name of the function that a tool call names, and its arguments as JSON text."""

    name: NonEmpty
    arguments: str


class ToolCall(Body):
    """A call that the model made in an earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Array[TextPart] | None = None
    name: str | None = None
    tool_calls: Array[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """An entry of `tools`: a function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The function that `tool_choice` names."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that names the function which the model has to call."""

    type: Literal["function"]
    function: FunctionName


class JSONSchema(Body):
    """A JSON schema that the reply has to follow, and its name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the reply: plain text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' is for type 'json_schema', which needs it")
        return self


class ChatRequest(_Sampled):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[Array[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[Array[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, bool | int | str] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _parameters_fit_each_other(self) -> ChatRequest:
        asks = self.tools or (self.response_format is not None and self.response_format.type != "text")
        if asks and (self.guided_regex or self.guided_grammar) is not None:
            raise ValueError("'guided_regex' and 'guided_grammar' exclude 'tools' and 'response_format'")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' is for 'logprobs': true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("'tool_choice' needs 'tools'")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in self.tool_names:
            raise ValueError(f"'tool_choice' names '{self.tool_choice.function.name}', which is not among 'tools'")
        if len(set(self.tool_names)) != len(self.tool_names):
            raise ValueError("two of 'tools' have the same name")
        return self

    @property
    def template_values(self) -> dict[str, bool | int | str]:
        """Values for the variables of the model's chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def tool_names(self) -> list[str]:
        return [tool.function.name for tool in self.tools or ()]

    @property
    def offered(self) -> list[Function]:
        """The functions that the model may call in this reply."""
        functions = [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


Parsed = TypeVar("Parsed", bound=Body)


def parse(kind: type[Parsed], data: Any, lenient: bool = False) -> Parsed:
    """The object of class `kind` for a body's JSON.

    Args:
        lenient: Whether to ignore all parameters that are not fields of `kind`. Otherwise those that have no effect
            here are ignored, such as `store: false`, and others are errors. Values of fields are always checked.

    Raises:
        APIError: 400, with the name of the first parameter that is wrong.
    """
    if not isinstance(data, dict):
        raise APIError(400, f"the body must be a JSON object, not {_json_type(data)}")
    if lenient:
        data = {name: value for name, value in data.items() if name in kind.model_fields}
    known = kind.model_fields
    data = {name: value for name, value in data.items() if name in known or not _has_no_effect(name, value)}
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_of(error, data) from None


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a body for /openapi.json.

    FastAPI cannot derive it, since routes read their bodies themselves, after the limits have been checked.
    """
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def _has_no_effect(name: str, value: Any) -> bool:
    if name not in _WITHOUT_EFFECT:
        return False
    if value is None or any(value == neutral and type(value) is not bool for neutral in _WITHOUT_EFFECT[name]):
        return True
    if value is False and False in _WITHOUT_EFFECT[name]:
        return True
    raise unsupported(name)


def _first_of(error: ValidationError, data: dict[str, Any]) -> APIError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union's members, the one that fits best is that which is wrong in the deepest place. A parameter that is
    # unknown there may only belong to another kind, which the other errors tell.
    order = [(item["type"] == "extra_forbidden", _path_in(data, item), item) for item in problems]
    unknown, keys, first = max(order, key=lambda item: (item[0] and len(item[1]) == 1, not item[0], len(item[1])))
    path = ".".join(map(str, keys))
    if unknown:
        return APIError(400, f"unknown parameter '{path}'", param=path, code="unknown_parameter")
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return APIError(400, f"'{path}': {message}" if path else message, param=path or None)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return APIError(400, f"invalid '{path}': {message}", param=path, code=code)


def _path_in(data: Any, error: ErrorDetails) -> list[int | str]:
    """The path of an error through the client's data, with the name of a missing field at its end.

    Other parts of the error's location are names of our classes, which the client does not know.
    """
    path: list[int | str] = []
    for key in error["loc"]:
        index = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if index or (isinstance(data, dict) and key in data):
            data = data[key]
            path.append(key)
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
