"""Lets products make and read heads of attention that end with zeros, where attention on tensor cores needs these.

Given:  t = matmul(x: [3136, 40], w: [120, 40]);  y = attention(q, k, v: [196, 4, 16, 10], of t);  z = matmul(y, u)
Result: prologue: w' = pad(w: [12, 10, 40]), [12, 16, 40];  u' = pad(u: [40, 4, 10]), [40, 4, 16]
        t = matmul(x, w' as [192, 40]);  y = attention(q, k, v: [196, 4, 16, 16]);  z = matmul(y, u' as [40, 64])

Heads that something else makes are copied (`attention_operands.py`), which takes a kernel for each operand; the result
is read by a product all the same. Where something else reads the result, that is copied too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cuda_compiler.passes.attention_operands import pads_heads
from cuda_compiler.passes.padded_constants import PaddedConstants
from cuda_compiler.rules.channel_packs import PACK
from npu_compiler.program.kernels import KERNELS, KernelCall, readers_and_writers
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides, numel

_ATTENTION, _PRODUCT = "attention_kernel", "matmul_kernel"
_MOST_GROWTH = 2  # of a product's rows


def widen_heads(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with heads of whole aligned vectors where only products of constant weights make and read them."""
    wide = _Wide(plan)
    for index, call in enumerate(plan.calls):
        if call.kernel == _ATTENTION and pads_heads(call):
            wide.attend(index)
    prologue = [*plan.prologue, *wide.constants.prologue]
    return replace(plan, prologue=prologue, calls=wide.calls, buffers=wide.constants.buffers)


@dataclass(frozen=True)
class _Growth:
    """The width of heads before and after."""

    old: int
    new: int

    def of(self, count: int) -> int:
        """A number of elements of whole heads, after they have grown."""
        return count // self.old * self.new

    def heads(self, view: View) -> View | None:
        """Heads [B, H, T, D] that have grown with the others of their buffer; None if they are not whole ones there."""
        *steps, step = view.strides
        whole = step == 1 and view.shape[3] == self.old and not any(each % self.old for each in (*steps, view.offset))
        if not whole:
            return None
        strides = (*map(self.of, steps), 1)
        return replace(view, shape=(*view.shape[:3], self.new), strides=strides, offset=self.of(view.offset))

    def rows(self, view: View) -> View:
        """The matrix of a whole buffer, each row of which is heads side by side, after they have grown."""
        shape = (view.shape[0], self.of(view.shape[1]))
        return replace(view, shape=shape, strides=contiguous_strides(shape))


class _Wide:
    """A plan under construction, with the calls of which some have grown."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.calls = list(plan.calls)
        self.constants = PaddedConstants(dict(plan.buffers))
        self._readers, self._writers = readers_and_writers(plan.calls)
        self._kept = {view.buffer for view in plan.output_views.values()}

    def attend(self, index: int) -> None:
        """Let an attention's operands and result grow, if products of constant weights make and read these."""
        call = self.calls[index]
        q, k, v, *_, out = KERNELS[_ATTENTION].bind(call)
        assert q is not None and k is not None and v is not None and out is not None
        if q.shape[3] != v.shape[3]:
            return
        growth = _Growth(q.shape[3], q.shape[3] + -q.shape[3] % PACK)
        inputs = [growth.heads(view) if view in (q, k, v) else view for view in call.inputs]
        makers = {view.buffer: self._maker(view.buffer, index, growth) for view in (q, k, v)}
        grown, reader = growth.heads(out), self._reader(out.buffer, index, growth)
        if growth.new > _MOST_GROWTH * growth.old or grown is None or reader is None:
            return
        whole, products = [x for x in inputs if x is not None], [at for at in makers.values() if at is not None]
        if len(whole) == len(inputs) and len(products) == len(makers):
            self.calls[index] = replace(call, inputs=tuple(whole), outputs=(grown,))
            for at in products:
                self.calls[at] = self._making(self.calls[at], growth)
        else:  # `form_attention` copies the operands, and fills the room behind the result's heads
            makers = {}
            self.calls[index] = replace(call, outputs=(replace(grown, shape=out.shape),))
        self.calls[reader] = self._reading(self.calls[reader], growth)
        for name in (*makers, out.buffer):
            buffer = self.constants.buffers[name]
            *rest, last = buffer.alloc_shape
            self.constants.buffers[name] = replace(buffer, alloc_shape=(*rest, growth.of(last)))

    def _maker(self, name: str, index: int, growth: _Growth) -> int | None:
        """The number of the product that makes a buffer for the attention `index` alone; None if there is none."""
        at = self._product(name, self._writers, growth) if self._readers[name] == {index} else None
        if at is None or self.calls[at].params["has_residual"] or self.calls[at].params["activation"] != "none":
            return None
        call = self.calls[at]
        constant = all(self._is_constant(view) for view in call.inputs[1:])
        return at if constant and self._is_whole(call.outputs[0]) and call.params["n"] % growth.old == 0 else None

    def _reader(self, name: str, index: int, growth: _Growth) -> int | None:
        """The number of the product that alone reads what the attention `index` makes; None if there is none."""
        at = self._product(name, self._readers, growth) if self._writers[name] == {index} else None
        if at is None or [view.buffer for view in self.calls[at].inputs].count(name) != 1:
            return None
        call = self.calls[at]
        x, weight = call.inputs[:2]
        fits = x.buffer == name and self._is_whole(x) and call.params["k"] % growth.old == 0
        return at if fits and self._is_constant(weight) else None

    def _product(self, name: str, touching: Mapping[str, set[int]], growth: _Growth) -> int | None:
        """The number of the product that alone reads, or writes, a buffer which may grow; None if there is none.

        Args:
            touching: The calls that read each buffer, or those that write it.
        """
        buffer, found = self.constants.buffers[name], touching.get(name, set())
        may_grow = buffer.kind == "arena" and name not in self._kept and buffer.alloc_shape[-1] % growth.old == 0
        return next((at for at in found if may_grow and len(found) == 1 and self.calls[at].kernel == _PRODUCT), None)

    def _is_constant(self, view: View) -> bool:
        return self.constants.buffers[view.buffer].is_constant and view.is_contiguous

    def _is_whole(self, matrix: View) -> bool:
        return matrix.is_contiguous and matrix.numel == numel(self.constants.buffers[matrix.buffer].alloc_shape)

    def _making(self, call: KernelCall, growth: _Growth) -> KernelCall:
        """A product whose result has grown: weight and bias have zeros behind the rows of each head."""
        x, weight, *biases = call.inputs
        n, k = weight.shape
        heads, spare = n // growth.old, growth.new - growth.old
        rows = self._padded(weight, (heads, growth.old, k), (0, spare, 0), (growth.of(n), k))
        added = [self._padded(bias, (heads, growth.old), (0, spare), (growth.of(n),)) for bias in biases]
        params = {**call.params, "n": growth.of(n)}
        return replace(call, inputs=(x, rows, *added), outputs=(growth.rows(call.outputs[0]),), params=params)

    def _reading(self, call: KernelCall, growth: _Growth) -> KernelCall:
        """A product whose operand has grown: the weight has columns of zeros behind those of each head."""
        x, weight, *others = call.inputs
        n, k = weight.shape
        spare = growth.new - growth.old
        columns = self._padded(weight, (n, k // growth.old, growth.old), (0, 0, spare), (n, growth.of(k)))
        params = {**call.params, "k": growth.of(k)}
        return replace(call, inputs=(growth.rows(x), columns, *others), params=params)

    def _padded(self, view: View, divided: tuple[int, ...], more: tuple[int, ...], shape: tuple[int, ...]) -> View:
        """A contiguous constant, seen as `divided`, with zeros behind its dimensions, and then as `shape`."""
        parts = view.reshape(divided)
        assert parts is not None
        padded = self.constants.padded(parts, more).reshape(shape)
        assert padded is not None
        return padded
