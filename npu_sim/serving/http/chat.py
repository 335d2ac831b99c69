"""`/v1/chat/completions`: makes requests to the engine from a chat, and OpenAI's replies from their updates."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from npu_sim.serving.http.grammar import json_rules
from npu_sim.serving.http.replies import ChunkWriter
from npu_sim.serving.http.schemas import ChatRequest
from npu_sim.serving.http.service import Service
from npu_sim.serving.http.text import ModelText
from npu_sim.serving.http.tools import CallParser, ParsedCall, template_messages
from npu_sim.serving.request import Request, TokenFilter, TokenLogprobs, Update


def chat_requests(service: Service, body: ChatRequest, tenant: str, param: str = "messages") -> list[Request]:
    """The requests to the engine for a chat, one for each of its choices (alternative replies).

    Args:
        param: Name of the parameter with the messages, for errors.

    Raises:
        APIError: prompt and reply are too long for the context or the limits.
        InputError: the chat template rejects the messages, or a JSON schema cannot be used.
    """
    text = service.model.text
    messages, tools = template_messages(body.messages, body.offered, text.tool_format)
    conversation = text.chat_text(messages, tools, body.template_values)
    service.check_text(conversation, param)
    prompt = text.encode_chat(conversation)
    most = service.check_lengths(prompt, body.max_completion_tokens or body.max_tokens, param)
    return [
        Request(
            prompt=tuple(prompt),
            max_new_tokens=most,
            sampling=body.sampling(choice, service.model.text.sampling),
            **body.ends,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=None if choice else body.prompt_logprobs,
            tenant=tenant,
            adapter=service.adapter(body.model),
            token_filter=_filter(text, body),
            timeout=service.limits.request_seconds,
        )
        for choice in range(body.choices)
    ]


def _filter(text: ModelText, body: ChatRequest) -> TokenFilter | None:
    """The grammar that the reply must follow; None if any text is allowed.

    If the reply has to be JSON and tools are offered, it may also be calls of these.
    """
    if body.must_call:
        rules = text.tool_format.rules(body.offered, several=_several(body))
        return text.grammars.filter(rules)
    if guided := text.guided(body.guided_regex, body.guided_grammar):
        return guided
    if body.response_format is None or body.response_format.type == "text":
        return None
    wanted = body.response_format.json_schema
    rules = json_rules({"type": "object"} if wanted is None else wanted.schema_)
    if body.offered:
        calls = text.tool_format.rules(body.offered, several=_several(body))
        rules = f"start: calls | reply\n{calls.replace('start:', 'calls:', 1)}{rules.replace('start:', 'reply:', 1)}"
    return text.grammars.filter(rules)


def _several(body: ChatRequest) -> bool:
    return body.parallel_tool_calls is not False and isinstance(body.tool_choice, str | None)


class ChatWriter(ChunkWriter):
    """The `Writer` of chat replies."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self._text = service.model.text
        self._with_usage = body.with_usage
        self._fields = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        names = [function.name for function in body.offered]
        form, forced = self._text.tool_format, body.must_call
        self._parsers = [CallParser(form, names, only_calls=forced) for _ in range(body.choices)]
        self._contents: list[list[str]] = [[] for _ in self._parsers]
        self._calls: list[list[ParsedCall]] = [[] for _ in self._parsers]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in self._parsers]
        self._reasons: list[str | None] = [None for _ in self._parsers]
        self._wants_logprobs = bool(body.logprobs)
        self._is_stream = bool(body.stream)
        self._scores: list[TokenLogprobs] = []  # of the prompt, which all choices have in common
        self._wants_scores = body.prompt_logprobs is not None
        if self._wants_logprobs or self._wants_scores:
            self._text.prepare_token_bytes()
        self.prompts: Sequence[int] = (0,)

    def begin(self) -> Iterator[dict[str, Any]]:
        for choice in range(len(self._parsers)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def chunks(self, choice: int, update: Update) -> Iterator[dict[str, Any]]:
        self._scores += update.prompt_logprobs
        parser = self._parsers[choice]
        content, calls = parser.push(update.text)
        if update.finish_reason is not None:
            rest, last = parser.flush()
            content, calls = content + rest, calls + last
            self._reasons[choice] = "tool_calls" if parser.calls else update.finish_reason
        entries = [logprob_entry(self._text, item) for item in update.logprobs]
        first = len(self._calls[choice])
        self._calls[choice] += calls
        if not self._is_stream:
            self._contents[choice].append(content)
            self._logprobs[choice] += entries
        if content or entries:
            yield self._chunk(choice, {"content": content}, entries)
        for index, call in enumerate(calls, first):
            yield self._chunk(choice, {"tool_calls": [{"index": index, **call.as_json()}]})
        if update.finish_reason is not None:
            yield self._chunk(choice, {}, reason=self._reasons[choice])

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        described = {"content": logprobs} if logprobs else None
        item = {"index": choice, "delta": delta, "logprobs": described, "finish_reason": reason}
        chunk = {"object": "chat.completion.chunk", **self._fields, "choices": [item]}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {"object": "chat.completion.chunk", **self._fields, "choices": [], "usage": usage}

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in range(len(self._parsers))]
        reply = {"object": "chat.completion", **self._fields, "choices": choices, "usage": usage}
        return {**reply, "prompt_logprobs": scored_prompt(self._text, self._scores)} if self._wants_scores else reply

    def _choice(self, choice: int) -> dict[str, Any]:
        content, calls = "".join(self._contents[choice]), self._calls[choice]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        logprobs = {"content": self._logprobs[choice], "refusal": None} if self._wants_logprobs else None
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": self._reasons[choice]}


def logprob_entry(text: ModelText, logprobs: TokenLogprobs) -> dict[str, Any]:
    """A token's log probability in the form in which chat replies have it."""
    top = [_token(text, token, value) for token, value in logprobs.top]
    return {**_token(text, logprobs.token, logprobs.logprob), "top_logprobs": top}


def scored_prompt(text: ModelText, scores: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """The log probabilities of a prompt's tokens in the form of vLLM's `prompt_logprobs`.

    The first token, of which `scores` says nothing, has none. All others have those of the most probable tokens and
    their own, by token id.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text.token_bytes(token).decode(errors="replace")}

    prompt: list[dict[str, Any] | None] = [None]
    for score in scores:
        best = {str(token): entry(token, value, rank) for rank, (token, value) in enumerate(score.top, 1)}
        prompt.append({**best, str(score.token): entry(score.token, score.logprob, score.rank)})
    return prompt


def _token(text: ModelText, token: int, logprob: float) -> dict[str, Any]:
    data = text.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
