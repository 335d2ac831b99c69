"""Quantized weights as operands of a kernel call, and the quantization of activation rows before a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat, dequantize_rows, quantize_rows
from npu_runtime.cpu.bound_call import Params

T = TypeVar("T")


def weight_parts(inputs: Sequence[T], params: Params, first: int) -> tuple[list[T], list[T]]:
    """The operands that are a quantized weight's parts, which begin at `first`; and all other operands."""
    end = first + 2 + bool(params["has_offset"])
    return list(inputs[first:end]), [*inputs[:first], *inputs[end:]]


def stored_weight(parts: Sequence[np.ndarray], params: Params) -> QuantizedArray:
    """The quantized weight whose parts (codes, scales, offsets) are arrays in device memory."""
    codes, scales, *offsets = parts
    k: int = params["k"]
    format = QuantizedFormat(params["codes"], k // params["groups"], scales.dtype.name, params["offsets"])
    return QuantizedArray(format, (codes.shape[0], k), codes, scales, *offsets)


def rounded_rows(x: np.ndarray, params: Params) -> np.ndarray:
    """The rows of x [m, k] as a product multiplies them, in float32.

    They are unchanged, or quantized to the format that the parameter `activations` names and dequantized.
    """
    kind = params.get("activations", "none")
    return x if kind == "none" else dequantize_rows(*quantize_rows(x, kind), kind)
