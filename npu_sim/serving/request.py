"""Requests to the engine, and the updates that come back."""

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
    """One sequence to generate.

    Attributes:
        prompt: Token ids; at least one.
        max_new_tokens: Maximum number of new tokens. Default: until the context is full.
        stop_ids: Token ids that end the sequence and are not returned. Default: the model's end-of-sequence ids.
        stop: Strings that end the sequence and are not returned.
        stop_token_ids: Further token ids that end the sequence.
        ignore_eos: Whether `stop_ids` do not end the sequence.
        logprobs: If given, each token comes with its log probability and those of this many most probable ones.
        tenant: Blocks of the prefix cache are shared within a tenant only.
        adapter: Name of one of the checkpoint's adapters. None: the base alone.
        token_filter: Restricts the tokens that may come next.
        timeout: Seconds after which the request ends with an error, queueing included. Default: none.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    tenant: str = ""
    adapter: str | None = None
    token_filter: TokenFilter | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class Update:
    """New output of a request. The last one has a finish reason.

    Attributes:
        tokens: New token ids, without those that ended the sequence.
        text: New text: only whole characters, and none that could still become part of a stop string.
        error: The problem, where the finish reason is "error".
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


class RequestHandle(Protocol):
    """A request that the engine has taken: its updates, in either kind of loop, until the one with a finish reason."""

    @property
    def usage(self) -> Usage: ...

    def __iter__(self) -> Iterator[Update]: ...

    def __aiter__(self) -> AsyncIterator[Update]: ...

    def cancel(self) -> None:
        """End the request; its blocks are returned after the step under way. From any thread, any number of times."""
