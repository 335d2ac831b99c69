"""The weight in few bits that a kernel's operands are the parts of, and rows that are rounded before a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat, dequantize_rows, quantize_rows
from npu_runtime.cpu.bound_call import Params

T = TypeVar("T")


def weight_parts(inputs: Sequence[T], params: Params, first: int) -> tuple[list[T], list[T]]:
    """The operands that are the weight's parts, which begin at `first`, and the others."""
    end = first + 2 + bool(params["has_offset"])
    return list(inputs[first:end]), [*inputs[:first], *inputs[end:]]


def stored_weight(parts: Sequence[np.ndarray], params: Params) -> QuantizedArray:
    """The weight whose parts are in device memory."""
    codes, scales, *offsets = parts
    k: int = params["k"]
    format = QuantizedFormat(params["codes"], k // params["groups"], scales.dtype.name, params["offsets"])
    return QuantizedArray(format, (codes.shape[0], k), codes, scales, *offsets)


def rounded_rows(x: np.ndarray, params: Params) -> np.ndarray:
    """The rows of x [m, k] as a product reads them: as they are, or rounded to what `activations` says, in float32."""
    kind = params.get("activations", "none")
    return x if kind == "none" else dequantize_rows(*quantize_rows(x, kind), kind)
