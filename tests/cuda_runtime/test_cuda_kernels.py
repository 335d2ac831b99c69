"""Every kernel on the CUDA device against the CPU device's reference, by the same cases as the Metal kernels."""

from __future__ import annotations

import pytest
from cuda_cases import CASES, TILED_ATTENTION, cached, tolerant
from cuda_convolutions import CASES as CONVOLUTIONS
from cuda_gpu import cuda_backends, need_gpu
from metal_harness import DTYPES, Case, all_cases, run_case

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_runtime import CUDABackend

need_gpu()
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backend() -> CUDABackend:
    (device,) = cuda_backends()
    return device


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("case", [*all_cases(), *CASES], ids=lambda case: case.id)
def test_a_kernel_does_what_the_reference_does(case: Case, dtype: str, backend: CUDABackend) -> None:
    run_case(tolerant(case, dtype), backend, dtype, 1)


class OtherBackend(CUDABackend):
    """The GPU with the kernels of one that has less."""

    def __init__(self, target: CUDACodegenTarget) -> None:
        super().__init__()
        self._target = target

    @property
    def target(self) -> CUDACodegenTarget:
        return self._target


OTHERS = {
    "ampere": CUDACodegenTarget(GPU(capability=80)),
    "turing": CUDACodegenTarget(GPU(capability=75, shared_memory=64 * 1024)),
}


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest) -> OtherBackend:
    return OtherBackend(OTHERS[request.param])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*TILED_ATTENTION, cached(128, 2048, 128), *CONVOLUTIONS], ids=lambda case: case.id)
def test_kernels_that_newer_gpus_do_without_are_right_too(case: Case, dtype: str, other: OtherBackend) -> None:
    run_case(case, other, dtype, 1)
