"""Rule of rotary embedding, alone or fused with the update of the KV cache that follows it."""

from __future__ import annotations

from collections.abc import Mapping

from cuda_compiler.rules.rows import shared_pack
from cuda_compiler.specialization.sizes import groups
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

_BLOCK = 128


def _rope(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, cos, sin = call.inputs
    return [rotary_kernel(make, call, "rope_kernel", {"x": x, "cos": cos, "sin": sin}, {"out": call.outputs[0]}, {})]


def rotary_kernel(
    make: Specializer,
    call: KernelCall,
    function: str,
    inputs: Mapping[str, View],
    outputs: Mapping[str, View],
    constants: Mapping[str, int],
) -> KernelCall:
    """The call of a rotary kernel, whose threads process pairs of `x`; an index tensor is not accessed as vectors."""
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


def shown_heads(view: View, whole: View) -> range | None:
    """The heads of `whole`, [B, H, T, D], that another view of its memory covers; None if it is no range of heads."""
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


def by_heads(view: View) -> View:
    """A view [rows, heads, width] of a paged pool as [1, heads, rows, width]; a view of another rank as it is."""
    return view.transpose(0, 1).unsqueeze(0) if view.rank == 3 else view


RULES: dict[str, Rule] = {
    "rope_kernel": _rope,
}
