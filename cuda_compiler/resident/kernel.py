"""Decode steps as one kernel that stays resident on every multiprocessor, from the first product to the last.

A step over a few tokens is bound by reading the weights, and a launch per product leaves the memory idle at each of
their ends. Here a run of calls becomes the phases of one kernel, with a barrier of the grid between them, while the
weights are fetched ahead across the barriers (`templates/resident`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cuda_compiler.cuda_program import KernelLaunch, LaunchKind, PeerExchange
from cuda_compiler.resident import clocks
from cuda_compiler.resident.attention import MOST_CALLS, attention_phase, match_attention
from cuda_compiler.resident.exchanges import connect_ranks, exchanging, with_rank_sum
from cuda_compiler.resident.experts import EXPERT_CALLS, match_experts
from cuda_compiler.resident.layout import ALL_THREADS, LEAST_SHARED, least_shared
from cuda_compiler.resident.mailboxes import connect_mailboxes, memory_words
from cuda_compiler.resident.phases import Phase
from cuda_compiler.resident.products import PRODUCTS, InputNorms, fit_slots, input_norms, product_phase
from cuda_compiler.resident.quantized_products import QUANTIZED_PRODUCTS, quantized_product_phase
from cuda_compiler.resident.source import RESIDENT, kernel_source
from cuda_compiler.rules.gates import with_gate
from cuda_compiler.rules.streamed import suits_streaming
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan

_MAX_OPERANDS = 2048  # of a kernel, whose arguments take up to 32 KiB
_MIN_PRODUCTS = 2
# Where others (`rules/streamed.py`) read the weights of several rows too. Weights in few bits are left to them from two
# rows on: with these the two were not compared.
_MIN_PRODUCTS_OF_ROWS = 3
_PRODUCT_PHASES = {
    **dict.fromkeys(PRODUCTS, product_phase),
    **dict.fromkeys(QUANTIZED_PRODUCTS, quantized_product_phase),
}


@dataclass
class Run:
    """Consecutive calls, and the phases of a resident kernel that compute them.

    A call that no phase can compute is a run without phases.

    Attributes:
        written: The buffers that the phases write.
    """

    calls: list[KernelCall] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    written: set[str] = field(default_factory=set)

    @property
    def products(self) -> int:
        return sum(phase.stream is not None for phase in self.phases)

    @property
    def operands(self) -> int:
        return _operands(self.phases)

    def takes(self, phases: Sequence[Phase]) -> bool:
        """Whether `phases` may follow in the same kernel.

        The kernel must have room for their operands, and may not write what they prefetch (I6).
        """
        read = {p.operands[name].buffer for p in phases for name in p.prefetched if name in p.operands}
        return self.operands + _operands(phases) <= _MAX_OPERANDS and self.written.isdisjoint(read)

    def may_follow(self, call: KernelCall, plan: ExecutionPlan) -> bool:
        """Whether the run's calls may be done after `call` instead of before it."""
        written = {view.buffer for own in self.calls for view in own.outputs}
        used = written | {view.buffer for own in self.calls for view in own.inputs}
        results = {view.buffer for view in call.outputs}
        return (
            written.isdisjoint(view.buffer for view in call.inputs)
            and used.isdisjoint(results)
            and all(plan.buffers[name].kind == "arena" for name in results)
        )

    def append(self, calls: Sequence[KernelCall], phases: Sequence[Phase]) -> None:
        self.calls += calls
        self.phases += phases
        self.written |= {view.buffer for phase in phases for view in phase.outputs.values() if view is not None}


def _operands(phases: Sequence[Phase]) -> int:
    return sum(len(phase.operands) for phase in phases)


def form_resident_kernels(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with each run of products and attention over a few rows as one call.

    Given:  embedding; rmsnorm; linear; rope; index_copy_pair; attention; linear; …; linear
    Result: embedding; resident

    A run that needs more shared memory than a block may have stays as it is, and so does one that would not be faster.
    """
    result: list[KernelCall] = []
    for run in find_runs(plan, make.gpu.reaches_peers):
        if _pays(run, make) and max(LEAST_SHARED, least_shared(run.phases)) <= make.gpu.shared_memory:
            result.append(resident_call(run, make))
        else:
            result += run.calls
    return replace(plan, calls=result)


def _pays(run: Run, make: Specializer) -> bool:
    """Whether a resident kernel is expected to be faster than separate kernels for the run's calls."""
    products = [phase for phase in run.phases if phase.stream is not None]
    if not products or any(phase.ranks != 1 for phase in products):
        return run.products >= _MIN_PRODUCTS
    largest = max(products, key=lambda phase: phase.call.params["n"] * phase.call.params["k"])
    if not suits_streaming(make, largest.call, largest.inputs):
        return run.products >= _MIN_PRODUCTS
    has_few_bits = largest.call.kernel in QUANTIZED_PRODUCTS
    return run.products >= _MIN_PRODUCTS_OF_ROWS and (largest.call.params["m"] == 1 or not has_few_bits)


def find_runs(plan: ExecutionPlan, reaches_peers: bool = False) -> Iterator[Run]:
    """The plan's calls divided into runs, in order; a call that no phase can compute is a run of its own.

    Such a call comes before the calls in front of it that have phases, if it depends on none of them, as tables do that
    are computed where they are first read. So it does not divide them.

    Args:
        reaches_peers: Whether phases may compute sums over ranks.
    """
    readers = plan.count_readers()
    run = Run()
    index = 0
    while index < len(plan.calls):
        taken, phases = _match(plan, index, readers, reaches_peers)
        if run.phases and not phases and run.may_follow(plan.calls[index], plan):
            yield Run(plan.calls[index : index + 1])
            index += 1
            continue
        if run.calls and not (run.phases and phases and run.takes(phases)):
            yield run
            run = Run()
        run.append(plan.calls[index : index + taken], phases)
        index += taken
    if run.calls:
        yield run


def _match(plan: ExecutionPlan, index: int, readers: Counter[str], reaches_peers: bool) -> tuple[int, list[Phase]]:
    """The number of calls from `index` on that a phase, or an inseparable few, can compute, and these; 1 if none can.

    Args:
        readers: Buffer → how many operands of calls and program outputs read it.
        reaches_peers: As in `find_runs`.
    """
    calls = plan.calls
    first = calls[index]
    if first.kernel in _PRODUCT_PHASES:
        more, product, ranks = with_rank_sum(calls, index + 1, first, readers) if reaches_peers else (0, first, 1)
        if not more:
            more, product = _with_gate(plan, index, readers)
        phase = _PRODUCT_PHASES[product.kernel](plan, product, InputNorms())
        return (1, []) if phase is None else (1 + more, [exchanging(phase, ranks)])
    norms = input_norms(plan, index, readers)
    if norms.count and calls[index + norms.count].kernel in _PRODUCT_PHASES:
        more, product = _with_gate(plan, index + norms.count, readers)
        phase = _PRODUCT_PHASES[product.kernel](plan, product, norms)
        return (norms.count + 1 + more, [phase]) if phase is not None else (1, [])
    experts = match_experts(plan, index, readers)
    if experts is not None:
        return EXPERT_CALLS, experts
    match = match_attention(calls[index : index + MOST_CALLS], readers)
    return (match.taken, [attention_phase(match)]) if match is not None else (1, [])


def _with_gate(plan: ExecutionPlan, index: int, readers: Counter[str]) -> tuple[int, KernelCall]:
    """The number of further calls that the product at `index` can be fused with, 1 for a gate, and the fused call."""
    product = plan.calls[index]
    inner = plan.buffers[product.outputs[0].buffer].kind == "arena"
    following = plan.calls[index + 1] if inner and index + 1 < len(plan.calls) else None
    gated = with_gate(product, following, readers) if following is not None else None
    return (0, product) if gated is None else (1, gated)


def resident_call(run: Run, make: Specializer) -> KernelCall:
    """The call of the resident kernel of a run; its operands are all views that its phases read and write."""
    phases, exchange = connect_ranks(run.phases, make, run.calls[-1].node)
    phases, mailbox_size = connect_mailboxes(fit_slots(phases))
    last = run.calls[-1]
    memory = make.counters(f"{last.node}.grid", memory_words(mailbox_size))
    if count := max(phase.partials for phase in phases):
        partials = make.counters(f"{last.node}.partials", 2 * count)
        phases = [
            replace(phase, outputs={**phase.outputs, "partials": partials}) if phase.partials else phase
            for phase in phases
        ]
    writes = dict.fromkeys(view for phase in phases for view in phase.outputs.values() if view is not None)
    reads = dict.fromkeys(view for phase in phases for view in phase.inputs.values() if view is not None)
    inputs = [view for view in reads if view not in writes]
    outputs = [*writes, memory]
    params = KernelLaunch((1, 1, 1), (ALL_THREADS, 1, 1), least_shared(phases), LaunchKind.RESIDENT).params()
    if make.gpu.phase_clocks:
        outputs.append(make.counters(f"{last.node}.clocks", 2 * clocks.words(len(phases))))
        params |= clocks.labels([f"{phase.function}: {phase.call.node}" for phase in phases])
    if exchange:
        (peers,) = {view for phase in phases if (view := phase.inputs.get("peers")) is not None}
        params |= PeerExchange(**exchange, peers=inputs.index(peers)).params()
    place = {view: index for index, view in enumerate((*inputs, *outputs))}
    source = kernel_source(phases, place, memory, mailbox_size)
    return KernelCall(
        RESIDENT,
        make.add_source(clocks.with_clocks(source, len(place) - 1) if make.gpu.phase_clocks else source),
        tuple(inputs),
        tuple(outputs),
        params,
        last.node,
        sum(call.flops for call in run.calls),
        sum(distinct_bytes(view) for view in (*inputs, *writes)) - _unread_bytes(phases),
    )


def _unread_bytes(phases: Sequence[Phase]) -> int:
    """Bytes of experts' weights that a step does not read, because other experts are chosen."""
    total = 0
    for phase in phases:
        if phase.stream is not None and phase.stream.expert_rows:
            codes, *sides = (distinct_bytes(phase.operands[name]) for name in phase.streamed)
            total += (codes - phase.stream.weight_bytes) * (codes + sum(sides)) // codes
    return total
