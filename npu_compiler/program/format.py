"""The `.npubin` format.

A file is the magic `NPUBIN`, then one msgpack array: format version, SHA-256 of the body, body, authentication. The
body is msgpack of plain maps and lists: `msgpack.unpackb` shows everything, and nothing in it is pickle. Reading checks
every type while it builds the program, then every reference and bound. The authentication is a map that is empty for
most programs; where programs are code, it says who made this one (see `npu_compiler.program.trust`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgpack

from npu_compiler.errors import ProgramFormatError
from npu_compiler.graph.dtypes import KNOWN_DTYPES, itemsize
from npu_compiler.program.codec import pack, unpack
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.trust import AUTHENTICATION_BYTES, MADE_HERE, Trust, authenticate, judge
from npu_compiler.program.views import View

MAGIC = b"NPUBIN"
FORMAT_VERSION = 4


class Program(Protocol):
    """A dataclass that holds a plan, and what else a program's file should say. Its trust is not in the body."""

    plan: ExecutionPlan
    contains_code: bool
    trust: Trust


P = TypeVar("P", bound=Program)


def encode(program: Program) -> bytes:
    """A whole file's content. Code that this user made is authenticated with this user's key."""
    body = pack(program)
    is_own_code = program.contains_code and program.trust == MADE_HERE
    return _seal(body, authenticate(_authenticated(body)) if is_own_code else {})


def decode(kind: type[P], data: bytes, origin: str) -> P:
    """The program of a file's content, with the trust that its authentication deserves.

    Raises:
        ProgramFormatError: it is truncated, corrupted, of another format version, or inconsistent.
    """
    body, authentication = _open_envelope(data, origin)
    try:
        program = unpack(kind, body)
        if program.plan.sources and not program.contains_code:
            raise ProgramFormatError("it has kernel sources, but says that it contains no code")
        _check_consistency(program.plan)
    except ProgramFormatError as error:
        raise ProgramFormatError(f"'{origin}' is not a valid program: {error}") from error
    program.trust = judge(_authenticated(body), authentication)
    return program


def sign(data: bytes, key_file: Path, origin: str) -> tuple[bytes, str]:
    """A file's content with a signature instead of the one that it had, if any; and the fingerprint of the key.

    Args:
        key_file: An Ed25519 private key as unencrypted PEM.

    Raises:
        ProgramFormatError: the content is no envelope of a program.
        InputError: there is no such key in the file.
    """
    from npu_compiler.program import signatures

    body, authentication = _open_envelope(data, origin)
    signature = signatures.sign(_authenticated(body), key_file)
    return _seal(body, {**authentication, **signature}), signatures.fingerprint(signature["public_key"])


def _seal(body: bytes, authentication: Mapping[str, bytes]) -> bytes:
    return MAGIC + bytes(msgpack.packb([FORMAT_VERSION, hashlib.sha256(body).digest(), body, dict(authentication)]))


def _authenticated(body: bytes) -> bytes:
    """What is authenticated: the body, and that it is one of this format version."""
    return MAGIC + bytes([FORMAT_VERSION]) + body


def _open_envelope(data: bytes, origin: str) -> tuple[bytes, dict[str, bytes]]:
    """Body and authentication of a file's content."""
    if not data.startswith(MAGIC):
        raise ProgramFormatError(f"'{origin}' is not a .npubin program (it does not start with {MAGIC.decode()})")
    try:
        envelope = msgpack.unpackb(data[len(MAGIC) :], max_bin_len=len(data))
    except (ValueError, msgpack.UnpackException) as error:
        raise ProgramFormatError(f"'{origin}' is truncated or corrupted: its envelope cannot be read") from error
    unexpected = ProgramFormatError(f"'{origin}' is corrupted: its envelope is not the expected array")
    if not isinstance(envelope, list) or not envelope or not isinstance(envelope[0], int):
        raise unexpected
    if envelope[0] != FORMAT_VERSION:
        raise ProgramFormatError(
            f"'{origin}' has format version {envelope[0]}; this runtime reads version {FORMAT_VERSION}: "
            "compile it again"
        )
    if len(envelope) != 4:
        raise unexpected
    _, digest, body, authentication = envelope
    if not isinstance(digest, bytes) or not isinstance(body, bytes) or not _is_authentication(authentication):
        raise unexpected
    if hashlib.sha256(body).digest() != digest:
        raise ProgramFormatError(f"'{origin}' is corrupted: its checksum does not match")
    return body, authentication


def _is_authentication(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() <= AUTHENTICATION_BYTES.keys()
        and all(isinstance(value, bytes) and len(value) == AUTHENTICATION_BYTES[key] for key, value in found.items())
        and ("signature" in found) == ("public_key" in found)
    )


def _check_consistency(plan: ExecutionPlan) -> None:
    """Names must refer to what exists, every view must lie inside its buffer and every arena buffer in the arena."""
    buffers = plan.buffers
    for name, buffer in buffers.items():
        if buffer.dtype not in KNOWN_DTYPES or min((*buffer.alloc_shape, 0)) < 0:
            raise ProgramFormatError(f"buffer '{name}' has no valid shape and dtype")
        if buffer.kind == "arena" and not 0 <= buffer.offset <= plan.arena_bytes - buffer.size_bytes:
            raise ProgramFormatError(f"buffer '{name}' lies outside the arena")
    weights = {name: weight.spec for name, weight in plan.weights.items()}
    names = [*(b.name for b in buffers.values()), *(spec.name for spec in weights.values())]
    if names != [*buffers, *weights]:
        raise ProgramFormatError("its buffers and weights are not listed under their names")
    for spec in (*plan.inputs, *weights.values(), *plan.outputs):
        if spec.dtype not in KNOWN_DTYPES or spec.storage not in KNOWN_DTYPES or min((*spec.shape, 0)) < 0:
            raise ProgramFormatError(f"tensor '{spec.name}' has no valid shape and dtype")
    for weight in plan.weights.values():
        if not set(weight.recipe.keys()) <= weight.source_shapes.keys():
            raise ProgramFormatError(f"weight '{weight.spec.name}' reads a key whose shape is not known")
    filled = {  # a constant is cast to the dtype of its buffer
        **{name: ("constant", value.shape, None) for name, value in plan.constants.items()},
        **{name: ("weight", spec.alloc_shape or spec.shape, spec.storage) for name, spec in weights.items()},
        **{spec.name: ("input", spec.alloc_shape or spec.shape, spec.storage) for spec in plan.inputs},
    }
    held = {
        name: (b.kind, b.alloc_shape, None if b.kind == "constant" else b.dtype)
        for name, b in buffers.items()
        if b.kind in ("input", "weight", "constant")
    }
    if held != filled:
        raise ProgramFormatError("its inputs, weights and constants do not match its buffers")
    if {spec.name for spec in plan.outputs} != plan.output_views.keys():
        raise ProgramFormatError("its outputs do not match its output views")
    inputs = {spec.name for spec in plan.inputs}
    for output, donor in plan.donations.items():
        if output not in plan.output_views or donor not in inputs:
            raise ProgramFormatError(f"output '{output}' cannot update '{donor}' in place")
    protected = held.keys() - set(plan.donations.values())
    calls = [*plan.prologue, *plan.calls]
    for call in calls:
        if not call.outputs or any(view.buffer in protected for view in call.outputs):
            raise ProgramFormatError(
                f"kernel '{call.kernel}' (node '{call.node}') writes to no buffer, or to one that is read-only"
            )
    for view in [view for call in calls for view in (*call.inputs, *call.outputs)] + list(plan.output_views.values()):
        _check_view(view, buffers.get(view.buffer))


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
