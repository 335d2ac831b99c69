"""Kernel calls in the form that Metal functions take: constants, a parameter struct and the geometry of operands.

`metal_kernels/README.md` describes the shaders' side.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.ops import KERNELS, elementwise_kernel
from npu_compiler.program.elementwise import ElementwiseKernel
from npu_compiler.program.kernels import KernelCall, KernelDecl
from npu_compiler.program.views import MAX_RANK, View, collapse

_TYPES = {"float16": 0, "bfloat16": 0, "float32": 1, "int32": 2, "bool": 3, "uint8": 4}
_OTHER_HALF = 5
_BYTES_AT_ONCE = 16  # of operands in uint8, which are packed codes
_MAX_ELEMENTS = 2**32  # kernels count elements in 32 bits


@dataclass(frozen=True)
class Binding:
    """A kernel call in the form that a Metal function takes; nothing here depends on the memory of its operands.

    Attributes:
        call: The call with its views collapsed, from which the grid is computed.
        operands: The view bound at each buffer index; None for an absent optional operand.
        params: The parameter struct, empty if the kernel has none.
        geometry: A `Strided` struct per operand.
        constants: Function constant → value.
    """

    call: KernelCall
    operands: tuple[View | None, ...]
    params: bytes
    geometry: bytes
    constants: dict[str, int]


def bind(call: KernelCall) -> Binding:
    """Compute everything about a call that does not depend on memory.

    Raises:
        DeviceError: there is no such kernel, or Metal kernels cannot address an operand.
    """
    elementwise = elementwise_kernel(call)
    if elementwise is not None:
        return _bind_elementwise(call, elementwise)
    if call.kernel not in KERNELS or not KERNELS[call.kernel].source:
        advice = "; compile the program for the target of this device" if call.kernel in KERNELS else ""
        raise DeviceError(f"the Metal device has no kernel '{call.kernel}'{advice}")
    return _binding(call, KERNELS[call.kernel], {})


def compute_half(call: KernelCall) -> str | None:
    """The 16-bit dtype that a call's kernel must be compiled for, that of its result if it has one; None for any."""
    return next((view.dtype for view in (*call.outputs, *call.inputs) if view.dtype in HALF_DTYPES), None)


def _bind_elementwise(call: KernelCall, kernel: ElementwiseKernel) -> Binding:
    """The binding of an element-wise call, with dimensions merged where all operands' strides allow it."""
    views = collapse_views([*call.inputs, *call.outputs])
    if kernel.is_strided:
        views = [_at_least_rank(view, 2) for view in views]
    scalars = [x for x in call.params["scalars"] if x is not None]
    whole = kernel.op.integer is not None and not any(isinstance(x, float) for x in scalars)
    integer = whole and all(view.dtype in ("int32", "bool") for view in call.inputs)
    params = {**call.params, **kernel.parameters(call.params)}
    collapsed = replace(call, inputs=tuple(views[:-1]), outputs=(views[-1],), params=params)
    return _binding(collapsed, kernel, {"integer": int(integer)})


def _binding(call: KernelCall, decl: KernelDecl, constants: dict[str, int]) -> Binding:
    operands, half = decl.bind(call), compute_half(call)
    present = [view for view in operands if view is not None]
    for bound in present:
        _check_addressable(bound, call)
    for operand, view in zip((*decl.inputs, *decl.outputs), operands, strict=True):
        constants[f"{operand.name}_type"] = _type(view, half)
        constants[f"{operand.name}_vectorized"] = int(view is not None and _is_vectorizable(view))
        if operand.optional:
            constants[f"has_{operand.name}"] = int(view is not None)
    try:
        constants.update(decl.variant(call.params))
        params = decl.pack(call.params)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise DeviceError(f"kernel '{call.kernel}' (node '{call.node}') has unusable parameters: {error}") from error
    constants["vectorized"] = int(all(map(_is_vectorizable, present)))
    constants["contiguous"] = int(all(view.is_contiguous for view in present))
    return Binding(
        call,
        tuple(operands),
        params,
        b"".join(map(pack_geometry, operands)),
        constants,
    )


def _type(view: View | None, half: str | None) -> int:
    """Number of an operand's storage type in `common.metal`; 0 for an absent operand."""
    if view is None:
        return 0
    return _OTHER_HALF if view.dtype in HALF_DTYPES and view.dtype != half else _TYPES[view.dtype]


def _check_addressable(view: View, call: KernelCall) -> None:
    if view.dtype not in _TYPES:
        raise DeviceError(f"kernel '{call.kernel}' (node '{call.node}'): Metal kernels do not read {view.dtype}")
    if view.span >= _MAX_ELEMENTS:
        raise DeviceError(
            f"kernel '{call.kernel}' (node '{call.node}'): an operand of shape {list(view.shape)} spans "
            f"{view.span + 1} elements; Metal kernels address {_MAX_ELEMENTS}"
        )


def _is_vectorizable(view: View) -> bool:
    if view.rank == 0:
        return True
    *outer, last = [stride if size > 1 else None for size, stride in zip(view.shape, view.strides, strict=True)]
    step = _BYTES_AT_ONCE if view.dtype == "uint8" else 4
    return view.offset % step == 0 and last in (None, 1) and all(x is None or x % step == 0 for x in outer)


def pack_geometry(view: View | None) -> bytes:
    """An operand's `Strided`: rank, shape and strides, padded to the largest rank; zeros for an absent operand."""
    if view is None:
        return bytes(4 * (1 + 2 * MAX_RANK))
    spare = MAX_RANK - view.rank
    return struct.pack(f"<{1 + 2 * MAX_RANK}I", view.rank, *view.shape, *[1] * spare, *view.strides, *[0] * spare)


def collapse_views(views: Sequence[View]) -> list[View]:
    """The views, all of one shape, with dimensions merged where all of them allow it; at least one dimension stays."""
    shape, strides = collapse(views[0].shape, *(view.strides for view in views))
    if not shape:
        shape, strides = [1], [[1] for _ in views]
    return [replace(view, shape=tuple(shape), strides=tuple(own)) for view, own in zip(views, strides, strict=True)]


def _at_least_rank(view: View, rank: int) -> View:
    while view.rank < rank:
        view = replace(view, shape=(1, *view.shape), strides=(0, *view.strides))
    return view
