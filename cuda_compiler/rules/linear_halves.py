"""Products of many rows of 16-bit floats by warpgroups, with what follows them, bound by the tensor cores."""

from __future__ import annotations

from cuda_compiler.rules.linear_codes import FEWEST_TILES, tile_product, tiling_of
from cuda_compiler.specialization.sizes import vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

_PACK = 8  # elements of the 16 bytes that the copy engine moves at least


def linear_halves(
    make: Specializer,
    call: KernelCall,
    x: View,
    weight: View,
    bias: View | None,
    residual: View | None,
    out: View,
    residual_last: bool,
) -> KernelCall | None:
    """The call of the kernel for out = act(x · weightᵀ + bias + residual), or act(x · weightᵀ + bias) + residual.

    Args:
        call: The call that it is for, with its activation.
        x, weight, residual, out: [m, k], [n, k], [m, n], [m, n].
        residual_last: Whether the residual is added behind the activation.

    Returns:
        None if the kernel cannot compute it, or has too few tiles to do at a time.
    """
    matrices = [view for view in (x, weight, residual, out) if view is not None]
    same = all(view.dtype == x.dtype and x.dtype in HALF_DTYPES for view in matrices)
    if not make.gpu.has_warpgroups or not same or not all(map(_is_copied, matrices)):
        return None
    (m, k), n = x.shape, weight.shape[0]
    if bias is not None and vector_width(bias) < 2:
        return None
    tiling = tiling_of(m, n, k * itemsize(x.dtype), False, make.gpu.shared_memory)
    if tiling is None or tiling.blocks < FEWEST_TILES:
        return None
    inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    return tile_product(make, call, "linear_halves", tiling, inputs, out, {"residual_last": residual_last})


def _is_copied(matrix: View) -> bool:
    """Whether the copy engine takes a matrix: its rows lie apart, and begin at multiples of 16 bytes."""
    (_, columns), (step, inner) = matrix.shape, matrix.strides
    return inner == 1 and step >= columns and columns % _PACK == 0 and vector_width(matrix) >= _PACK
