"""Every kernel on the CUDA device against the CPU device's reference, by the same cases as the Metal kernels."""

from __future__ import annotations

import pytest
from cuda_gpu import PROBLEM, cuda_backends
from metal_harness import DTYPES, Case, all_cases, run_case
from test_cuda_templates import CASES, TILED_ATTENTION

from cuda_compiler import CUDACodegenTarget
from cuda_runtime import CUDABackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)]


@pytest.fixture(scope="module")
def backend() -> CUDABackend:
    (device,) = cuda_backends()
    return device


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("case", [*all_cases(), *CASES], ids=lambda case: case.id)
def test_a_kernel_does_what_the_reference_does(case: Case, dtype: str, backend: CUDABackend) -> None:
    run_case(case, backend, dtype, 1)


class OlderBackend(CUDABackend):
    """The GPU with the kernels of one that lacks what came with compute capability 9.0."""

    @property
    def target(self) -> CUDACodegenTarget:
        return CUDACodegenTarget(capability=80)


@pytest.fixture(scope="module")
def older() -> OlderBackend:
    return OlderBackend()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TILED_ATTENTION, ids=lambda case: case.id)
def test_kernels_that_newer_gpus_do_without_are_right_too(case: Case, dtype: str, older: OlderBackend) -> None:
    run_case(case, older, dtype, 1)
