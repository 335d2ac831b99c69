"""GGUF's blocks of quantized weights as `QuantizedArray`s, bit for bit.

A row is a sequence of blocks, each with its scales in front of or behind its codes. The layouts are those of
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Here, codes of 2 and 3 bits are stored in 4 bits, and
codes of 5 and 6 bits in 8; the two levels of scales of the K formats are
multiplied into one, in float32 as ggml does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.pieces import in_pieces

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[np.integer], NDArray[np.floating], "NDArray[np.floating] | None"]
"""Parts of unpacked blocks: codes [blocks, elements]; scales and minimums (None without any), both [blocks, groups]."""

_PIECE = 2**18  # elements


@dataclass(frozen=True)
class _Encoding:
    """A ggml type: elements and bytes of a block, the `QuantizedFormat` that holds them, and how to unpack a block."""

    elements: int
    bytes: int
    format: QuantizedFormat
    take_apart: Callable[[Bytes], Parts]

    @property
    def zero(self) -> int:
        """The code that stands for the number 0."""
        return self.format.code_format.zero_code if self.format.offsets == "none" else 0


def quantized_format(encoding: str) -> QuantizedFormat | None:
    """The format that holds the values of a ggml type exactly; None if there is no such format."""
    return _ENCODINGS[encoding].format if encoding in _ENCODINGS else None


def quantized_rows(rows: Bytes, encoding: str) -> QuantizedArray:
    """The matrix whose rows [n, bytes] are stored in a ggml type that `quantized_format` has a format for."""
    kind = _ENCODINGS[encoding]
    n, blocks = rows.shape[0], rows.shape[1] // kind.bytes
    shape = (n, blocks * kind.elements)
    parts = {name: np.empty(size, dtype) for name, (size, dtype) in kind.format.parts(shape).items()}

    def convert(piece: slice) -> None:
        codes, scales, minimums = kind.take_apart(rows[piece].reshape(-1, kind.bytes))
        if not scales.all():  # codes of such groups say nothing, and are any
            blocks = codes.reshape(*scales.shape, -1)
            codes = np.where(scales[..., None] == 0, kind.zero, blocks).astype(codes.dtype)
        count = rows[piece].shape[0]
        parts["codes"][piece] = kind.format.code_format.pack(codes.reshape(count, -1))
        parts["scales"][piece] = scales.reshape(count, -1)
        if minimums is not None:
            parts["offsets"][piece] = minimums.reshape(count, -1)

    in_pieces(convert, n, max(1, _PIECE // shape[1]))
    return QuantizedArray(kind.format, shape, **parts)


def _halves(block: Bytes, count: int) -> NDArray[np.float16]:
    """The first `count` float16 numbers of each block."""
    return np.ascontiguousarray(block[:, : 2 * count]).view(np.float16)


def _nibbles(block: Bytes, run: int) -> Bytes:
    """Unpack 4-bit codes: each `run` bytes hold 2 · `run` codes, first all low halves, then all high ones."""
    runs = block.reshape(len(block), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(block), -1)


def _bits(block: Bytes) -> Bytes:
    """The bits of each block as bytes of 0 or 1, from the lowest bit of the first byte on."""
    return np.unpackbits(block, axis=1, bitorder="little")


def _q4_0(block: Bytes) -> Parts:
    return _nibbles(block[:, 2:], 16), _halves(block, 1), None


def _q4_1(block: Bytes) -> Parts:
    scale = _halves(block, 2)
    return _nibbles(block[:, 4:], 16), scale[:, :1], scale[:, 1:]


def _q5_0(block: Bytes) -> Parts:
    return (_nibbles(block[:, 6:], 16) | _bits(block[:, 2:6]) << 4).view(np.int8) - np.int8(16), _halves(block, 1), None


def _q5_1(block: Bytes) -> Parts:
    scale = _halves(block, 2)
    return _nibbles(block[:, 8:], 16) | _bits(block[:, 4:8]) << 4, scale[:, :1], scale[:, 1:]


def _q8_0(block: Bytes) -> Parts:
    return block[:, 2:].view(np.int8), _halves(block, 1), None


def _k_scales(block: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minimums, each [blocks, 8], of Q4_K and Q5_K blocks.

    They are stored as two float16 and eight pairs of 6 bits in 12 bytes.
    """
    whole = _halves(block, 2).astype(np.float32)
    low, middle, high = np.split(block[:, 4:16], 3, axis=1)
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1).astype(np.float32)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], axis=1).astype(np.float32)
    return whole[:, :1] * scales, -(whole[:, 1:] * minimums)


def _q4_k(block: Bytes) -> Parts:
    return _nibbles(block[:, 16:], 32), *_k_scales(block)


def _q5_k(block: Bytes) -> Parts:
    planes = block[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _nibbles(block[:, 48:], 32) | planes.reshape(len(block), -1) << 4, *_k_scales(block)


def _q6_k(block: Bytes) -> Parts:
    pairs = block[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (_nibbles(block[:, :128], 64) | pairs.reshape(len(block), -1) << 4).view(np.int8) - np.int8(32)
    whole = np.ascontiguousarray(block[:, 208:]).view(np.float16).astype(np.float32)
    return codes, whole * block[:, 192:208].view(np.int8).astype(np.float32), None


def _pairs(block: Bytes) -> Bytes:
    """Unpack 2-bit codes: each 32 bytes hold those of 128 elements, first the lowest two bits of all bytes."""
    runs = block.reshape(len(block), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (runs & np.uint8(3)).reshape(len(block), -1)


def _q2_k(block: Bytes) -> Parts:
    whole = _halves(block[:, 80:], 2).astype(np.float32)
    scales, minimums = (part.astype(np.float32) for part in (block[:, :16] & 15, block[:, :16] >> 4))
    return _pairs(block[:, 16:80]), whole[:, :1] * scales, -(whole[:, 1:] * minimums)


def _q3_k(block: Bytes) -> Parts:
    planes = block[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _pairs(block[:, 32:96]) + (planes.reshape(len(block), -1) << 2) + np.uint8(4)  # 8 stands for 0
    low = _nibbles(block[:, 96:104], 8)
    high = block[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | high.reshape(len(block), -1) << 4).astype(np.float32) - np.float32(32)
    return codes, _halves(block[:, 108:], 1).astype(np.float32) * scales, None


def _iq4_nl(block: Bytes) -> Parts:
    return _nibbles(block[:, 2:], 16), _halves(block, 1), None


def _iq4_xs(block: Bytes) -> Parts:
    low = np.stack((block[:, 4:8] & 15, block[:, 4:8] >> 4), axis=2).reshape(len(block), -1)
    high = np.ascontiguousarray(block[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high.astype(np.uint8) << 4).astype(np.float32) - np.float32(32)
    return _nibbles(block[:, 8:], 16), _halves(block, 1).astype(np.float32) * scales, None


def _mxfp4(block: Bytes) -> Parts:
    from gguf import quants

    return _nibbles(block[:, 1:], 16), quants.MXFP4.e8m0_to_fp32_half(block[:, :1]), None


def _nvfp4(block: Bytes) -> Parts:
    from gguf import quants

    scales = quants.NVFP4.ue4m3_to_fp32(block[:, :4]).astype(np.float32)
    return _nibbles(block[:, 4:], 8), scales, None


def _tq2_0(block: Bytes) -> Parts:
    return _pairs(block[:, :64]) + np.uint8(7), _halves(block[:, 64:], 1), None  # 8 stands for 0


_ENCODINGS = {
    "Q4_0": _Encoding(32, 18, QuantizedFormat("int4", 32, "float16"), _q4_0),
    "Q4_1": _Encoding(32, 20, QuantizedFormat("int4", 32, "float16", "minimum"), _q4_1),
    "Q5_0": _Encoding(32, 22, QuantizedFormat("int8", 32, "float16"), _q5_0),
    "Q5_1": _Encoding(32, 24, QuantizedFormat("int8", 32, "float16", "minimum"), _q5_1),
    "Q8_0": _Encoding(32, 34, QuantizedFormat("int8", 32, "float16"), _q8_0),
    "Q2_K": _Encoding(256, 84, QuantizedFormat("int4", 16, "float32", "minimum"), _q2_k),
    "Q3_K": _Encoding(256, 110, QuantizedFormat("int4", 16, "float32"), _q3_k),
    "Q4_K": _Encoding(256, 144, QuantizedFormat("int4", 32, "float32", "minimum"), _q4_k),
    "Q5_K": _Encoding(256, 176, QuantizedFormat("int8", 32, "float32", "minimum"), _q5_k),
    "Q6_K": _Encoding(256, 210, QuantizedFormat("int8", 16, "float32"), _q6_k),
    "IQ4_NL": _Encoding(32, 18, QuantizedFormat("iq4_nl", 32, "float16"), _iq4_nl),
    "IQ4_XS": _Encoding(256, 136, QuantizedFormat("iq4_nl", 32, "float32"), _iq4_xs),
    "MXFP4": _Encoding(32, 17, QuantizedFormat("float4_e2m1", 32, "bfloat16"), _mxfp4),
    "NVFP4": _Encoding(64, 36, QuantizedFormat("float4_e2m1", 16, "float16"), _nvfp4),
    "TQ2_0": _Encoding(256, 66, QuantizedFormat("int4", 256, "float16"), _tq2_0),
}


def quantized_encodings() -> tuple[str, ...]:
    """The ggml types whose matrices stay quantized in programs."""
    return tuple(_ENCODINGS)
