"""Matrices with 8-bit scales for groups of elements: MXFP4, MXFP8 and NVFP4 of compressed-tensors and gpt-oss.

MX scales are powers of two, stored as exponents; NVFP4 scales are float8, all divided by one float32. A 4-bit float is
one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. The format `float4_e2m1` counts them in halves, so scales are
halved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_sim.checkpoints.bits import by_rows
from npu_sim.checkpoints.layouts import Parts, checked, expect, groups_of, matrix_shape
from npu_sim.lazy_tensors import LazyTensors

_MX_GROUP = 32
_EXPONENTS = np.append(np.exp2(np.arange(255, dtype=np.float64) - 127), np.nan)  # 255 is no number
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Microscaled:
    """The layouts "mxfp4-pack-quantized", "mxfp8-quantized" and "nvfp4-pack-quantized" of compressed-tensors.

    The weight is uint8 [n, k / 2] with the even element in the low bits, or float8 [n, k]; weight_scale is [n, groups].

    Attributes:
        bits: Bits of a code: 4 or 8.
        group: Elements that share a scale.
        is_divided: Whether scales are float8, and divided by weight_global_scale.
    """

    bits: int
    group: int
    is_divided: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        weight = "weight_packed" if self.bits == 4 else "weight"
        return (weight, "weight_scale", *(("weight_global_scale",) if self.is_divided else ()))

    @property
    def required(self) -> tuple[str, ...]:
        return self.names

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, k = matrix_shape(parts, self.names[0], "uint8" if self.bits == 4 else "float8_e4m3fn")
        return n, k * 8 // self.bits

    def format(self, parts: Parts) -> QuantizedFormat:
        n, k = self.shape(parts)
        kinds = ("float8_e4m3fn",) if self.is_divided else ("uint8", "float8_e8m0fnu")
        expect(parts, "weight_scale", (n, groups_of(k, self.group)), kinds)
        if self.is_divided and (parts["weight_global_scale"].size != 1):
            raise WeightError(f"its weight_global_scale has {parts['weight_global_scale'].size} elements, not one")
        scales = "float32" if self.is_divided else "bfloat16"
        return QuantizedFormat("float4_e2m1" if self.bits == 4 else "float8_e4m3", self.group, scales)

    def array(self, parts: Parts) -> QuantizedArray:
        format, stored = self.format(parts), parts["weight_scale"]
        if self.is_divided:
            divisor = np.float32(parts["weight_global_scale"].reshape(-1)[0])
            with np.errstate(all="ignore"):  # what is not finite is refused
                scales = stored.astype(np.float32) / divisor / np.float32(2)
        else:
            scales = _powers(stored, self.bits == 4)
        codes = np.ascontiguousarray(parts[self.names[0]]).view(np.uint8)
        return checked(_array(format, codes, scales))


def _powers(exponents: np.ndarray, is_halved: bool) -> np.ndarray:
    """The powers of two with these stored exponents, in bfloat16, halved if `is_halved`."""
    return (_EXPONENTS / (1 + is_halved)).astype(ml_dtypes.bfloat16)[exponents.view(np.uint8)]


def _array(format: QuantizedFormat, stored: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    """The matrix of stored codes [n, k · bits / 8] with scales [n, groups].

    Codes of a group whose scale is 0 do not matter; they become 0.
    """
    codes = np.empty_like(stored)

    def clear(piece: slice) -> np.ndarray:
        rows, empty = stored[piece], scales[piece] == 0
        groups = rows.reshape(len(rows), scales.shape[1], -1)
        return np.where(empty[..., None], np.uint8(0), groups).reshape(rows.shape) if empty.any() else rows

    by_rows(codes, clear)
    return QuantizedArray(
        format, (len(stored), stored.shape[1] * 8 // format.bits), codes, np.ascontiguousarray(scales)
    )


class BlockTensors(LazyTensors[Any]):
    """The tensors of a folder quantized as gpt-oss is, by parameter name; a matrix is repacked when it is looked up.

    The experts' matrices of a layer are stored as `…_blocks`, uint8 [E, N, K / 32, 16], and `…_scales`, uint8 [E, N, K
    / 32]; they become one matrix [E · N, K].

    Args:
        state: The tensors as they are stored.

    Attributes:
        formats: Parameter name → format of each quantized parameter.

    Raises:
        WeightError: blocks and scales do not fit each other.
    """

    def __init__(self, state: Mapping[str, np.ndarray]) -> None:
        self._state = state
        format = QuantizedFormat("float4_e2m1", _MX_GROUP, "bfloat16")
        self.formats = {key.removesuffix(_BLOCKS): format for key in state if key.endswith(_BLOCKS)}
        if not self.formats:
            raise InputError("none of its tensors is quantized, although the quantization_config says mxfp4")
        parts = {name + end for name in self.formats for end in (_BLOCKS, _SCALES)}
        self._dense = dict.fromkeys(key for key in state if key not in parts)
        super().__init__(self._dense, self.formats)
        for name in self.formats:
            self._check(name)

    def _check(self, name: str) -> None:
        if name + _SCALES not in self._state:
            raise WeightError(f"'{name}{_BLOCKS}' has no scales")
        blocks, scales = self._state[name + _BLOCKS], self._state[name + _SCALES]
        if name in self._dense:
            raise WeightError(f"'{name}' is stored twice, in blocks and as it is")
        if any(x.dtype.name != "uint8" for x in (blocks, scales)) or blocks.shape != (*scales.shape, _MX_GROUP // 2):
            shapes = f"{blocks.dtype.name}{list(blocks.shape)} and {scales.dtype.name}{list(scales.shape)}"
            raise WeightError(f"blocks and scales of '{name}' are {shapes}, which do not fit each other")
        if scales.ndim < 2 or 0 in scales.shape:
            raise WeightError(f"the scales of '{name}' have the shape {list(scales.shape)}, not that of matrices")

    def __getitem__(self, key: str) -> Any:
        if key not in self.formats:
            return self._state[key] if key in self._dense else self._dense[key]
        blocks, scales = self._state[key + _BLOCKS], self._state[key + _SCALES]
        groups = scales.shape[-1]
        codes = np.ascontiguousarray(blocks).reshape(-1, groups * _MX_GROUP // 2)
        array = _array(self.formats[key], codes, _powers(scales.reshape(-1, groups), is_halved=True))
        try:
            return checked(array)
        except WeightError as error:
            raise WeightError(f"'{key}' cannot be used: {error}") from error
