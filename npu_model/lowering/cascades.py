"""Cascades: chains of kernel calls computed in stripes of rows, so that intermediate values stay on the chip.

Given: c = conv(x); p = pool(c), where c does not fit the scratchpad
Result: for each stripe of p's rows: the rows of c that it needs, into a small buffer; then the stripe of p

A stripe's call is an ordinary kernel call on slices of the operands, so that tilings and residency (which values stay
in the scratchpad) know nothing of cascades. In the tile program, the section of the chain's last call has the
instructions of all stripes, and those of the other calls are empty. The rows of c that two stripes need, the halo, are
computed again or, where that is cheaper, copied from the previous stripe. Weights may be copied into a buffer once for
all stripes.

Cascades are chosen in two steps: first by estimates from the tilings of the stripes, which choose the numbers of
stripes; then the whole program is simulated, and must take fewer cycles and move no more bytes of DRAM than the calls
one by one, where intermediate values are stored and loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, product, starmap, zip_longest
from typing import TypeAlias

from npu_compiler.errors import ConstraintError
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, declaration
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides
from npu_compiler.target_config import OP_LEVEL
from npu_model.chip import Chip
from npu_model.isa.instructions import Buffer, Section, TileProgram
from npu_model.lowering.families import CannotLower, operands_of
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import ARENA, check_calls, link_program, shapes
from npu_model.lowering.refinement import refined
from npu_model.lowering.residency import Residency, choose_residency, positions
from npu_model.lowering.shared import Shared
from npu_model.machine.machine import Machine, Run

MOST_CALLS = 4  # of a chain
_MOST_STRIPES = 64
_COARSE = 8  # tilings of a stripe that are looked at before its chain is chosen
_NOTABLE = 0.01  # part of a program's cycles that DRAM is busy with a value which is worth a cascade
_WORTH = 0.005  # part of a program's cycles that a cascade saves at least
_SIMULATED = 2  # numbers of stripes that are simulated
_STAGED = 1024  # bytes of a weight that is worth a buffer

Rows: TypeAlias = tuple[int, int]
"""A range of rows: the first, and one past the last."""


@dataclass(frozen=True)
class Part:
    """A kernel call restricted to some rows of its result.

    Attributes:
        call: The call, on slices of its operands.
        reads: For each input, the range of rows that it reads; None for the whole input.
    """

    call: KernelCall
    reads: tuple[Rows | None, ...]


Rule: TypeAlias = Callable[[KernelCall, Rows], tuple[Sequence[Rows | None], Mapping[str, object]] | None]
"""A rule of a kernel: from a call and rows of its result to the rows that it needs of each input (None: all), and the
parameters that change; None where no such call exists.
    """


@dataclass(frozen=True)
class _Striped:
    dim: int
    rule: Rule


_RULES: dict[str, _Striped] = {}


def _striped(dim: int, *kernels: str) -> Callable[[Rule], Rule]:
    """Decorator that registers the rule of kernels, whose results are divided along dimension `dim`."""

    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(kernels, _Striped(dim, rule)))
        return rule

    return add


def _under(rows: Rows, height: int, window: int, stride: int, dilation: int, top: int) -> tuple[Rows, Rows] | None:
    """Input rows under the windows of some result rows, and the rows of padding above and below.

    None if all is padding.

    Args:
        height: Rows of the input.
        window, stride, dilation, top: Of the windows, along the rows; `top` is the padding above the input.
    """
    first, stop = rows[0] * stride - top, (rows[1] - 1) * stride - top + (window - 1) * dilation + 1
    inside = max(0, first), min(height, stop)
    return (inside, (inside[0] - first, stop - inside[1])) if inside[0] < inside[1] else None


@_striped(2, "conv2d_kernel", "integer_conv2d_kernel")
def _convolution(call: KernelCall, rows: Rows) -> tuple[Sequence[Rows | None], Mapping[str, object]] | None:
    o = operands_of(call)
    under = _under(rows, o.x.shape[2], o.weight.shape[2], o.stride[0], o.dilation[0], o.padding[0])
    if under is None:
        return None
    reads = [under[0], *(rows if view is o.residual else None for view in call.inputs[1:])]
    return reads, {"padding": [*under[1], *o.padding[2:]]}


@_striped(2, "max_pool2d_kernel", "integer_max_pool2d_kernel")
def _pooling(call: KernelCall, rows: Rows) -> tuple[Sequence[Rows | None], Mapping[str, object]] | None:
    o = operands_of(call)
    under = _under(rows, o.x.shape[2], o.window[0], o.stride[0], o.dilation[0], o.padding[0])
    if under is None or under[1][1] > under[1][0]:  # padding is alike above and below; too much below does no harm
        return None
    return [under[0]], {"padding": [under[1][0], o.padding[1]]}


@_striped(0, "matmul_kernel", "matmul_notrans_kernel", "integer_linear_kernel")
def _product(call: KernelCall, rows: Rows) -> tuple[Sequence[Rows | None], Mapping[str, object]] | None:
    o = operands_of(call)
    reads = [rows, *(rows if view is o.residual else None for view in call.inputs[1:])]
    return reads, {"m": rows[1] - rows[0]} if "m" in call.params else {}


def _elementwise(call: KernelCall, rows: Rows) -> tuple[Sequence[Rows | None], Mapping[str, object]] | None:
    return [rows] * len(call.inputs), {}


_striped(2, *ELEMENTWISE_KERNELS, "integer_add_kernel")(_elementwise)


def part_of(call: KernelCall, dim: int, rows: Rows) -> Part | None:
    """Restrict a call to some rows of its result; None if its kernel has no rule for this or could not compute them."""
    striped = _RULES.get(call.kernel)
    if striped is None or striped.dim != dim or call.outputs[0].rank <= dim:
        return None
    found = striped.rule(call, rows)
    if found is None:
        return None
    reads, changed = found
    inputs = tuple(
        view if read is None else view.slice(dim, *read) for view, read in zip(call.inputs, reads, strict=True)
    )
    outputs = tuple(view.slice(dim, *rows) for view in call.outputs)
    dense_inputs, dense_outputs = ([compact(view, view.buffer)[0] for view in views] for views in (inputs, outputs))
    dense = with_views(call, dense_inputs, dense_outputs, changed)
    if declaration(call).problem(dense) is not None:  # the NPU reads operands with any strides
        return None
    return Part(with_views(call, inputs, outputs, changed), tuple(reads))


def with_views(
    call: KernelCall, inputs: Sequence[View], outputs: Sequence[View], changed: Mapping[str, object]
) -> KernelCall:
    """Copy a call with other operands, and scale its operations and bytes to them."""
    share = math.prod(outputs[0].shape) / math.prod(call.outputs[0].shape)
    moved = sum(map(distinct_bytes, (*inputs, *outputs)))
    return replace(
        call,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        params={**call.params, **changed},
        flops=round(call.flops * share),
        bytes_moved=moved,
    )


@dataclass(frozen=True)
class Cascade:
    """A way to compute a chain of a plan's kernel calls in stripes.

    Attributes:
        first, stop: Numbers of the chain's first call and of the one after its last.
        stripes: Number of stripes.
        keeps_halo: Whether rows that two stripes need are copied, instead of computed again.
        stages_weights: Whether weights are copied into buffers once for all stripes.
        cores: Number of cores, each of which computes consecutive stripes and shares no halo with others.
    """

    first: int
    stop: int
    stripes: int
    keeps_halo: bool
    stages_weights: bool
    cores: int = 1


@dataclass(frozen=True)
class Stripes:
    """The calls and buffers of a cascade.

    Attributes:
        staging: Calls that copy weights into buffers, before the first stripe.
        stripes: The calls of each stripe, in order.
        buffers: New buffers, for rows between the calls and for weights.
        passing: Bytes between the calls of the largest stripe.
        staged: Bytes of the weights in buffers.
    """

    staging: tuple[KernelCall, ...]
    stripes: tuple[tuple[KernelCall, ...], ...]
    buffers: tuple[BufferAllocation, ...]
    passing: int
    staged: int

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """All calls in the order of execution."""
        return (*self.staging, *chain(*self.stripes))


def copy_call(source: View, target: View, node: str) -> KernelCall:
    moved = distinct_bytes(source) + distinct_bytes(target)
    return KernelCall("copy_kernel", "", (source,), (target,), {"scalars": [None]}, node, bytes_moved=moved)


def compact(view: View, name: str) -> tuple[View, BufferAllocation]:
    """A new buffer with the shape of a view, dense, with dimensions in the same memory order; and the view of it."""
    order = sorted(range(view.rank), key=lambda d: -abs(view.strides[d]))
    strides = dict(zip(order, contiguous_strides([view.shape[d] for d in order]), strict=True))
    own = View(name, view.shape, tuple(strides[d] for d in range(view.rank)), 0, view.dtype)
    return own, BufferAllocation(name, "arena", view.shape, view.dtype)


def stripes_of(plan: ExecutionPlan, cascade: Cascade, most: int | None = None) -> Stripes | None:
    """Calls of a cascade's first `most` stripes, or of all (None); None if a rule cannot compute some rows."""
    last = plan.calls[cascade.stop - 1]
    total = last.outputs[0].shape[_RULES[last.kernel].dim]
    each = -(-total // cascade.stripes)
    writer = _Writer(plan, cascade)
    starts = range(0, total, each)
    for number, start in islice(enumerate(starts), most):
        if number and core_of_stripe(cascade, len(starts), number) != core_of_stripe(cascade, len(starts), number - 1):
            writer.forget()
        if not writer.add((start, min(total, start + each))):
            return None
    return writer.stripes()


def core_of_stripe(cascade: Cascade, stripes: int, number: int) -> int:
    """The core that computes a stripe of so many."""
    return number * cascade.cores // stripes


def _stripes(plan: ExecutionPlan, cascade: Cascade, shared: Shared, most: int | None = None) -> Stripes | None:
    """The result of `stripes_of`, cached for all chips."""
    return shared.stripes.get(plan, (cascade, most), lambda: stripes_of(plan, cascade, most))


class _Writer:
    """Writes the calls of a cascade, stripe by stripe.

    Invariants:
        1. `_passed[n]` are the rows of the result of the chain's call n that the last stripe has, and their view.
        2. A stripe's calls are made from the last to the first: each determines the rows that the call before computes.
    """

    def __init__(self, plan: ExecutionPlan, cascade: Cascade) -> None:
        self._plan, self._cascade = plan, cascade
        self._chain = plan.calls[cascade.first : cascade.stop]
        self._dim = _RULES[self._chain[-1].kernel].dim
        self._staging: list[KernelCall] = []
        self._stripes: list[tuple[KernelCall, ...]] = []
        self._buffers: list[BufferAllocation] = []
        self._staged: dict[View, View] = {}
        self._passed: dict[int, tuple[Rows, View]] = {}
        self._passing = 0

    def forget(self) -> None:
        """Let the next stripe compute all its rows: another core has those of the last one."""
        self._passed = {}

    def add(self, rows: Rows) -> bool:
        """Write the calls for these rows of the chain's result.

        Return False if some kernel's rule cannot compute its rows.
        """
        stripe: list[KernelCall] = []
        before = dict(self._passed)
        passing = 0
        for position in reversed(range(len(self._chain))):
            part = part_of(self._chain[position], self._dim, rows)
            if part is None:
                return False
            inputs, outputs = list(part.call.inputs), part.call.outputs
            copies: list[KernelCall] = []
            if position < len(self._chain) - 1:
                (first, _), view = self._passed[position]
                outputs = (view.slice(self._dim, rows[0] - first, rows[1] - first),)
            self._stage(part, inputs)
            if position:
                at = self._chain[position].inputs.index(self._chain[position - 1].outputs[0])
                read = part.reads[at]
                if read is None:
                    return False
                inputs[at] = self._buffer(position - 1, read)
                passing += distinct_bytes(inputs[at])
                rows, copies = self._missing(position - 1, read, before.get(position - 1))
                if rows[0] >= rows[1]:
                    return False
            stripe = [*copies, with_views(part.call, inputs, outputs, {}), *stripe]
        self._stripes.append(tuple(stripe))
        self._passing = max(self._passing, passing)
        return True

    def _buffer(self, position: int, rows: Rows) -> View:
        """Create a buffer for rows of the result of the chain's call number `position`."""
        value = self._chain[position].outputs[0]
        view, buffer = compact(value.slice(self._dim, *rows), f"{value.buffer}.{len(self._stripes)}")
        self._buffers.append(buffer)
        self._passed[position] = rows, view
        return view

    def _missing(self, position: int, rows: Rows, before: tuple[Rows, View] | None) -> tuple[Rows, list[KernelCall]]:
        """The rows of a result that have to be computed, and copies of those that the previous stripe has."""
        if before is None or not self._cascade.keeps_halo or before[0][1] <= rows[0]:
            return rows, []
        (first, stop), source = before
        halo = source.slice(self._dim, rows[0] - first, stop - first)
        target = self._passed[position][1].slice(self._dim, 0, stop - rows[0])
        return (stop, rows[1]), [copy_call(halo, target, self._chain[position].node)]

    def _stage(self, part: Part, inputs: list[View]) -> None:
        """Make a call read its weights from on-chip buffers, to which they are copied before the first stripe."""
        for at, read in enumerate(part.reads if self._cascade.stages_weights else ()):
            view = inputs[at]
            is_weight = read is None and self._plan.buffers[view.buffer].is_constant
            if not is_weight or distinct_bytes(view) < _STAGED:
                continue
            if view not in self._staged:
                self._staged[view], buffer = compact(view, f"{view.buffer}.at{self._cascade.first}")
                self._buffers.append(buffer)
                self._staging.append(copy_call(view, self._staged[view], part.call.node))
            inputs[at] = self._staged[view]

    def stripes(self) -> Stripes:
        """All calls and buffers written so far."""
        staged = sum(distinct_bytes(view) for view in self._staged)
        return Stripes(tuple(self._staging), tuple(self._stripes), tuple(self._buffers), self._passing, staged)


@dataclass(frozen=True)
class Arrangement:
    """A plan with its cascades and its tile program.

    Attributes:
        plan: The execution plan, with memory for the cascades' buffers.
        program: Its tile program before redundant waits are removed, with a section for each of the plan's calls.
        run: The simulation of the program; None if no alternatives were compared.
    """

    plan: ExecutionPlan
    program: TileProgram
    run: Run | None = None


@dataclass(frozen=True)
class _Way:
    """A plan with some chains in stripes or pieces, before its instructions are generated.

    Attributes:
        plan: The original plan, with memory for the steps' buffers.
        steps: A plan in which the chains are replaced by the calls of their stripes.
        counts: For each call of the plan, its number of calls in `steps`.
        residency: The values that stay in the scratchpad.
        kind: Name of the division, for comments.
    """

    plan: ExecutionPlan
    steps: ExecutionPlan
    counts: Sequence[int]
    residency: Residency
    kind: str = "a cascade"

    def linked(self, chip: Chip, mapper: Mapper) -> Arrangement:
        """Generate the instructions. Raises `ConstraintError` if some step does not fit the chip's memory."""
        return Arrangement(self.plan, self._merged(link_program(self.steps, chip, mapper, self.residency)))

    def _merged(self, program: TileProgram) -> TileProgram:
        """A program of the steps with a section for each call of the plan."""
        sections = iter(program.sections)
        own = [tuple(islice(sections, count)) for count in self.counts]
        merged = tuple(_section(call, each, self.kind) for call, each in zip(self.plan.calls, own, strict=True))
        return replace(program, sections=merged)

    def of_steps(self, arrangement: Arrangement) -> Arrangement:
        """The plan and its tile program, made from an arrangement of `steps` on several cores."""
        plan = arrangement.plan
        buffers = {
            name: replace(buffer, offset=plan.buffers[name].offset if name in plan.buffers else 0)
            for name, buffer in self.plan.buffers.items()
        }
        ends = [buffer.offset + buffer.size_bytes for buffer in buffers.values() if buffer.kind == "arena"]
        own = replace(self.plan, buffers=buffers, arena_bytes=max([plan.arena_bytes, *ends]))
        program = self._merged(arrangement.program)
        arena = [Buffer(ARENA, own.arena_bytes)] if own.arena_bytes else []
        others = (buffer for buffer in program.buffers if buffer.name != ARENA)
        return Arrangement(own, replace(program, buffers=(*others, *arena)))


def _section(call: KernelCall, steps: Sequence[Section], kind: str) -> Section:
    if len(steps) == 1:
        return steps[0]
    comment = f"{shapes(call)}; in {kind}" + (f" of {len(steps)} steps" if steps else "")
    return Section(call.node, call.kernel, comment, tuple(node for step in steps for node in step.body))


def arrange(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Arrangement:
    """Lower a plan with those cascades that make it faster on a chip.

    Raises:
        ConstraintError: the chip cannot run some calls; the message names all of them with the reason.
    """
    check_calls(plan.calls, chip, mapper)
    residency = choose_residency(plan, chip, mapper)
    program, before = refined(plan, chip, mapper, residency)
    plain = Arrangement(plan, program, before)
    chosen = _chosen(plan, chip, mapper, residency)
    if not chosen:
        return plain
    ways = _ways_to_stripe(plan, chosen, chip, mapper, residency.cycles * (1 - _WORTH / 2))
    if not ways:
        return plain
    before = before or Machine(chip, plain.program).run()
    best, cycles = replace(plain, run=before), before.cycles * (1 - _WORTH)
    most = before.dram_bytes + _kept_between(plan, chosen, residency)
    for way in ways:
        try:
            changed = way.linked(chip, mapper)
        except ConstraintError:
            continue
        run = Machine(chip, changed.program).run()
        if run.cycles < cycles and run.dram_bytes <= most:
            best, cycles = replace(changed, run=run), run.cycles
    return best


@dataclass(frozen=True)
class StripedPlan:
    """A plan whose chains are computed in stripes or pieces by several cores at once, each core its own.

    Attributes:
        steps: The plan with the chains replaced by the calls of their stripes, of which those that cores compute at
            once count as one, the first.
        groups: For each call of `steps`, the calls that are computed at once and their cores; the core of a call that
            is in no chain is None.
    """

    steps: ExecutionPlan
    groups: Sequence[Sequence[tuple[KernelCall, int | None]]]
    _way: _Way

    @classmethod
    def of_groups(
        cls,
        plan: ExecutionPlan,
        buffers: Mapping[str, BufferAllocation],
        groups: Sequence[Sequence[tuple[KernelCall, int | None]]],
        kind: str,
    ) -> StripedPlan:
        """A plan all of whose calls are replaced by groups of calls on the cores.

        Args:
            buffers: Those that the groups access.
            kind: Name of the division, for comments.
        """
        steps = replace(plan, calls=[group[0][0] for group in groups], buffers=dict(buffers))
        counts = [*[0] * (len(plan.calls) - 1), len(groups)]
        return cls(steps, groups, _Way(plan, steps, counts, Residency({}, []), kind))

    def of_plan(self, arrangement: Arrangement) -> Arrangement:
        """The original plan and its tile program, made from an arrangement of `steps` on several cores."""
        return self._way.of_steps(arrangement)


def striped(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Iterator[StripedPlan]:
    """Ways to divide a plan's chains into stripes, of which each core computes consecutive ones."""
    chosen = _chosen(plan, chip, mapper, choose_residency(plan, chip, mapper))
    for factor in (1, 2) if chosen else ():
        cascades = []
        for each in chosen:
            stripes = factor * chip.core_count * -(-each.stripes // chip.core_count)
            own = replace(each, stages_weights=False, cores=chip.core_count)
            cascades.append(_with_stripes(plan, own, stripes))
        way = _way(plan, cascades, chip, mapper)
        if way is not None:
            yield _side_by_side(plan, cascades, way, mapper)


def _side_by_side(plan: ExecutionPlan, cascades: Sequence[Cascade], way: _Way, mapper: Mapper) -> StripedPlan:
    """Group the calls of a way's stripes: those at one place of each core's sequence are computed at once."""
    groups: list[list[tuple[KernelCall, int | None]]] = []
    counts: list[int] = []
    by_first = {cascade.first: cascade for cascade in cascades}
    while len(counts) < len(plan.calls):
        cascade = by_first.get(len(counts))
        if cascade is None:
            groups.append([(plan.calls[len(counts)], None)])
            counts.append(1)
            continue
        found = _stripes(plan, cascade, mapper.shared)
        assert found is not None  # or there would be no such way
        sequences: list[list[tuple[KernelCall, int | None]]] = [[] for _ in range(cascade.cores)]
        for number, calls in enumerate(found.stripes):
            core = core_of_stripe(cascade, len(found.stripes), number)
            sequences[core] += [(call, core) for call in calls]
        together = [[each for each in place if each is not None] for place in zip_longest(*sequences)]
        groups += together
        counts += [*[0] * (cascade.stop - cascade.first - 1), len(together)]
    steps = replace(way.steps, calls=[group[0][0] for group in groups])
    return StripedPlan(steps, groups, replace(way, steps=steps, counts=counts))


def _ways_to_stripe(
    plan: ExecutionPlan, cascades: Sequence[Cascade], chip: Chip, mapper: Mapper, most: float
) -> list[_Way]:
    """Plans with the few numbers of stripes whose estimates are best and below `most` cycles, fastest first."""
    finer = {
        tuple(_with_stripes(plan, cascade, cascade.stripes * factor) for cascade in cascades)
        for factor in (0.5, 1, 4, 16)
    }
    ways = [way for each in finer if (way := _way(plan, each, chip, mapper)) is not None]
    ways = sorted(ways, key=lambda way: (way.residency.cycles, len(way.steps.calls)))
    least = min((way.residency.cycles for way in ways), default=0.0)
    return [way for way in ways[:_SIMULATED] if way.residency.cycles < min(most, least * (1 + _WORTH))]


def _kept_between(plan: ExecutionPlan, cascades: Sequence[Cascade], residency: Residency) -> int:
    """The most DRAM bytes that cascades may move beyond those of the program without cascades.

    They are those of a write and a read of each intermediate value within the chains that the program without cascades
    keeps in the scratchpad.
    """
    passing = (call.outputs[0].buffer for each in cascades for call in plan.calls[each.first : each.stop - 1])
    return sum(2 * plan.buffers[name].size_bytes for name in passing if name in residency.addresses)


def _with_stripes(plan: ExecutionPlan, cascade: Cascade, stripes: float) -> Cascade:
    """A cascade with about that many stripes, at most one for each row of its result."""
    last = plan.calls[cascade.stop - 1]
    rows = last.outputs[0].shape[_RULES[last.kernel].dim]
    each = -(-rows // max(2, round(stripes)))
    return replace(cascade, stripes=-(-rows // each))


def with_cascades(plan: ExecutionPlan, cascades: Sequence[Cascade], chip: Chip, mapper: Mapper) -> Arrangement | None:
    """Lower a plan with the given cascades, which do not overlap.

    None if some stripe cannot be computed or does not fit.
    """
    way = _way(plan, cascades, chip, mapper)
    try:
        return None if way is None else way.linked(chip, mapper)
    except ConstraintError:
        return None


def _way(plan: ExecutionPlan, cascades: Sequence[Cascade], chip: Chip, mapper: Mapper) -> _Way | None:
    """Plan the stripes of the given cascades; None if some stripe cannot be computed or does not fit."""
    shared = mapper.shared
    own = shared.steps.get(plan, tuple(cascades), lambda: _steps(plan, cascades, shared))
    if own is None:
        return None
    try:
        check_calls(own.steps.calls, chip, mapper)
    except ConstraintError:
        return None
    return _Way(own.plan, own.steps, own.counts, choose_residency(own.steps, chip, mapper, own.passing))


@dataclass(frozen=True)
class Steps:
    """A plan with some chains in stripes, for any chip.

    Attributes:
        plan: The original plan, with memory for the steps' buffers.
        steps: A plan in which the chains are replaced by the calls of their stripes.
        counts: For each call of the plan, its number of calls in `steps`.
        passing: The buffers of the stripes.
    """

    plan: ExecutionPlan
    steps: ExecutionPlan
    counts: Sequence[int]
    passing: frozenset[str]


def _steps(plan: ExecutionPlan, cascades: Sequence[Cascade], shared: Shared) -> Steps | None:
    """Replace chains by the calls of their stripes; None if some stripe cannot be computed.

    Memory is planned anew, since the inputs of a chain are live until its last stripe.
    """
    calls, buffers = list(plan.calls), dict(plan.buffers)
    counts = [1] * len(calls)
    for cascade in sorted(cascades, key=lambda each: -each.first):
        stripes = _stripes(plan, cascade, shared)
        if stripes is None:
            return None
        for call in plan.calls[cascade.first : cascade.stop - 1]:
            del buffers[call.outputs[0].buffer]
        calls[cascade.first : cascade.stop] = stripes.calls
        counts[cascade.first : cascade.stop] = [*[0] * (cascade.stop - cascade.first - 1), len(stripes.calls)]
        buffers.update({buffer.name: buffer for buffer in stripes.buffers})
    steps = plan_memory(replace(plan, calls=calls, buffers=buffers), OP_LEVEL.buffer_alignment)
    own = {
        name: replace(buffer, offset=steps.buffers[name].offset if name in steps.buffers else 0)
        for name, buffer in plan.buffers.items()
    }
    ends = [buffer.offset + buffer.size_bytes for buffer in own.values() if buffer.kind == "arena"]
    steps = replace(steps, arena_bytes=max([steps.arena_bytes, *ends]))
    passing = frozenset(buffers.keys() - plan.buffers.keys())
    return Steps(replace(plan, buffers=own, arena_bytes=steps.arena_bytes), steps, counts, passing)


def _chosen(plan: ExecutionPlan, chip: Chip, mapper: Mapper, residency: Residency) -> list[Cascade]:
    """The non-overlapping cascades that are estimated to save the most cycles in total, the best first."""
    own = [positions(call, residency.addresses) for call in plan.calls]
    parts = [
        mapper.choices(call).estimate(names, room)
        for call, names, room in zip(plan.calls, own, residency.rooms, strict=True)
    ]
    least = _NOTABLE * sum(parts) * chip.dram_bytes_per_cycle
    coarse = Mapper(chip, mapper.shared, _COARSE, mapper.forms)
    passes = _passing(plan)
    best: list[tuple[float, tuple[tuple[float, Cascade], ...]]] = [(0.0, ())]  # gain and cascades of the first calls
    for stop in range(1, len(plan.calls) + 1):
        best.append(best[-1])
        for first in range(stop - 2, max(0, stop - MOST_CALLS) - 1, -1):
            if not passes[first]:
                break
            values = {
                call.outputs[0].buffer: plan.buffers[call.outputs[0].buffer] for call in plan.calls[first : stop - 1]
            }
            if all(2 * value.size_bytes < least for value in values.values()):
                continue
            room = _room(plan, residency.addresses, first, stop, chip)
            passing = sum(value.size_bytes for value in values.values())
            for cascade in _ways(plan, first, stop, room, passing):
                gain = sum(parts[first:stop]) - _price(plan, cascade, room, chip, coarse)
                if gain > 0 and best[first][0] + gain > best[-1][0]:
                    best[-1] = best[first][0] + gain, (*best[first][1], (gain, cascade))
    return [cascade for _, cascade in sorted(best[-1][1], key=lambda each: -each[0])]


def _passing(plan: ExecutionPlan) -> list[bool]:
    """Whether each call but the last can pass its result to the next in stripes.

    Their striping rules must divide the same dimension; the result must be the call's only one, no output of the
    program, and used by nothing but one input of the next call, whole.
    """
    touching: dict[str, list[View]] = {}
    for call in plan.calls:
        for view in (*call.outputs, *call.inputs):
            touching.setdefault(view.buffer, []).append(view)
    outputs = {view.buffer for view in plan.output_views.values()}

    def passes(call: KernelCall, following: KernelCall) -> bool:
        own, next_ = _RULES.get(call.kernel), _RULES.get(following.kernel)
        if own is None or next_ is None or own.dim != next_.dim or len(call.outputs) != 1:
            return False
        if any(view.rank <= own.dim or not view.numel for view in (*call.outputs, *following.outputs)):
            return False
        value = call.outputs[0]
        is_between = plan.buffers[value.buffer].kind == "arena" and value.buffer not in outputs
        return is_between and touching[value.buffer] == [value, value] and value in following.inputs

    return list(starmap(passes, pairwise(plan.calls)))


def _room(plan: ExecutionPlan, addresses: Mapping[str, int], first: int, stop: int, chip: Chip) -> int:
    """Scratchpad bytes below the lowest value that stays resident throughout a chain.

    Weights and the chain's own inputs and outputs do not count: their residency is chosen anew.
    """
    lowest = chip.sram.size
    for name, address in addresses.items():
        buffer = plan.buffers[name]
        if not buffer.is_constant and buffer.first_use < first and stop <= buffer.last_use:
            lowest = min(lowest, address)
    return lowest


def _ways(plan: ExecutionPlan, first: int, stop: int, room: int, passing: int) -> Iterator[Cascade]:
    """Cascades of a chain with the fewest stripes that leave `room` for their calls' own tiles, and with twice as many.

    Args:
        passing: Bytes of all intermediate values between the chain's calls.
    """
    last = plan.calls[stop - 1]
    most = last.outputs[0].shape[_RULES[last.kernel].dim]
    least = next((1 << power for power in range(1, most.bit_length()) if 2 * passing >> power <= room // 2), most + 1)
    for stripes in (least, 2 * least):
        if stripes <= min(most, _MOST_STRIPES):
            for keeps_halo, stages_weights in product((False, True), repeat=2):
                yield Cascade(first, stop, stripes, keeps_halo, stages_weights)


def _price(plan: ExecutionPlan, cascade: Cascade, room: int, chip: Chip, mapper: Mapper) -> float:
    """Estimated cycles of a cascade whose buffers all lie in the scratchpad, if all stripes take as long as the second.

    Infinite if the cascade is not possible. Loads of a stripe overlap with the computation of the previous one.
    """
    stripes = _stripes(plan, cascade, mapper.shared, 2)
    if stripes is None or len(stripes.stripes) < 2 or (cascade.stages_weights and not stripes.staging):
        return math.inf
    names = {buffer.name for buffer in stripes.buffers}
    room -= 2 * stripes.passing + stripes.staged
    launch = 1e3 * chip.clock_ghz * chip.launch.cost_us

    def cycles(calls: Sequence[KernelCall]) -> float:
        options = [mapper.choices(call).likely(positions(call, names), room) for call in calls]
        return sum(min((2 * each.beside - each.apart for each in own), default=math.inf) for own in options)

    try:
        return launch + cycles(stripes.staging) + cascade.stripes * cycles(stripes.stripes[1])
    except CannotLower:
        return math.inf


__all__ = [
    "Arrangement",
    "Cascade",
    "Steps",
    "StripedPlan",
    "arrange",
    "compact",
    "copy_call",
    "part_of",
    "striped",
    "stripes_of",
    "with_cascades",
    "with_views",
]
