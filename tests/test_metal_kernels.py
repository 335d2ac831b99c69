"""Every Metal kernel against the CPU device's reference: both 16-bit dtypes, three thread orders, all checks on."""

from __future__ import annotations

import pytest
from metal_harness import DTYPES, Case, all_cases, run_case

import metal_emulator
from npu_compiler.codegen import KERNELS
from npu_compiler.elementwise import ELEMENTWISE
from npu_runtime import MetalBackend

CASES = all_cases()
THREAD_ORDERS = (1, 2, 3)


@pytest.fixture(scope="module")
def api() -> metal_emulator.MetalAPI:
    return metal_emulator.api(checks=True)


@pytest.fixture(scope="module")
def backend(api: metal_emulator.MetalAPI) -> MetalBackend:
    return MetalBackend(api)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_kernel_does_what_the_reference_does(
    case: Case, dtype: str, backend: MetalBackend, api: metal_emulator.MetalAPI
) -> None:
    for order in THREAD_ORDERS:
        api.emulator.seed = order
        run_case(case, backend, dtype, order)


def test_every_kernel_has_cases() -> None:
    tried = {case.kernel for case in CASES}
    assert sorted(KERNELS.keys() - tried) == []
    assert sorted(f"{op}{form}" for op in ELEMENTWISE for form in ("_kernel", "_broadcast_kernel")
                  if f"{op}{form}" not in tried) == []  # fmt: skip
