"""Runs convolutions some images of a batch at a time, so that what one call writes is still in a cache for the next.

The images of a batch do not depend on each other: calls that follow each other, each for all images, may as well all
run for the first images, and then all for the next ones. What they pass on takes the memory of one piece. But every
piece reads the weights again, so a call stays whole for which these readings together are larger than its images. It
is cut all the same between calls that are, where the readings are smaller than the images that these pass on: the few
products of squeeze-and-excite do not end a stretch.
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
# Maximum number of elements of the images around a gap that a stretch passes over, for each piece. More would not stay
# in the caches near the cores, and smaller calls take longer (measured with 512 KiB of L2 for each core, a Zen 3).
_NEAR = 1 << 19
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
    for is_cut, stretch in _stretches(plan, batch, pieces):
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


def _stretches(plan: ExecutionPlan, batch: int, pieces: int) -> Iterator[tuple[bool, list[KernelCall]]]:
    """The calls in order, in stretches; of each, whether its calls are cut."""

    def is_cut(call: KernelCall) -> bool:
        images, weights = _sizes([call], plan)
        return _can_be_cut(call, batch, plan) and pieces * weights <= images

    runs = [(cut, list(calls)) for cut, calls in groupby(plan.calls, is_cut)]
    for index, (cut, gap) in enumerate(runs):
        if not cut and 0 < index < len(runs) - 1 and all(_can_be_cut(call, batch, plan) for call in gap):
            images, weights = _sizes([runs[index - 1][1][-1], *gap, runs[index + 1][1][0]], plan)
            runs[index] = pieces * weights <= images <= pieces * _NEAR, gap
    for cut, stretch in groupby(runs, lambda run: run[0]):
        yield cut, [call for _, calls in stretch for call in calls]


def _sizes(calls: Sequence[KernelCall], plan: ExecutionPlan) -> tuple[int, int]:
    """Number of elements of the operands that are no constants, and of those that are, which each piece reads."""
    sizes = [0, 0]
    for view in (view for call in calls for view in (*call.inputs, *call.outputs)):
        sizes[plan.buffers[view.buffer].is_constant] += view.numel
    return sizes[0], sizes[1]


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
