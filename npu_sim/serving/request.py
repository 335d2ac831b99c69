"""Requests to the engine, and the updates that it returns."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from npu_sim.llm.engine.choosing import GRAMMAR_FAILED
from npu_sim.llm.engine.sequence import FinishReason, TokenFilter, TokenLogprobs
from npu_sim.llm.sampling import SamplingSettings

__all__ = [
    "GRAMMAR_FAILED",
    "FinishReason",
    "Request",
    "RequestHandle",
    "SamplingSettings",
    "TokenFilter",
    "TokenLogprobs",
    "Update",
    "Usage",
]


@dataclass(frozen=True)
class Request:
    """A sequence to generate: a prompt, and how to continue it.

    Attributes:
        prompt: Token ids; at least one.
        max_new_tokens: Maximum number of new tokens; 0: only the prompt is computed. None: until the context is full.
        stop_ids: Token ids that end the sequence and are not returned. None: the model's end-of-sequence ids.
        stop: Strings that end the sequence and are not returned.
        stop_token_ids: Further token ids that end the sequence.
        ignore_eos: Whether `stop_ids` do not end the sequence.
        logprobs: Number of the most probable tokens whose log probabilities come with each new token, beside its own.
            None: no log probabilities come.
        prompt_logprobs: The same number for each token of the prompt after its first. The prompt is then computed as a
            whole, without the prefix cache. None: no log probabilities of the prompt come.
        tenant: Name of the client; blocks of the prefix cache are shared only between requests of the same tenant.
        adapter: Name of one of the checkpoint's LoRA adapters. None: the base model without an adapter.
        token_filter: Grammar that restricts the tokens that may come next. None: any token may come.
        timeout: Seconds after which the request ends with an error, including the time in the queue. None: no limit.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tenant: str = ""
    adapter: str | None = None
    token_filter: TokenFilter | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class Update:
    """New output of a request. The last update has a finish reason.

    Attributes:
        tokens: New token ids, without those that ended the sequence.
        text: New text: only whole characters, and none that could still become part of a stop string.
        error: The problem if the finish reason is "error", else None.
        finish_reason: The reason why the request has ended. None: it goes on.
        prompt_logprobs: Log probabilities of the prompt's tokens after the first; in the first update, if wanted.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


class RequestHandle(Protocol):
    """A request that the engine has taken: an iterator of its updates, for a thread or an event loop."""

    @property
    def usage(self) -> Usage: ...

    def __iter__(self) -> Iterator[Update]: ...

    def __aiter__(self) -> AsyncIterator[Update]: ...

    def cancel(self) -> None:
        """End the request; its blocks are released after the step that is running.

        Any thread may call it, and several times.
        """
