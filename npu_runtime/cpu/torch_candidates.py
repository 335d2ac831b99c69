"""PyTorch's kernels as candidates, listed without PyTorch: it is imported when one of them is made for a call."""

from __future__ import annotations

from functools import partial

from npu_runtime.cpu.bound_call import ArrayCall, Candidate
from npu_runtime.cpu.spinning_threads import takes_one_thread
from npu_runtime.hardware import Launch
from npu_runtime.pytorch import find_torch

_LINEAR = ("matmul_kernel", "matmul_notrans_kernel", "matmul_vec_kernel", "matmul_vec_notrans_kernel")
_QUANTIZED = ("quantized_matmul_kernel", "quantized_matmul_vec_kernel")
# Kernels → the candidates for them, the default first: name, and function in `torch_kernels.prepacked`.
_ROWS = (
    (_LINEAR, (("onednn", "packed_linear"), ("sgemm", "plain_linear"), ("16-bit", "half_linear"))),
    (("gated_matmul_vec_kernel",), (("sgemm", "gated_linear"),)),
    (_QUANTIZED, (("onednn", "widened_packed_linear"), ("sgemm", "widened_plain_linear"))),
    (("quantized_gated_matmul_vec_kernel",), (("sgemm", "widened_gated_linear"),)),
    (("conv2d_kernel",), (("onednn", "packed_conv"), ("conv2d", "plain_conv"), ("sgemm", "pointwise_conv"))),
    (("attention_kernel",), (("torch", "unprepared"), ("torch 16-bit", "half_attention"))),
    (("batched_matmul_kernel", "max_pool2d_kernel", "avg_pool2d_kernel"), (("torch", "unprepared"),)),
)
_MAKERS = {kernel: makers for kernels, makers in _ROWS for kernel in kernels}


def torch_candidates(call: ArrayCall, among_native: bool) -> list[Candidate]:
    """PyTorch's kernels that may run the call, the default first; none where only the reference can.

    Args:
        among_native: As for `takes_one_thread`.
    """
    alone = takes_one_thread(call, among_native)
    possible = [
        Candidate(name, partial(_make, maker, alone), uses_pytorch=True, leaves_threads=among_native and not alone)
        for name, maker in _MAKERS.get(call.name, ())
    ]
    if call.name == "conv2d_kernel" and call.inputs[1].size < call.out.size:
        # Packing a small weight at every call takes less than the layout in which a packed one leaves a large result.
        possible.sort(key=lambda candidate: candidate.name == "onednn")
    return possible


def _make(maker: str, alone: bool, call: ArrayCall) -> Launch | None:
    if find_torch() is None:
        return None
    from npu_runtime.cpu.torch_kernels import on_one_thread, prepacked

    launch = prepacked.make(getattr(prepacked, maker), call)
    return on_one_thread(launch) if alone and launch is not None else launch
