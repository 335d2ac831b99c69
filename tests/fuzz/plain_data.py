"""Random changes of plain data: numbers, strings, bytes, None, and lists and maps of them."""

from __future__ import annotations

import math
from random import Random
from typing import Any

_DESCEND = 0.85  # how likely a change is made inside a container instead of at it
_MANY = 10_000  # leaves; a list with more is not repeated, or a few changes in a row would make a file of gigabytes
INTS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    127,
    255,
    65_536,
    10**8,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62 - 1,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.5, -1e-30, 1e30, 1e300, math.inf, -math.inf, math.nan)
STRINGS = (
    "",
    "x",
    "float16",
    "bool",
    "float64",
    "complex64",
    "a" * 1000,
    "ü\0\n",
    "aten.add.Tensor",
    "../../x",
    "\ud800",
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, b"", b"\0" * 7)


def change(data: Any, rng: Random) -> Any:
    """Plain data with one to four changes, which may be made in place."""
    strings = _strings(data, [])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _changed_somewhere(data, rng, strings)
    return data


def change_bytes(data: bytes, rng: Random) -> bytes:
    """Bytes with some of them overwritten, removed, inserted or copied elsewhere."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 50))
        match rng.randrange(5):
            case 0:
                changed[at : at + length] = rng.randbytes(length)
            case 1:
                changed[at : at + 8] = rng.choice(INTS).to_bytes(8, rng.choice(("little", "big")), signed=True)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = rng.randbytes(length)
            case 4:
                other = rng.randrange(len(changed) + 1)
                changed[at : at + length] = changed[other : other + length]
    return bytes(changed)


def _strings(data: Any, found: list[str]) -> list[str]:
    if isinstance(data, str):
        found.append(data)
    elif isinstance(data, dict):
        for key, value in data.items():
            _strings(key, found)
            _strings(value, found)
    elif isinstance(data, list):
        for value in data:
            _strings(value, found)
    return found


def _leaves(data: Any) -> int:
    """The number of values that are no containers."""
    if isinstance(data, (list, dict)):
        return sum(map(_leaves, data.values() if isinstance(data, dict) else data))
    return 1


def _changed_somewhere(data: Any, rng: Random, strings: list[str]) -> Any:
    """Descend at random, so that a place in a long list is no likelier than one in a short one."""
    if isinstance(data, (list, dict)) and data and rng.random() < _DESCEND:
        key = rng.randrange(len(data)) if isinstance(data, list) else rng.choice(list(data))
        data[key] = _changed_somewhere(data[key], rng, strings)
        return data
    return _changed(data, rng, strings)


def _changed(data: Any, rng: Random, strings: list[str]) -> Any:
    if rng.random() < 0.15:
        return rng.choice((*INTS, *FLOATS, *STRINGS, *OTHERS))
    match data:
        case bool():
            return not data
        case int():
            return rng.choice((data + 1, data - 1, data * 2, -data, rng.choice(INTS)))
        case float():
            return rng.choice((-data, data * 1e10, rng.choice(FLOATS)))
        case str():
            return rng.choice((rng.choice(strings or STRINGS), rng.choice(STRINGS), data[:-1], data + "x"))
        case bytes():
            return change_bytes(data, rng)
        case list():
            return _changed_list(data, rng)
        case dict():
            return _changed_map(data, rng, strings)
    return rng.choice((*INTS, *STRINGS))


def _changed_list(items: list[Any], rng: Random) -> list[Any]:
    at, other = rng.randrange(len(items) + 1), rng.randrange(len(items) + 1)
    match rng.randrange(5):
        case 0:
            return items[:at] + items[at + 1 :]
        case 1:
            return items[:at] + items[other : other + 1] + items[at:]
        case 2:
            return items[:at]
        case 3:
            factor = rng.choice((2, 2, 100))
            return items * (factor if _leaves(items) < _MANY else 1)
    return rng.sample(items, len(items))


def _changed_map(items: dict[Any, Any], rng: Random, strings: list[str]) -> dict[Any, Any]:
    keys = list(items)
    if not keys:
        return {"x": None}
    key, other = rng.choice(keys), rng.choice(keys)
    match rng.randrange(4):
        case 0:
            del items[key]
        case 1:
            items[key], items[other] = items[other], items[key]
        case 2:
            items[rng.choice((rng.choice(strings) if strings else "x", f"{key}x"))] = items[key]
        case 3:
            items[key] = items[other]
    return items
