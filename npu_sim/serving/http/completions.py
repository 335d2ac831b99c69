"""`/v1/completions`: makes requests to the engine from plain prompts, and OpenAI's replies from their updates."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from npu_sim.serving.http.chat import scored_prompt
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.replies import ChunkWriter
from npu_sim.serving.http.schemas import CompletionRequest
from npu_sim.serving.http.service import Service
from npu_sim.serving.request import Request, TokenLogprobs, Update

_DEFAULT_NEW_TOKENS = 16
_MOST_PROMPTS = 128


def completion_requests(service: Service, body: CompletionRequest, tenant: str) -> list[Request]:
    """The requests to the engine, one for each choice (alternative reply) of each prompt.

    Raises:
        APIError: a prompt holds unknown token ids, or prompt and reply are too long for the context or the limits.
    """
    wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
    scored = max((number for number in wanted if number is not None), default=None)
    requests = []
    for number, prompt in enumerate(_prompts(service, body)):
        most = service.check_lengths(prompt, body.max_tokens, "prompt")
        if body.max_tokens is None:
            most = min(most, _DEFAULT_NEW_TOKENS)
        requests += [
            Request(
                prompt=tuple(prompt),
                max_new_tokens=most,
                sampling=body.sampling(number * body.drawn + choice, service.model.text.sampling),
                **body.ends,
                logprobs=0 if body.logprobs is None and body.drawn > body.choices else body.logprobs,
                prompt_logprobs=scored,
                tenant=tenant,
                adapter=service.adapter(body.model),
                token_filter=service.model.text.guided(body.guided_regex, body.guided_grammar),
                timeout=service.limits.request_seconds,
            )
            for choice in range(body.drawn)
        ]
    return requests


def _prompts(service: Service, body: CompletionRequest) -> list[Sequence[int]]:
    """The token ids of each prompt, which the request gives as a text or as ids."""
    prompt = body.prompt
    several: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    if not 1 <= len(several) <= _MOST_PROMPTS:
        raise APIError(400, f"give 1 to {_MOST_PROMPTS} prompts, not {len(several)}", param="prompt")
    vocab = service.model.text.vocab_size
    prompts: list[Sequence[int]] = []
    for item in several:
        if isinstance(item, str):
            service.check_text(item, "prompt")
        ids = service.model.text.encode(item) if isinstance(item, str) else item
        if wrong := [token for token in ids if not 0 <= token < vocab]:
            raise APIError(400, f"the model has no token {wrong[0]}; ids are 0 to {vocab - 1}", param="prompt")
        prompts.append(ids)
    return prompts


class CompletionWriter(ChunkWriter):
    """The `Writer` of plain completions."""

    def __init__(self, service: Service, body: CompletionRequest, requests: Sequence[Request]) -> None:
        self._text = service.model.text
        self._with_usage = body.with_usage
        self._fields = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        self._echoes = [self._text.decode(request.prompt) if body.echo else "" for request in requests]
        self._texts: list[list[str]] = [[echo] for echo in self._echoes]
        self._lengths = [0 for _ in requests]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in requests]
        self._reasons: list[str | None] = [None for _ in requests]
        self._wants_logprobs = body.logprobs is not None
        self._top = body.logprobs or 0
        self._prompts = [request.prompt for request in requests]
        self._scores: list[list[TokenLogprobs]] = [[] for _ in requests]
        self._top_scores = body.prompt_logprobs
        # Choices whose prompt is to come with log probabilities, which begin their first update.
        self._unechoed = {*range(len(requests))} if body.echo and self._wants_logprobs else set[int]()
        self._is_stream = bool(body.stream)
        if self._wants_logprobs or self._top_scores is not None:
            self._text.prepare_token_bytes()
        self._likelihoods: list[list[float]] = [[] for _ in requests]  # log probabilities of tokens, for `best_of`
        self._drawn, self._kept = body.drawn, body.choices
        self.prompts: Sequence[int] = range(0, len(requests), body.drawn)

    def begin(self) -> Iterator[dict[str, Any]]:
        for choice, echo in enumerate(self._echoes):
            if echo and choice not in self._unechoed:
                yield self._chunk(choice, echo)

    def chunks(self, choice: int, update: Update) -> Iterator[dict[str, Any]]:
        self._reasons[choice] = update.finish_reason
        self._scores[choice] += update.prompt_logprobs
        if choice in self._unechoed:
            self._unechoed.remove(choice)
            prompt = self._prompt_chunk(choice, update.prompt_logprobs)
            self._logprobs[choice].append(prompt)
            yield self._chunk(choice, self._echoes[choice], prompt)
        self._likelihoods[choice] += [entry.logprob for entry in update.logprobs]
        shown = self._wants_logprobs and update.logprobs
        logprobs = self._logprobs_chunk(choice, update.logprobs) if shown else None
        if not self._is_stream:
            self._texts[choice].append(update.text)
            self._logprobs[choice] += [] if logprobs is None else [logprobs]
        if update.text or logprobs or update.finish_reason:
            yield self._chunk(choice, update.text, logprobs, update.finish_reason)

    def _prompt_chunk(self, choice: int, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The log probabilities of a prompt's tokens, the first of which has none, in the form of `/v1/completions`."""
        first = self._shown(self._prompts[choice][0])
        self._lengths[choice] = len(first)
        begun = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        rest = self._logprobs_chunk(choice, scores)
        return {name: begun[name] + rest[name] for name in begun}

    def _logprobs_chunk(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log probabilities in the form of `/v1/completions`.

        The offset of a token is the number of characters of all tokens before it.
        """
        tokens = [self._shown(entry.token) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._lengths[choice])
            self._lengths[choice] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._shown(token): value for token, value in entry.top[: self._top]} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _shown(self, token: int) -> str:
        """A token's text, or, like OpenAI's API, its bytes if these are not whole characters."""
        data = self._text.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        item = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        chunk = {"object": "text_completion", **self._fields, "choices": [item]}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {"object": "text_completion", **self._fields, "choices": [], "usage": usage}

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": "".join(self._texts[choice]),
                "logprobs": self._joined(choice) if self._wants_logprobs else None,
                "finish_reason": self._reasons[choice],
                **self._scored(choice),
            }
            for index, choice in enumerate(self._best())
        ]
        return {"object": "text_completion", **self._fields, "choices": choices, "usage": usage}

    def _scored(self, choice: int) -> dict[str, Any]:
        """The field of a choice for the log probabilities of its prompt, if the request asks for them."""
        if self._top_scores is None:
            return {}
        scores = [replace(score, top=score.top[: self._top_scores]) for score in self._scores[choice]]
        return {"prompt_logprobs": scored_prompt(self._text, scores)}

    def _best(self) -> list[int]:
        """Numbers of the choices to return: for each prompt, those with the highest mean log probability of a token."""

        def likelihood(choice: int) -> float:
            values = self._likelihoods[choice]
            return sum(values) / len(values) if values else 0.0

        groups = [range(first, first + self._drawn) for first in self.prompts]
        if self._drawn == self._kept:
            return [choice for group in groups for choice in group]
        return [choice for group in groups for choice in sorted(group, key=likelihood, reverse=True)[: self._kept]]

    def _joined(self, choice: int) -> dict[str, Any]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [item for part in self._logprobs[choice] for item in part[name]] for name in names}
