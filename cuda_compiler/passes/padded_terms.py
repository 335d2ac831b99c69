"""Gives products on tensor cores rows of whole aligned vectors, by zeros behind the ends of both operands' rows.

Given:  y = matmul(x: [4096, 180], w: [360, 180])
Result: prologue: w' = pad(w), [360, 184]
        x' = to_channels_last(x), [4096, 184];  y = matmul(x', w')

For rows of other lengths cuBLASLt has kernels for older GPUs only, and we have none: 65,536 rows of 180 terms take it
138 µs for 540 results, where an H200's memory takes 24.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cuda_compiler.passes.packed_operands import packing
from cuda_compiler.passes.padded_constants import PaddedConstants
from cuda_compiler.rules.channel_packs import PACK, single_pixels
from cuda_compiler.rules.matmul import VECTOR_ROWS
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_PRODUCT = "matmul_kernel"
_FEWEST_TERMS = 4 * PACK  # below, the zeros are a large part of the product, and the copy of the time


def pad_terms(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with whole vectors of terms in products of many rows by constant weights."""
    padded = _Padded(PaddedConstants(dict(plan.buffers)))
    for call in plan.calls:
        padded.append(call)
    prologue = [*plan.prologue, *padded.constants.prologue]
    return replace(plan, prologue=prologue, calls=padded.calls, buffers=padded.constants.buffers)


@dataclass
class _Padded:
    """A plan under construction.

    Attributes:
        constants: The padded weights; its buffers are all of the plan's.
        calls: The calls so far.
    """

    constants: PaddedConstants
    calls: list[KernelCall] = field(default_factory=list)
    _copies: dict[View, View] = field(default_factory=dict)  # of operands that were not written since

    def append(self, call: KernelCall) -> None:
        self.calls.append(self._with_whole_vectors(call) if self._takes(call) else call)
        written = {view.buffer for view in call.outputs}
        self._copies = {view: copied for view, copied in self._copies.items() if view.buffer not in written}

    def _takes(self, call: KernelCall) -> bool:
        if call.kernel != _PRODUCT or call.params["m"] <= VECTOR_ROWS:
            return False
        x, weight = call.inputs[:2]
        terms = x.shape[1]
        of_halves = x.dtype == weight.dtype and x.dtype in HALF_DTYPES
        is_constant = self.constants.buffers[weight.buffer].is_constant
        return of_halves and is_constant and terms % PACK != 0 and terms >= _FEWEST_TERMS and x.strides[1] == 1

    def _with_whole_vectors(self, call: KernelCall) -> KernelCall:
        x, weight, *others = call.inputs
        spare = -x.shape[1] % PACK
        rows = self._copied(x, x.shape[1] + spare, call.node)
        inputs = (rows, self.constants.padded(weight, (0, spare)), *others)
        return replace(call, inputs=inputs, params={**call.params, "k": rows.shape[1]})

    def _copied(self, x: View, terms: int, node: str) -> View:
        """A copy of the rows of x with zeros behind their ends."""
        if x not in self._copies:
            name = f"{node}.rows{len(self.constants.buffers)}"
            shape = (x.shape[0], terms)
            self.constants.buffers[name] = BufferAllocation(name, "arena", shape, x.dtype)
            copied = self._copies[x] = View(name, shape, contiguous_strides(shape), 0, x.dtype)
            self.calls.append(packing(single_pixels(x), single_pixels(copied), node))
        return self._copies[x]
