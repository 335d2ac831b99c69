"""Forms in which weights lie in DRAM: compressed, or with N:M sparsity; their encoders, decoders and stored bytes.

N:M sparsity: of M consecutive elements along the summed dimension, from its first on, at most N are not zero. Packed,
each such group is N values and N positions of `metadata_bits` each. A weight has a pattern if it satisfies it
everywhere; of several, the one with the fewest stored bytes is taken. Weights that satisfy none are compressed if the
chip has a codec, else they lie there as they are:

- `bitmask`: a bit for each element, and the bytes of those that are not zero;
- `deflate`: the stream of zlib, at its default level.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import is_float, itemsize
from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View, is_contiguous
from npu_model.chip import Chip
from npu_model.chip.description import CODECS
from npu_model.isa.instructions import TileProgram
from npu_model.lowering.families import LOWERINGS
from npu_runtime.buffer import DeviceBuffer

Bytes: TypeAlias = NDArray[np.uint8]
Pattern: TypeAlias = tuple[int, int]
"""N and M of N:M sparsity."""


@dataclass(frozen=True)
class Form:
    """A weight's form in DRAM: the bytes that it takes, and its N:M pattern (`2:4`; empty for other forms)."""

    stored: int
    pattern: str = ""


@dataclass(frozen=True)
class SparseCall(KernelCall):
    """A kernel call whose weight has N:M sparsity.

    Attributes:
        sparsity: N and M.
    """

    sparsity: Pattern = (1, 1)


def pattern_of(text: str) -> Pattern:
    """N and M of a pattern such as `2:4`."""
    kept, of = text.split(":")
    return int(kept), int(of)


def pack(groups: NDArray[Any], kept: int) -> tuple[NDArray[Any], Bytes]:
    """The values of groups [count, M] that are stored, and their positions, both [count, kept], in ascending order.

    Raises `ValueError` if a group has more than `kept` elements that are not zero.
    """
    is_zero = groups == 0
    if groups.shape[1] - is_zero.sum(1).min(initial=groups.shape[1]) > kept:
        raise ValueError("a group has too many elements that are not zero")
    positions = np.sort(np.argsort(is_zero, axis=1, kind="stable")[:, :kept], axis=1)
    return np.take_along_axis(groups, positions, 1), positions.astype(np.uint8)


def unpack(values: NDArray[Any], positions: Bytes, of: int) -> NDArray[Any]:
    """The groups [count, of] whose stored values and positions these are; the inverse of `pack`."""
    groups = np.zeros((len(values), of), values.dtype)
    np.put_along_axis(groups, positions.astype(np.int64), values, 1)
    return groups


def encode(data: Bytes, codec: str, item: int) -> bytes:
    """Compress bytes with a codec; `item` is the size of an element."""
    if codec == "deflate":
        return zlib.compress(data.tobytes())
    elements = data.reshape(-1, item)
    is_stored = elements.any(1)
    return np.packbits(is_stored).tobytes() + elements[is_stored].tobytes()


def decode(code: bytes, codec: str, item: int, size: int) -> Bytes:
    """The `size` bytes that `encode` has compressed."""
    if codec == "deflate":
        return np.frombuffer(zlib.decompress(code), np.uint8)
    count = size // item
    flags = np.unpackbits(np.frombuffer(code[: -(-count // 8)], np.uint8))[:count].astype(bool)
    elements = np.zeros((count, item), np.uint8)
    elements[flags] = np.frombuffer(code[-(-count // 8) :], np.uint8).reshape(-1, item)
    return elements.reshape(-1)


def forms_of(program: CompiledProgram, chip: Chip, weights: Mapping[str, DeviceBuffer]) -> dict[str, Form]:
    """Measure weights: name → form on a chip, for those that do not lie in DRAM as they are.

    Args:
        weights: The program's weights in the host's memory, as `load_weights` returns them for a `CPUBackend`.
    """
    import npu_compiler.ops  # noqa: F401  (declares the kernels)

    own = {name: buffer.native_handle.view(np.uint8).reshape(-1) for name, buffer in weights.items()}
    return measured_forms(program.plan, chip, own)


def measured_forms(plan: ExecutionPlan, chip: Chip, weights: Mapping[str, Bytes]) -> dict[str, Form]:
    """The result of `forms_of`, from buffers of the plan → their bytes."""
    forms = {}
    for name, view in sparse_views(plan).items() if chip.sparsity is not None else ():
        if name in weights and (form := _sparse_form(weights[name], view, chip)) is not None:
            forms[name] = form
    if chip.weights is not None and chip.weights.codec in CODECS:
        for name, data in weights.items():
            if name not in forms and name in plan.buffers and plan.buffers[name].size_bytes:
                item = itemsize(plan.buffers[name].dtype)
                own = data[: plan.buffers[name].size_bytes]
                code = encode(own, chip.weights.codec, item)
                assert np.array_equal(decode(code, chip.weights.codec, item, own.size), own)
                forms[name] = Form(len(code))
    return forms


def sparse_views(plan: ExecutionPlan) -> dict[str, View]:
    """Weights that may have N:M sparsity → the view of them with the summed dimension as dimension 1.

    All calls that read such a weight multiply by it; it is dense, and its elements are no codes of several bits.
    """
    views: dict[str, View] = {}
    others: set[str] = set()
    for call in plan.calls:
        weight = weight_of(call)
        for view in call.inputs:
            if view is not weight or views.setdefault(view.buffer, view) != view:
                others.add(view.buffer)
    return {
        name: view
        for name, view in views.items()
        if name not in others and plan.buffers[name].is_constant and _is_whole(view, plan.buffers[name].size_bytes)
    }


def weight_of(call: KernelCall) -> View | None:
    """The operand of a call that its products sum over along dimension 1, with zeros that are zero; None without."""
    lowering = LOWERINGS.get(call.kernel)
    if lowering is None or not lowering.multiplies_weight:
        return None
    inputs = declaration(call).inputs_of(call)
    return inputs["weight"] if inputs.get("weight_zeros") is None else None


def _is_whole(view: View, size: int) -> bool:
    order = sorted(range(view.rank), key=lambda d: -abs(view.strides[d]))
    shape, strides = (tuple(own[d] for d in order) for own in (view.shape, view.strides))
    return not view.offset and view.numel * itemsize(view.dtype) == size and is_contiguous(shape, strides)


def groups_of(data: Bytes, view: View, of: int) -> NDArray[Any]:
    """The elements of a weight as groups of `of` along dimension 1 of the view, [count, of]."""
    item = itemsize(view.dtype)
    array = np.ndarray(view.shape, f"u{item}", data, 0, [stride * item for stride in view.strides])
    groups = np.moveaxis(array, 1, -1).reshape(-1, of)
    if is_float(view.dtype):  # a pruned weight may be -0.0
        groups = np.where(groups == 1 << 8 * item - 1, 0, groups).astype(groups.dtype)
    return groups


def _stored(size: int, view: View, chip: Chip, pattern: str) -> Form | None:
    """The form of a weight of `size` bytes in a pattern; None if groups do not divide its summed dimension."""
    kept, of = pattern_of(pattern)
    if chip.sparsity is None or view.shape[1] % of:
        return None
    count = prod(view.shape) // of * kept
    stored = count * itemsize(view.dtype) + ceil(count * chip.sparsity.metadata_bits / 8)
    return Form(stored, pattern) if stored < size else None


def _sparse_form(data: Bytes, view: View, chip: Chip) -> Form | None:
    """The form with the fewest stored bytes whose pattern a weight satisfies; None if it satisfies none."""
    assert chip.sparsity is not None
    size = view.numel * itemsize(view.dtype)
    forms = [_stored(size, view, chip, pattern) for pattern in chip.sparsity.patterns]
    for form in sorted(filter(None, forms), key=lambda form: form.stored):
        kept, of = pattern_of(form.pattern)
        if np.count_nonzero(groups_of(data, view, of), axis=1).max(initial=0) <= kept:
            return form
    return None


def with_sparsity(plan: ExecutionPlan, forms: Mapping[str, Form], chip: Chip) -> ExecutionPlan:
    """A plan whose calls say the N:M sparsity of their weights, if the chip's matrix engine skips zeros."""
    if chip.sparsity is None or not chip.sparsity.skips_zeros:
        return plan

    def marked(call: KernelCall) -> KernelCall:
        weight = weight_of(call)
        form = None if weight is None else forms.get(weight.buffer)
        if form is None or not form.pattern:
            return call
        return SparseCall(**vars(call), sparsity=pattern_of(form.pattern))

    return ExecutionPlan(**{**vars(plan), "calls": [marked(call) for call in plan.calls]})


def with_counted_forms(
    program: TileProgram, plan: ExecutionPlan, chip: Chip, weights: Mapping[str, Bytes]
) -> TileProgram:
    """A program whose compressed weights take the bytes into which the chip's codec encodes these weights.

    It is the same one if all its weights lie in DRAM as they are. Raises `DeviceError`, which names the first weight
    without the sparsity that the program was compiled for.
    """
    if not any(buffer.stored for buffer in program.buffers):
        return program
    compressed = [b.name for b in program.buffers if b.stored and not b.pattern and b.name in weights]
    counted = measured_forms(plan, replace(chip, sparsity=None), {name: weights[name] for name in compressed})
    _check_patterns(program, plan, weights)
    buffers = [
        replace(buffer, stored=counted[buffer.name].stored) if buffer.name in counted else buffer
        for buffer in program.buffers
    ]
    return replace(program, buffers=tuple(buffers))


def _check_patterns(program: TileProgram, plan: ExecutionPlan, weights: Mapping[str, Bytes]) -> None:
    """Check that weights can be packed as a program was compiled for, and come back as they are."""
    views = sparse_views(plan)
    for name, buffer in ((buffer.name, buffer) for buffer in program.buffers):
        if not buffer.pattern or name not in weights:
            continue
        if name not in views:
            raise DeviceError(
                f"weight '{name}' is none that may have {buffer.pattern} sparsity; compile the program again"
            )
        kept, of = pattern_of(buffer.pattern)
        groups = groups_of(weights[name], views[name], of)
        try:
            values, positions = pack(groups, kept)
        except ValueError:
            raise DeviceError(
                f"weight '{name}' has more than {kept} of {of} elements that are not zero, but the program was "
                f"compiled for {buffer.pattern} sparsity; compile it again for these weights"
            ) from None
        assert np.array_equal(unpack(values, positions, of), groups)


__all__ = [
    "Form",
    "SparseCall",
    "decode",
    "encode",
    "forms_of",
    "measured_forms",
    "pack",
    "pattern_of",
    "sparse_views",
    "unpack",
    "with_counted_forms",
    "with_sparsity",
]
