"""Every Metal kernel against the CPU device's reference: both 16-bit dtypes, several thread orders, all checks on."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import drawn
from metal_harness import DTYPES, Case, all_cases, open_metal, run_case, run_in_several_orders

from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.kernels import KERNELS
from npu_runtime import MetalBackend

CASES = all_cases()


@pytest.fixture(scope="module")
def metal() -> tuple[MetalBackend, Any]:
    return open_metal(mps=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", drawn(CASES, 1 / 8, lambda case: case.id))
def test_a_kernel_does_what_the_reference_does(case: Case, dtype: str, metal: tuple[MetalBackend, Any]) -> None:
    backend, emulator = metal
    if emulator is None:
        run_case(case, backend, dtype, 1)
    else:
        run_in_several_orders(case, backend, emulator, dtype)


def test_every_kernel_has_cases() -> None:
    tried = {case.kernel for case in CASES}
    assert sorted({name for name, decl in KERNELS.items() if decl.source} - tried) == []
    assert (
        sorted(
            f"{op}{form}"
            for op in ELEMENTWISE
            for form in ("_kernel", "_broadcast_kernel")
            if f"{op}{form}" not in tried
        )
        == []
    )
