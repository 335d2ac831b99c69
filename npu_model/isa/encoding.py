"""The binary form of tile programs: msgpack of a version, a table of strings and a body (docs/npu_isa.md).

A dataclass is a list of its fields in order; where a field may hold one of several classes, the class's name comes
first. Strings, such as buffer names and dtypes, are indices into the table. Reading checks every value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from npu_compiler.errors import ProgramFormatError
from npu_model.isa import instructions as isa
from npu_model.isa.instructions import MAX_LOOPS, Compute, Fence, Loop, Multiply, TileProgram, Transfer

VERSION = 2
_KINDS = {kind.__name__: kind for kind in (Compute, Fence, Loop, Multiply, Transfer)}
_MOST = 2**62
_NESTING = MAX_LOOPS + 1


def encode(program: TileProgram) -> bytes:
    """Serialize a tile program."""
    texts: dict[str, int] = {}
    body = _packed(program, texts)
    return bytes(msgpack.packb([VERSION, list(texts), body]))


def decode(data: bytes) -> TileProgram:
    """Deserialize a tile program.

    Raises:
        ProgramFormatError: the bytes are not a tile program of this version; the message says what is wrong.
    """
    try:
        content = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, OverflowError) as error:
        raise ProgramFormatError(f"the tile program is not readable msgpack ({error})") from error
    if not isinstance(content, list) or len(content) != 3 or not isinstance(content[1], list):
        raise ProgramFormatError("the tile program is not a version, a table of texts and a body")
    version, texts, body = content
    if version != VERSION:
        raise ProgramFormatError(f"the tile program has version {version!r:.40}; this is version {VERSION}")
    if not all(isinstance(text, str) for text in texts):
        raise ProgramFormatError("the tile program's table of texts holds something else")
    program: TileProgram = _reader(TileProgram)(body, texts, 0)
    return program


def _packed(value: Any, texts: dict[str, int]) -> Any:
    if isinstance(value, str):
        return texts.setdefault(str(value), len(texts))
    if isinstance(value, (tuple, list)):
        return [_packed(item, texts) for item in value]
    if is_dataclass(value):
        kind = type(value).__name__
        own = [_packed(getattr(value, field.name), texts) for field in fields(value)]
        return [_packed(kind, texts), *own] if kind in _KINDS else own
    return value


Reader = Callable[[Any, "list[str]", int], Any]


@cache
def _reader(hint: Any) -> Reader:  # noqa: C901  (a case for each kind of type)
    kind, args = get_origin(hint), get_args(hint)
    if hint == isa.Node:
        return _node
    if hint is int:
        return _integer
    if hint is float:
        return _float
    if hint == isa.Value or hint == int | float:
        return lambda value, texts, depth: value if isinstance(value, float) else _integer(value, texts, depth)
    if hint is bool:
        return _flag
    if hint is str:
        return _text
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value, texts, depth: _word(hint, _text(value, texts, depth))
    if kind is tuple and args[1:] == (...,):
        return _sequence(args[0])
    if kind is tuple:
        return _pair(args)
    if kind in (Union, UnionType) and NoneType in args:
        others = [arg for arg in args if arg is not NoneType]
        present = _reader(others[0] if len(others) == 1 else Union[tuple(others)])  # noqa: UP007
        return lambda value, texts, depth: None if value is None else present(value, texts, depth)
    if kind in (Union, UnionType) and set(args) == {int, float}:
        return _reader(isa.Value)
    if is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"no reader for {hint}")


def _record(kind: Any) -> Reader:
    hints = get_type_hints(kind, vars(isa))
    names = [field.name for field in fields(kind)]

    @cache
    def readers() -> list[Reader]:
        return [_reader(hints[name]) for name in names]

    def read(value: Any, texts: list[str], depth: int) -> Any:
        if not isinstance(value, list) or len(value) != len(names):
            raise ProgramFormatError(f"the tile program has something else in place of a {kind.__name__}")
        items = zip(names, readers(), value, strict=True)
        try:
            return kind(**{name: reader(item, texts, depth) for name, reader, item in items})
        except ValueError as error:
            raise ProgramFormatError(f"the tile program has a {kind.__name__} that cannot be: {error}") from error

    return read


def _node(value: Any, texts: list[str], depth: int) -> Any:
    if depth > _NESTING:
        raise ProgramFormatError(f"the tile program has loops more than {MAX_LOOPS} deep")
    if not isinstance(value, list) or not value:
        raise ProgramFormatError("the tile program has something else in place of an instruction")
    kind = _KINDS.get(_text(value[0], texts, depth))
    if kind is None:
        raise ProgramFormatError(f"the tile program has an unknown instruction {texts[value[0]]!r:.40}")
    return _reader(kind)(value[1:], texts, depth + 1)


def _integer(value: Any, texts: list[str], depth: int) -> int:
    if type(value) is not int or abs(value) > _MOST:
        raise ProgramFormatError(f"the tile program has {value!r:.40} in place of an integer")
    return value


def _flag(value: Any, texts: list[str], depth: int) -> bool:
    if not isinstance(value, bool):
        raise ProgramFormatError(f"the tile program has {value!r:.40} in place of a flag")
    return value


def _float(value: Any, texts: list[str], depth: int) -> float:
    if type(value) is not float:
        raise ProgramFormatError(f"the tile program has {value!r:.40} in place of a number")
    return value


def _text(value: Any, texts: list[str], depth: int) -> str:
    if type(value) is not int or not 0 <= value < len(texts):
        raise ProgramFormatError(f"the tile program refers to text {value!r:.40} of {len(texts)}")
    return texts[value]


def _word(kind: type[StrEnum], text: str) -> StrEnum:
    try:
        return kind(text)
    except ValueError:
        raise ProgramFormatError(f"the tile program has {text!r:.40} in place of a {kind.__name__}") from None


def _sequence(item: Any) -> Reader:
    def read(value: Any, texts: list[str], depth: int) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ProgramFormatError("the tile program has something else in place of a list")
        reader = _reader(item)
        return tuple(reader(each, texts, depth) for each in value)

    return read


def _pair(kinds: tuple[Any, ...]) -> Reader:
    def read(value: Any, texts: list[str], depth: int) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(kinds):
            raise ProgramFormatError(f"the tile program has something else in place of {len(kinds)} values")
        return tuple(_reader(kind)(each, texts, depth) for kind, each in zip(kinds, value, strict=True))

    return read
