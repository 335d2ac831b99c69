"""Programs for a chip of several cores: each call's result is divided among them, or whole calls by layers.

A part of a call is an ordinary kernel call on slices of the operands (`division.py`). Tilings and the values that stay
in a scratchpad are chosen for each core as if it were a chip by itself; `spreading.py` says which values are its own.
In the tile program, the section of a call has the instructions of all cores.

An intermediate value that several cores use lies in DRAM, or each of them has a copy in its scratchpad, to which the
others send over the network the parts that they compute. A value is copied only if all its copies fit. So may a weight
or an input that several cores read whole, which one core reads for all if the network has multicast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from npu_compiler.errors import ConstraintError
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.collection import seldom_collected
from npu_model.isa.instructions import Section, Space, TileProgram, core_name
from npu_model.lowering.cascades import Arrangement, arrange, striped
from npu_model.lowering.division import Way, divided
from npu_model.lowering.emitter import Place
from npu_model.lowering.families import CannotLower
from npu_model.lowering.forms import with_sparsity
from npu_model.lowering.l2 import Use, check_places, choose_l2, l2_place
from npu_model.lowering.mapper import Mapper, Placed, in_sequence
from npu_model.lowering.pipelines import pipelined
from npu_model.lowering.program import (
    Linker,
    Part,
    buffers_of,
    check_calls,
    chip_digest,
    dram_places,
    preloaded,
    shapes,
    trimmed,
)
from npu_model.lowering.relocation import to_core
from npu_model.lowering.residency import Residency, choose_residency, positions
from npu_model.lowering.spreading import Spread, Step, common_operands, copy_name, shared_values, spread
from npu_model.machine.machine import Machine, token_totals


@seldom_collected()
def arranged(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Arrangement:
    """Lower a plan for a chip, on several cores as `cores.split` says.

    Raises:
        ConstraintError: the chip cannot run some calls; the message names all of them with the reason.
    """
    arrangement = _arranged(with_sparsity(plan, mapper.forms, chip), chip, mapper)
    return replace(arrangement, plan=replace(arrangement.plan, calls=plan.calls))


def _arranged(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Arrangement:
    if chip.cores is None:
        return arrange(plan, chip, mapper)
    check_calls(plan.calls, chip, mapper)
    if chip.cores.split != "auto":
        return _fastest(_ways(plan, chip, mapper, [chip.cores.split]), chip)
    alone, ways = _on_one_core(plan, chip, mapper), _ways(plan, chip, mapper, [*Way, "layers"])
    return _fastest([alone, *ways, *_striped(plan, chip, mapper)], chip)


def _striped(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Iterator[Arrangement | ConstraintError]:
    """Lower a plan with chains in stripes, each computed by one core; rows of the other calls are divided."""
    for own in striped(plan, chip, mapper):
        steps = [
            [Step(call, core) for call, core in group if core is not None] or parts
            for group, parts in zip(own.groups, _divided(own.steps, Way.ROWS, chip, mapper), strict=True)
        ]
        way = _linked(spread(own.steps, steps), chip, mapper)
        yield way if isinstance(way, ConstraintError) else own.of_plan(way)


def _on_one_core(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Arrangement | ConstraintError:
    """Lower a plan for the first core alone, or return the error if it does not fit there."""
    try:
        alone = arrange(plan, replace(chip, cores=None), mapper)
    except ConstraintError as error:
        return error
    moved = to_core(core_name(0)).program(alone.program)
    return Arrangement(alone.plan, replace(moved, digest=chip_digest(chip)))


def lower_arranged(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> tuple[ExecutionPlan, TileProgram]:
    """Lower a plan; return it with memory for its cascades and cores, and its tile program without redundant waits.

    Raises `ConstraintError` as `arranged` does.
    """
    arrangement = arranged(plan, chip, mapper)
    return arrangement.plan, trimmed(arrangement.program, chip)


def _fastest(ways: Iterable[Arrangement | ConstraintError], chip: Chip) -> Arrangement:
    """The alternative with the fewest simulated cycles, the first if equal.

    Raises the first error if all are errors.
    """
    tried = list(ways)
    fitting = [way for way in tried if isinstance(way, Arrangement)]
    if not fitting:
        raise next(way for way in tried if isinstance(way, ConstraintError))
    runs = ((way, Machine(chip, way.program).run()) for way in fitting)
    fastest, run = min(runs, key=lambda each: each[1].cycles)
    return replace(fastest, run=run)


def _ways(
    plan: ExecutionPlan, chip: Chip, mapper: Mapper, splits: Sequence[str]
) -> Iterator[Arrangement | ConstraintError]:
    """Lower a plan divided in each of these ways: with shared values in DRAM, and with copies of them if these fit.

    If the network has multicast, also with copies of weights and inputs that several cores read whole. By layers, also
    in pieces of the batch (`pipelines.py`).

    On a chip without DRAM, a way that does not fit yields its error instead.
    """
    for split in splits:
        steps = _layers(plan, chip, mapper) if split == "layers" else _divided(plan, Way(split), chip, mapper)
        yield from _placements(plan, steps, chip, mapper)
        if split == "layers":
            for own in pipelined(plan, [step.core for (step,) in steps], chip.core_count):
                pieces = [[Step(call, core) for call, core in group if core is not None] for group in own.groups]
                for way in _placements(own.steps, pieces, chip, mapper):
                    yield way if isinstance(way, ConstraintError) else own.of_plan(way)


def _placements(
    plan: ExecutionPlan, steps: Sequence[Sequence[Step]], chip: Chip, mapper: Mapper
) -> Iterator[Arrangement | ConstraintError]:
    """Lower a plan that is divided among the cores, with shared values in DRAM and with copies of them."""
    yield _linked(spread(plan, steps), chip, mapper)
    shared = [name for name in shared_values(plan, steps) if _is_small(plan, name, chip)]
    copied = _with_copies(plan, steps, shared, chip, mapper)
    if copied is not None:
        yield copied
    if chip.cores is None or not chip.cores.network.multicast:
        return
    common = [name for name in common_operands(plan, steps) if _is_small(plan, name, chip)]
    brought = _with_copies(plan, steps, [*common, *shared], chip, mapper) if common else None
    if brought is not None:
        yield brought


def _is_small(plan: ExecutionPlan, name: str, chip: Chip) -> bool:
    """Whether a value takes at most half of a scratchpad."""
    return plan.buffers[name].size_bytes <= chip.sram.size // 2


def _divided(plan: ExecutionPlan, way: Way, chip: Chip, mapper: Mapper) -> list[list[Step]]:
    """Divide each call among the cores; calls that cannot be divided run on the first core."""

    def parts(call: KernelCall) -> list[KernelCall]:
        if any(view.buffer in plan.donations for view in call.outputs):
            return [call]  # it writes where it reads
        parts = divided(call, way, chip.core_count)
        try:
            for part in parts:
                mapper.choices(part)
        except CannotLower:
            return [call]
        return parts

    return [[Step(part, core) for core, part in enumerate(parts(call))] for call in plan.calls]


def _layers(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> list[list[Step]]:
    """Assign whole calls to cores: consecutive calls to each core, with about equal estimated cycles."""
    estimates = [mapper.choices(call).estimate(frozenset(), chip.sram.size) for call in plan.calls]
    total, done, steps = sum(estimates), 0.0, []
    for call, cycles in zip(plan.calls, estimates, strict=True):
        core = min(chip.core_count - 1, int(chip.core_count * (done + cycles / 2) / total))
        steps.append([Step(call, core)])
        done += cycles
    return steps


def _with_copies(
    plan: ExecutionPlan, steps: Sequence[Sequence[Step]], shared: Sequence[str], chip: Chip, mapper: Mapper
) -> Arrangement | ConstraintError | None:
    """Lower a plan with copies of shared values on all cores, for those values whose copies all fit.

    None if none do.
    """
    copied = list(shared)
    while copied:
        own = spread(plan, steps, copied)
        residencies = _residencies(own, chip, mapper)
        kept = [
            name
            for name in copied
            if all(
                residencies[core].addresses.keys() >= {copy_name(name, core)} & own.owners.keys()
                for core in range(chip.core_count)
            )
        ]
        if kept == copied:
            return _linked(own, chip, mapper, residencies)
        copied = kept
    return None


def _residencies(own: Spread, chip: Chip, mapper: Mapper) -> list[Residency]:
    """Choose the values that stay in the scratchpad of each core: one `Residency` for each, in order of the cores."""
    return [choose_residency(own.of_core(core), chip, mapper) for core in range(chip.core_count)]


def _linked(
    own: Spread, chip: Chip, mapper: Mapper, residencies: Sequence[Residency] | None = None
) -> Arrangement | ConstraintError:
    """Generate the tile program of a plan on several cores, or return the error if it does not fit a chip without DRAM.

    On a chip with DRAM, nothing stays in the scratchpads if some part would not fit otherwise.
    """
    try:
        return _Linking(own, chip, mapper, residencies or _residencies(own, chip, mapper)).arrangement()
    except ConstraintError as error:  # values that stay leave too little room for some part
        if chip.dram is None:
            return error
        nothing = [Residency({}, [chip.sram.size] * len(own.of_core(c).calls)) for c in range(chip.core_count)]
        return _Linking(own, chip, mapper, nothing).arrangement()


class _Linking:
    """Generates the tile program of a plan on several cores, given the values that stay in each scratchpad."""

    def __init__(self, own: Spread, chip: Chip, mapper: Mapper, residencies: Sequence[Residency]) -> None:
        self._own, self._chip, self._mapper, self._residencies = own, chip, mapper, residencies
        self._names = [core_name(core) for core in range(chip.core_count)]
        self._uses = [self._uses_of(core) for core in range(chip.core_count)]
        uses = [use for of_core in self._uses for use in of_core]
        self._l2 = choose_l2(uses, own.buffers, own.plan, chip)
        for core, of_core in enumerate(self._uses):
            touched = {view.buffer for use in of_core for view in (*use.call.inputs, *use.call.outputs)}
            kept = {*self._l2, *(name for each in residencies for name in each.addresses if name not in each.weights)}
            kept.update(residencies[core].weights)
            check_places(kept, {name: own.buffers[name] for name in touched}, own.plan, chip)

    def arrangement(self) -> Arrangement:
        """Generate the program.

        Raises `ConstraintError` if a part does not fit beside the values that stay in the scratchpad.
        """
        own, chip = self._own, self._chip
        outside = self._outside()
        preload = [
            to_core(name).section(preloaded(weight, outside[weight], residency.addresses[weight], chip))
            for name, residency in zip(self._names, self._residencies, strict=True)
            for weight in residency.weights
        ] + [
            to_core(self._names[0]).section(preloaded(weight, outside[weight], address, chip, Space.L2))
            for weight, address in self._l2.items()
            if own.buffers[weight].is_constant
        ]
        inside = self._inside(outside)
        shared = {name: l2_place(address, outside[name].size) for name, address in self._l2.items()}
        linker = Linker(self._mapper, {**outside, **shared}, token_totals(preload), own_places=inside)
        parts = [iter(self._parts(core)) for core in range(chip.core_count)]
        sections = []
        for group, call in zip(own.groups, own.plan.calls, strict=True):
            begin = len(linker.sections)
            if group.brings:
                linker.send(*((send.copy, self._names[send.core]) for send in group.brings))
            linker.add(*(next(parts[step.core]) for step in group.steps))
            if group.sends:
                linker.send(*((send.copy, self._names[send.core]) for send in group.sends))
            written = linker.sections[begin:]
            body = tuple(node for section in written for node in section.body)
            comment = f"{shapes(call)}; on {len(group.steps)} core{'s' * (len(group.steps) > 1)}"
            sections.append(Section(call.node, call.kernel, comment, body))
        buffers = buffers_of(own.plan, self._mapper)
        program = TileProgram(chip.name, chip_digest(chip), buffers, tuple(preload), tuple(sections))
        return Arrangement(own.plan, program)

    def _outside(self) -> dict[str, Place]:
        """Buffer → its location in DRAM."""
        own = self._own
        places = dram_places(replace(own.plan, buffers={**own.plan.buffers, **own.buffers}), self._mapper)
        for name, (weight, first) in own.parts.items():
            places[name] = replace(places[name], space=places[weight].space, name=weight, offset=first)
        return places

    def _inside(self, outside: dict[str, Place]) -> dict[str, dict[str, Place]]:
        """Core → buffer → its location in a scratchpad: the core's own, or that of the core that owns the value."""
        values: dict[str, Place] = {}
        weights: dict[str, dict[str, Place]] = {}
        for name, residency in zip(self._names, self._residencies, strict=True):
            placed = {
                buffer: Place(Space.SCRATCHPAD, name, address, outside[buffer].size)
                for buffer, address in residency.addresses.items()
            }
            weights[name] = {buffer: placed[buffer] for buffer in residency.weights}
            values.update({buffer: place for buffer, place in placed.items() if buffer not in weights[name]})
        return {name: {**values, **weights[name]} for name in self._names}

    def _parts(self, core: int) -> list[Part]:
        """The parts of calls on a core, each with its best tiling."""
        calls = [use.with_l2(self._l2) for use in self._uses[core]]
        copies = {id(send.copy) for group in self._own.groups for send in (*group.brings, *group.sends)}
        return [
            Part(use.call, candidate.tiling, placed.room, candidate.needs(placed.resident), self._names[core])
            for use, candidate, placed in zip(self._uses[core], in_sequence(calls), calls, strict=True)
            if id(use.call) not in copies
        ]

    def _uses_of(self, core: int) -> list[Use]:
        """The calls of a core, with the operands that stay in its scratchpad."""
        residency = self._residencies[core]
        times = [time for time, group in enumerate(self._own.groups) for _ in group.of_core(core)]
        return [
            Use(call, time, Placed(self._mapper.choices(call), positions(call, residency.addresses), room), elsewhere)
            for call, room, time in zip(self._own.of_core(core).calls, residency.rooms, times, strict=True)
            for elsewhere in [{*residency.addresses, *self._owned_elsewhere()}]
        ]

    def _owned_elsewhere(self) -> set[str]:
        """Names of the values, other than weights, that lie in some core's scratchpad."""
        return {name for each in self._residencies for name in each.addresses if name not in each.weights}


__all__ = ["arranged", "lower_arranged"]
