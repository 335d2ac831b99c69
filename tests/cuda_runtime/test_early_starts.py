"""No launch reads what the kernel before it still writes, though a kernel may start before that one has ended."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
from cuda_convolutions import SAME, nhwc
from cuda_gpu import PROBLEM, cuda_backends, prepared
from metal_cases.conv import conv
from metal_harness import Case, call_of, plan_of

from cuda_compiler.cuda_program import ConvolutionLaunch, launch_of
from cuda_runtime import CUDABackend
from cuda_runtime.cublaslt import Addresses, Product
from cuda_runtime.cuda_backend import _extent
from cuda_runtime.launches import CUDALaunch, GraphSequence
from cuda_runtime.tuned_convolutions import kernels_of, over, product_of
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View
from npu_runtime.backend import DeviceBuffer, Launch, Operand

LATE = """
// Lets the next kernel start at once, and copies much later.
extern "C" __global__ void late(unsigned char *out, const unsigned char *in, long long bytes, long long clocks) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (long long start = clock64(); clock64() - start < clocks;) {
    }
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < bytes; i += threads) {
        out[i] = in[i];
    }
}
"""
CLOCKS = 100_000
PLANS, ALGORITHMS = 6, 16
CASES = [
    conv("pointwise", nhwc(4, 256, 28, 28), (512, 256, 1, 1), bias="compute", residual="compute"),
    conv("activated", nhwc(4, 256, 28, 28), (512, 256, 1, 1), bias="float32", residual="compute", activation="relu"),
    conv("strided", nhwc(4, 128, 56, 56), (256, 128, 1, 1), stride=(2, 2), bias="float32", residual="compute"),
    conv("three-by-three", nhwc(2, 64, 28, 28), (64, 64, 3, 3), **SAME, bias="float32", residual="compute"),
    conv("grouped", nhwc(2, 128, 28, 28), (128, 4, 3, 3), groups=32, **SAME, bias="float32", residual="compute"),
]


def late_copy(backend: CUDABackend, target: Operand, source: DeviceBuffer) -> CUDALaunch:
    """The launch of a kernel that fills an operand, which lets the next kernel start long before it does so."""
    device, place = backend._device, _extent(target)
    kernel = device.cupy.RawKernel(LATE, "late")
    numbers = (place.start, source.native_handle.data.ptr, len(place), CLOCKS)

    def start() -> None:
        with device.stream:
            kernel((16,), (256,), tuple(map(np.int64, numbers)))

    return CUDALaunch(device, KernelCall("late", "", (), (), {}, "late"), start, kernel, written=[place])


def forms_of(backend: CUDABackend, call: KernelCall, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """Name and form of all that may be launched for a convolution; each is to be used before the next is asked for."""
    convolutions, products = backend._convolutions, backend._products

    def by_algorithm(number: int, call: KernelCall, places: list[int]) -> Any:
        product = Product(products._lt, call, Addresses.of(call, places))
        return product.launch(product.algorithms(ALGORITHMS)[number])

    for kernel in kernels_of(call):
        yield kernel.kernel, kernel
    if (product := product_of(call)) is not None:
        for number in range(ALGORITHMS):
            monkeypatch.setattr(products, "launch", partial(by_algorithm, number))
            yield f"algorithm {number}", product
    if convolutions._cudnn is not None and convolutions._cudnn.takes(call):
        for each in islice(convolutions._cudnn.plans(call), PLANS):
            yield f"plan {each.choice}", each


def right_though_late(
    backend: CUDABackend, launch: Launch, view: View, memory: dict[str, DeviceBuffer], out: str, expected: np.ndarray
) -> bool:
    """Whether a launch's result is right where the kernel before it writes one of its inputs late."""
    own = memory[view.buffer]
    values = own.to_numpy().copy()
    copy = late_copy(backend, Operand(own, view, 0, False), backend.allocate_buffer(values))
    run = GraphSequence(backend._device, [copy, cast(CUDALaunch, launch)])
    results = []
    for _ in range(3):
        own.write(np.zeros_like(values))
        backend.synchronize()
        run()
        results.append(memory[out].to_numpy().copy())
    own.write(values)
    return all(np.array_equal(each, expected) for each in results)


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_form_of_a_convolution_reads_early(
    case: Case, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """cuDNN's kernels start early by themselves, and read biases and residuals before they wait."""
    (backend,) = cuda_backends()
    convolutions = backend._convolutions
    plan = plan_of(call_of(case, "float16"), backend.target)
    (call,) = [each for each in plan.calls if isinstance(launch_of(each), ConvolutionLaunch)]
    out = call.outputs[0].buffer
    memory = {
        view.buffer: backend.allocate_buffer(
            (rng.standard_normal(plan.buffers[view.buffer].alloc_shape) / 8).astype(numpy_dtype(view.dtype))
        )
        for view in (*call.inputs, *call.outputs)
    }
    backend.compile(kernels_of(call), plan.sources)
    monkeypatch.setattr(convolutions, "tune", lambda calls: None)
    varying = [view for view in call.inputs if not plan.buffers[view.buffer].is_constant]
    early = []
    for name, form in forms_of(backend, call, monkeypatch):
        monkeypatch.setattr(convolutions, "form", partial(over, form))
        try:
            (launch,) = prepared(backend, [call], plan.sources, memory)
            launch()
            backend.synchronize()
        except (*convolutions._refusals, IndexError):
            continue
        expected = memory[out].to_numpy().copy()
        assert np.isfinite(expected).all() and expected.any()
        early += [
            (name, view.buffer)
            for view in varying
            if not right_though_late(backend, launch, view, memory, out, expected)
        ]
    assert not early
