"""`Spread`: a program whose calls are divided among cores, with values that belong to one core made separate buffers.

Given: y = linear(x, w); z = relu(y), both by columns on two cores
Result: core0: y0 = linear(x, w[:n/2]); z[:n/2] = relu(y0); core1: y1 = linear(x, w[n/2:]); z[n/2:] = relu(y1)

1. A part of a weight that is contiguous becomes a weight by itself.
2. A value of which each core reads exactly what it has written itself becomes a separate value for each core.
3. Any other intermediate value may have a copy on each core that uses it, to which the other cores send the parts that
   they have computed. Otherwise it lies in DRAM.
4. A weight or an input that several cores read whole may have such copies too, which one of them brings from DRAM for
   all, in a multicast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.plan import BufferAllocation, BufferKind, ExecutionPlan
from npu_compiler.program.views import View
from npu_compiler.target_config import OP_LEVEL
from npu_model.isa.instructions import core_name
from npu_model.lowering.cascades import copy_call
from npu_model.lowering.regions import common, region_of


@dataclass(frozen=True)
class Step:
    """A part of a call, assigned to a core."""

    call: KernelCall
    core: int


@dataclass(frozen=True)
class Send:
    """A transfer of a part of a value to a core's copy: the copy call, and the sending and the receiving core.

    From DRAM, the core that reads sends to itself too.
    """

    copy: KernelCall
    core: int
    target: int


@dataclass(frozen=True)
class Group:
    """The work for a call of the plan.

    Attributes:
        steps: Its parts, which run concurrently.
        sends: Transfers between cores after them.
        brings: Transfers from DRAM to several cores before them.
    """

    steps: tuple[Step, ...]
    sends: tuple[Send, ...] = ()
    brings: tuple[Send, ...] = ()

    @property
    def calls(self) -> list[KernelCall]:
        """All parts and transfers."""
        moves = (*self.brings, *self.sends)
        return [*(step.call for step in self.steps), *(send.copy for send in moves)]

    def of_core(self, core: int) -> list[KernelCall]:
        """The parts that a core computes, and the transfers that it sends or receives."""
        brings, sends = (
            [send.copy for send in own if core in (send.core, send.target)] for own in (self.brings, self.sends)
        )
        return [*brings, *(step.call for step in self.steps if step.core == core), *sends]


Renaming: TypeAlias = Callable[[View, int], View]


@dataclass
class _Accesses:
    """The views of a buffer that each core writes, and those that it reads."""

    written: dict[int, set[View]] = field(default_factory=dict)
    read: dict[int, set[View]] = field(default_factory=dict)

    @property
    def cores(self) -> set[int]:
        """The cores that access the buffer."""
        return self.written.keys() | self.read.keys()

    @property
    def are_apart(self) -> bool:
        """Whether every core accesses a part of its own, and reads exactly the part that it writes."""
        if self.written.keys() < self.cores:
            return False
        regions = set()
        for core, written in self.written.items():
            views = written | self.read.get(core, set())
            own = {region_of(view) for view in views}
            if len(own) > 1 or any(region_of(view).packed(view, "") is None for view in views):
                return False
            regions |= own
        return len(regions) == len(self.written)


@dataclass(frozen=True)
class Spread:
    """A plan divided among several cores.

    Attributes:
        plan: The original plan, with memory for the buffers of the groups.
        groups: The work for each of its calls.
        buffers: All buffers that the groups access.
        parts: Name of a part of a weight → name of the weight, and the first byte of the part.
        owners: Name of a value that belongs to one core → that core.
    """

    plan: ExecutionPlan
    groups: tuple[Group, ...]
    buffers: Mapping[str, BufferAllocation]
    parts: Mapping[str, tuple[str, int]]
    owners: Mapping[str, int]

    def of_core(self, core: int) -> ExecutionPlan:
        """The calls of a core as a plan by itself.

        Values that are not its own are outputs, and what is brought from DRAM to copies is an input: these are never
        resident.
        """
        calls = [call for group in self.groups for call in group.of_core(core)]
        brought = {send.copy.inputs[0].buffer for group in self.groups for send in group.brings}

        def kind(name: str, buffer: BufferAllocation) -> BufferKind:
            if name in brought:
                return "input"
            return "output" if buffer.kind == "arena" and self.owners.get(name) != core else buffer.kind

        buffers = {name: replace(buffer, kind=kind(name, buffer)) for name, buffer in self.buffers.items()}
        return replace(self.plan, calls=calls, buffers=buffers)


def spread(plan: ExecutionPlan, steps: Sequence[Sequence[Step]], copied: Collection[str] = ()) -> Spread:
    """Divide a plan among cores.

    Args:
        steps: For each call of the plan, its parts.
        copied: Names of values that get a copy on each core that uses them.
    """
    return _Spreading(plan, steps).spread(copied)


def shared_values(plan: ExecutionPlan, steps: Sequence[Sequence[Step]]) -> list[str]:
    """Names of the intermediate values that several cores access and that cannot be made separate for each core."""
    return _Spreading(plan, steps).shared()


def common_operands(plan: ExecutionPlan, steps: Sequence[Sequence[Step]]) -> list[str]:
    """Names of the weights and inputs that several cores read whole, and that no call writes."""
    return _Spreading(plan, steps).common()


class _Spreading:
    def __init__(self, plan: ExecutionPlan, steps: Sequence[Sequence[Step]]) -> None:
        self._plan, self._steps = plan, steps
        self._outputs = {view.buffer for view in plan.output_views.values()}
        self._buffers = dict(plan.buffers)
        self._parts: dict[str, tuple[str, int]] = {}
        self._owners: dict[str, int] = {}
        self._accesses: dict[str, _Accesses] = {}
        for step in (step for own in steps for step in own):
            for view in step.call.inputs:
                self._accesses.setdefault(view.buffer, _Accesses()).read.setdefault(step.core, set()).add(view)
            for view in step.call.outputs:
                self._accesses.setdefault(view.buffer, _Accesses()).written.setdefault(step.core, set()).add(view)

    def _is_between(self, name: str) -> bool:
        return self._plan.buffers[name].kind == "arena" and name not in self._outputs

    def shared(self) -> list[str]:
        """Names of the intermediate values that lie in DRAM unless they are copied."""
        return [
            name
            for name, accesses in self._accesses.items()
            if self._is_between(name) and len(accesses.cores) > 1 and not accesses.are_apart
        ]

    def common(self) -> list[str]:
        """Names of the weights and inputs that several cores read whole."""

        def is_whole(view: View) -> bool:
            buffer = self._plan.buffers[view.buffer]
            return region_of(view).bytes == (0, buffer.size_bytes) and view.dtype == buffer.dtype

        return [
            name
            for name, accesses in self._accesses.items()
            if self._plan.buffers[name].kind != "arena" and not accesses.written and len(accesses.read) > 1
            if all(is_whole(view) for views in accesses.read.values() for view in views)
        ]

    def spread(self, copied: Collection[str]) -> Spread:
        """Divide the plan, with copies of these values on the cores."""
        outside = {name for name in copied if self._plan.buffers[name].kind != "arena"}
        renamed = []
        for parts in self._steps:
            brings = tuple(self._brings(parts, outside))
            steps = tuple(self._renamed(step, copied) for step in parts)
            renamed.append(Group(steps, tuple(self._sends(parts, copied)), brings))
        touched = {view.buffer for group in renamed for call in group.calls for view in (*call.inputs, *call.outputs)}
        buffers = {name: buffer for name, buffer in self._buffers.items() if name in touched}
        # Calls of a group run side by side: what they touch lives while any of them does.
        whole = [
            KernelCall(
                "group", "", tuple(v for c in group.calls for v in c.inputs),
                tuple(v for c in group.calls for v in c.outputs), {}, "",
            )
            for group in renamed
        ]  # fmt: skip
        planned = plan_memory(replace(self._plan, calls=whole, buffers=buffers), OP_LEVEL.buffer_alignment)
        own = {
            name: replace(buffer, offset=planned.buffers[name].offset if name in planned.buffers else 0)
            for name, buffer in self._plan.buffers.items()
        }
        ends = [buffer.offset + buffer.size_bytes for buffer in own.values() if buffer.kind == "arena"]
        size = max([planned.arena_bytes, *ends])
        plan = replace(self._plan, buffers=own, arena_bytes=size)
        return Spread(plan, tuple(renamed), planned.buffers, self._parts, self._owners)

    def _renamed(self, step: Step, copied: Collection[str]) -> Step:
        inputs, outputs = (
            tuple(self._view(view, step.core, copied) for view in views)
            for views in (step.call.inputs, step.call.outputs)
        )
        return Step(replace(step.call, inputs=inputs, outputs=outputs), step.core)

    def _view(self, view: View, core: int, copied: Collection[str]) -> View:
        """Replace a view by one of the core's own buffer (part of a weight, separate value or copy) if there is one."""
        name, accesses = view.buffer, self._accesses[view.buffer]
        if name in copied and self._plan.buffers[name].kind != "arena":
            return replace(view, buffer=self._copy(name, core))
        if self._plan.buffers[name].is_constant:
            return self._part(view)
        if not self._is_between(name):
            return view
        if len(accesses.cores) == 1:
            self._owners[name] = core
        elif name in copied:
            return replace(view, buffer=self._copy(name, core))
        elif accesses.are_apart:
            return self._own(view, core)
        return view

    def _part(self, view: View) -> View:
        """A view of a contiguous part of a weight as a weight by itself; other views are returned unchanged."""
        whole, region = self._plan.buffers[view.buffer], region_of(view)
        size = region.size * itemsize(view.dtype)
        if region.bytes is None or size == whole.size_bytes or view.dtype != whole.dtype:
            return view
        packed = region.packed(view, f"{view.buffer}[{region.offset}:{region.offset + region.size}]")
        if packed is None:
            return view
        self._parts[packed.buffer] = view.buffer, region.bytes[0]
        self._buffers[packed.buffer] = BufferAllocation(packed.buffer, whole.kind, (region.size,), view.dtype)
        return packed

    def _own(self, view: View, core: int) -> View:
        """A view of the part of a value that only this core accesses, in a separate buffer."""
        name, region = f"{view.buffer} of {core_name(core)}", region_of(view)
        packed = region.packed(view, name)
        assert packed is not None
        self._buffers[name] = BufferAllocation(name, "arena", (region.size,), view.dtype)
        self._owners[name] = core
        return packed

    def _copy(self, name: str, core: int) -> str:
        own = copy_name(name, core)
        self._buffers[own] = replace(self._plan.buffers[name], name=own, kind="arena")
        self._owners[own] = core
        return own

    def _brings(self, steps: Sequence[Step], outside: set[str]) -> Iterator[Send]:
        """The transfers from DRAM to all cores that read them, of values that these steps are the first to read.

        They are taken out of `outside`, the values in DRAM that get copies.
        """
        for step in steps:
            for name in [view.buffer for view in step.call.inputs if view.buffer in outside]:
                outside.discard(name)
                buffer = self._plan.buffers[name]
                view = View(name, (buffer.size_bytes // itemsize(buffer.dtype),), (1,), 0, buffer.dtype)
                first, *others = sorted(self._accesses[name].read)
                for core in (first, *others):
                    target = replace(view, buffer=self._copy(name, core))
                    yield Send(copy_call(view, target, step.call.node), first, core)

    def _sends(self, steps: Sequence[Step], copied: Collection[str]) -> list[Send]:
        """The transfers of what these steps have written to all other cores that read it."""
        sends = []
        for step in steps:
            for view in step.call.outputs:
                if view.buffer not in copied:
                    continue
                shown = region_of(view).view(view.buffer)
                for reader, reads in sorted(self._accesses[view.buffer].read.items()):
                    parts = {common(shown, region_of(read).view(view.buffer)) for read in reads}
                    for part in sorted(filter(None, parts), key=repr) if reader != step.core else ():
                        ends = step.core, reader
                        source, target = (replace(part, buffer=self._copy(part.buffer, core)) for core in ends)
                        sends.append(Send(copy_call(source, target, step.call.node), *ends))
        return sends


def copy_name(name: str, core: int) -> str:
    """The name of a core's copy of a value."""
    return f"{name} on {core_name(core)}"


__all__ = ["Group", "Send", "Spread", "Step", "common_operands", "copy_name", "shared_values", "spread"]
