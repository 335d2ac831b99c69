"""Runs convolutions some images of a batch at a time, so that what one call writes is still in a cache for the next.

The images of a batch do not depend on each other: calls that follow each other, each for all images, may as well all
run for the first images, and then all for the next ones. What they pass on takes the memory of one piece. But every
piece reads the weights again, so a call stays whole for which these readings together are larger than its images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import Family, KernelCall
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, numel

# Maximum number of pieces: preparing a program takes time for each call.
_MOST_PIECES = 8
# First dimension of the operands that hold a batch, in the declarations of kernels that treat its images alike.
_BATCH = {Family.CONV: "n", Family.POOL: "n", Family.ELEMENTWISE: "*s"}


def run_in_pieces(plan: ExecutionPlan, threads: int, alignment: int) -> ExecutionPlan:
    """The plan with stretches of convolutions cut along the batch, its memory planned anew.

    Given:  conv2d x[4, …] v → y[4, …]; conv2d y[4, …] w → z[4, …]
    Result: conv2d x[:2] v → y.0[2, …]; conv2d y.0[2, …] w → z[:2];
            conv2d x[2:] v → y.1[2, …]; conv2d y.1[2, …] w → z[2:]

    Args:
        threads: Number of threads; a piece has as many images at least.
    """
    batch = _batch(plan)
    pieces = next((n for n in range(min(_MOST_PIECES, batch // threads), 1, -1) if batch % n == 0), 1)
    if pieces == 1:
        return plan
    calls: list[KernelCall] = []
    buffers = dict(plan.buffers)
    for is_cut, group in groupby(
        plan.calls, lambda call: _can_be_cut(call, batch, plan) and _is_mostly_images(call, pieces, plan)
    ):
        stretch = list(group)
        if not is_cut or sum(map(_is_convolution, stretch)) < 2:
            calls += stretch
            continue
        inner = _inner_buffers(stretch, plan)
        for name in inner:
            buffers.update((part.name, part) for part in _parts(buffers.pop(name), pieces))
        calls += _cut(stretch, inner, batch, pieces)
    return (
        plan if len(calls) == len(plan.calls) else plan_memory(replace(plan, calls=calls, buffers=buffers), alignment)
    )


def _is_convolution(call: KernelCall) -> bool:
    return declaration(call).family == Family.CONV


def _batch(plan: ExecutionPlan) -> int:
    """The number of images of most convolutions; 1 if there are none."""
    sizes = Counter(call.outputs[0].shape[0] for call in plan.calls if not call.source and _is_convolution(call))
    return sizes.most_common(1)[0][0] if sizes else 1


def _can_be_cut(call: KernelCall, batch: int, plan: ExecutionPlan) -> bool:
    """Whether a call computes each image of its output from constants and the same image of its other inputs."""
    if call.source or declaration(call).family not in _BATCH:
        return False
    views = (*call.inputs, *call.outputs)
    return all(
        plan.buffers[view.buffer].is_constant or (is_batch and _is_batch(view, batch, plan))
        for view, is_batch in zip(views, _hold_batches(call), strict=True)
    )


def _is_mostly_images(call: KernelCall, pieces: int, plan: ExecutionPlan) -> bool:
    """Whether a call's constants, read once for each piece, are no larger than its other operands together."""
    views = (*call.inputs, *call.outputs)
    constants = sum(view.numel for view in views if plan.buffers[view.buffer].is_constant)
    return (pieces + 1) * constants <= sum(view.numel for view in views)


def _hold_batches(call: KernelCall) -> list[bool]:
    """Whether each of a call's operands has an image per index of its first dimension, by the kernel's declaration."""
    kernel = declaration(call)
    views = kernel.operands_of(call)
    present = [operand for operand in (*kernel.inputs, *kernel.outputs) if views[operand.name] is not None]
    return [operand.sizes is None or operand.sizes[0] == _BATCH[kernel.family] for operand in present]


def _is_batch(view: View, batch: int, plan: ExecutionPlan) -> bool:
    """Whether the images of a batch follow each other in a buffer, and a view's first dimension counts them."""
    size = numel(plan.buffers[view.buffer].alloc_shape)
    return view.rank > 0 and view.shape[0] == batch and view.strides[0] * batch == size


def _inner_buffers(stretch: Sequence[KernelCall], plan: ExecutionPlan) -> set[str]:
    """The buffers that nothing but a stretch's calls uses."""
    own_calls = set(map(id, stretch))
    others = [call for call in (*plan.prologue, *plan.calls) if id(call) not in own_calls]
    used = {view.buffer for call in others for view in (*call.inputs, *call.outputs)}
    used.update(view.buffer for view in plan.output_views.values())
    own = {view.buffer for call in stretch for view in call.outputs}
    return {name for name in own - used if plan.buffers[name].kind == "arena"}


def _parts(buffer: BufferAllocation, pieces: int) -> Iterator[BufferAllocation]:
    """The buffers of the pieces of a batch."""
    count = numel(buffer.alloc_shape) // pieces
    for piece in range(pieces):
        yield replace(buffer, name=f"{buffer.name}.{piece}", alloc_shape=(count,))


def _cut(stretch: Sequence[KernelCall], inner: set[str], batch: int, pieces: int) -> Iterator[KernelCall]:
    """The calls of a stretch for each piece of the batch."""
    images = batch // pieces

    def part(view: View, is_batch: bool, piece: int) -> View:
        if not is_batch or view.shape[0] != batch:
            return view
        cut = replace(view, shape=(images, *view.shape[1:]))
        if view.buffer in inner:
            return replace(cut, buffer=f"{view.buffer}.{piece}")
        return replace(cut, offset=view.offset + piece * images * view.strides[0])

    for piece in range(pieces):
        for call in stretch:
            views = [
                part(view, is_batch, piece)
                for view, is_batch in zip((*call.inputs, *call.outputs), _hold_batches(call), strict=True)
            ]
            yield replace(
                call,
                inputs=tuple(views[: len(call.inputs)]),
                outputs=tuple(views[len(call.inputs) :]),
                flops=call.flops // pieces,
                bytes_moved=call.bytes_moved // pieces,
            )
