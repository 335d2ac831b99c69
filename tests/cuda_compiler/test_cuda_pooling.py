"""Pooling and resampling on CUDA: what the kernels compute, compiled as C++ for the CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from metal_cases.pool import CASES
from metal_harness import Case, T, call_of, run_case

from cuda_compiler.cuda_program import kernel_launch_of
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.views import contiguous_strides


@pytest.mark.parametrize("case", drawn(CASES, 1 / 5, lambda case: case.name))
def test_kernels_are_those_of_the_cpu_device(case: Case, seed: int, tmp_path: Path) -> None:
    run_case(case, EmulatedBackend(tmp_path), Random(seed).choice(["float16", "bfloat16"]), seed)


def channels_last(*shape: int) -> T:
    """An image [N, C, H, W] with channels side by side."""
    images, channels, rows, columns = shape
    return T(shape, strides=(rows * columns * channels, 1, columns * channels, channels))


def test_a_block_shares_windows_that_are_large_and_few(seed: int, tmp_path: Path) -> None:
    draw, backend = Random(seed), EmulatedBackend(tmp_path)
    for channels in (draw.choice([1, 5, 12]), 8 * draw.randint(1, 6)):
        x = channels_last(draw.randint(1, 2), channels, draw.randint(64, 80), draw.randint(64, 80))
        out = T((*x.shape[:2], *draw.choice([(1, 1), (1, 2)])))
        case, dtype = Case("adaptive_avg_pool2d_kernel", "large", [x], [out]), draw.choice(["float16", "bfloat16"])
        (pool,) = expand(Specializer(), call_of(case, dtype))
        assert kernel_launch_of(pool).block[0] > 128
        run_case(case, backend, dtype, seed)


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
