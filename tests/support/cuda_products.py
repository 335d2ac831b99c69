"""Cases of cuBLASLt's matrix products: operands, epilogues, and expected results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cuda_compiler.cuda_program import ConvolutionLaunch, GemmLaunch, launch_of
from npu_compiler import CompiledProgram
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, contiguous_strides


def view(name: str, shape: Sequence[int], dtype: str = "float32", offset: int = 0) -> View:
    return View(name, tuple(shape), contiguous_strides(tuple(shape)), offset, dtype)


def products_of(program: CompiledProgram) -> list[GemmLaunch]:
    """The products of cuBLASLt that a program may launch: those that it does, and those that are tried."""
    launches = [launch_of(call) for call in program.plan.calls]
    found = [launch.product if isinstance(launch, ConvolutionLaunch) else launch for launch in launches]
    return [launch for launch in found if isinstance(launch, GemmLaunch)]


GEMMS = [
    pytest.param(ta, tb, batch, pad, id=f"{'NT'[ta]}{'NT'[tb]}-batch{batch}-pad{pad}")
    for ta in (False, True)
    for tb in (False, True)
    for batch in (1, 3)
    for pad in (0, 2)
]


def gemm_case(
    ta: bool,
    tb: bool,
    batch: int,
    pad: int,
    rng: np.random.Generator,
    activation: str = "none",
    sizes: tuple[int, int, int] = (5, 7, 4),
) -> tuple[KernelCall, list[np.ndarray], np.ndarray]:
    """A product with all that can be added, its padded memory (a, b, bias, residual, out), and what out becomes.

    A batched one has nothing to add. All is exact in 16 bits, sums included.

    Args:
        sizes: m, k and n.
    """
    m, k, n = sizes
    shapes = [(k, m) if ta else (m, k), (n, k) if tb else (k, n), (1, n), (m, n), (m, n)]
    memory = [
        np.round(4 * rng.standard_normal((batch, rows, columns + pad)).astype(np.float32)) / 4
        for rows, columns in shapes
    ]
    memory[3] = np.pad(memory[3], ((0, 0), (0, 0), (0, 8)))
    a, b, bias, residual, out = (whole[:, :, :columns] for whole, (_, columns) in zip(memory, shapes, strict=True))
    adds = batch == 1
    launch = GemmLaunch(
        m=m,
        n=n,
        k=k,
        trans_a=ta,
        trans_b=tb,
        lda=shapes[0][1] + pad,
        ldb=shapes[1][1] + pad,
        ldc=n + pad,
        ldr=n + pad + 8,
        batch=batch,
        stride_a=memory[0][0].size,
        stride_b=memory[1][0].size,
        stride_c=memory[4][0].size,
        stride_r=memory[3][0].size,
        alpha=0.5,
        activation=activation,
        has_bias=adds,
        has_residual=adds,
    )
    expected = 0.5 * (a.swapaxes(1, 2) if ta else a) @ (b.swapaxes(1, 2) if tb else b)
    if adds:
        expected += bias + residual
    else:
        del memory[2:4]
    views = [view(f"operand{index}", array.shape) for index, array in enumerate(memory)]
    call = KernelCall("cublas_gemm", "", tuple(views[:-1]), (views[-1],), launch.params(), "node")
    whole = memory[-1].copy()
    whole[:, :, :n] = np.maximum(expected, 0) if activation == "relu" else expected
    return call, memory, whole
