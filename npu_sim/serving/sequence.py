"""`Sequence`: a request in the engine, with its tokens, its blocks and its random numbers."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from npu_sim.llm import Drawing, make_sampler
from npu_sim.serving.blocks import next_digest, tenant_digest
from npu_sim.serving.draft_control import DraftControl
from npu_sim.serving.handle import Handle
from npu_sim.serving.request import TokenLogprobs
from npu_sim.serving.text import TextOutput

GREEDY = (0.0, float("inf"), 1.0)
_UNIFORMS = 64  # random numbers drawn at a time


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine.

    Attributes:
        arrival: Increasing number.
        tokens: The prompt and the new tokens that are known.
        limit: Maximum length of `tokens`.
        stop_ids: Token ids that end the sequence.
        deadline: Time by `time.monotonic` at which the request ends with an error.
        text: Its text; `logprobs` are those of tokens whose text is held back, and `written` says that the last update
            is out.
        control: How many tokens to draft; None: none.
        draws: Whether tokens are sampled.
        settings: Temperature, top_k and top_p, as `Batch.settings` has them.
        computed: Tokens whose keys and values are in the pool or will be after the steps that are launched.
        pending: Outputs in launched steps whose tokens are not known yet.
        output: The index of the latest output in its step.
        table: The blocks that the sequence holds, in order.
        rows: Number of tokens that these hold.
        digests: Of the first full blocks of known tokens, as far as they were needed.
        registered: Blocks at the start of `table` that are shared or can be.
        slot: Row of the scheduler's table of blocks; -1 while the sequence waits.
        preempted: Whether it has lost its blocks before.
        ended: No more tokens are wanted.
        prompt_length: Number of tokens of the prompt.
        reads_logits: Whether the host needs the logits of each output.
        penalty: For repetitions; see `npu_sim.llm.sampling.penalized`.
        last_time: When the latest token was known, or the request submitted.
    """

    handle: Handle
    arrival: int
    tokens: list[int]
    limit: int
    stop_ids: frozenset[int]
    deadline: float | None
    text: TextOutput
    control: DraftControl | None
    last_time: float
    penalty: float = 1.0
    settings: tuple[float, float, float] = GREEDY
    computed: int = 0
    pending: int = 0
    output: int = 0
    table: list[int] = field(default_factory=list)
    rows: int = 0
    digests: list[bytes] = field(default_factory=list)
    registered: int = 0
    slot: int = -1
    preempted: bool = False
    ended: bool = False
    written: bool = False
    logprobs: deque[TokenLogprobs] = field(default_factory=deque)
    prompt_length: int = 0
    reads_logits: bool = False
    draws: bool = False
    _generator: np.random.Generator | None = None
    _uniforms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.handle.request
        self.prompt_length = len(request.prompt)
        filtered = request.token_filter is not None
        self.reads_logits = request.logprobs is not None or filtered or self.penalty != 1
        sampling = request.sampling
        sampler = make_sampler(sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed)
        if isinstance(sampler, Drawing):
            temperature, top_k, top_p = sampler.settings.tolist()
            self.settings = (temperature, top_k, top_p)
            self.draws = True
            self._generator = np.random.default_rng(sampling.seed)

    @property
    def tenant(self) -> str:
        return self.handle.request.tenant

    def next_uniform(self) -> float:
        """The random number for the token after the known and pending ones, the same in whatever step it is chosen."""
        return self.uniform(len(self.tokens) + self.pending - self.prompt_length)

    def uniform(self, index: int) -> float:
        """The random number that chooses new token `index`."""
        if self._generator is None:
            return 0.0
        while len(self._uniforms) <= index:
            self._uniforms += self._generator.random(_UNIFORMS, dtype=np.float32).tolist()
        return self._uniforms[index]

    def digest(self, block: int, block_size: int) -> bytes:
        """The digest of a block that is full of known tokens."""
        while len(self.digests) <= block:
            before = self.digests[-1] if self.digests else tenant_digest(self.tenant)
            start = len(self.digests) * block_size
            self.digests.append(next_digest(before, self.tokens[start : start + block_size]))
        return self.digests[block]
