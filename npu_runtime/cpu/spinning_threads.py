"""The cost of PyTorch's threads to native kernels, and the rule for which of PyTorch's kernels run without them.

After their work PyTorch's threads keep spinning for some milliseconds, beside the native kernels that follow. Among
these, PyTorch's kernels therefore wake no threads unless they take long.
"""

from __future__ import annotations

import os

from npu_runtime.cpu.bound_call import ArrayCall

# What one thread does in a second at the least, of element-wise work and in products.
_ELEMENTS_PER_SECOND, _FLOPS_PER_SECOND = 1.5e9, 2e10
_SPINNING = 4e-3  # seconds: on two cores, 8 ms of native kernels took so much longer after a kernel of PyTorch's
_SHORT = _SPINNING / 2  # what waking the threads has to win at the least


def takes_one_thread(call: ArrayCall, among_native: bool) -> bool:
    """Whether PyTorch's kernel for a call should run on the calling thread alone.

    Args:
        among_native: Whether native kernels run before and after it.
    """
    elements = sum(x.size for x in (*call.inputs, *call.outputs))
    seconds = elements / _ELEMENTS_PER_SECOND + call.call.flops / _FLOPS_PER_SECOND
    return among_native and seconds <= _SHORT


def spinning_seconds() -> float:
    """Seconds that native kernels lose after a kernel of PyTorch's that woke its threads."""
    return 0.0 if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else _SPINNING
