"""Brings attention into forms that tensor cores compute, where its heads are not.

Given:   y = attention(q, k, v: [3136, 4, 16, 6])
Result:  q' = to_channels_last(q), which is [3136, 4, 16, 8] with zeros at the ends of rows;  k' and v' likewise
         t = attention(q', k', v');  y = copy(t[:, :, :, :6])

Given:   y = attention(q, k, v: [1, 1, 4096, 512])
Result:  s = batched_matmul(q, k.T);  p = softmax(s);  y = batched_matmul(p, v)

Given:   k' = copy(k);  y = attention(q, k', v), where k's heads have contiguous rows
Result:  y = attention(q, k, v)

The first is for heads whose rows are not whole aligned vectors; zeros change no score. The second is for heads that are
wider than the attention kernels' registers. Without them a plain kernel computes the rows one by one. The third is for
heads that are channels of images: `channels_last` lays them as attention can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cuda_compiler.passes.packed_operands import copy, packing
from cuda_compiler.rules.attention import WIDEST_HEAD, suits_tensor_cores
from cuda_compiler.rules.channel_packs import PACK
from cuda_compiler.specialization.sizes import vector_width
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes, readers_and_writers
from npu_compiler.program.placement import is_copy, moved_view
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import Shape, View, contiguous_strides, numel

_ATTENTION = "attention_kernel"
_FEW_ROWS = 8  # queries of a problem, below which the plain kernel reads keys about as often as a copy would
_LONG = 16  # queries, from which on products over wide heads pay


def form_attention(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with attention over padded heads, or as two products and a softmax, where tensor cores need that."""
    formed = _Formed(dict(plan.buffers), readers_and_writers(plan.calls)[1])
    for call in plan.calls:
        if call.kernel == _ATTENTION:
            formed.attend(call)
        else:
            formed.calls.append(call)
    return replace(plan, calls=formed.calls, buffers=formed.buffers)


def pads_heads(call: KernelCall) -> bool:
    """Whether an attention is computed on tensor cores once its heads have zeros at the ends of their rows."""
    q, k, v, *_ = KERNELS[_ATTENTION].bind(call)
    assert q is not None and k is not None and v is not None
    spare = q.shape[3] % PACK or v.shape[3] % PACK
    return bool(spare) and _is_for_tensor_cores(q, k, v) and _is_narrow(q, v)


def _is_for_tensor_cores(q: View, k: View, v: View) -> bool:
    """Whether operands are 16-bit floats, and there are enough queries for each key."""
    of_halves = q.dtype == k.dtype == v.dtype and q.dtype in HALF_DTYPES
    return of_halves and k.numel > 0 and q.shape[2] * (q.shape[1] // k.shape[1]) >= _FEW_ROWS


def _is_narrow(q: View, v: View) -> bool:
    return max(q.shape[3], v.shape[3]) <= WIDEST_HEAD


@dataclass
class _Formed:
    """A plan under construction.

    Attributes:
        buffers: The plan's buffers and new ones, by name.
        writers: The plan's calls that write each buffer.
        calls: The calls so far.
    """

    buffers: dict[str, BufferAllocation]
    writers: Mapping[str, set[int]]
    calls: list[KernelCall] = field(default_factory=list)

    def attend(self, call: KernelCall) -> None:
        """Append the calls for an attention."""
        q, k, v, mask, sinks, out = KERNELS[_ATTENTION].bind(call)
        assert q is not None and k is not None and v is not None and out is not None
        rows = q.shape[2] * (q.shape[1] // k.shape[1])
        is_product = mask is sinks is None and not call.params["causal"] and q.shape[1] == k.shape[1] and rows >= _LONG
        if not _is_for_tensor_cores(q, k, v):
            self.calls.append(call)
        elif is_product and not _is_narrow(q, v):
            self._multiply(call, q, k, v, out)
        elif _is_narrow(q, v) and not suits_tensor_cores(q, k, v):
            self._pad(call, q, k, v, [view for view in (mask, sinks) if view is not None], out)
        else:
            self._read_in_place(call, q, k, v)

    def _read_in_place(self, call: KernelCall, q: View, k: View, v: View) -> None:
        """Append an attention that reads heads where they were copied from, if their rows are whole vectors there."""
        sources = [self._copied(view) for view in (q, k, v)]
        if all(view.strides[3] == 1 for view in sources) and suits_tensor_cores(*sources):
            call = replace(call, inputs=(*sources, *call.inputs[3:]))
        self.calls.append(call)

    def _pad(self, call: KernelCall, q: View, k: View, v: View, others: list[View], out: View) -> None:
        padded = [self._padded(view, call.node) for view in (q, k, v)]
        if self._has_room(out, width := padded[2].shape[3]):
            result = replace(out, shape=(*out.shape[:3], width))
            self.calls.append(replace(call, inputs=(*padded, *others), outputs=(result,)))
            return
        result = self._by_tokens((*out.shape[:3], padded[2].shape[3]), out.dtype, f"{call.node}.heads")
        self.calls.append(replace(call, inputs=(*padded, *others), outputs=(result,)))
        self.calls.append(copy(result.slice(3, 0, out.shape[3]), out, call.node))

    def _has_room(self, out: View, width: int) -> bool:
        """Whether a result's rows lie in heads of `width` elements each, of a buffer that has no other content."""
        heads = self.buffers[out.buffer].alloc_shape[-1] % width == 0
        apart = out.strides[3] == 1 and not any(step % width for step in (*out.strides[:3], out.offset))
        return heads and apart and out.shape[3] < width and len(self.writers[out.buffer]) == 1

    def _padded(self, view: View, node: str) -> View:
        """Heads [B, H, T, D] whose rows are whole aligned vectors: the view, or a copy with zeros at their ends."""
        spare = -view.shape[3] % PACK
        view = self._copied(view)
        if spare == 0 and view.strides[3] == 1 and vector_width(view) >= PACK:
            return view
        target = self._by_tokens((*view.shape[:3], view.shape[3] + spare), view.dtype, f"{node}.padded")
        if spare == 0:
            self.calls.append(copy(view, target, node))
            return target
        source, packed = (each.permute((0, 3, 2, 1)) for each in (view, target))
        self.calls.append(packing(source, packed, node))
        return target

    def _multiply(self, call: KernelCall, q: View, k: View, v: View, out: View) -> None:
        q, k, v = (self._copied(view) for view in (q, k, v))
        scores = self._buffer((*q.shape[:3], k.shape[2]), "float32", f"{call.node}.scores")
        weights = self._buffer(scores.shape, v.dtype, f"{call.node}.weights")
        softmax = replace(call, kernel="softmax_kernel", params={"scale": 1.0}, flops=0)
        self.calls += [
            self._product(call, q, k.transpose(-1, -2), scores, call.params["scale"]),
            replace(softmax, inputs=(scores,), outputs=(weights,)),
            self._product(call, weights, v, out, 1.0),
        ]

    def _copied(self, view: View) -> View:
        """The elements of a view where they were copied from: products take either order of a matrix in memory.

        The view itself if it is no copy, or its source was written since.
        """
        for at in range(len(self.calls) - 1, -1, -1):
            call = self.calls[at]
            if all(out.buffer != view.buffer for out in call.outputs):
                continue
            source = call.inputs[0] if is_copy(call) else view
            written = {out.buffer for later in self.calls[at:] for out in later.outputs}
            moved = moved_view(view, call.outputs[0], source) if source.buffer not in written else None
            return view if moved is None or 1 not in moved.strides[2:] else moved
        return view

    def _product(self, call: KernelCall, a: View, b: View, out: View, scale: float) -> KernelCall:
        m, n, k = out.shape[2], out.shape[3], a.shape[3]
        params = {"m": m, "n": n, "k": k, "batch": numel(out.shape[:2]), "scale": scale, "transpose_b": 0}
        moved = sum(map(distinct_bytes, (a, b, out)))
        return KernelCall("batched_matmul_kernel", "", (a, b), (out,), params, call.node, 2 * out.numel * k, moved)

    def _by_tokens(self, shape: Shape, dtype: str, stem: str) -> View:
        """A view [B, H, T, D] of a new buffer, in which the heads of a token lie side by side."""
        batch, heads, tokens, width = shape
        return self._buffer((batch, tokens, heads, width), dtype, stem).permute((0, 2, 1, 3))

    def _buffer(self, shape: Shape, dtype: str, stem: str) -> View:
        name = f"{stem}{len(self.buffers)}"
        self.buffers[name] = BufferAllocation(name, "arena", shape, dtype)
        return View(name, shape, contiguous_strides(shape), 0, dtype)
