"""Rewrites preprocessed Metal source as C++, token by token, so that every line keeps its number.

Address spaces become pointer types, threadgroup variables become arrays of the threadgroup, writes through pointers
become calls that the runtime can check, attributes are removed, and every kernel gets an entry that binds its
arguments.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from metal_emulator.translation.kernels import (
    FunctionConstant,
    KernelInfo,
    describe,
    entries,
    find_kernels,
    read_parameters,
    take_constants,
)
from metal_emulator.translation.memory import rewrite_address_spaces, rewrite_addresses, rewrite_writes
from metal_emulator.translation.mutants import Mutant, add_mutants
from metal_emulator.translation.program import split_items, take_attributes
from metal_emulator.translation.tokens import Source

_SWIZZLE = re.compile("[xyzw]{2,4}")
_FLOAT = re.compile(r"(?i)(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Translation:
    """The C++ source, and the kernels, function constants and mutants that it contains."""

    source: str
    kernels: tuple[KernelInfo, ...]
    constants: tuple[FunctionConstant, ...]
    mutants: tuple[Mutant, ...]

    def metadata(self) -> str:
        """Everything but the source, as JSON text."""
        return json.dumps(
            {
                "kernels": [asdict(kernel) for kernel in self.kernels],
                "constants": [asdict(constant) for constant in self.constants],
                "mutants": [asdict(mutant) for mutant in self.mutants],
            }
        )


def translate(preprocessed: str, not_guards: frozenset[tuple[str, int]] = frozenset()) -> Translation:
    """The C++ translation of preprocessed Metal source.

    Args:
        not_guards: (file, line) of lines whose comparisons are no bounds guards.

    Raises:
        TranslationError: Source that Metal does not have, or that the emulator does not support.
    """
    source = Source(preprocessed)
    rewrite_numbers(source)
    attributes = take_attributes(source)
    items = list(split_items(source))
    constants = take_constants(source, items, attributes)
    kernels = find_kernels(source, items)
    rewrite_address_spaces(source, items)
    bound = [(kernel, read_parameters(source, kernel, attributes)) for kernel in kernels]
    rewrite_addresses(source)
    rewrite_writes(source)
    rewrite_swizzles(source)
    mutants = add_mutants(source, items, not_guards)
    infos = tuple(describe(kernel, parameters, items, constants.declared) for kernel, parameters in bound)
    return Translation(source.emit() + entries(bound, constants), infos, constants.declared, mutants)


def rewrite_numbers(source: Source) -> None:
    """Rewrite floating-point literals as float, or as half if they end with `h`."""
    for index, token in enumerate(source.tokens):
        if token.kind == "name" and token.text == "double":
            raise source.error(index, "Metal has no type 'double'")
        if token.kind != "number" or token.text.lower().startswith("0x"):
            continue
        if _FLOAT.fullmatch(token.text):
            token.output = f"{token.text}f"
        elif token.text[-1] in "hH":
            token.output = f"half({token.text[:-1]}f)"


def rewrite_swizzles(source: Source) -> None:
    """Rewrite `v.zx` as `v.template swizzle<2, 0>()`."""
    for index, token in enumerate(source.tokens):
        if source.text(index - 1) == "." and source.text(index + 1) != "(" and _SWIZZLE.fullmatch(token.text):
            places = ", ".join(str("xyzw".index(name)) for name in token.text)
            token.output = f"template swizzle<{places}>()"
