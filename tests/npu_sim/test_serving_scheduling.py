"""The scheduler and the core of the engine, step by step, on a toy model that detects every wrong row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_batches import VOCAB, EvenTimes, ToyModel, ToyResult, alone

from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.engine.blocks import BlockPool, next_digest, tenant_digest
from npu_sim.llm.engine.core import EngineCore, SequenceOutput
from npu_sim.llm.engine.sequence import Sequence
from npu_sim.llm.engine.step_times import FIRST_TOKENS, LEAST_TOKENS, SLOWER, StepTimes
from npu_sim.llm.speculation.budget import MAX_DRAFT, DraftBudget, draft_lengths
from npu_sim.llm.speculation.lookup import Drafter, PromptLookup
from npu_sim.llm.speculation.model import ModelDrafter
from npu_sim.serving.request import Request, SamplingSettings

STOPS = frozenset({7})


class Bench:
    """A core, the requests that it got and what it has told of them."""

    def __init__(
        self, model: ToyModel, prefill_tokens: int | None = None, drafter: Drafter | None = None, *, eager: bool = False
    ) -> None:
        self.model = model
        self.core = EngineCore(model, prefill_tokens, drafter, self._receive, eager=eager)
        self.core.scheduler.times = EvenTimes()
        self.limit = self.core.scheduler.max_rows + 1
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self._arrivals = count()

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            arrival = output.sequence.arrival
            assert arrival not in self.reasons, "an output of a sequence that has ended"
            self.tokens[arrival] += output.tokens
            if output.reason is not None:
                self.reasons[arrival], self.errors[arrival] = output.reason, str(output.error)

    def submit(self, request: Request) -> int:
        arrival = next(self._arrivals)
        self.requests[arrival], self.tokens[arrival] = request, []
        limit = self.limit if request.max_new_tokens is None else len(request.prompt) + request.max_new_tokens
        self.core.add(
            Sequence(
                arrival,
                list(request.prompt),
                min(limit, self.limit),
                STOPS,
                sampling=request.sampling,
                token_filter=request.token_filter,
                logprobs=request.logprobs,
                tenant=request.tenant,
            )
        )
        return arrival

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.core.busy:
                return
            self.core.advance()
        raise AssertionError("the requests do not end")

    def check(self, arrival: int) -> None:
        """The tokens told so far are the first of those of the request alone; all of them if it ended by itself."""
        right = alone(self.requests[arrival], self.limit, STOPS, self.model.read_window)
        told, reason = tuple(self.tokens[arrival]), self.reasons.get(arrival)
        assert told == (right if reason in ("stop", "length") else right[: len(told)])


def greedy(*prompt: int, new: int | None = None, tenant: str = "") -> Request:
    return Request(prompt, new, tenant=tenant)


prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.integers(1, 20).map(lambda length: [index * 5 % VOCAB for index in range(length)]),  # these share prefixes
).map(tuple)
samplings = st.one_of(
    st.just(SamplingSettings()),
    st.builds(
        SamplingSettings,
        st.sampled_from([0.5, 1.0, 2.0]),
        st.none() | st.integers(1, 5),
        st.none() | st.floats(0.1, 1.0),
        st.integers(0, 3),
    ),
)
requests = st.builds(
    Request, prompts, st.none() | st.integers(1, 20), samplings, tenant=st.sampled_from(["", "ann", "bob"])
)


@pytest.mark.parametrize(("ahead", "first"), [(0, 1), (1, 3), (3, 4)])
def test_tokens_are_told_as_soon_as_the_device_has_enough_to_do(ahead: int, first: int) -> None:
    bench = Bench(ToyModel(runs_ahead=ahead))
    arrival = bench.submit(greedy(1, 3, new=6))
    told = []
    while bench.core.busy:
        bench.core.advance()
        told.append((bench.model.steps, len(bench.tokens[arrival])))
    assert next(steps for steps, tokens in told if tokens) == first
    assert len(bench.tokens[arrival]) == 6
    if ahead != 1:
        assert all(after - before <= 1 for (_, before), (_, after) in zip(told, told[1:], strict=False))


class Serving(RuleBasedStateMachine):
    """Requests come, are cancelled and meet failing steps in any order; every answer is that of the request alone."""

    @initialize(
        blocks=st.integers(6, 16),
        block_size=st.sampled_from([1, 3, 4]),
        max_tokens=st.integers(2, 24),
        sequences=st.integers(1, 6),
        outputs=st.none() | st.integers(1, 8),
        prefill=st.none() | st.integers(1, 8),
        runs_ahead=st.booleans(),
        draft=st.sampled_from(["", "lookup", "model", "ahead"]),
        window=st.sampled_from([0, 0, 1, 3, 8, 17]),
    )
    def start(
        self,
        blocks: int,
        block_size: int,
        max_tokens: int,
        sequences: int,
        outputs: int | None,
        prefill: int | None,
        runs_ahead: bool,
        draft: str,
        window: int,
    ) -> None:
        blocks = max(blocks, -(-24 // block_size))
        model = ToyModel(blocks, block_size, 40, max_tokens, sequences, runs_ahead, outputs, window)
        small = ToyModel(blocks + 3, 2, 30, max_tokens, sequences, draft == "ahead")
        drafter = {"": None, "lookup": PromptLookup()}.get(draft, ModelDrafter(small))
        self.bench = Bench(model, prefill, drafter)

    @rule(request=requests)
    def submit(self, request: Request) -> None:
        self.bench.submit(request)

    @rule(steps=st.integers(1, 12))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            if self.bench.core.busy:
                self.bench.core.advance()
                self.blocks_are_accounted_for()

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.core.cancel(data.draw(st.sampled_from(sorted(self.bench.requests))))

    @rule(reading=st.booleans(), ahead=st.integers(1, 4))
    def break_a_step(self, reading: bool, ahead: int) -> None:
        model = self.bench.model
        (model.fail_reading if reading else model.fail_launching).add(model.steps + ahead)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if not hasattr(self, "bench"):
            return
        scheduler = self.bench.core.scheduler
        pool, size = scheduler.pool, self.bench.model.block_size
        held = Counter(block for sequence in scheduler.running for block in sequence.table[sequence.released :])
        assert pool.free + pool.cached + len(held) == pool.blocks
        tenants: dict[int, str] = {}
        for sequence in scheduler.running:
            blocks = sequence.table[sequence.released :]
            assert all(tenants.setdefault(block, sequence.tenant) == sequence.tenant for block in blocks)
            own = sequence.table[sequence.computed // size :]
            assert all(held[block] == 1 for block in own), "a block that will be written is shared"

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.finish()
        self.blocks_are_accounted_for()
        pool = self.bench.core.scheduler.pool
        assert pool.available == pool.blocks
        for arrival in self.bench.requests:
            self.bench.check(arrival)
        broken = self.bench.model.fail_launching | self.bench.model.fail_reading
        assert broken or "error" not in self.bench.reasons.values()


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=25)


def test_a_sequence_holds_the_blocks_of_its_window_however_long_it_grows() -> None:
    window, piece, size, new = 9, 8, 4, 150
    prompt = next(
        tokens
        for tokens in itertools.product(range(VOCAB), repeat=20)
        if len(alone(Request(tokens, new), 200, STOPS, window)) == new
    )
    bench = Bench(ToyModel(64, size, 200, piece, 2, read_window=window))
    bench.submit(greedy(*prompt, new=new))
    pool, held = bench.core.scheduler.pool, []
    while bench.core.busy:
        bench.core.advance()
        held.append(pool.blocks - pool.available)
    bench.check(0)
    assert len(bench.tokens[0]) == new
    assert max(held) <= -(-(window + piece) // size) + 1  # the window and a piece of a prompt begin within blocks
    assert max(held[20:]) <= -(-window // size) + 1


def test_a_long_prompt_does_not_stall_the_others() -> None:
    bench = Bench(ToyModel(blocks=40, context_length=100, max_tokens=16))
    first = bench.submit(greedy(1, new=60))
    bench.core.advance()
    long = bench.submit(greedy(*range(20), *range(20), *range(20), new=1))
    steps = 0
    while long not in bench.reasons:
        before = len(bench.tokens[first])
        bench.core.advance()
        steps += 1
        assert len(bench.tokens[first]) == before + 1
    assert steps == 4  # 60 tokens of prompt, 15 in each step


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    bench = Bench(ToyModel(blocks=80, context_length=240, max_tokens=16))
    long = bench.submit(greedy(*(index * 7 % VOCAB for index in range(200)), new=1))
    bench.core.advance()
    short = bench.submit(greedy(1, 2, 3, new=1))
    bench.core.advance()
    assert short in bench.reasons and long not in bench.reasons
    bench.finish()
    assert bench.model.steps == 13  # all steps but the last are full


def test_half_of_a_step_goes_to_the_earliest_prompt() -> None:
    bench = Bench(ToyModel(blocks=100, context_length=240, max_tokens=16))
    long = bench.submit(greedy(*(index * 7 % VOCAB for index in range(96)), new=1))
    steps = 0
    while long not in bench.reasons:
        bench.submit(greedy(*(index * (5 + steps) % VOCAB for index in range(15)), new=1, tenant=str(steps)))
        bench.core.advance()
        steps += 1
    assert steps <= 12


def paced(seconds: Callable[[int, bool], float], decoded: int, steps: int = 40) -> list[tuple[int, float]]:
    """The prompt tokens of steps, and how much longer than a step without they took, on a device with such times.

    Args:
        seconds: The time of a step of a number of tokens, a power of two, with prompts or without.
        decoded: Tokens of each step that others wait for.
    """
    times, found = StepTimes(), list[tuple[int, float]]()
    plain = seconds(1 << (decoded - 1).bit_length(), False)
    for first in (10.0, 0.0):  # the first step compiles a program
        times.learn(decoded, first + plain)
    for _ in range(steps):
        prompt = times.prompt_tokens(decoded, 512)
        taken = seconds(1 << (decoded + prompt - 1).bit_length(), True)
        times.learn(decoded + prompt, taken, prompt)
        found.append((prompt, taken / plain))
    return found


@given(
    decoded=st.integers(1, 128),
    base=st.floats(0.01, 10),
    per_token=st.floats(0, 0.1),
    with_prompts=st.floats(0, 1),
)
def test_pieces_of_prompts_fill_the_longest_step_that_others_hardly_notice(
    decoded: int, base: float, per_token: float, with_prompts: float
) -> None:
    def seconds(tokens: int, prompts: bool) -> float:
        return base + per_token * tokens + (with_prompts * base if prompts else 0.0)

    found = paced(seconds, decoded)
    sizes = [size for size in (2**power for power in range(10)) if size >= decoded + LEAST_TOKENS]
    plain = seconds(1 << (decoded - 1).bit_length(), False)
    fast = [size for size in sizes if seconds(size, True) <= SLOWER * plain]
    alike = [size for size in sizes if seconds(size, True) <= 1.1 * seconds(sizes[0], True)]
    assert all(prompt + decoded in sizes for prompt, _ in found), "no step is padded"
    if fast:
        assert all(slower <= 1.001 * SLOWER for _, slower in found[10:])
        prompt, slower = found[-1]
        following = 1 + (slower - 1) * (2 * (prompt + decoded) - decoded) / prompt
        assert prompt + decoded == fast[-1] or following > SLOWER, "a longer one could be as fast"
    else:
        assert found[-1][0] + decoded <= max(sizes[0], alike[-1])


def test_where_every_step_with_prompts_is_slow_the_pieces_are_not_short() -> None:
    """Shorter pieces of a prompt with a long history take as long on a device that is not full, and are more."""
    found = paced(lambda tokens, prompts: (9.0 if prompts else 2.0) + tokens / 1000, decoded=32)
    assert found[-1] == (480, pytest.approx((9 + 0.512) / 2.032))


def test_pieces_are_shorter_where_longer_ones_cost_others_more_for_each_token() -> None:
    """The times are of a GPU that 256 tokens fill: steps of 64 and 128 take hardly longer than those of 32."""
    taken = {32: 1.725, 64: 1.81, 128: 1.95, 256: 2.85, 512: 4.3}
    found = paced(lambda tokens, prompts: taken[tokens], decoded=32)
    assert [prompt for prompt, _ in found[10:]] == [96] * 30
    assert taken[256] < SLOWER * taken[32]


def test_times_of_steps_with_prompts_are_forgotten_but_not_those_without() -> None:
    times = StepTimes()
    assert times.prompt_tokens(1, 512) == FIRST_TOKENS - 1 and times.prompt_tokens(32, 512) == 96
    for seconds in (1.0, 1.0, 5.0, 5.0):
        times.learn(32 if seconds == 1 else 128, seconds, 0 if seconds == 1 else 96)
    assert times.prompt_tokens(32, 512) == 32, "by a step that took five times as long"
    for _ in range(300):
        times.learn(64, 1.2, 32)
    assert times.prompt_tokens(32, 512) == 96, "as far as steps of 64 tokens tell"
    for _ in range(2):
        times.learn(128, 99.0, 128)  # nobody waited for a token
    assert times.prompt_tokens(32, 512) == 96
    for _ in range(2):
        times.learn(512, 9.0, 480)
    assert times.prompt_tokens(511, 512) == 1 and times.prompt_tokens(512, 512) == 0


def test_a_prompt_with_a_known_beginning_is_computed_from_there() -> None:
    bench = Bench(ToyModel())
    bench.submit(greedy(*range(14), new=1))
    bench.finish()
    computed = bench.model.computed
    bench.submit(greedy(*range(10), 20, 21, new=1))
    bench.finish()
    assert bench.model.computed - computed == 4  # two blocks of four are shared
    assert bench.core.stats().cached_tokens == 8


def test_a_prompt_that_is_cached_as_a_whole_costs_one_token_and_a_copied_block() -> None:
    bench = Bench(ToyModel())
    first = bench.submit(greedy(*range(8), new=6))
    bench.finish()
    computed = bench.model.computed
    again = bench.submit(greedy(*range(8), new=1))
    bench.finish()
    assert bench.model.computed - computed == 1
    assert bench.tokens[again] == bench.tokens[first][:1]


def test_prompts_that_arrive_together_share_what_the_first_computes() -> None:
    bench = Bench(ToyModel(blocks=40, max_tokens=12, context_length=40))
    for index in range(6):
        bench.submit(greedy(*range(12), index, new=1))
    bench.finish()
    assert bench.model.computed < 2 * 13 + 6


def test_a_tenant_shares_nothing_with_another() -> None:
    bench = Bench(ToyModel())
    for tenant in ("ann", "bob"):
        bench.submit(greedy(*range(13), new=1, tenant=tenant))
        bench.finish()
    assert bench.core.stats().cached_tokens == 0


def test_one_tenant_with_many_requests_does_not_keep_out_another() -> None:
    bench = Bench(ToyModel(max_sequences=2, blocks=40))
    for _ in range(10):
        bench.submit(greedy(1, 2, new=8, tenant="many"))
    other = bench.submit(greedy(3, new=8, tenant="one"))
    while other not in bench.reasons:
        bench.core.advance()
    assert len(bench.reasons) <= 4


def test_the_latest_request_gives_way_and_says_the_same_in_the_end() -> None:
    bench = Bench(ToyModel(blocks=8, block_size=2, context_length=16))
    arrivals = [bench.submit(greedy(index, index + 1, new=12)) for index in (10, 13, 17)]
    bench.finish()
    assert bench.core.stats().preemptions > 0
    for arrival in arrivals:
        bench.check(arrival)
    assert list(bench.reasons) == arrivals  # the earliest ends first


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    model = ToyModel()
    model.not_finite = {23}
    bench = Bench(model)
    bad, good = bench.submit(greedy(1, 2, 3, 4, 23, new=3)), bench.submit(greedy(1, new=2))
    bench.finish()
    assert bench.reasons == {bad: "error", good: "length"} and "not finite" in str(bench.errors[bad])
    assert bench.core.scheduler.pool.cached == 0  # nobody takes up what may be wrong


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_tokens_are_delivered_while_the_device_is_busy(runs_ahead: bool) -> None:
    events: list[str] = []

    class Model(ToyModel):
        def step(self, batch: Batch) -> ToyResult:
            events.append("launch")
            return super().step(batch)

    bench = Bench(Model(runs_ahead=runs_ahead))
    deliver = bench.core._deliver

    def delivering(outputs: list[SequenceOutput]) -> None:
        events.append("deliver")
        deliver(outputs)

    bench.core._deliver = delivering
    possible = (greedy(token, new=6) for token in range(VOCAB))
    arrival = bench.submit(next(each for each in possible if len(alone(each, bench.limit, STOPS)) == 6))
    bench.finish()
    bench.check(arrival)
    ahead = 3 if runs_ahead else 1  # the step that chose the tokens, one under way, and the one just launched
    assert events == [*["launch"] * ahead, *["deliver", "launch"] * (6 - ahead), *["deliver"] * ahead]


@pytest.mark.parametrize("eager", [False, True])
def test_an_eager_core_delivers_the_first_token_before_it_launches_the_next_step(eager: bool) -> None:
    events: list[str] = []

    class HostResult(ToyResult):
        on_host = True  # as after a prompt that a program without a choice has computed

    class Model(ToyModel):
        def step(self, batch: Batch) -> ToyResult:
            events.append("launch")
            result = super().step(batch)
            result.__class__ = HostResult if len(batch.tokens) > 1 else ToyResult
            return result

    bench = Bench(Model(runs_ahead=True), eager=eager)
    receive = bench.core._deliver

    def receiving(outputs: list[SequenceOutput]) -> None:
        events.append("deliver")
        receive(outputs)

    bench.core._deliver = receiving
    possible = (greedy(token, token, new=3) for token in range(VOCAB))
    arrival = bench.submit(next(each for each in possible if len(alone(each, bench.limit, STOPS)) == 3))
    bench.finish()
    bench.check(arrival)
    assert events[:3] == ["launch", *(["deliver", "launch"] if eager else ["launch", "deliver"])]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_fails_ends_its_requests_and_the_others_go_on(runs_ahead: bool) -> None:
    bench = Bench(ToyModel(max_sequences=2, runs_ahead=runs_ahead))
    bench.model.fail_reading.add(3)
    arrivals = [bench.submit(greedy(index, new=8)) for index in range(4)]
    bench.finish()
    assert [bench.reasons[arrival] == "error" for arrival in arrivals] == [True, True, False, False]
    for arrival in arrivals:
        bench.check(arrival)
    assert bench.errors[arrivals[0]] == "the toy has failed while running"


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "lookup": PromptLookup,
    "model": lambda: ModelDrafter(ToyModel(blocks=60, context_length=64, max_tokens=24)),
    "model that runs ahead": lambda: ModelDrafter(
        ToyModel(blocks=60, context_length=64, max_tokens=24, runs_ahead=True)
    ),
}


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_drafts_take_fewer_steps_and_change_no_token(make: Callable[[], Drafter], seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = [
        Request(tuple(rng.integers(0, VOCAB, 5).tolist()), 30, SamplingSettings(temperature, seed=index))
        for index, temperature in enumerate([0.0, 0.0, 0.3, 0.3])
    ]
    steps = []
    for drafter in (None, make()):
        bench = Bench(ToyModel(blocks=60, context_length=64, max_tokens=40), drafter=drafter)
        for request in asked:
            bench.submit(request)
        bench.finish()
        for arrival in bench.requests:
            bench.check(arrival)
        steps.append(bench.model.steps)
    assert steps[1] < steps[0] / 2 if isinstance(drafter, ModelDrafter) else steps[1] <= steps[0]


def test_a_draft_model_that_equals_the_large_one_is_always_right() -> None:
    drafter = ModelDrafter(ToyModel(blocks=60, context_length=64, max_tokens=8))
    bench = Bench(ToyModel(blocks=60, context_length=64, max_tokens=40), drafter=drafter)
    for temperature in (0.0, 1.0):
        bench.submit(Request((1, 2, 3) * 6, 40, SamplingSettings(temperature, seed=1)))
    bench.finish()
    stats = bench.core.stats()
    stopped = sum(reason == "stop" for reason in bench.reasons.values())  # whose last draft said more
    assert stats.drafted_tokens - MAX_DRAFT * stopped <= stats.accepted_tokens > 20
    assert drafter._pool.available == 60 and not drafter._rows


def test_a_draft_model_reads_prompts_in_several_steps_before_it_drafts() -> None:
    small = ToyModel(blocks=60, context_length=64, max_tokens=4)
    bench = Bench(ToyModel(blocks=60, context_length=64, max_tokens=40, runs_ahead=True), drafter=ModelDrafter(small))
    arrivals = [bench.submit(greedy(first, *[3] * 17, new=24)) for first in (1, 3)]
    bench.finish()
    for arrival in arrivals:
        bench.check(arrival)
    assert bench.core.stats().accepted_tokens > 8


def test_a_draft_model_that_fails_only_ends_the_drafts(caplog: pytest.LogCaptureFixture) -> None:
    small = ToyModel(blocks=60, context_length=64)
    small.fail_launching.add(2)
    bench = Bench(ToyModel(blocks=60, context_length=64), drafter=ModelDrafter(small))
    arrival = bench.submit(greedy(1, 2, new=30))
    bench.finish()
    bench.check(arrival)
    assert small.steps == 2 and "the draft model has failed" in caplog.text


def test_drafting_pauses_longer_each_time_that_it_is_not_worth_it() -> None:
    budget, tokens, drafted = DraftBudget(), 0, []
    while tokens < 2000:
        if length := budget.length(tokens):
            if any(draft_lengths(1, [(budget.acceptance_rate(), length)], lambda rows: 1 + 0.1 * rows, 0.0)):
                drafted.append(tokens)
                budget.record(length, 0)
            else:
                budget.pause(tokens)
        tokens += 1
    pauses = np.diff([place for place in drafted if place - 1 not in drafted])
    assert len(drafted) < 40 and (np.diff(pauses) >= 0).all() and pauses[-1] > 500


@pytest.mark.parametrize("cost", [0.1, 0.4, 1.0])
def test_drafts_that_fail_cost_a_text_next_to_nothing(cost: float) -> None:
    budget, spent, lost = DraftBudget(start=50), 0.0, []
    for tokens in range(50, 2050):
        if budget.length(tokens):
            budget.spend(tokens, cost)
            spent += cost
        lost.append(spent / (tokens - 49))
    assert spent > 12 and all(share < 0.0075 + (0.6 + cost) / tokens for tokens, share in enumerate(lost, 1))


def test_drafts_that_are_right_are_not_held_back_by_what_they_cost() -> None:
    budget = DraftBudget(start=50)
    for tokens in range(50, 2050, 3):
        assert budget.length(tokens) > 0
        budget.spend(tokens, 1.9)
        budget.record(2, 2)


def test_drafts_grow_while_they_are_right() -> None:
    budget, lengths = DraftBudget(), []
    for tokens in range(4):
        lengths.append(budget.length(tokens))
        budget.record(lengths[-1], lengths[-1])
    assert lengths == [4, 7, 7, 7]
    assert budget.acceptance_rate() > 0.95


@pytest.mark.parametrize(
    ("rows", "drafts", "per_row", "expected"),
    [
        (1, [(0.9, 7)], 0.0, [7]),  # rows cost nothing
        (1, [(0.9, 7)], 0.1, [7]),
        (1, [(0.5, 7)], 0.2, [1]),  # a step of eight rows is too long for what it brings
        (1, [(0.5, 7)], 1.0, [0]),
        (1, [(0.1, 7)], 0.2, [0]),
        (2, [(0.9, 3), (0.2, 3)], 0.05, [3, 3]),  # the last rows cost nothing: steps are padded to eight
        (6, [(0.9, 3), (0.5, 3)], 0.3, [2, 0]),
    ],
)
def test_a_step_drafts_what_brings_most_tokens_a_second(
    rows: int, drafts: list[tuple[float, int]], per_row: float, expected: list[int]
) -> None:
    def seconds(tokens: int) -> float:
        return 1 + per_row * (1 << (tokens - 1).bit_length())

    assert draft_lengths(rows, drafts, seconds, 0.0) == expected
    assert not any(draft_lengths(rows, drafts, seconds, 100.0))  # where drafting itself takes too long


def test_times_of_steps_are_known_after_two_and_forgotten_after_many() -> None:
    times = StepTimes()
    times.learn(1, 9.0)  # which compiled a program
    assert not times.knows(1)
    times.learn(1, 1.0)
    assert times.knows(1) and times.seconds(1) == times.seconds(8) == 1.0
    for _ in range(3):
        times.learn(7, 3.0)
    assert times.seconds(8) == 3.0 and times.seconds(4) == 1.0 and not times.knows(9)
    for _ in range(300):
        times.learn(6, 3.0)
    assert not times.knows(1) and times.knows(5)


def test_a_sequence_drafts_nothing_before_the_time_of_a_plain_step_is_known() -> None:
    bench = Bench(ToyModel(blocks=60, context_length=64), drafter=PromptLookup())
    times = bench.core.scheduler.times = StepTimes()
    bench.submit(greedy(*(1, 2, 3) * 6, new=30))
    while not times.knows(1):
        assert bench.core.stats().drafted_tokens == 0
        bench.core.advance()
    bench.finish()
    bench.check(0)


class Clueless:
    """A drafter that never guesses anything, says so before unless it `hopes`, and counts how often it was asked."""

    def __init__(self, hopes: bool) -> None:
        self._hopes = hopes
        self.asked = 0

    def may_draft(self, sequence: Sequence) -> bool:
        return self._hopes

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        self.asked += 1
        return {}

    def has_match(self, sequence: Sequence, length: int) -> bool:
        return False

    def forget(self, sequence: Sequence) -> None: ...


@pytest.mark.parametrize(("runs_ahead", "hopes"), [(False, True), (True, True), (True, False)])
def test_where_there_are_no_drafts_a_device_that_runs_ahead_keeps_its_lead(runs_ahead: bool, hopes: bool) -> None:
    drafter = Clueless(hopes)
    model = ToyModel(blocks=60, context_length=240, max_tokens=8, runs_ahead=runs_ahead)
    bench = Bench(model, drafter=drafter)
    arrival = bench.submit(greedy(1, 2, 3, new=230))
    bench.finish()
    bench.check(arrival)
    made = len(bench.tokens[arrival])
    assert made > 60
    if not runs_ahead:
        assert drafter.asked >= made - 3
    elif hopes:
        assert 0 < drafter.asked <= 8 + made // 32
    else:
        assert drafter.asked == 0


@pytest.mark.parametrize("logprobs", [None, 0])
def test_stops_for_log_probabilities_are_not_counted_as_those_for_drafts(logprobs: int | None) -> None:
    bench = Bench(ToyModel(blocks=60, context_length=240, runs_ahead=True), drafter=Clueless(hopes=True))
    bench.submit(replace(greedy(1, 2, 3, new=230), logprobs=logprobs))
    bench.finish()
    assert (bench.core.scheduler.times.stop > 0) == (logprobs is None)


def test_prompt_lookup_continues_what_came_before() -> None:
    request = greedy(1, 2, 3, 4, 5, 9, 1, 2, 3)
    sequence = Sequence(0, list(request.prompt), 40, STOPS)
    lookup = PromptLookup()
    assert lookup.drafts({sequence: 2}) == {sequence: [4, 5]}
    assert lookup.may_draft(sequence), "2, 3 may be followed by 4 again"
    sequence.tokens += [7]
    assert not lookup.may_draft(sequence), "3, 7 is new"
    sequence.tokens += [8, 7, 8, 7]
    assert lookup.drafts({sequence: 5}) == {sequence: [8, 7, 8, 7, 8]}
    sequence.tokens += [11]
    assert lookup.drafts({sequence: 5}) == {}


def test_the_least_recently_released_block_leaves_the_cache_first_and_successors_before_it() -> None:
    pool = BlockPool(3)
    first = tenant_digest("ann")
    digests = [first := next_digest(first, [token]) for token in range(3)]
    blocks = [pool.allocate() for _ in digests]
    assert None not in blocks and pool.allocate() is None
    table = [block for block in blocks if block is not None]
    for block, digest in zip(table, digests, strict=True):
        pool.register(block, digest)
    pool.release(table)
    assert pool.cached == 3
    assert pool.allocate() == table[2]
    assert pool.find(digests[2]) is None and pool.find(digests[0]) == table[0]
    assert pool.allocate() == table[1] and pool.allocate() is None
