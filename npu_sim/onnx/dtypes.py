"""Conversion of dtypes and tensors from ONNX to PyTorch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from npu_sim.onnx.rows import Refusal

TORCH_DTYPES: dict[int, torch.dtype] = {
    ir.DataType.BOOL: torch.bool,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
}
_OWN_WIDTH = {
    ir.DataType.INT4: np.int8,
    ir.DataType.UINT4: np.uint8,
    ir.DataType.INT2: np.int8,
    ir.DataType.UINT2: np.uint8,
}


def torch_dtype(kind: int | None) -> torch.dtype:
    """Return PyTorch's dtype for a number of ONNX's `DataType`. Raises `Refusal` if IR has no such dtype."""
    dtype = TORCH_DTYPES.get(-1 if kind is None else int(kind))
    if dtype is None:
        name = "unknown" if kind is None or int(kind) not in set(ir.DataType) else ir.DataType(int(kind)).name
        raise Refusal(
            f"has a tensor of dtype {name}; known are {', '.join(x.name for x in map(ir.DataType, TORCH_DTYPES))}"
        )
    return dtype


def torch_tensor(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Return an ONNX tensor as a torch tensor with its own memory; integers below eight bits become bytes."""
    if tensor.dtype in _OWN_WIDTH:
        array = tensor.numpy().astype(_OWN_WIDTH[tensor.dtype])
        return torch.from_numpy(np.ascontiguousarray(array).copy())
    torch_dtype(tensor.dtype)
    return tensor_of(tensor.numpy())


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a copy of an array as a tensor."""
    copy = np.array(array, order="C", copy=True)
    return (
        torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
        if copy.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(copy)
    )
