"""`Sequence`: a prompt and the tokens generated after it, with its KV blocks and its random numbers."""

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
    """A grammar, which says which tokens may come next. Each request has an object of its own."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return whether each token may come next, [vocab]."""

    def advance(self, token: int) -> None:
        """Note that a token has been chosen, so that `allowed` speaks of the token after it."""


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural log probability of a token, before temperature, top-k and top-p, and those of the best tokens.

    Attributes:
        top: Ids and log probabilities of the most probable tokens, in descending order.
        rank: Place of the token among all tokens, the most probable one first; 1 is the first place.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens while the engine generates, and all that it keeps for them.

    Attributes:
        arrival: Number of the sequence; later sequences have larger ones.
        tokens: The prompt and the new tokens that are known.
        limit: Maximum length of `tokens`.
        stop_ids: Token ids that end the sequence.
        sampling: Rule by which tokens are chosen.
        sampler: Function that chooses each token on the host, from the logits, in place of `sampling`. None: `sampling`
            decides.
        token_filter: Grammar that the new tokens follow. None: any token may come.
        logprobs: Number of the most probable tokens whose log probabilities come with each new token. None: no log
            probabilities come.
        prompt_logprobs: The same for the tokens of the prompt after its first. None: none come.
        scored: Number of prompt tokens whose log probabilities are known, the first one, which has none, included.
        scores: Log probabilities of these tokens, until an output takes them.
        tenant: Name of the client; sequences share blocks only with others of this tenant.
        adapter: Name of its LoRA adapter; blocks are shared only with sequences of the same adapter. None: the base
            model without an adapter.
        adapter_place: Index of the adapter among the model's; -1: no adapter.
        deadline: Time by the engine's clock at which the sequence ends with an error. None: there is no time limit.
        timeout: Seconds from submission to the deadline; None without one.
        budget: Decides how many tokens to draft, and counts the time spent on them.
        generator: Source of the random numbers. None: one with the seed of `sampling` if tokens are sampled.
        draws: Whether tokens are sampled with random numbers, not greedily.
        settings: Temperature, top_k and top_p, as `Batch.settings` has them.
        computed: Tokens whose keys and values are in the pool or will be after the steps that are launched.
        cached_tokens: Tokens of the prompt that were in the pool when the sequence was first admitted.
        pending: Outputs in launched steps whose tokens are not known yet.
        output: Index of the latest output in its step.
        table: Numbers of its KV blocks, in order. The first `released` of them it holds no longer.
        rows: Number of tokens for which the blocks in `table` have room.
        digests: Hashes of its first full blocks, chained over their tokens, as many as were needed so far.
        registered: Number of blocks at the start of `table` that other sequences can share.
        slot: Number of its row in the scheduler's tables; -1 while the sequence waits.
        preempted: Whether it has run before and lost its blocks to an earlier sequence.
        ended: Whether no more tokens are wanted.
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
    prompt_logprobs: int | None = None
    scored: int = 1
    scores: list[TokenLogprobs] = field(default_factory=list)
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
        self.reads_logits = self.is_scoring or self._chooses_by_host
        how = self.sampling
        sampler = make_sampler(how.temperature, top_k=how.top_k, top_p=how.top_p, seed=how.seed)
        if isinstance(sampler, Drawing):
            temperature, top_k, top_p = sampler.settings.tolist()
            self.settings = (temperature, top_k, top_p)
            self.draws = True
            self.generator = self.generator or sampler.generator()

    @property
    def is_scoring(self) -> bool:
        """Whether log probabilities of tokens of the prompt are wanted and not known yet."""
        return self.prompt_logprobs is not None and self.scored < self.prompt_length

    @property
    def _chooses_by_host(self) -> bool:
        by_host = self.sampler is not None or self.token_filter is not None or self.sampling.by_host
        return by_host or self.logprobs is not None

    def add_scores(self, scores: list[TokenLogprobs]) -> None:
        """Note the log probabilities of the next tokens of the prompt."""
        self.scores += scores
        self.scored += len(scores)
        self.reads_logits = self.is_scoring or self._chooses_by_host

    def next_uniform(self) -> float:
        """The random number for the next token that no step has chosen yet; it does not depend on the step."""
        return self.uniform(len(self.tokens) + self.pending - self.prompt_length)

    def uniform(self, index: int) -> float:
        """The random number from [0, 1) that chooses new token `index`; 0 where tokens are not sampled."""
        if self.generator is None:
            return 0.0
        while len(self._uniforms) <= index:
            self._uniforms += self.generator.random(_UNIFORMS, dtype=np.float32).tolist()
        return self._uniforms[index]

    def uniforms(self, first: int, count: int) -> NDArray[np.float32]:
        """The random numbers that choose the new tokens `first` to `first + count - 1`."""
        self.uniform(first + count - 1)
        return np.array(self._uniforms[first : first + count], np.float32)

    def draw_from(self, generator: np.random.Generator) -> None:
        """Take the random numbers of all tokens after the known ones from another generator."""
        del self._uniforms[len(self.tokens) - self.prompt_length :]
        self.generator = generator

    def digest(self, block: int, block_size: int) -> bytes:
        """The chained hash of a block that is full of known tokens, by which the prefix cache finds it."""
        while len(self.digests) <= block:
            before = self.digests[-1] if self.digests else first_digest(self.tenant, self.adapter)
            start = len(self.digests) * block_size
            self.digests.append(next_digest(before, self.tokens[start : start + block_size]))
        return self.digests[block]
