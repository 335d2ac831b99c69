"""Tensor maps, by which the GPU's copy engine finds boxes of a matrix.

The driver makes them, as CuPy has no call for it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from cuda_compiler.cuda_program import TensorMap
from cuda_runtime.cuda_device import load_driver
from npu_compiler.errors import DeviceError

_BYTES, _ALIGNMENT = 128, 64  # of a map
_BOX_WIDTH = 128
_UINT8, _PLAIN, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 0, 0, 3, 3, 0  # cuda.h: CU_TENSOR_MAP_…


@cache
def _encode() -> Any:
    encode = load_driver().cuTensorMapEncodeTiled
    encode.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    ]
    return encode


def encoded(matrix: TensorMap, address: int) -> np.ndarray:
    """The encoded tensor map of a matrix at this address, as a kernel's parameter: uint8 [128], suitably aligned.

    Raises:
        DeviceError: the driver refuses it.
    """
    memory = np.zeros(_BYTES + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    place = memory[start : start + _BYTES]
    sizes = (ctypes.c_uint64 * 2)(matrix.width, matrix.rows)
    strides = (ctypes.c_uint64 * 1)(matrix.stride)
    box, steps = (ctypes.c_uint32 * 2)(_BOX_WIDTH, matrix.box_rows), (ctypes.c_uint32 * 2)(1, 1)
    status = _encode()(
        place.ctypes.data,
        _UINT8,
        2,
        address,
        sizes,
        strides,
        box,
        steps,
        _PLAIN,
        _SWIZZLE_128,
        _PROMOTE_256,
        _ZEROS,
    )
    if status:
        raise DeviceError(f"cuTensorMapEncodeTiled failed with error {status} for {matrix}")
    return place
