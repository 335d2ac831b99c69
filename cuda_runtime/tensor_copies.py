"""Copies between a caller's tensors and a program's buffers: all those of a run in one launch, with casts.

The addresses of the caller's tensors change from run to run and those of the buffers do not. Integers are checked on
the GPU: one that is out of its bounds is clamped, and reported in memory that the host reads later, since waiting for
it would keep the host from running ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST = 32  # copies of a launch; their description is the kernel's argument
THREADS = 256
_PER_THREAD = 8
_MAX_BLOCKS = 1024

_CODES = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "float64": 3,
    "int32": 4,
    "int64": 5,
    "int16": 6,
    "int8": 7,
    "uint8": 8,
    "bool": 8,
}
_COPY = np.dtype(
    [("source", "<u8"), ("target", "<u8"), ("count", "<i8"), ("low", "<i8"), ("high", "<i8"), ("kinds", "<i4", 2)]
)
_COPIES = np.dtype([("items", _COPY, MOST), ("flag", "<u8")])


@dataclass(frozen=True)
class Copy:
    """A copy of one tensor between the caller and the program.

    Attributes:
        address: Address of the program's buffer.
        outside: Dtype of the caller's tensor.
        inside: Dtype of the buffer.
        bounds: Smallest and largest integer allowed on the way in; None for no check.
    """

    address: int
    count: int
    outside: str
    inside: str
    bounds: tuple[int, int] | None = None


def can_copy(outside: str, inside: str) -> bool:
    """Whether the copy kernel can convert between tensors of these dtypes."""
    return outside in _CODES and inside in _CODES


class TensorCopies:
    """Copies that one launch makes together.

    Args:
        copies: The tensors' copies, at most `MOST`.
        inwards: Whether they go to the program's buffers, rather than from there.
        flag: Address of an int32 that receives the number of a copy, from 1, that met an integer out of bounds.

    Attributes:
        argument: Address and size in bytes of the kernel's argument.
        grid: Blocks of the launch.
    """

    def __init__(self, copies: Sequence[Copy], inwards: bool, flag: int) -> None:
        described = np.zeros((), _COPIES)
        described["flag"] = flag
        for copy, item in zip(copies, described["items"], strict=False):
            kinds = (_CODES[copy.outside], _CODES[copy.inside])
            item["target" if inwards else "source"] = copy.address
            item["count"] = copy.count
            item["low"], item["high"] = copy.bounds or (1, 0)
            item["kinds"] = kinds if inwards else kinds[::-1]
        self._described = described
        self._changing: np.ndarray = described["items"]["source" if inwards else "target"][: len(copies)]
        blocks = -(-max(copy.count for copy in copies) // (THREADS * _PER_THREAD))
        self.grid = (max(1, min(blocks, _MAX_BLOCKS)), len(copies), 1)
        self.argument = (described.ctypes.data, described.nbytes)

    def point_to(self, addresses: Sequence[int]) -> None:
        """Set the addresses of the caller's dense tensors, for the next launch and later ones."""
        self._changing[:] = addresses


SOURCE = (
    f"#define MOST {MOST}"
    + """
struct Copy {
    const char* source;
    char* target;
    long long count, low, high;
    int kinds[2];
};

struct Copies {
    Copy items[MOST];
    int* flag;
};

__device__ float read_float(const char* data, int kind, long long i) {
    switch (kind) {
        case 0: return ((const float*)data)[i];
        case 1: {
            float value;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(((const unsigned short*)data)[i]));
            return value;
        }
        case 2: return __uint_as_float((unsigned)((const unsigned short*)data)[i] << 16);
        default: return (float)((const double*)data)[i];
    }
}

__device__ unsigned short bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

__device__ void write_float(char* data, int kind, long long i, float value) {
    switch (kind) {
        case 0: ((float*)data)[i] = value; break;
        case 1: asm("cvt.rn.f16.f32 %0, %1;" : "=h"(((unsigned short*)data)[i]) : "f"(value)); break;
        case 2: ((unsigned short*)data)[i] = bfloat16(value); break;
        default: ((double*)data)[i] = value;
    }
}

__device__ long long read_integer(const char* data, int kind, long long i) {
    switch (kind) {
        case 4: return ((const int*)data)[i];
        case 5: return ((const long long*)data)[i];
        case 6: return ((const short*)data)[i];
        case 7: return ((const signed char*)data)[i];
        default: return ((const unsigned char*)data)[i];
    }
}

__device__ void write_integer(char* data, int kind, long long i, long long value) {
    switch (kind) {
        case 4: ((int*)data)[i] = (int)value; break;
        case 5: ((long long*)data)[i] = value; break;
        case 6: ((short*)data)[i] = (short)value; break;
        case 7: ((signed char*)data)[i] = (signed char)value; break;
        default: ((unsigned char*)data)[i] = (unsigned char)value;
    }
}

__device__ int width(int kind) {
    return kind == 0 || kind == 4 ? 4 : kind == 3 || kind == 5 ? 8 : kind == 7 || kind == 8 ? 1 : 2;
}

extern "C" __global__ void tensor_copies(const __grid_constant__ Copies copies) {
    const Copy& copy = copies.items[blockIdx.y];
    const int from = copy.kinds[0], to = copy.kinds[1];
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long step = gridDim.x * (long long)blockDim.x;
    const bool checked = copy.low <= copy.high;
    if (from == to && !checked) {
        const long long bytes = copy.count * width(from);
        const bool aligned = ((size_t)copy.source | (size_t)copy.target) % 16 == 0;
        const long long vectors = aligned ? bytes / 16 : 0;
        for (long long i = first; i < vectors; i += step)
            ((uint4*)copy.target)[i] = ((const uint4*)copy.source)[i];
        for (long long i = 16 * vectors + first; i < bytes; i += step)
            copy.target[i] = copy.source[i];
        return;
    }
    for (long long i = first; i < copy.count; i += step) {
        if (from <= 3) {
            write_float(copy.target, to, i, read_float(copy.source, from, i));
            continue;
        }
        long long value = read_integer(copy.source, from, i);
        if (checked && (value < copy.low || value > copy.high)) {
            *(volatile int*)copies.flag = (int)blockIdx.y + 1;
            value = value < copy.low ? copy.low : copy.high;
        }
        write_integer(copy.target, to, i, value);
    }
}
"""
)
