"""Rotary embedding, which also puts the keys where the KV cache wants them: one launch instead of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cuda_compiler.compute_rules import shared_pack
from cuda_compiler.cuda_templates import Specializer, groups, template_rule
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_BLOCK = 128


@template_rule("rope_kernel")
def _rope(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, cos, sin = call.inputs
    return [_kernel(make, call, "rope_kernel", {"x": x, "cos": cos, "sin": sin}, {"out": call.outputs[0]}, {})]


def _kernel(
    make: Specializer,
    call: KernelCall,
    function: str,
    inputs: Mapping[str, View],
    outputs: Mapping[str, View],
    constants: Mapping[str, int],
) -> KernelCall:
    """A kernel over the pairs of `x`; its index tensor, if it has one, is read one by one."""
    pack = shared_pack(view for name, view in (*inputs.items(), *outputs.items()) if name != "index")
    pairs = inputs["x"].shape[-1] // 2
    while pairs % pack:
        pack //= 2
    grid = (groups(inputs["x"].numel // 2 // pack, _BLOCK), 1, 1)
    return make.kernel(
        call,
        "rotary/rope.cu",
        function=function,
        grid=grid,
        block=(_BLOCK, 1, 1),
        inputs=inputs,
        outputs=outputs,
        constants={**constants, "pack": pack},
    )


def join_rotary_updates(plan: ExecutionPlan, make: Specializer) -> list[KernelCall]:
    """The plan's calls with each rotation of keys, and the update of the cache behind it, as one.

    Given:  rope; index_copy_pair; attention
    Result: rotary_update; attention

    The rotated keys must be read by nobody else, since only the cache gets them.
    """
    readers: dict[str, list[View]] = {}
    for view in (*(view for call in plan.calls for view in call.inputs), *plan.output_views.values()):
        readers.setdefault(view.buffer, []).append(view)
    result: list[KernelCall] = []
    for call in plan.calls:
        joined = _join(result[-1], call, readers, make) if result else None
        if joined is None:
            result.append(call)
        else:
            result[-1] = joined
    return result


def _join(rope: KernelCall, update: KernelCall, readers: dict[str, list[View]], make: Specializer) -> KernelCall | None:
    """One call that does both; None where one kernel cannot."""
    if (rope.kernel, update.kernel) != ("rope_kernel", "index_copy_pair_kernel") or update.params["dim"] != 2:
        return None
    x, cos, sin = rope.inputs
    (turned,), (index, new_keys, source), (keys, values) = rope.outputs, update.inputs, update.outputs
    stored = shown_heads(new_keys, turned)
    others = [shown_heads(view, turned) for view in readers[turned.buffer] if view != new_keys]
    if (
        stored is None
        or len(others) + 1 != len(readers[turned.buffer])
        or any(heads is None or set(heads) & set(stored) for heads in others)
        or source.shape != new_keys.shape
        or source.buffer == turned.buffer
        or keys.dtype != turned.dtype
        or {keys.buffer, values.buffer} & {view.buffer for view in (*rope.inputs, *update.inputs, turned)}
    ):
        return None
    inputs = {"x": x, "cos": cos, "sin": sin, "index": index, "source": source}
    outputs = {"out": turned, "keys": keys, "values": values}
    call = replace(
        update,
        flops=rope.flops,
        bytes_moved=rope.bytes_moved + distinct_bytes(index) + 2 * distinct_bytes(source),
    )
    return _kernel(make, call, "rotary_update", inputs, outputs, {"first_key": stored.start})


def shown_heads(view: View, whole: View) -> range | None:
    """Which heads of [B, H, T, D] another view of the same memory shows; None where it does not show whole heads."""
    if view.buffer != whole.buffer or view.rank != 4 or not whole.numel:
        return None
    if (view.shape[0], *view.shape[2:]) != (whole.shape[0], *whole.shape[2:]):
        return None
    pairs = zip(view.shape, view.strides, whole.strides, strict=True)
    if any(size > 1 and mine != other for size, mine, other in pairs):
        return None
    head, rest = divmod(view.offset - whole.offset, whole.strides[1])
    if rest or not 0 <= head <= whole.shape[1] - view.shape[1]:
        return None
    return range(head, head + view.shape[1])
