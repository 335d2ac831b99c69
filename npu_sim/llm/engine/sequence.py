"""`Sequence`: tokens that the engine continues, with their blocks of the pool and their random numbers."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.engine.blocks import first_digest, next_digest
from npu_sim.llm.sampling import Drawing, Sampler, SamplingSettings, make_sampler
from npu_sim.llm.speculation.budget import DraftBudget

FinishReason = Literal["stop", "length", "cancelled", "error"]
GREEDY = (0.0, float("inf"), 1.0)
_UNIFORMS = 64  # random numbers drawn at a time


class TokenFilter(Protocol):
    """A grammar: which tokens may come next. One object per request."""

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab]: whether each token may come next."""

    def advance(self, token: int) -> None:
        """Take a chosen token."""


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability (natural) of a chosen token before temperature, top-k and top-p, and of the best others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence in the engine.

    Attributes:
        arrival: Increasing number.
        tokens: The prompt and the new tokens that are known.
        limit: Maximum length of `tokens`.
        stop_ids: Token ids that end the sequence.
        sampling: Rule by which tokens are chosen.
        sampler: Chooses each token on the host instead, from the logits.
        token_filter: Grammar that the tokens follow.
        logprobs: Number of the most probable tokens whose log probabilities come with each token. None: none come.
        tenant: Blocks are shared within a tenant only.
        adapter: Name of its adapter; blocks are shared with sequences of the same one only. None: the base alone.
        adapter_place: Place of the adapter among the model's; -1: the base alone.
        deadline: Time by the engine's clock at which the sequence ends with an error.
        timeout: Seconds from submission to the deadline.
        budget: Length and budget of drafts.
        generator: Source of the random numbers. Default: one with the seed of `sampling`.
        draws: Whether tokens are sampled.
        settings: Temperature, top_k and top_p, as `Batch.settings` has them.
        computed: Tokens whose keys and values are in the pool or will be after the steps that are launched.
        cached_tokens: Tokens of the prompt that were in the pool when the sequence was first admitted.
        pending: Outputs in launched steps whose tokens are not known yet.
        output: Index of the latest output in its step.
        table: Blocks that the sequence holds, in order, after `released` ones that it holds no longer.
        rows: Number of tokens that these hold.
        digests: Digests of the first full blocks of known tokens, as far as they were needed.
        registered: Blocks at the start of `table` that are shared or can be.
        slot: Row of the scheduler's table of blocks; -1 while the sequence waits.
        preempted: Whether it has lost its blocks before.
        ended: No more tokens are wanted.
        prompt_length: Number of tokens of the prompt.
        reads_logits: Whether the host needs the logits of each output.
        last_time: Time at which the latest token was known, or the request submitted.
    """

    arrival: int
    tokens: list[int]
    limit: int
    stop_ids: frozenset[int]
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    sampler: Sampler | None = None
    token_filter: TokenFilter | None = None
    logprobs: int | None = None
    tenant: str = ""
    adapter: str | None = None
    adapter_place: int = -1
    deadline: float | None = None
    timeout: float | None = None
    last_time: float = 0.0
    generator: np.random.Generator | None = None
    settings: tuple[float, float, float] = GREEDY
    computed: int = 0
    cached_tokens: int = 0
    pending: int = 0
    output: int = 0
    table: list[int] = field(default_factory=list)
    rows: int = 0
    digests: list[bytes] = field(default_factory=list)
    registered: int = 0
    released: int = 0
    slot: int = -1
    preempted: bool = False
    ended: bool = False
    prompt_length: int = 0
    reads_logits: bool = False
    draws: bool = False
    budget: DraftBudget = field(init=False)
    _uniforms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.budget = DraftBudget(self.prompt_length)
        by_host = self.sampler is not None or self.token_filter is not None or self.sampling.by_host
        self.reads_logits = by_host or self.logprobs is not None
        how = self.sampling
        sampler = make_sampler(how.temperature, top_k=how.top_k, top_p=how.top_p, seed=how.seed)
        if isinstance(sampler, Drawing):
            temperature, top_k, top_p = sampler.settings.tolist()
            self.settings = (temperature, top_k, top_p)
            self.draws = True
            self.generator = self.generator or sampler.generator()

    def next_uniform(self) -> float:
        """The random number for the token after the known and pending ones, the same in whatever step it is chosen."""
        return self.uniform(len(self.tokens) + self.pending - self.prompt_length)

    def uniform(self, index: int) -> float:
        """The random number that chooses new token `index`."""
        if self.generator is None:
            return 0.0
        while len(self._uniforms) <= index:
            self._uniforms += self.generator.random(_UNIFORMS, dtype=np.float32).tolist()
        return self._uniforms[index]

    def uniforms(self, first: int, count: int) -> NDArray[np.float32]:
        """The random numbers that choose `count` new tokens from token `first` on."""
        self.uniform(first + count - 1)
        return np.array(self._uniforms[first : first + count], np.float32)

    def draw_from(self, generator: np.random.Generator) -> None:
        """Take the random numbers of all further tokens from a generator."""
        del self._uniforms[len(self.tokens) - self.prompt_length :]
        self.generator = generator

    def digest(self, block: int, block_size: int) -> bytes:
        """The digest of a block that is full of known tokens."""
        while len(self.digests) <= block:
            before = self.digests[-1] if self.digests else first_digest(self.tenant, self.adapter)
            start = len(self.digests) * block_size
            self.digests.append(next_digest(before, self.tokens[start : start + block_size]))
        return self.digests[block]
