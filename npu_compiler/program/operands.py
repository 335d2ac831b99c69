"""The operands of a kernel, declared as text, and the check of a call's views against them.

An operand is written `name?:kinds[sizes]`; only the name is needed.

- `?` marks an operand that a call may lack.
- `kinds` are letters of the dtypes it may be stored in: `f` floats, `i` int32, `b` booleans, `u` uint8, `c` int8.
  Default: the first three.
- `sizes` name its dimensions: `x[m,.k] weight[n,k] -> out[m,n]`. A name stands for one size throughout the declaration,
  and for the parameter of that name, if there is one. `*s` stands for any number of dimensions, a number for itself,
  `_` for any size. The dimensions from a `.` on are packed: row-major without gaps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from npu_compiler.program.views import View, is_contiguous

_DTYPES = {"f": ("float32", "float16", "bfloat16"), "i": ("int32",), "b": ("bool",), "u": ("uint8",), "c": ("int8",)}
_ANY = "fib"  # kinds of an operand that names none
_OPERAND = re.compile(r"(?P<name>\w+)(?P<optional>\?)?(?::(?P<kinds>[fibuc]+))?(?:\[(?P<sizes>[^\]]*)\])?")

Sizes = dict[str, Any]  # name of a dimension → its size; name of a group of dimensions → their sizes


@dataclass(frozen=True)
class Operand:
    """A declared operand of a kernel.

    Attributes:
        optional: Whether a call may lack it.
        dtypes: Dtypes that it may be stored in.
        sizes: The names of its dimensions; None if any shape is allowed.
        packed: The first of the packed dimensions, counted from the end if a variable number of dimensions precedes it;
            None if none is packed.
    """

    name: str
    optional: bool
    dtypes: frozenset[str] = frozenset()
    sizes: tuple[str, ...] | None = None
    packed: int | None = None

    def __str__(self) -> str:
        """The declaration as text, `name?:kinds[sizes]`, from which `parse_operands` reads the operand again."""
        kinds = "".join(kind for kind, names in _DTYPES.items() if self.dtypes.issuperset(names))
        text = f"{self.name}{'?' * self.optional}" + (f":{kinds}" if kinds != _ANY else "")
        if self.sizes is None:
            return text
        first = None if self.packed is None else self.packed % len(self.sizes)
        return f"{text}[{','.join('.' * (index == first) + size for index, size in enumerate(self.sizes))}]"

    def problem(self, view: View, bound: Sizes) -> str | None:
        """The reason why a view does not fit the operand; None if it does.

        Adds sizes that were unknown so far to `bound`.
        """
        if view.dtype not in self.dtypes:
            return f"'{self.name}' is stored as {view.dtype}, not as {' or '.join(sorted(self.dtypes))}"
        if self.sizes is not None and not _bind(self.sizes, view.shape, bound):
            return f"'{self.name}' has shape {list(view.shape)}, not [{', '.join(self.sizes)}]"
        if self.packed is not None and not is_contiguous(view.shape[self.packed :], view.strides[self.packed :]):
            return f"'{self.name}' is not packed: shape {list(view.shape)}, strides {list(view.strides)}"
        return None


def parse_operands(text: str) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """The inputs and outputs of `"x weight bias? -> out"`."""
    inputs, outputs = (tuple(map(_parse, side.split())) for side in text.split("->"))
    return inputs, outputs


def _parse(text: str) -> Operand:
    match = _OPERAND.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' declares no operand")
    dtypes = frozenset(name for kind in match["kinds"] or _ANY for name in _DTYPES[kind])
    written = None if match["sizes"] is None else match["sizes"].split(",") if match["sizes"] else []
    packed = next((index for index, size in enumerate(written or ()) if size.startswith(".")), None)
    if written is not None and packed is not None and any(size.startswith("*") for size in written[:packed]):
        packed -= len(written)
    sizes = None if written is None else tuple(size.lstrip(".") for size in written)
    return Operand(match["name"], match["optional"] is not None, dtypes, sizes, packed)


def _bind(names: tuple[str, ...], shape: tuple[int, ...], bound: Sizes) -> bool:
    """Whether a shape has the sizes that `bound` gives to its names; unknown names get their sizes from the shape."""
    star = next((index for index, name in enumerate(names) if name.startswith("*")), None)
    if star is None:
        pairs: list[tuple[str, Any]] = list(zip(names, shape, strict=False))
        fits = len(names) == len(shape)
    else:
        behind = len(names) - star - 1
        end = len(shape) - behind
        fits = star <= end
        pairs = [*zip(names[:star], shape, strict=False), (names[star][1:], shape[star:end])]
        pairs += zip(names[star + 1 :], shape[end:], strict=False)
    return fits and all(
        name == "_" or (size == int(name) if name.isdigit() else bound.setdefault(name, size) == size)
        for name, size in pairs
    )
