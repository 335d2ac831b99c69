"""What a user asks of the engine, and what comes back."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "cancelled", "error"]
GRAMMAR_FAILED = "the output cannot follow its grammar"  # begins the error of a request whose grammar is to blame


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen, as in `npu_sim.llm.make_sampler`.

    Attributes:
        repetition_penalty: See `npu_sim.llm.sampling.penalized`. Default: that of the engine's checkpoint.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None


class TokenFilter(Protocol):
    """A grammar: which tokens may come next. One object per request."""

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab]: whether each token may come next."""

    def advance(self, token: int) -> None:
        """Take a chosen token."""


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: Token ids; at least one.
        max_new_tokens: Maximum number of new tokens. Default: until the context is full.
        stop_ids: Token ids that end the sequence and are not returned. Default: the model's end-of-sequence ids.
        stop: Strings that end the sequence and are not returned.
        logprobs: If given, each token comes with its log probability and those of this many most probable ones.
        tenant: Blocks of the prefix cache are shared within a tenant only.
        token_filter: Restricts the tokens that may come next.
        timeout: Seconds after which the request ends with an error, queueing included. Default: none.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    tenant: str = ""
    token_filter: TokenFilter | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability (natural) of a chosen token before temperature, top-k and top-p, and of the best others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Update:
    """New output of a request. The last one has a finish reason.

    Attributes:
        tokens: New token ids, without those that ended the sequence.
        text: New text: only whole characters, and none that could still become part of a stop string.
        error: What went wrong, where the finish reason is "error".
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
