"""The text dump of a plan: kernels, buffers with offsets and lifetimes, memory, weights."""

from __future__ import annotations

from collections import Counter

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, numel


def describe_plan(plan: ExecutionPlan, *, tables: bool = True) -> str:
    lines = [
        "inputs",
        *(f"  {spec.name}: {_spec(spec.shape, spec.storage, spec.alloc_shape)}" for spec in plan.inputs),
        "outputs",
        *(
            f"  {spec.name}: {_spec(spec.shape, spec.storage, spec.alloc_shape)}"
            + (f" (updates {plan.donations[spec.name]} in place)" if spec.name in plan.donations else "")
            for spec in plan.outputs
        ),
    ]
    if tables:
        lines += [
            "kernels",
            "     #  kernel                            output                  flops        bytes  node",
        ]
        lines += [_kernel_line(index, call) for index, call in enumerate(plan.calls)]
        if plan.prologue:
            lines += ["prologue (once per set of weights)"]
            lines += [_kernel_line(index, call) for index, call in enumerate(plan.prologue)]
        lines += ["buffers", "  kind          offset      bytes  lifetime   shape"]
        lines += [_buffer_line(buffer) for buffer in plan.buffers.values() if buffer.kind != "weight"]
        lines += ["weights"]
        lines += [f"  {name}: {_spec(w.spec.shape, w.spec.storage)} = {w.recipe}" for name, w in plan.weights.items()]
    lines += ["summary", *(f"  {key}: {value}" for key, value in summary(plan).items())]
    return "\n".join(lines)


def summary(plan: ExecutionPlan) -> dict[str, str | int]:
    """Totals: launches by kernel, FLOPs, bytes, peak memory, padding waste."""
    counts = Counter(call.kernel for call in plan.calls)
    by_kind: Counter[str] = Counter()
    waste = 0
    for buffer in plan.buffers.values():
        by_kind[buffer.kind] += buffer.size_bytes
    for spec in (*plan.inputs, *plan.outputs):
        waste += padding_waste(spec.shape, spec.alloc_shape, spec.storage)
    padded = _padded_arena_waste(plan)
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
        "padding waste bytes": waste + padded,
    }


def padding_waste(shape: tuple[int, ...], alloc_shape: tuple[int, ...] | None, dtype: str) -> int:
    """Bytes allocated for channels that hold no data."""
    return 0 if alloc_shape is None else (numel(alloc_shape) - numel(shape)) * itemsize(dtype)


def _padded_arena_waste(plan: ExecutionPlan) -> int:
    seen: dict[str, int] = {}
    for call in plan.calls:
        for view in call.outputs:
            buffer = plan.buffers[view.buffer]
            if buffer.kind == "arena" and view.rank == 4 and len(buffer.alloc_shape) == 4:
                spare = (numel(buffer.alloc_shape) - view.numel) * itemsize(view.dtype)
                seen[view.buffer] = min(seen.get(view.buffer, spare), spare)
    return sum(seen.values())


def _spec(shape: tuple[int, ...], dtype: str, alloc_shape: tuple[int, ...] | None = None) -> str:
    text = f"{dtype}{list(shape)}"
    return f"{text} in {list(alloc_shape)}" if alloc_shape else text


def _kernel_line(index: int, call: KernelCall) -> str:
    out: View = call.outputs[0]
    shape = _spec(out.shape, out.dtype)
    return f"  {index:4}  {call.kernel:32}  {shape:22} {call.flops:12} {call.bytes_moved:12}  {call.node}"


def _buffer_line(buffer: BufferAllocation) -> str:
    where = str(buffer.offset) if buffer.kind == "arena" else "-"
    life = f"{buffer.first_use}..{buffer.last_use}"
    shape = f"{buffer.dtype}{list(buffer.alloc_shape)}"
    return f"  {buffer.kind:10} {where:>9} {buffer.size_bytes:10}  {life:9}  {shape}  {buffer.name}"
