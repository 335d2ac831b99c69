"""A CPU device that runs each call twice, by its meaning in torch and by its kernel in NumPy, and compares the two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_compiler.program.kernels import KernelCall
from npu_runtime import CPUBackend
from npu_runtime.cpu.backend import bind
from npu_runtime.cpu.bound_call import BoundCall
from npu_runtime.cpu.kernels.reference import bound_reference
from npu_runtime.cpu.numpy_kernels import numpy_launch
from npu_runtime.hardware import Launch, Operand

# Sums of float32 differ by their order; in 16 bits two results may lie on either side of a rounding.
_TOLERANCE = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}


class Twins(CPUBackend):
    """Runs programs by their meaning in torch.

    Attributes:
        seen: The names of the kernels that were compared.
    """

    def __init__(self) -> None:
        super().__init__(native=False, tune=False)
        self.seen: set[str] = set()

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        bound = BoundCall(call, [bind(x) for x in inputs], [bind(x) for x in outputs], inputs)
        first, second = numpy_launch(bound), bound_reference(bound, among_native=False)

        def run() -> None:
            self.seen.add(call.kernel)
            before = [x.copy() for x in bound.outputs]
            first()
            found = [x.copy() for x in bound.outputs]
            for out, content in zip(bound.outputs, before, strict=True):
                out[...] = content
            second()
            for ours, theirs in zip(found, bound.outputs, strict=True):
                compare(ours, theirs, f"{call.kernel} {dict(call.params)} {[x.shape for x in bound.inputs]}")

        return run


def compare(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    if theirs.dtype.name not in _TOLERANCE:
        np.testing.assert_array_equal(ours, theirs, what)
        return
    tolerance, wide = _TOLERANCE[theirs.dtype.name], theirs.astype(np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    limit = tolerance * max(1e-3, float(finite.max(initial=0.0)))
    np.testing.assert_allclose(ours.astype(np.float64), wide, tolerance, limit, err_msg=what)
