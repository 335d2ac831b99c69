"""DLPack capsules of dtypes that CuPy can export only as integers of equal size."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_CODES = {"bool": 6, "bfloat16": 4}
_CARRIERS: dict[str, np.dtype] = {"bool": np.dtype(np.uint8), "bfloat16": np.dtype(np.uint16)}

# The byte of DLDataType.code: in a DLManagedTensor, a data pointer, a DLDevice and ndim come before it; in a
# DLManagedTensorVersioned, four more words (version, manager_ctx, deleter, flags) before those.
_CODE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 52}


def carrier(dtype: str) -> np.dtype:
    """The NumPy dtype that memory of a storage dtype is exported as: for bool and bfloat16, an integer of its size."""
    stand_in = _CARRIERS.get(dtype)
    return np.dtype(dtype) if stand_in is None else stand_in


def retag(capsule: Any, dtype: str) -> Any:
    """The capsule of an array of dtype `carrier(dtype)`, changed to announce `dtype` itself."""
    if dtype in _CODES:
        name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
        name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        name = name_of(capsule)
        ctypes.c_uint8.from_address(pointer_of(capsule, name) + _CODE_OFFSETS[name]).value = _CODES[dtype]
    return capsule
