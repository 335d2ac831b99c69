"""Kernels of a captured CUDA graph whose arguments change from launch to launch.

CuPy has no call for this, so the driver is called directly (`cuGraphExecKernelNodeSetParams`). It changes later
launches of the graph, not those that are under way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cuda_runtime.cuda_device import load_driver
from npu_compiler.errors import DeviceError

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _KernelNode(ctypes.Structure):
    """The C struct CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@cache
def _driver() -> Any:
    library = load_driver()
    handle, pointer = ctypes.c_void_p, ctypes.POINTER
    library.cuGraphGetNodes.argtypes = [handle, pointer(handle), pointer(ctypes.c_size_t)]
    library.cuGraphNodeGetType.argtypes = [handle, pointer(ctypes.c_int)]
    library.cuGraphKernelNodeGetParams_v2.argtypes = [handle, pointer(_KernelNode)]
    library.cuGraphExecKernelNodeSetParams_v2.argtypes = [handle, handle, handle]
    return library


def _check(status: int, doing: str) -> None:
    if status:
        raise DeviceError(f"{doing}: the CUDA driver reports error {status}")


def argument_updates(graph: Any, function: int, arguments: Sequence[tuple[int, int]]) -> list[Callable[[], None]]:
    """A function for each of some kernels of a graph that makes later launches read the kernel's argument anew.

    Args:
        graph: A captured graph, of CuPy.
        function: The kernels' function: each takes one argument, a struct.
        arguments: Address and size in bytes of each kernel's argument, unchanged since the capture.

    Raises:
        DeviceError: the graph does not contain the kernels.
    """
    nodes = {}
    for node in _nodes(graph.graph):
        described = _KernelNode()
        _check(_driver().cuGraphKernelNodeGetParams_v2(node, ctypes.byref(described)), "a graph's node cannot be read")
        if described.function == function:
            for index, (address, size) in enumerate(arguments):
                if ctypes.string_at(described.arguments[0], size) == ctypes.string_at(address, size):
                    nodes[index] = node, described
    if len(nodes) != len(arguments):
        raise DeviceError("a captured graph does not contain the copies of its inputs and outputs")
    return [_update(graph.graphExec, *nodes[index], address) for index, (address, _) in enumerate(arguments)]


def _nodes(graph: int) -> list[int]:
    """Handles of the kernel nodes of a graph."""
    driver, count = _driver(), ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(graph, None, ctypes.byref(count)), "a graph cannot be read")
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "a graph cannot be read")
    kernels = []
    for node in nodes:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)), "a graph's node cannot be read")
        if kind.value == _KERNEL and node is not None:
            kernels.append(node)
    return kernels


def _update(executable: int, node: int, described: _KernelNode, address: int) -> Callable[[], None]:
    places = (ctypes.c_void_p * 1)(address)
    described.arguments = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
    described.extra = None
    set_arguments, place = _driver().cuGraphExecKernelNodeSetParams_v2, ctypes.addressof(described)
    keep = (described, places)

    def update() -> None:
        status = set_arguments(executable, node, place)
        if status:
            raise DeviceError(f"the arguments of a graph's kernel cannot be set: error {status} of {len(keep)}")

    return update
