"""The `.npubin` format.

A file is the magic `NPUBIN`, then one msgpack array: format version, SHA-256 of the body, body. The body is msgpack of
plain maps and lists: `msgpack.unpackb` shows everything, and nothing in it is code or pickle. Reading checks every type
while it builds the program (`codec`), then everything that must hold between its parts (`check`).
"""

from __future__ import annotations

import hashlib
from typing import Protocol, TypeVar

import msgpack

from npu_compiler.errors import ProgramFormatError
from npu_compiler.program.check import check_program
from npu_compiler.program.codec import pack, unpack
from npu_compiler.program.plan import ExecutionPlan

MAGIC = b"NPUBIN"
FORMAT_VERSION = 3


class Program(Protocol):
    """A dataclass that holds a plan, and what else a program's file should say."""

    target: str
    compute_dtype: str
    plan: ExecutionPlan


P = TypeVar("P", bound=Program)


def encode(program: Program) -> bytes:
    """A whole file's content."""
    body = pack(program)
    return MAGIC + bytes(msgpack.packb([FORMAT_VERSION, hashlib.sha256(body).digest(), body]))


def decode(kind: type[P], data: bytes, origin: str) -> P:
    """The program of a file's content.

    Raises:
        ProgramFormatError: it is truncated, corrupted, of another format version, or inconsistent.
    """
    body = _open_envelope(data, origin)
    try:
        program = unpack(kind, body)
        check_program(program.target, program.compute_dtype, program.plan)
    except ProgramFormatError as error:
        raise ProgramFormatError(f"'{origin}' is not a valid program: {error}") from error
    return program


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
