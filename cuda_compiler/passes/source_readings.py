"""Calls that read the elements of a copy's target where its source has them, one function for each kind of call."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cuda_compiler.op_classify import classify
from cuda_compiler.passes.view_steps import Located, divided, merged
from cuda_compiler.rules.batched_halves import beats_copies
from cuda_compiler.rules.channel_packs import PACK, is_packed
from cuda_compiler.rules.matmul import gemm
from npu_compiler.program.kernels import KERNELS, Family, KernelCall, distinct_bytes
from npu_compiler.program.views import View

PRODUCT, ATTENTION = "batched_matmul_kernel", "attention_kernel"

Found = dict[View, Located]
"""View of a copy's target → the same elements of its source."""


def elementwise_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """An element-wise call that reads what is `found`; None if its threads would read it less side by side."""
    views = [*call.inputs, *call.outputs]
    moved = divided([found.get(view) or Located.of(view) for view in views])
    if moved is None:
        return None
    out = moved[-1]
    inner = next((dim for dim in reversed(range(out.rank)) if out.shape[dim] > 1), None)
    if inner is not None and any(
        new.strides[inner] > 1 and old.strides[-1] <= 1 for old, new in zip(views, moved, strict=True)
    ):
        return None
    count = len(call.inputs)
    return replace(call, inputs=tuple(moved[:count]), outputs=tuple(moved[count:]))


def reduction_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A reduction over what is `found`, whose kernel reads it in the order of memory; None if no views express that."""
    (x,), (out,) = call.inputs, call.outputs
    kept = x.rank - call.params["reduce_dims"]
    result = replace(out, shape=(*out.shape, *x.shape[kept:]), strides=(*out.strides, *(0 for _ in x.shape[kept:])))
    moved = divided((found[x], Located.of(result)))
    if moved is None:
        return None
    kept = sum(len(steps) for steps in found[x].steps[:kept])
    x, result = moved
    out = replace(result, shape=result.shape[:kept], strides=result.strides[:kept])
    return replace(call, inputs=(x,), outputs=(out,), params={**call.params, "reduce_dims": x.rank - kept})


def product_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A batched product that reads what is `found`; None if it is faster with the copy.

    Where an operand's rows (on the right, its columns) are divided, their outer parts become dimensions of the batch:
    there are more products, which share the other operand.
    """
    (left, right), (out,) = call.inputs, call.outputs
    swaps = right in found  # and so computes outᵀ = rightᵀ · leftᵀ
    if left == right or len(found) > 1:
        return None
    own = found[right if swaps else left]
    other, result = (left.transpose(-1, -2), out.transpose(-1, -2)) if swaps else (right, out)
    *lead, rows, terms = (*own.steps[:-2], own.steps[-1], own.steps[-2]) if swaps else own.steps
    *outer, inner = rows
    if len(terms) > 1:
        return None
    batch = [step for steps in (*lead, outer) for step in steps]
    shape, strides = zip(*batch, inner, *terms, strict=True)
    moved, sizes = replace(own.view, shape=shape, strides=strides, offset=own.offset), shape[:-2]
    divided_result = result.reshape((*shape[:-1], result.shape[-1]))
    shared = other.reshape((*sizes[: len(sizes) - len(outer)], *(1 for _ in outer), *other.shape[-2:]))
    if divided_result is None or shared is None:
        return None
    shared, result = shared.expand((*sizes, *other.shape[-2:])), divided_result
    if swaps:
        moved, shared, result = shared.transpose(-1, -2), moved.transpose(-1, -2), result.transpose(-1, -2)
    sides = {"m": result.shape[-2], "n": result.shape[-1], "batch": prod(sizes)}
    changed = replace(call, inputs=(moved, shared), outputs=(result,), params={**call.params, **sides})
    is_as_good = not outer and gemm(changed, moved, shared, result) is not None
    return changed if is_as_good or beats_copies(changed, distinct_bytes(own.view), 1) else None


def attention_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """Attention that reads what is `found`, with its batch and heads divided as they are there; None if that fails.

    The dimensions of a head must lie side by side.
    """
    q, k, v, mask, sinks, out = KERNELS[ATTENTION].bind(call)
    assert q is not None and k is not None and v is not None and out is not None
    if sinks is not None or q.shape[:2] != k.shape[:2]:
        return None
    batch, heads = q.shape[:2]
    for located in found.values():
        steps = [step for steps in located.steps[:2] for step in steps if step[0] > 1]
        if len(steps) == 2:
            (batch, _), (heads, _) = steps
    moved = []
    for view in (q, k, v, mask, out):
        if view is None:
            continue
        sizes = (batch, heads, *view.shape[2:])
        changed = _as_dimensions(found[view], (batch, heads)) if view in found else view.reshape(sizes)
        if changed is None or (view in found and changed.strides[3] != 1):
            return None
        moved.append(changed)
    *inputs, out = moved
    return replace(call, inputs=tuple(inputs), outputs=(out,))


def _as_dimensions(located: Located, lead: tuple[int, int]) -> View | None:
    """Elements [B, H, T, D] as a view of these sizes, whose first two are `lead`; None if no strides express that."""
    steps = merged([step for steps in located.steps[:2] for step in steps])
    rest = [step for steps in located.steps[2:] for step in steps]
    shape, strides = zip(*steps, *rest, strict=True)
    view = replace(located.view, shape=shape, strides=strides, offset=located.offset)
    return view.reshape((*lead, *view.shape[len(steps) :])) if len(rest) == 2 else None


def image_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A call over images that reads what is `found`, if that can be read in vectors of as many channels as the copy."""
    weights = call.inputs[1:2] if classify(call) is Family.CONV else ()
    if any(view in found for view in weights):  # their copies have the order that kernels need
        return None
    inputs = []
    for view in call.inputs:
        moved = found[view].undivided if view in found else view
        if moved is None or view in found and not (moved.rank == 4 and _pack(moved) >= max(_pack(view), 1)):
            return None
        inputs.append(moved)
    return replace(call, inputs=tuple(inputs))


def _pack(image: View) -> int:
    """The largest number of channels that can be read as an aligned vector; 0 if channels do not lie side by side."""
    return next((pack for pack in (PACK, 4, 2, 1) if is_packed(image, pack)), 0)
