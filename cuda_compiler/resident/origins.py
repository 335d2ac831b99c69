"""Origins of queries and new keys: their views before rotary embedding, RMSNorm and copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cuda_compiler.rules.rotary import shown_heads
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View


@dataclass(frozen=True)
class HeadOrigin:
    """The origin of queries or keys [B, H, T, D], and the calls between the origin and attention.

    Attributes:
        view: The view before these calls, [B, H, T, D].
        rope: The rotary embedding; None if there is none.
        norm: The RMSNorm of each head's D values, before the rotary embedding; None if there is none.
        copy: The copy before the RMSNorm, which needs equally spaced rows; None if there is none.
    """

    view: View
    rope: KernelCall | None
    norm: KernelCall | None
    copy: KernelCall | None

    @property
    def calls(self) -> list[KernelCall]:
        return [call for call in (self.rope, self.norm, self.copy) if call is not None]


def find_origin(view: View, makers: Mapping[str, KernelCall]) -> HeadOrigin | None:
    """The origin of queries or keys, traced back through their rotary embedding, RMSNorm and copy.

    None if the view does not fit one of these calls, or if the rows of the origin are not contiguous.

    Args:
        makers: Buffer → the call that computes it, for the calls that may lie between origin and attention.
    """
    rope = norm = copy = None
    if _kernel_of(view, makers) == "rope_kernel":
        rope = makers[view.buffer]
        view = _before_rope(view, rope) or view
    if _kernel_of(view, makers) == "rmsnorm_kernel":
        norm = makers[view.buffer]
        view = _before_norm(view, norm) or view
        if (maker := makers.get(view.buffer)) is not None and _is_copy(maker):
            copy = maker
            view = _before_copy(view, copy) or view
    if view.buffer in makers or view.strides[-1] != 1:
        return None
    return HeadOrigin(view, rope, norm, copy)


def _kernel_of(view: View, makers: Mapping[str, KernelCall]) -> str | None:
    maker = makers.get(view.buffer)
    return maker.kernel if maker is not None else None


def _is_copy(call: KernelCall) -> bool:
    kernel = elementwise_kernel(call)
    return kernel is not None and kernel.op.name == "copy" and len(call.inputs) == 1


def _before_rope(view: View, rope: KernelCall) -> View | None:
    """The heads of `view` before their rotation.

    None if the view does not cover whole heads, or if only a part of each head is rotated.
    """
    x, (turned,) = rope.inputs[0], rope.outputs
    heads = shown_heads(view, turned)
    if heads is None or rope.params["rotary_dim"] != view.shape[3] or x.dtype != turned.dtype:
        return None
    return replace(x, shape=view.shape, offset=x.offset + heads.start * x.strides[1])


def _before_norm(view: View, norm: KernelCall) -> View | None:
    """The rows of `view` before their RMSNorm; None if the view does not cover whole rows."""
    x, (normal,) = norm.inputs[0], norm.outputs
    row, first = normal.strides[0], view.offset - normal.offset
    outer = [stride if size > 1 else 0 for size, stride in zip(view.shape[:-1], view.strides, strict=False)]
    if (
        view.shape[-1] != norm.params["width"]
        or any(place % row for place in (first, *outer))
        or not view.strides[-1] == normal.strides[1] == x.strides[1] == 1
        or x.dtype != normal.dtype
    ):
        return None
    strides = (*(stride // row * x.strides[0] for stride in outer), 1)
    return replace(x, shape=view.shape, strides=strides, offset=x.offset + first // row * x.strides[0])


def _before_copy(view: View, copy: KernelCall) -> View | None:
    """The part of a copy's source that `view`, a view of its result, stands for.

    None if the view's dimensions are not the copy's in some order.
    """
    (x,), (copied,) = copy.inputs, copy.outputs
    strides_before = {
        (size, stride): before
        for size, stride, before in zip(copied.shape, copied.strides, x.strides, strict=True)
        if size > 1
    }
    dims = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1]
    if view.offset != copied.offset or x.dtype != copied.dtype or not strides_before.keys() >= set(dims):
        return None
    strides = tuple(strides_before.get(dim, 0) for dim in zip(view.shape, view.strides, strict=True))
    return replace(x, shape=view.shape, strides=strides)
