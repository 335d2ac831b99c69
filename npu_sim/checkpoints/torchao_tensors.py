"""Weights that torchao's `quantize_` has made tensor subclasses, read as `QuantizedArray`s.

Classes and attributes are recognized by their names (torchao 0.18), so torchao is not imported. Rounding of activations
that torchao would do is left out: the inputs of layers stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from npu_compiler.errors import WeightError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.torch_arrays import tensor_to_numpy
from npu_sim.checkpoints.layouts import Plain

_BY_BYTE = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")
_INT4 = "Int4Tensor"


def as_quantized(tensor: torch.Tensor) -> QuantizedArray | None:
    """The matrix that a tensor of torchao holds, exactly; None for a plain tensor.

    Raises:
        WeightError: the tensor is of a torchao class, or has a layout, that is not supported.
    """
    if not type(tensor).__module__.startswith("torchao."):
        return None
    kind = type(tensor).__name__
    if kind not in (*_BY_BYTE, _INT4) or tensor.ndim != 2:
        supported = ", ".join((*_BY_BYTE, _INT4))
        raise WeightError(f"a weight is a {kind} of torchao, of shape {list(tensor.shape)}; supported: {supported}")
    if getattr(tensor, "act_pre_scale", None) is not None:
        raise WeightError(f"a weight is a {kind} of torchao that scales its input (act_pre_scale), not supported")
    return _int4(tensor) if kind == _INT4 else _by_byte(tensor)


def _by_byte(tensor: Any) -> QuantizedArray:
    codes, scales, zeros = tensor.qdata, tensor.scale, getattr(tensor, "zero_point", None)
    if zeros is not None and zeros.is_floating_point():
        if not bool((zeros == zeros.round()).all()):
            raise WeightError("a weight of torchao has zero points that are not whole numbers")
        zeros = zeros.to(torch.int8)
    symmetric = zeros is None or not bool(zeros.any())
    parts = {"weight": _array(codes), "weight_scale": tensor_to_numpy(scales.cpu())}
    if zeros is not None and not symmetric:
        parts["weight_zero_point"] = tensor_to_numpy(zeros.cpu())
    rows, columns = tensor.block_size or tensor.shape
    block = int(rows), 0 if columns == codes.shape[1] else int(columns)
    array = Plain("weight_scale", block, symmetric).array(parts)
    fits = codes.dtype == torch.int8 and array.shape[1] % 2 == 0
    return _narrowed(array) if fits and _bits(tensor) <= 4 else array


def _array(codes: torch.Tensor) -> np.ndarray:
    if codes.dtype != torch.float8_e4m3fn:
        return tensor_to_numpy(codes.cpu())
    import ml_dtypes

    return tensor_to_numpy(codes.view(torch.uint8).cpu()).view(ml_dtypes.float8_e4m3fn)


def _bits(tensor: Any) -> int:
    return int(str(getattr(tensor, "target_dtype", "int8")).rpartition("int")[2])


def _narrowed(array: QuantizedArray) -> QuantizedArray:
    """An array of codes from -8 to 7, stored in a byte each, as one with 4-bit codes."""
    format = replace(array.format, codes="int4")
    codes = format.code_format.pack(array.codes.view(np.int8) + np.int8(format.code_format.zero))
    zeros = None if array.offsets is None else array.offsets + np.uint8(format.code_format.zero)
    return QuantizedArray(format, array.shape, codes, array.scales, zeros)


def _int4(tensor: Any) -> QuantizedArray:
    """The matrix of a torchao int4 tensor.

    A weight is scale · q + zero_point with q from -8 to 7; two codes share a byte, the first in the low bits.
    """
    shape = (int(tensor.shape[0]), int(tensor.shape[1]))
    group = int(tensor.block_size[-1])
    scales, zeros = (np.ascontiguousarray(tensor_to_numpy(x.cpu()).T) for x in (tensor.scale, tensor.zero_point))
    codes = tensor_to_numpy(tensor.qdata.cpu()).view(np.uint8) ^ np.uint8(0x88)
    if not zeros.astype(np.float32).any():
        return QuantizedArray(QuantizedFormat("int4", group, scales.dtype.name), shape, codes, scales)
    wide, middle = scales.astype(np.float32), zeros.astype(np.float32)
    minimums = middle - 8 * wide
    if not (minimums.astype(np.float64) == middle.astype(np.float64) - 8 * wide.astype(np.float64)).all():
        raise WeightError("a weight of torchao has zero points that are too small beside their scales")
    return QuantizedArray(QuantizedFormat("int4", group, "float32", "minimum"), shape, codes, wide, minimums)


def quantized_parameters(module: nn.Module) -> dict[str, QuantizedArray]:
    """Parameter name → weight, of the parameters that torchao has quantized.

    Raises WeightError for the reasons of `as_quantized`.
    """
    arrays = {key: as_quantized(value) for key, value in module.named_parameters(remove_duplicate=False)}
    return {key: value for key, value in arrays.items() if value is not None}


@contextmanager
def dense_stand_ins(module: nn.Module, weights: Mapping[str, QuantizedArray]) -> Iterator[None]:
    """Replace these parameters, inside the context, by plain tensors of the same shapes and dtypes.

    `torch.export` then sees a linear layer with a plain weight instead of torchao's operations on its parts. The values
    of the stand-ins are undefined.
    """
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for key in weights:
            path, _, name = key.rpartition(".")
            owner = module.get_submodule(path)
            value = owner.get_parameter(name)
            before.append((owner, name, value))
            plain = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            owner.register_parameter(name, nn.Parameter(plain, requires_grad=False))
        yield
    finally:
        for owner, name, value in reversed(before):
            owner.register_parameter(name, value)
