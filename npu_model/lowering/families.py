"""`Lowering`: a rule by which the calls of a kernel become instructions; and the table of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import KernelCall
from npu_model.chip import Chip
from npu_model.lowering.emitter import Emitter

Tiling: TypeAlias = Mapping[str, int]
"""Parameters of a lowering by name: tile sizes and loop orders."""


class CannotLower(Exception):
    """A chip cannot run a call. The message is the reason, which completes "… cannot run on chip X: "."""


@dataclass(frozen=True)
class Operands:
    """A call with its views and parameters as attributes, by the names in the kernel's declaration.

    Attributes:
        names: The attributes, as `getattr(o.names, name, default)` reads one that not every kernel has.
    """

    call: KernelCall
    names: SimpleNamespace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.names, name)


@dataclass(frozen=True)
class Lowering:
    """The rule that lowers the calls of some kernels to instructions.

    Attributes:
        tilings: Yields the tilings to try for a call on a chip, promising ones first. After a None, further ones follow
            that are tried only if no earlier one fits. Raises `CannotLower` if the chip cannot run the call.
        emit: Generates the section of a call in one of these tilings.
        multiplies_weight: Whether all products multiply by the operand `weight`, and sum over its dimension 1.
    """

    tilings: Callable[[Operands, Chip], Iterable[Tiling | None]]
    emit: Callable[[Emitter, Operands, Tiling], None]
    multiplies_weight: bool = False


LOWERINGS: dict[str, Lowering] = {}


def lowering(
    *kernels: str, tilings: Callable[[Operands, Chip], Iterable[Tiling | None]], multiplies_weight: bool = False
) -> Callable[[Callable[[Emitter, Operands, Tiling], None]], Callable[[Emitter, Operands, Tiling], None]]:
    """Decorator that registers a function as the `emit` of these kernels' lowering."""

    def add(emit: Callable[[Emitter, Operands, Tiling], None]) -> Callable[[Emitter, Operands, Tiling], None]:
        LOWERINGS.update(dict.fromkeys(kernels, Lowering(tilings, emit, multiplies_weight)))
        return emit

    return add


def operands_of(call: KernelCall) -> Operands:
    """Bind a call's views, sizes and parameters to their names; absent optional operands are None."""
    return Operands(call, SimpleNamespace(**{**call.params, **declaration(call).operands_of(call)}))


def parts(size: int, tile: int) -> int:
    """Number of tiles along an axis, the last of which may be partial."""
    return -(-size // tile)


def halvings(size: int, least: int, multiple: int = 1) -> list[int]:
    """Tile sizes to try along an axis: the whole and repeated halves down to `least`, rounded up to a multiple."""
    sizes = [size]
    part = size
    while part > least:
        part = -(-part // 2)
        rounded = min(size, -(-part // multiple) * multiple)
        if rounded < sizes[-1]:
            sizes.append(rounded)
        elif part <= multiple:
            break
    return sizes


def in_tiers(tilings: Callable[[int], Iterable[Tiling]]) -> Iterator[Tiling | None]:
    """Tilings of usual sizes; then, each group after a None, of ever smaller sizes, for chips on which none fits.

    Args:
        tilings: Yields tilings whose sizes are divided by its argument.
    """
    yield from tilings(1)
    for divisor in (8, 64, 512, 4096):
        yield None
        yield from tilings(divisor)


def divided(sizes: Iterable[int], divisor: int, multiple: int = 1) -> list[int]:
    """Divide tile sizes, round results above `multiple` up to a multiple of it, and remove duplicates."""
    shares = [(size, parts(size, divisor)) for size in sizes]
    return list(
        dict.fromkeys(min(size, parts(part, multiple) * multiple) if part > multiple else part for size, part in shares)
    )


def divisors(size: int) -> list[int]:
    """All divisors of a size, in descending order."""
    return [part for part in range(size, 0, -1) if size % part == 0]


__all__ = [
    "LOWERINGS",
    "CannotLower",
    "Lowering",
    "Operands",
    "Sequence",
    "Tiling",
    "divided",
    "divisors",
    "halvings",
    "in_tiers",
    "lowering",
    "operands_of",
    "parts",
]
