"""The text dump of a plan: totals, and tables of kernels, buffers and weights, which show equal layers once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan, WeightSpec
from npu_compiler.program.repeats import Run, fold
from npu_compiler.program.views import View, numel

_KERNELS = "     #  kernel                            output                       FLOP        bytes  node"


def describe_plan(plan: ExecutionPlan, *, tables: bool = True, full: bool = False) -> str:
    """A text with totals, inputs and outputs and, with `tables`, the kernels, buffers and weights.

    Args:
        full: Show every line, also of layers that are like the one before.
    """
    lines = ["summary", *(f"  {key}: {value}" for key, value in _totals(plan))]
    for title, specs, donations in (("inputs", plan.inputs, {}), ("outputs", plan.outputs, plan.donations)):
        rows = [
            f"{spec.name}: {_spec(spec.shape, spec.storage, spec.alloc_shape)}"
            + (f" (updates {donations[spec.name]} in place)" if spec.name in donations else "")
            for spec in specs
        ]
        alike = [
            (_unnumbered(spec.name), spec.shape, spec.storage, _unnumbered(donations.get(spec.name, "")))
            for spec in specs
        ]
        lines += _table(title, rows, alike, full)
    if tables:
        lines += _kernel_table("kernels", plan.calls, full)
        if plan.prologue:
            lines += _kernel_table("prologue kernels (once per set of weights)", plan.prologue, full)
        lines += _buffer_table([buffer for buffer in plan.buffers.values() if buffer.kind != "weight"], full)
        lines += _weight_table(plan.weights, full)
    return "\n".join(lines)


def print_calls(plan: ExecutionPlan) -> str:
    """A line of text for each call of a plan, the prologue's first, and one for the size of the arena."""
    lines = []
    for call in (*plan.prologue, *plan.calls):
        outputs, inputs = (
            ", ".join(f"%{view.buffer}: {_spec(view.shape, view.dtype)}" for view in views)
            for views in (call.outputs, call.inputs)
        )
        params = ", ".join(f"{name}={value}" for name, value in call.params.items())
        lines.append(f"{outputs} = {call.kernel}({inputs}) {{{params}}}")
    return "\n".join([*lines, f"arena: {plan.arena_bytes} bytes"])


def _table(
    title: str, rows: Sequence[str], alike: Sequence[Hashable], full: bool, heading: Sequence[str] = ()
) -> list[str]:
    """A title and its rows, indented. If groups of rows repeat, only the first group is shown, unless `full`.

    Args:
        alike: A key for each row; rows with equal keys count as repetitions.
    """
    shown, what = [title, *(f"  {line}" for line in heading)], title.partition(" (")[0]
    for run in [Run(0, len(rows), 1)] if full else fold(alike):
        period = rows[run.start : run.start + run.period]
        if run.count > 1:
            each = f", {run.period} each" if run.period > 1 else ""
            shown.append(f"  × {run.count}: {what} {run.start} to {run.stop - 1}{each}; the first:")
            period = [f"|{row}" for row in period]
        shown += [f"  {row}" for row in period]
    return shown


def _kernel_table(title: str, calls: Sequence[KernelCall], full: bool) -> list[str]:
    rows = [_kernel_line(index, call) for index, call in enumerate(calls)]
    return _table(title, rows, [_work(call) for call in calls], full, [_KERNELS])


def _work(call: KernelCall) -> Hashable:
    """A key that is equal for calls of equal layers: everything but their buffers, parameters and node."""
    views = (*call.inputs, *call.outputs)
    return call.kernel, len(call.inputs), tuple((view.shape, view.dtype) for view in views)


def _buffer_table(buffers: Sequence[BufferAllocation], full: bool) -> list[str]:
    rows = [_buffer_line(buffer) for buffer in buffers]
    alike = [(buffer.kind, buffer.dtype, buffer.alloc_shape) for buffer in buffers]
    return _table("buffers", rows, alike, full, ["kind          offset      bytes  lifetime   shape"])


def _weight_table(weights: Mapping[str, WeightSpec], full: bool) -> list[str]:
    rows = [f"{name}: {_spec(w.spec.shape, w.spec.storage)} = {w.recipe}" for name, w in weights.items()]
    alike = [(_unnumbered(str(w.recipe)), w.spec.shape, w.spec.storage) for w in weights.values()]
    return _table("weights", rows, alike, full)


def _unnumbered(name: str) -> str:
    """A name without the numbers in it, so that names of equal layers are equal."""
    return re.sub(r"_?\d+", "", name)


def _totals(plan: ExecutionPlan) -> list[tuple[str, str]]:
    """The label and the text of each row of the summary."""
    facts = summary(plan)
    families = Counter(family_name(call) for call in plan.calls)
    prologue = f", and {len(plan.prologue)} once per set of weights" if plan.prologue else ""
    around = int(facts["peak bytes without weights"]) - plan.arena_bytes
    return [
        ("kernel launches", f"{len(plan.calls)}{prologue}"),
        ("by family", ", ".join(f"{name} {count}" for name, count in families.most_common())),
        ("by kernel", str(facts["launches by kernel"])),
        ("work", f"{format_flops(int(facts['FLOPs']))}, {format_bytes(int(facts['bytes moved']))} moved"),
        ("weights", f"{len(plan.weights)} tensors, {format_bytes(int(facts['weight bytes']))}"),
        ("arena", format_bytes(plan.arena_bytes)),
        ("inputs, outputs and constants", format_bytes(around)),
        ("padding", format_bytes(int(facts["padding waste bytes"]))),
    ]


def family_name(call: KernelCall) -> str:
    """The family of a call's kernel; "generated" for a kernel that a target has generated or named itself."""
    try:
        return declaration(call).family.value
    except KeyError:
        return "generated"


def format_bytes(count: int) -> str:
    """A number of bytes as text: 1536 as "1.5 KiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_flops(count: int) -> str:
    """A number of floating-point operations as text: 2500000 as "2.5 MFLOP"."""
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(count: int, base: int, units: Sequence[str]) -> str:
    value, unit = float(count), 0
    while value >= base and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    return f"{value:.1f} {units[unit]}" if unit else f"{count} {units[0]}"


def summary(plan: ExecutionPlan) -> dict[str, str | int]:
    """Totals of a plan: launches by kernel, FLOPs, bytes, peak memory, padding waste."""
    counts = Counter(call.kernel for call in plan.calls)
    by_kind: Counter[str] = Counter()
    for buffer in plan.buffers.values():
        by_kind[buffer.kind] += buffer.size_bytes
    constant = by_kind["persistent"] + by_kind["constant"]
    peak = plan.arena_bytes + by_kind["input"] + by_kind["output"] + constant
    return {
        "kernel launches": len(plan.calls),
        "prologue launches": len(plan.prologue),
        "launches by kernel": ", ".join(f"{name} {count}" for name, count in counts.most_common()),
        "FLOPs": sum(call.flops for call in plan.calls),
        "bytes moved": sum(call.bytes_moved for call in plan.calls),
        "weight bytes": by_kind["weight"],
        "arena bytes": plan.arena_bytes,
        "peak bytes without weights": peak,
        "padding waste bytes": sum(padding_by_buffer(plan).values()),
    }


def padding_waste(shape: tuple[int, ...], alloc_shape: tuple[int, ...] | None, dtype: str) -> int:
    """Bytes of a tensor's memory that are padding of its channels; 0 if it has none."""
    return 0 if alloc_shape is None else (numel(alloc_shape) - numel(shape)) * itemsize(dtype)


def padding_by_buffer(plan: ExecutionPlan) -> dict[str, int]:
    """Input, output or arena buffer → its bytes of padding; buffers without padding are left out.

    In the arena, a buffer's data is the largest tensor that a call writes there, since a plan has no other specs of it.
    """
    waste = {spec.name: padding_waste(spec.shape, spec.alloc_shape, spec.storage) for spec in plan.inputs}
    for spec in plan.outputs:
        waste[spec.name] = padding_waste(spec.shape, spec.alloc_shape, spec.storage)
    in_arena: dict[str, int] = {}
    for call in plan.calls:
        for view in call.outputs:
            buffer = plan.buffers[view.buffer]
            if buffer.kind == "arena" and view.rank == 4 and len(buffer.alloc_shape) == 4:
                spare = (numel(buffer.alloc_shape) - view.numel) * itemsize(view.dtype)
                in_arena[view.buffer] = min(in_arena.get(view.buffer, spare), spare)
    return {name: size for name, size in (waste | in_arena).items() if size}


def _spec(shape: tuple[int, ...], dtype: str, alloc_shape: tuple[int, ...] | None = None) -> str:
    text = f"{dtype}{list(shape)}"
    return f"{text} in {list(alloc_shape)}" if alloc_shape else text


def _kernel_line(index: int, call: KernelCall) -> str:
    out: View = call.outputs[0]
    shape = _spec(out.shape, out.dtype)
    return f"{index:6}  {call.kernel:32}  {shape:22} {call.flops:12} {call.bytes_moved:12}  {call.node}"


def _buffer_line(buffer: BufferAllocation) -> str:
    where = str(buffer.offset) if buffer.kind == "arena" else "-"
    life = f"{buffer.first_use}..{buffer.last_use}"
    shape = f"{buffer.dtype}{list(buffer.alloc_shape)}"
    return f"{buffer.kind:10} {where:>9} {buffer.size_bytes:10}  {life:9}  {shape}  {buffer.name}"
