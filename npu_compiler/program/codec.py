"""Converts dataclasses to msgpack of plain maps and lists, and back.

A dataclass is a map of its fields, and their type hints say what the file may hold: reading checks every value while it
builds the objects. Fields may be `int`, `SignedInt`, `float`, `str`, `bool`, `bytes`, `Literal`, `X | None`,
`list[X]`, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, `Mapping[str, X]`, `np.ndarray`, dataclasses, and `Any` for
plain data. A field with the metadata `NOT_STORED` and a default is left out of the file.

An `int` is a size, an offset or an index, at least -1; a `SignedInt` is any integer of 64 bits.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from npu_compiler.errors import InputError, IRError, ProgramFormatError
from npu_compiler.graph.dtypes import INT64_MAX, INT64_MIN, SignedInt, dtype_name, numpy_dtype

Decoder = Callable[[Any, int], Any]  # of an unpacked value and its nesting
T = TypeVar("T")

NOT_STORED = {"stored": False}
MAX_NESTING = 64  # of dataclasses, and of lists and maps under `Any`, within each other


def pack(record: Any) -> bytes:
    """The msgpack bytes of a dataclass object.

    Raises:
        InputError: a text in it has half of a surrogate pair, or an integer more than 64 bits.
    """
    try:
        return bytes(msgpack.packb(record, default=_as_map))
    except (UnicodeEncodeError, OverflowError) as error:
        raise InputError(f"this cannot be saved: {error}") from error


def unpack(kind: type[T], data: bytes) -> T:
    """A dataclass object of type `kind` from msgpack bytes; the inverse of `pack`.

    Raises:
        ProgramFormatError: the data is not msgpack, or not this dataclass; names the first place that differs.
    """
    try:
        content = msgpack.unpackb(data)
    except (ValueError, OverflowError, msgpack.UnpackException) as error:
        raise ProgramFormatError(f"it is not readable msgpack ({error})") from error
    return cast(T, decoder(cast(Any, kind))(content, 0))


class Misfit(ProgramFormatError):
    """An error for a value that does not fit its type.

    Each decoder on the way out adds its step to the place that the message names.
    """

    def __init__(self, problem: str) -> None:
        self.place, self.problem = "", problem

    def __str__(self) -> str:
        return f"{self.place.lstrip('.') or 'it'} {self.problem}"

    def inside(self, step: str) -> Misfit:
        self.place = step + self.place
        return self


@dataclass(frozen=True)
class _Array:
    """The form in which a file holds a NumPy array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _as_map(value: Any) -> dict[str, Any]:
    """The map that msgpack packs in place of an object that it does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, int):
        raise OverflowError("an integer has more than 64 bits")
    if isinstance(value, np.ndarray):
        value = _Array(dtype_name(value.dtype), value.shape, value.tobytes())
    return {field.name: getattr(value, field.name) for field in _stored(value)}


def _stored(kind: Any) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.metadata.get("stored", True)]


@cache
def decoder(hint: Any) -> Decoder:
    """A function from unpacked msgpack to a value of a type, which raises `Misfit` if the data does not fit."""
    kind, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _plain_data
    if hint == SignedInt:
        return _signed
    if hint in (int, float, str, bool, bytes):
        return partial(_exactly, hint)
    if hint is np.ndarray:
        return _array
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    if kind is Literal:
        return _one_of(args)
    if kind in (Union, UnionType) and len(args) == 2 and NoneType in args:
        present = decoder(args[args[0] is NoneType])
        return lambda value, depth: None if value is None else present(value, depth)
    if kind is list or (kind is tuple and args[1:] == (...,)):
        return _sequence(kind, repeat(decoder(args[0])))
    if kind is tuple:
        return _sequence(tuple, [decoder(arg) for arg in args], len(args))
    if kind in (dict, Mapping) and args[0] is str:
        return _map(decoder(args[1]))
    raise TypeError(f"no file can hold a {hint}")


def _exactly(kind: Any, value: Any, depth: int = 0) -> Any:
    if type(value) is not kind or (kind is int and not -1 <= value < 2**62):
        raise Misfit(f"is {reprlib.repr(value)}, not a valid {kind.__name__}")
    return value


def _signed(value: Any, depth: int) -> int:
    if type(value) is not int or not INT64_MIN <= value <= INT64_MAX:
        raise Misfit(f"is {reprlib.repr(value)}, not a valid integer of 64 bits")
    return value


def _one_of(allowed: tuple[Any, ...]) -> Decoder:
    typed = [(type(value), value) for value in allowed]

    def decode(value: Any, depth: int) -> Any:
        if (type(value), value) not in typed:
            raise Misfit(f"is {reprlib.repr(value)}, not one of {', '.join(map(repr, allowed))}")
        return value

    return decode


def _sequence(kind: type, items: Iterable[Decoder], length: int | None = None) -> Decoder:
    def decode(value: Any, depth: int) -> Any:
        _exactly(list, value)
        if length not in (None, len(value)):
            raise Misfit(f"has {len(value)} items instead of {length}")
        decoded: list[Any] = []
        try:
            for entry, item in zip(value, items, strict=False):
                decoded.append(item(entry, depth))
        except Misfit as misfit:
            raise misfit.inside(f"[{len(decoded)}]") from None
        return kind(decoded)

    return decode


def _map(item: Decoder) -> Decoder:
    def decode(value: Any, depth: int) -> dict[str, Any]:
        decoded = {}
        for key, entry in _exactly(dict, value).items():
            try:
                decoded[_exactly(str, key)] = item(entry, depth)
            except Misfit as misfit:
                raise misfit.inside(f"[{reprlib.repr(key)}]") from None
        return decoded

    return decode


def _record(kind: type) -> Decoder:
    members: dict[str, Decoder] = {}

    def decode(value: Any, depth: int) -> Any:
        if not members:  # only now, since a dataclass may hold others of its kind
            hints = get_type_hints(kind, include_extras=True)
            members.update({field.name: decoder(hints[field.name]) for field in _stored(kind)})
        if _exactly(dict, value).keys() != members.keys():
            raise Misfit(f"does not have exactly the fields {', '.join(members)}")
        depth = _deeper(depth)
        decoded = {}
        try:
            for name, member in members.items():
                decoded[name] = member(value[name], depth)
        except Misfit as misfit:
            raise misfit.inside(f".{name}") from None
        try:
            return kind(**decoded)
        except (ValueError, InputError) as error:
            raise Misfit(f"is no {kind.__name__}: {error}") from error

    return decode


def _array(value: Any, depth: int) -> np.ndarray:
    held: _Array = decoder(_Array)(value, depth)
    try:
        array = np.frombuffer(held.data, dtype=numpy_dtype(held.dtype)).reshape(held.shape)
    except (IRError, ValueError) as error:
        raise Misfit(f"is no array: {error}") from error
    if array.shape != held.shape:
        raise Misfit(f"is no array: its shape is {list(held.shape)}")
    return array


def _plain_data(value: Any, depth: int) -> Any:
    """Check that a value consists of numbers, strings, None, and lists and maps of them, and return it."""
    if isinstance(value, (list, dict)):
        return decoder(list[Any] if isinstance(value, list) else dict[str, Any])(value, _deeper(depth))
    if value is not None and type(value) not in (bool, int, float, str):
        raise Misfit(f"is {reprlib.repr(value)}, which is not plain data")
    return value


def _deeper(depth: int) -> int:
    if depth == MAX_NESTING:
        raise ProgramFormatError(f"it is nested deeper than {MAX_NESTING} levels")
    return depth + 1
