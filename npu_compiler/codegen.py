"""Code generation: from an optimized graph to an `ExecutionPlan` of kernel calls and buffers.

Memory is planned later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.ops import OPS, find_op
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import well_formed
from npu_compiler.program.kernels import KERNELS, KernelCall, KernelDecl, declare_kernel
from npu_compiler.program.plan import BufferAllocation, BufferKind, ExecutionPlan, WeightSpec
from npu_compiler.program.target import CodegenTarget, MetalCodegenTarget
from npu_compiler.program.views import Shape, View, contiguous_strides, numel

__all__ = [
    "HANDLED_OPS",
    "KERNELS",
    "BufferAllocation",
    "CodegenTarget",
    "ExecutionPlan",
    "KernelCall",
    "KernelDecl",
    "MetalCodegenTarget",
    "declare_kernel",
    "generate_execution_plan",
    "lower_graph",
]

HANDLED_OPS = frozenset(name for name in OPS if not name.startswith("npu."))


def generate_execution_plan(
    graph: IRGraph, target: CodegenTarget, source_shapes: dict[str, tuple[int, ...]]
) -> ExecutionPlan:
    """Lower the graph, give each graph output a buffer of its own, and move constant work into the prologue.

    Args:
        source_shapes: `state_dict` key → shape, for checking weights at load time.
    """
    ctx = lower_graph(graph, target)
    donations = ctx.donations
    output_views = _own_outputs(ctx, donations)
    written = {view.buffer for view in output_views.values()}
    output_buffers = written - set(donations.values())
    ctx.calls = _without_unread(ctx.calls, written.union(graph.inputs, graph.weights, graph.constants))
    prologue, calls = _hoist_constant_calls(ctx, graph, output_buffers)
    prologue_buffers = {view.buffer for call in prologue for view in call.outputs}
    buffers: dict[str, BufferAllocation] = {}

    def allocate(names: Iterable[str], kind: BufferKind) -> None:
        for name in names:
            spec = graph.tensors[name]
            buffers[name] = BufferAllocation(name, kind, spec.alloc_shape or spec.shape, spec.storage)

    allocate(graph.inputs, "input")
    allocate(graph.weights, "weight")
    allocate(graph.constants, "constant")
    touched = {view.buffer for call in (*prologue, *calls) for view in (*call.inputs, *call.outputs)}
    for name, (shape, dtype) in ctx.allocs.items():
        kind: BufferKind = "output" if name in output_buffers else "persistent" if name in prologue_buffers else "arena"
        if name in touched or kind == "output":
            buffers[name] = BufferAllocation(name, kind, shape, dtype)
    for output, donor in donations.items():
        buffers[donor] = replace(buffers[donor], donor=output)
    return ExecutionPlan(
        prologue=prologue,
        calls=calls,
        buffers=buffers,
        inputs=[graph.tensors[name] for name in graph.inputs],
        outputs=[
            _output_spec(graph, name, tensor, output_views[name])
            for name, tensor in zip(graph.output_names, graph.outputs, strict=True)
        ],
        output_views=output_views,
        weights={
            name: WeightSpec(graph.tensors[name], recipe, {key: source_shapes[key] for key in recipe.keys()})
            for name, recipe in graph.weights.items()
        },
        constants=dict(graph.constants),
        donations=donations,
        unused_weights=tuple(sorted(source_shapes.keys() - {key for w in graph.weights.values() for key in w.keys()})),
    )


def lower_graph(graph: IRGraph, target: CodegenTarget) -> Lowering:
    """Lower the nodes in order; afterwards every tensor has a view and every kernel launch is in `calls`.

    Raises:
        IRError: a node lacks an input or an attribute, or its attributes or output contradict its inputs.
    """
    ctx = Lowering(graph, target)
    for name in (*graph.inputs, *graph.weights, *graph.constants):
        spec = graph.tensors[name]
        strides = contiguous_strides(spec.alloc_shape or spec.shape)
        ctx.views[name] = View(name, spec.shape, strides, 0, spec.storage)
    for node in graph.nodes:
        op = find_op(node.op_type)
        assert op is not None, f"{node.op_type} passed the constraint check"
        ctx.node = node
        with well_formed(node):
            op.lower(ctx, node)
    return ctx


def _without_unread(calls: list[KernelCall], read_later: set[str]) -> list[KernelCall]:
    """Return the calls without those whose results nobody reads, such as the positions of maxima beside their values.

    Args:
        read_later: The buffers that may be read after the last call.
    """
    kept, live = [], set(read_later)
    for call in reversed(calls):
        if not call.outputs or any(view.buffer in live for view in call.outputs):
            kept.append(call)
            live.update(view.buffer for view in call.inputs)
    return kept[::-1]


def _output_spec(graph: IRGraph, name: str, tensor: str, view: View) -> TensorSpec:
    return replace(graph.tensors[tensor], name=name, storage=view.dtype)


def _own_outputs(ctx: Lowering, donations: dict[str, str]) -> dict[str, View]:
    """Graph output → its view.

    An output that shares a buffer with another tensor is copied into a buffer of its own.
    """
    taken: set[str] = set()
    views: dict[str, View] = {}
    for name, tensor in zip(ctx.graph.output_names, ctx.graph.outputs, strict=True):
        view, spec = ctx.view(tensor), ctx.spec(tensor)
        memory = spec.alloc_shape or spec.shape
        if name not in donations and (not _is_whole_buffer(ctx, view, memory) or view.buffer in taken):
            buffer = ctx._fresh(f"{name}.out")
            ctx.allocs[buffer] = (memory, view.dtype)
            ctx.node = OpNode(name, "output", (tensor,), (tensor,))
            copied = View(buffer, spec.shape, contiguous_strides(memory), 0, view.dtype)
            ctx.copy(view, copied)
            view = copied
        taken.add(view.buffer)
        views[name] = view
    return views


def _is_whole_buffer(ctx: Lowering, view: View, memory: Shape) -> bool:
    """Whether a call's buffer holds exactly this view, laid out row-major in the shape `memory`."""
    if view.buffer not in ctx.allocs:
        return False
    allocated, _ = ctx.allocs[view.buffer]
    packed = contiguous_strides(memory)
    same = all(s == p or size == 1 for s, p, size in zip(view.strides, packed, view.shape, strict=True))
    return view.offset == 0 and same and numel(allocated) == numel(memory)


def _hoist_constant_calls(
    ctx: Lowering, graph: IRGraph, output_buffers: set[str]
) -> tuple[list[KernelCall], list[KernelCall]]:
    """Split the calls into those that depend on weights and constants only, and all others."""
    constant = set(graph.weights) | set(graph.constants)
    writers: dict[str, int] = {}
    for call in ctx.calls:
        for view in call.outputs:
            writers[view.buffer] = writers.get(view.buffer, 0) + 1
    made_constant: dict[str, int] = {}
    variable = set(graph.inputs) | output_buffers

    def is_constant(call: KernelCall) -> bool:
        reads = all(view.buffer in constant for view in call.inputs)
        return reads and not any(view.buffer in variable for view in call.outputs)

    candidates = []
    for call in ctx.calls:
        if is_constant(call):
            candidates.append(call)
            for view in call.outputs:
                made_constant[view.buffer] = made_constant.get(view.buffer, 0) + 1
                if made_constant[view.buffer] == writers[view.buffer]:
                    constant.add(view.buffer)
    hoisted = [call for call in candidates if all(view.buffer in constant for view in call.outputs)]
    chosen = {id(call) for call in hoisted}
    return hoisted, [call for call in ctx.calls if id(call) not in chosen]
