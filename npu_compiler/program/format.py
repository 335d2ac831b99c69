"""The `.npubin` format.

A file is the magic `NPUBIN`, then one msgpack array: format version, SHA-256 of the body, body, authentication. The
body is msgpack of plain maps and lists: `msgpack.unpackb` shows everything, and nothing in it is pickle. Reading checks
every type while it builds the program (`codec`), then everything that must hold between its parts (`check`). The
authentication is a map that is empty for most programs; where programs are code, it says who made this one (`trust`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgpack

from npu_compiler.errors import ProgramFormatError, reading
from npu_compiler.program.check import check_program
from npu_compiler.program.codec import pack, unpack
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.trust import AUTHENTICATION_BYTES, MADE_HERE, Trust, authenticate, judge

MAGIC = b"NPUBIN"
FORMAT_VERSION = 4


class Program(Protocol):
    """A dataclass with a plan, and other fields that a program's file contains. Its trust is not in the body."""

    compute_dtype: str
    plan: ExecutionPlan
    contains_code: bool
    trust: Trust


P = TypeVar("P", bound=Program)


def encode(program: Program) -> bytes:
    """The content of a program's file. Code that this user compiled is authenticated with this user's key."""
    body = pack(program)
    is_own_code = program.contains_code and program.trust == MADE_HERE
    return _seal(body, authenticate(_authenticated(body)) if is_own_code else {})


def decode(kind: type[P], data: bytes, origin: str) -> P:
    """The program in a file's content, with the trust that its authentication deserves.

    Args:
        kind: The class of the program.
        origin: Name of the file, for messages.

    Raises:
        ProgramFormatError: it is truncated, corrupted, of another format version, or inconsistent.
    """
    body, authentication = _open_envelope(data, origin)
    try:
        with reading(ProgramFormatError):
            program = unpack(kind, body)
            if program.plan.sources and not program.contains_code:
                raise ProgramFormatError("it has kernel sources, but says that it contains no code")
            check_program(program.compute_dtype, program.plan)
    except ProgramFormatError as error:
        raise ProgramFormatError(f"'{origin}' is not a valid program: {error}") from error
    program.trust = judge(_authenticated(body), authentication)
    return program


def sign(data: bytes, key_file: Path, origin: str) -> tuple[bytes, str]:
    """A file's content with a new signature, which replaces any other one; and the fingerprint of the key.

    Args:
        key_file: An Ed25519 private key as unencrypted PEM.

    Raises:
        ProgramFormatError: the content is not that of a program's file.
        InputError: there is no such key in the file.
    """
    from npu_compiler.program import signatures

    body, authentication = _open_envelope(data, origin)
    signature = signatures.sign(_authenticated(body), key_file)
    return _seal(body, {**authentication, **signature}), signatures.fingerprint(signature["public_key"])


def _seal(body: bytes, authentication: Mapping[str, bytes]) -> bytes:
    return MAGIC + bytes(msgpack.packb([FORMAT_VERSION, hashlib.sha256(body).digest(), body, dict(authentication)]))


def _authenticated(body: bytes) -> bytes:
    """The bytes that are authenticated: the format's version and the body."""
    return MAGIC + bytes([FORMAT_VERSION]) + body


def _open_envelope(data: bytes, origin: str) -> tuple[bytes, dict[str, bytes]]:
    """The body and the authentication in a file's content."""
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


def _is_authentication(entries: Any) -> bool:
    return (
        isinstance(entries, dict)
        and entries.keys() <= AUTHENTICATION_BYTES.keys()
        and all(isinstance(value, bytes) and len(value) == AUTHENTICATION_BYTES[key] for key, value in entries.items())
        and ("signature" in entries) == ("public_key" in entries)
    )
