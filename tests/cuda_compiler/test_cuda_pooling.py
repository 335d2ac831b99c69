"""Pooling and resampling on CUDA: what the kernels compute, compiled as C++ for the CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from metal_cases.pool import CASES
from metal_harness import Case, T, run_case

from npu_compiler.program.views import contiguous_strides


@pytest.mark.parametrize("case", drawn(CASES, 1 / 5, lambda case: case.name))
def test_kernels_are_those_of_the_cpu_device(case: Case, seed: int, tmp_path: Path) -> None:
    run_case(case, EmulatedBackend(tmp_path), Random(seed).choice(["float16", "bfloat16"]), seed)


def test_drawn_means_of_windows_are_those_of_the_cpu_device(seed: int, tmp_path: Path) -> None:
    draw, backend = Random(seed), EmulatedBackend(tmp_path)
    for _ in range(3):
        shape = (draw.randint(1, 2), draw.choice([1, 3, 8, 24, 40]), draw.randint(1, 9), draw.randint(1, 20))
        innermost = draw.choice([1, 3])  # channels, or columns
        order = [dim for dim in (0, 2, 3, 1) if dim != innermost] + [innermost]
        packed = contiguous_strides(tuple(shape[dim] for dim in order))
        x = T(shape, strides=tuple(packed[order.index(dim)] for dim in range(4)))
        out = T((*shape[:2], *draw.choice([(1, 1), (2, 3), (shape[2], 1)])))
        run_case(
            Case("adaptive_avg_pool2d_kernel", "drawn", [x], [out]), backend, draw.choice(["float16", "bfloat16"]), seed
        )
