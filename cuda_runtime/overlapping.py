"""Launches of kernels that may start before the preceding one has ended (programmatic dependent launch).

Such a kernel executes `griddepcontrol.wait` before it accesses what other kernels write. CuPy has no call for this, so
the driver is called directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cuda_runtime.cuda_device import load_driver
from npu_compiler.errors import DeviceError

_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint64 * 8))


class _Configuration(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _driver() -> Any:
    library = load_driver()
    library.cuLaunchKernelEx.argtypes = [
        ctypes.POINTER(_Configuration),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return library


def overlapping_launch(
    function: int,
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    stream: int,
    arguments: int,
    cooperative: bool = False,
) -> Callable[[], None]:
    """A function that enqueues a kernel so that it may start before the preceding kernel has ended.

    Args:
        function, stream: Handles of the driver.
        arguments: Address of the array of pointers to the kernel's arguments.
        cooperative: Whether all blocks must run at the same time.
    """
    names = [_PROGRAMMATIC_STREAM_SERIALIZATION, *([_COOPERATIVE] if cooperative else [])]
    attributes = (_Attribute * len(names))(*map(_Attribute, names))
    for attribute in attributes:
        attribute.value[0] = 1
    configuration = _Configuration(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared, stream, attributes, len(names)
    )
    launch = _driver().cuLaunchKernelEx

    def enqueue() -> None:
        status = launch(ctypes.byref(configuration), function, arguments, None)
        if status:
            raise DeviceError(f"cuLaunchKernelEx failed with error {status}")

    return enqueue
