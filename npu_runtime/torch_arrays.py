"""Conversion between NumPy arrays and torch tensors in shared memory; bfloat16 is `ml_dtypes.bfloat16` in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch


def numpy_to_tensor(array: np.ndarray) -> torch.Tensor:
    """A torch tensor that shares the array's memory, or of a copy if the array is read-only, as tensors never are."""
    array = np.asarray(array, order="C")
    if not array.flags.writeable:
        array = array.copy()
    return view_tensor(array)


def view_tensor(array: np.ndarray) -> torch.Tensor:
    """A torch tensor that shares a strided array's memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy array that shares the tensor's memory if the tensor is contiguous; the tensor is on the CPU."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()  # PyTorch may leave both for later
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array
