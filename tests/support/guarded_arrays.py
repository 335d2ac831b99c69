"""A pytest plugin: each NumPy array ends where an unmapped page begins, so that a kernel which goes beyond it crashes.

    PYTHONPATH=tests/support python -m pytest -p guarded_arrays tests/npu_runtime/test_native.py

AddressSanitizer does not watch vector loads with masks; this does.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from npu_runtime.cpu.native.build import find_compiler

SOURCE = Path(__file__).with_suffix(".c")
_SET_HANDLER = 304  # of PyDataMem_SetHandler in NumPy's C API, see numpy/__multiarray_api.h


def install() -> None:
    """Give all arrays that this thread makes from here on such memory."""
    compiler = find_compiler()
    assert compiler is not None, "no C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "guarded_arrays.so")
        command = [compiler, "-x", "c", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True)
        handler = ctypes.c_char.in_dll(ctypes.CDLL(str(library)), "guarded_arrays")
    make, pointer = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    functions = ctypes.cast(pointer(np._core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[_SET_HANDLER])
    set_handler(make(ctypes.addressof(handler), b"mem_handler", None))


def pytest_configure() -> None:
    install()


def pytest_report_header() -> str:
    return f"NumPy's arrays: {np._core.multiarray.get_handler_name()}"
