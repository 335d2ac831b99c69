"""The `.npubin` format.

A file is the magic `NPUBIN`, then one msgpack array: format version, SHA-256 of the body, body. The body is msgpack of
plain maps and lists: `msgpack.unpackb` shows everything, and nothing in it is code or pickle. Reading compares it with
a schema and checks every reference and bound before anything is built from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import msgpack
import numpy as np

from npu_compiler.errors import IRError, ProgramFormatError
from npu_compiler.graph.dtypes import KNOWN_DTYPES, dtype_name, itemsize, numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.weight_recipe import WeightTransformRecipe
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, BufferKind, ExecutionPlan, WeightSpec
from npu_compiler.program.views import View

MAGIC = b"NPUBIN"
FORMAT_VERSION = 2
HEADER = ("name", "target", "compute_dtype", "compiler_version")


def encode(header: Mapping[str, str], plan: ExecutionPlan) -> bytes:
    """A whole file's content."""
    body = msgpack.packb(_to_dict(header, plan), use_bin_type=True)
    return MAGIC + bytes(msgpack.packb([FORMAT_VERSION, hashlib.sha256(body).digest(), body]))


def decode(data: bytes, origin: str) -> tuple[dict[str, str], ExecutionPlan]:
    """Header and plan of a file's content.

    Raises:
        ProgramFormatError: it is truncated, corrupted, of another format version, or inconsistent.
    """
    body = _open_envelope(data, origin)
    try:
        content = msgpack.unpackb(body, raw=False, strict_map_key=False)
        _check_types(content, _PROGRAM, "program")
        plan = _plan_from_dict(content)
        _check_consistency(plan)
    except ProgramFormatError as error:
        raise ProgramFormatError(f"'{origin}' is not a valid program: {error}") from error
    except (ValueError, KeyError, TypeError, IRError, msgpack.UnpackException) as error:
        raise ProgramFormatError(f"'{origin}' is not a valid program: {type(error).__name__}: {error}") from error
    return {key: content[key] for key in HEADER}, plan


def _open_envelope(data: bytes, origin: str) -> bytes:
    if not data.startswith(MAGIC):
        raise ProgramFormatError(f"'{origin}' is not a .npubin program (it does not start with {MAGIC.decode()})")
    try:
        envelope = msgpack.unpackb(data[len(MAGIC) :], max_bin_len=len(data))
    except (ValueError, msgpack.UnpackException) as error:
        raise ProgramFormatError(f"'{origin}' is truncated or corrupted: its envelope cannot be read") from error
    if not isinstance(envelope, list) or not envelope or not isinstance(envelope[0], int):
        raise ProgramFormatError(f"'{origin}' is corrupted: its envelope is not the expected array")
    if envelope[0] != FORMAT_VERSION:
        raise ProgramFormatError(
            f"'{origin}' has format version {envelope[0]}; this runtime reads version {FORMAT_VERSION}: "
            "compile it again"
        )
    if len(envelope) != 3 or not isinstance(envelope[1], bytes) or not isinstance(envelope[2], bytes):
        raise ProgramFormatError(f"'{origin}' is corrupted: its envelope is not the expected array")
    if hashlib.sha256(envelope[2]).digest() != envelope[1]:
        raise ProgramFormatError(f"'{origin}' is corrupted: its checksum does not match")
    return envelope[2]


def _plain(item: Any) -> dict[str, Any]:
    """A flat dataclass as a map."""
    return {f.name: getattr(item, f.name) for f in fields(item)}


def _view_to_list(view: View) -> list[Any]:
    return [view.buffer, view.shape, view.strides, view.offset, view.dtype]


def _view_from_list(data: list[Any]) -> View:
    buffer, shape, strides, offset, dtype = data
    return View(buffer, tuple(shape), tuple(strides), offset, dtype)


def _spec_from_dict(data: Mapping[str, Any]) -> TensorSpec:
    alloc, bounds = data["alloc_shape"], data["bounds"]
    return TensorSpec(
        data["name"],
        tuple(data["shape"]),
        data["dtype"],
        data["storage"],
        None if alloc is None else tuple(alloc),
        None if bounds is None else (bounds[0], bounds[1]),
    )


def _call_to_dict(call: KernelCall) -> dict[str, Any]:
    return {
        **_plain(call),
        "inputs": [_view_to_list(view) for view in call.inputs],
        "outputs": [_view_to_list(view) for view in call.outputs],
        "params": dict(call.params),
    }


def _call_from_dict(data: Mapping[str, Any]) -> KernelCall:
    views = {key: tuple(_view_from_list(view) for view in data[key]) for key in ("inputs", "outputs")}
    return KernelCall(
        data["kernel"],
        data["source"],
        views["inputs"],
        views["outputs"],
        data["params"],
        data["node"],
        data["flops"],
        data["bytes_moved"],
    )


def _to_dict(header: Mapping[str, str], plan: ExecutionPlan) -> dict[str, Any]:
    return {
        **header,
        "prologue": [_call_to_dict(call) for call in plan.prologue],
        "calls": [_call_to_dict(call) for call in plan.calls],
        "buffers": [_plain(buffer) for buffer in plan.buffers.values()],
        "inputs": [_plain(spec) for spec in plan.inputs],
        "outputs": [_plain(spec) for spec in plan.outputs],
        "output_views": {name: _view_to_list(view) for name, view in plan.output_views.items()},
        "weights": [
            {"spec": _plain(w.spec), "recipe": w.recipe.to_dict(), "source_shapes": dict(w.source_shapes)}
            for w in plan.weights.values()
        ],
        "constants": {
            name: {"dtype": dtype_name(value.dtype), "shape": value.shape, "data": value.tobytes()}
            for name, value in plan.constants.items()
        },
        "donations": plan.donations,
        "arena_bytes": plan.arena_bytes,
        "unused_weights": plan.unused_weights,
        "sources": plan.sources,
    }


def _plan_from_dict(data: Mapping[str, Any]) -> ExecutionPlan:
    weights = [
        WeightSpec(
            _spec_from_dict(w["spec"]),
            WeightTransformRecipe.from_dict(w["recipe"]),
            {key: tuple(shape) for key, shape in w["source_shapes"].items()},
        )
        for w in data["weights"]
    ]
    buffers = [BufferAllocation(**{**b, "alloc_shape": tuple(b["alloc_shape"])}) for b in data["buffers"]]
    if len({buffer.name for buffer in buffers}) < len(buffers):
        raise ProgramFormatError("two buffers have the same name")
    return ExecutionPlan(
        prologue=[_call_from_dict(call) for call in data["prologue"]],
        calls=[_call_from_dict(call) for call in data["calls"]],
        buffers={buffer.name: buffer for buffer in buffers},
        inputs=[_spec_from_dict(spec) for spec in data["inputs"]],
        outputs=[_spec_from_dict(spec) for spec in data["outputs"]],
        output_views={name: _view_from_list(view) for name, view in data["output_views"].items()},
        weights={weight.spec.name: weight for weight in weights},
        constants={
            name: np.frombuffer(c["data"], dtype=numpy_dtype(c["dtype"])).reshape(c["shape"])
            for name, c in data["constants"].items()
        },
        donations=dict(data["donations"]),
        arena_bytes=data["arena_bytes"],
        unused_weights=tuple(data["unused_weights"]),
        sources=dict(data["sources"]),
    )


@dataclass(frozen=True)
class _Maybe:
    """`schema`, or nil."""

    schema: Any


@dataclass(frozen=True)
class _MapOf:
    """A map from strings to `schema`."""

    schema: Any


_SIZES: Any = [int]
_VIEW: Any = (str, _SIZES, _SIZES, int, str)
_SPEC: Any = {
    "name": str,
    "shape": _SIZES,
    "dtype": str,
    "storage": str,
    "alloc_shape": _Maybe(_SIZES),
    "bounds": _Maybe((int, int)),
}
_CALL: Any = {
    "kernel": str,
    "source": str,
    "inputs": [_VIEW],
    "outputs": [_VIEW],
    "params": _MapOf(object),
    "node": str,
    "flops": int,
    "bytes_moved": int,
}
_BUFFER: Any = {
    "name": str,
    "kind": str,
    "alloc_shape": _SIZES,
    "dtype": str,
    "offset": int,
    "first_use": int,
    "last_use": int,
    "donor": _Maybe(str),
}
_RECIPE: dict[str, Any] = {"op": str, "params": _MapOf(object)}
_RECIPE["args"] = [_RECIPE]
_PROGRAM: Any = {
    "name": str,
    "target": str,
    "compute_dtype": str,
    "compiler_version": str,
    "prologue": [_CALL],
    "calls": [_CALL],
    "buffers": [_BUFFER],
    "inputs": [_SPEC],
    "outputs": [_SPEC],
    "output_views": _MapOf(_VIEW),
    "weights": [{"spec": _SPEC, "recipe": _RECIPE, "source_shapes": _MapOf(_SIZES)}],
    "constants": _MapOf({"dtype": str, "shape": _SIZES, "data": bytes}),
    "donations": _MapOf(str),
    "arena_bytes": int,
    "unused_weights": [str],
    "sources": _MapOf(str),
}


def _check_types(value: Any, schema: Any, where: str) -> None:
    """Compare msgpack data with a schema: a type, [items], (fixed, items), {fields}, `_MapOf` or `_Maybe`.

    Raises:
        ProgramFormatError: names the first place that differs.
    """
    if isinstance(schema, _Maybe):
        if value is not None:
            _check_types(value, schema.schema, where)
        return
    wanted: Any = dict if isinstance(schema, _MapOf) else schema if isinstance(schema, type) else type(schema)
    wanted = list if wanted is tuple else wanted
    if not isinstance(value, wanted) or (wanted is int and (isinstance(value, bool) or not -1 <= value < 2**62)):
        raise ProgramFormatError(f"{where} is {value!r:.40}, not a valid {wanted.__name__}")
    if isinstance(schema, tuple) and len(value) != len(schema):
        raise ProgramFormatError(f"{where} has {len(value)} items instead of {len(schema)}")
    if isinstance(schema, dict) and value.keys() != schema.keys():
        raise ProgramFormatError(f"{where} has other fields than {', '.join(schema)}")
    if isinstance(schema, _MapOf):
        for key, item in value.items():
            _check_types(key, str, f"{where}: key")
            _check_types(item, schema.schema, f"{where}.{key}")
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            _check_types(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, (list, tuple)):
        inners = schema if isinstance(schema, tuple) else schema * len(value)
        for index, (item, inner) in enumerate(zip(value, inners, strict=True)):
            _check_types(item, inner, f"{where}[{index}]")


def _check_consistency(plan: ExecutionPlan) -> None:
    """Names must refer to what exists, every view must lie inside its buffer and every arena buffer in the arena."""
    for buffer in plan.buffers.values():
        if buffer.dtype not in KNOWN_DTYPES or any(size < 0 for size in buffer.alloc_shape):
            raise ProgramFormatError(f"buffer '{buffer.name}' has no valid shape and dtype")
        if buffer.kind not in get_args(BufferKind):
            raise ProgramFormatError(f"buffer '{buffer.name}' is of unknown kind '{buffer.kind}'")
        if buffer.kind == "arena" and not 0 <= buffer.offset <= plan.arena_bytes - buffer.size_bytes:
            raise ProgramFormatError(f"buffer '{buffer.name}' lies outside the arena")
    specs = {spec.name: spec for spec in (*plan.inputs, *(weight.spec for weight in plan.weights.values()))}
    constants = {name: (value.shape, "constant") for name, value in plan.constants.items()}
    inputs = {spec.name: (spec.alloc_shape or spec.shape, "input") for spec in plan.inputs}
    weights = {name: (weight.spec.alloc_shape or weight.spec.shape, "weight") for name, weight in plan.weights.items()}
    for spec in (*specs.values(), *plan.outputs):
        if spec.dtype not in KNOWN_DTYPES or spec.storage not in KNOWN_DTYPES or min((*spec.shape, 0)) < 0:
            raise ProgramFormatError(f"tensor '{spec.name}' has no valid shape and dtype")
    held = {b.name: (b.alloc_shape, b.kind) for b in plan.buffers.values() if b.kind in ("input", "weight", "constant")}
    if held != {**constants, **weights, **inputs}:
        raise ProgramFormatError("its inputs, weights and constants are not those of its buffers")
    if {spec.name for spec in plan.outputs} != plan.output_views.keys():
        raise ProgramFormatError("its outputs are not those of its views")
    for output, donor in plan.donations.items():
        if output not in plan.output_views or donor not in inputs:
            raise ProgramFormatError(f"output '{output}' cannot update '{donor}' in place")
    writable = {b.name for b in plan.buffers.values() if b.kind not in ("input", "weight", "constant")}
    calls = [*plan.prologue, *plan.calls]
    for call in calls:
        if not call.outputs or not {view.buffer for view in call.outputs} & plan.buffers.keys() <= writable | set(
            plan.donations.values()
        ):
            raise ProgramFormatError(f"kernel '{call.kernel}' (node '{call.node}') writes where it must not")
    for view in [view for call in calls for view in (*call.inputs, *call.outputs)] + list(plan.output_views.values()):
        _check_view(view, plan.buffers.get(view.buffer))


def _check_view(view: View, owner: BufferAllocation | None) -> None:
    if owner is None:
        raise ProgramFormatError(f"a kernel uses buffer '{view.buffer}', which does not exist")
    lengths_differ = len(view.shape) != len(view.strides)
    if lengths_differ or min((*view.shape, *view.strides, view.offset, 0)) < 0 or view.dtype not in KNOWN_DTYPES:
        raise ProgramFormatError(f"a view of buffer '{view.buffer}' is malformed")
    if 0 in view.shape:
        return
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if (last + 1) * itemsize(view.dtype) > owner.size_bytes:
        raise ProgramFormatError(f"a view reaches beyond its buffer '{view.buffer}'")
