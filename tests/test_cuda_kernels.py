"""Every kernel on the CUDA device against the CPU device's reference, by the same cases as the Metal kernels."""

from __future__ import annotations

from typing import Any

import pytest
from metal_harness import DTYPES, Case, all_cases, run_case


@pytest.fixture(scope="module")
def backend() -> Any:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no NVIDIA GPU: {error}")
    from cuda_runtime import CUDABackend

    return CUDABackend()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
def test_a_kernel_does_what_the_reference_does(case: Case, dtype: str, backend: Any) -> None:
    run_case(case, backend, dtype, 1)
