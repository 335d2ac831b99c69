"""The CUDA kernels, compiled for the CPU, against the CPU device's reference: some of the cases that run on a GPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from cuda_cases import CASES, tolerant
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from metal_harness import DTYPES, Case, all_cases, run_case

from cuda_compiler import GPU, CUDACodegenTarget

# Recurrent kernels, whose blocks wait for each other, have tests of their own.
SINGLE = [case for case in (*all_cases(), *CASES) if case.kernel != "rnn_kernel"]


@pytest.mark.parametrize("case", drawn(SINGLE, 1 / 150, lambda case: case.id))
def test_a_kernel_does_what_the_reference_does(case: Case, seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    target, dtype = CUDACodegenTarget(GPU(capability=draw.choice([70, 80]))), draw.choice(DTYPES)
    run_case(tolerant(case, dtype), EmulatedBackend(tmp_path, target), dtype, seed)
