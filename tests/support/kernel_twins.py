"""A CPU device that runs each call by its reference, and by PyTorch where that has a kernel, and compares the two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_compiler.program.kernels import KernelCall
from npu_runtime import CPUBackend
from npu_runtime.cpu.backend import bind, candidates
from npu_runtime.cpu.bound_call import BoundCall
from npu_runtime.cpu.kernels import bound_reference
from npu_runtime.cpu.torch_kernels import torch_launch
from npu_runtime.cpu.tuning import default_launch
from npu_runtime.hardware import Launch, Operand

# Sums of float32 differ by their order; in 16 bits two results may lie on either side of a rounding.
_TOLERANCE = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}


class Twins(CPUBackend):
    """Runs programs by their reference kernels.

    Attributes:
        seen: Names of the kernels that were compared with PyTorch's.
    """

    def __init__(self) -> None:
        super().__init__(native=False, tune=False)
        self.seen: set[str] = set()

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        bound = BoundCall(call, [bind(x) for x in inputs], [bind(x) for x in outputs], inputs)
        reference = bound_reference(bound)
        twin = default_launch(bound, candidates(bound, native=False)) or torch_launch(bound, among_native=False)
        if twin is None:
            return reference

        def run() -> None:
            self.seen.add(call.kernel)
            before = [x.copy() for x in bound.outputs]
            twin()
            found = [x.copy() for x in bound.outputs]
            for out, content in zip(bound.outputs, before, strict=True):
                out[...] = content
            reference()
            for theirs, ours in zip(found, bound.outputs, strict=True):
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
