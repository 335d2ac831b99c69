"""Mutation schemata: compiles a switch for every barrier and bounds guard, by which it can be disabled at run time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from metal_emulator.translation.memory import SPACES
from metal_emulator.translation.program import Item
from metal_emulator.translation.tokens import Source

BARRIERS = ("threadgroup_barrier", "simdgroup_barrier")
_FLOAT_TYPE = re.compile(r"(?:b?float|half|compute|other)\d?(?:_t)?")


@dataclass(frozen=True)
class Mutant:
    """A barrier or bounds guard that can be switched off at run time.

    Attributes:
        kind: `barrier` or `guard`.
        function: The function that contains it.
        text: The barrier call, or the comparison.
        file: The name that the source's #line directives give the file.
    """

    id: int
    kind: str
    function: str
    line: int
    text: str
    file: str


def add_mutants(source: Source, items: Sequence[Item], not_guards: frozenset[tuple[str, int]]) -> tuple[Mutant, ...]:
    """Give every barrier and bounds guard a switch that turns it off; return these mutants, numbered from 1.

    A guard is a comparison of indices in the condition of an `if` or a `?`. Switched off, it has a constant value, as
    if there were no guard: true if it lets a thread continue (`i < n`), false if it makes one leave (`if (i >= n)
    return;`).

    Args:
        not_guards: (file, line) of lines whose comparisons are no guards.
    """
    mutation = _Mutation(source, not_guards)
    for item in items:
        mutation.add_barriers(item)
    shared = _shared_floats(source, items)
    for item in items:
        floats, others = _declared(source, item)
        mutation.add_guards(item, (shared - others) | floats)
    return tuple(mutation.mutants)


class _Mutation:
    def __init__(self, source: Source, not_guards: frozenset[tuple[str, int]]) -> None:
        self.source = source
        self.not_guards = not_guards
        self.mutants: list[Mutant] = []

    def add(self, item: Item, first: int, last: int, kind: str, macro: str) -> None:
        tokens = self.source.tokens
        number, start = len(self.mutants) + 1, tokens[first]
        text = self.source.original(first, last + 1)
        self.mutants.append(Mutant(number, kind, item.declares, start.line, text, start.file))
        start.wrap(tokens[last], f"{macro}({number}, ", ")")

    def add_barriers(self, item: Item) -> None:
        source = self.source
        for index in range(item.start, item.end):
            if source.text(index) in BARRIERS and source.text(index + 1) == "(":
                start = index - 2 if source.text(index - 1) == "::" else index
                self.add(item, start, source.tokens[index + 1].partner, "barrier", "METAL_UNLESS_MUTANT")

    def add_guards(self, item: Item, floats: frozenset[str]) -> None:
        source = self.source
        for index in range(item.start, item.end):
            if source.text(index) == "if" and source.text(index + 1) == "(":
                end = source.tokens[index + 1].partner
                self.find_guards(item, floats, index + 2, end, "", _leaves(source, end + 1))
            elif source.text(index) == "?":
                self.find_guards(item, floats, source.condition_start(index), index, "", False)

    def find_guards(
        self, item: Item, floats: frozenset[str], start: int, end: int, joined_by: str, leaves: bool
    ) -> None:
        """Add the guards of the condition [start, end).

        Args:
            floats: Names of floating-point values, whose comparisons are no guards.
            joined_by: The operator that joins this part of the condition to others.
            leaves: Whether a thread for which the condition holds leaves the function or loop.
        """
        source = self.source
        for operator in ("||", "&&"):
            places = [i for i in _top_level(source, start, end) if source.text(i) == operator]
            if places:
                for left, right in zip([start - 1, *places], [*places, end], strict=True):
                    self.find_guards(item, floats, left + 1, right, operator, leaves)
                return
        if source.text(start) == "(" and source.tokens[start].partner == end - 1:
            self.find_guards(item, floats, start + 1, end - 1, joined_by, leaves)
            return
        comparisons = [i for i in _top_level(source, start, end) if source.text(i) in ("<", "<=", ">", ">=")]
        if len(comparisons) != 1 or not self.bounds_index(start, end, floats):
            return
        is_upper_bound = source.text(comparisons[0]) in ("<", "<=")
        is_sign_test = source.original(comparisons[0] + 1, end) == "0"
        goes_on = joined_by == "&&" or (joined_by == "" and (is_upper_bound or is_sign_test))
        macro = "METAL_TRUE_IN_MUTANT" if goes_on and not leaves else "METAL_FALSE_IN_MUTANT"
        self.add(item, start, end - 1, "guard", macro)

    def bounds_index(self, start: int, end: int, floats: frozenset[str]) -> bool:
        """Whether the comparison in [start, end) compares integers, and is not marked as no guard."""
        for index in range(start, end):
            token = self.source.tokens[index]
            if (token.file, token.line) in self.not_guards:
                return False
            if token.kind == "number" and token.output != token.text:
                return False
            # A member says what it is, not the struct that it is in.
            if token.text in floats and self.source.text(index + 1) != ".":
                return False
        return True


def _leaves(source: Source, index: int) -> bool:
    """Whether the statement at `index` consists of one `return`, `continue` or `break`."""
    if source.text(index) == "{":
        inside = [source.text(i) for i in range(index + 1, source.tokens[index].partner)]
        return inside[:1] in (["return"], ["continue"], ["break"]) and inside.count(";") == 1
    return source.text(index) in ("return", "continue", "break")


def _top_level(source: Source, start: int, end: int) -> Iterator[int]:
    """Indices of the tokens in [start, end) that are inside no bracket, template brackets included."""
    index = start
    while index < end:
        if source.text(index) in ("(", "["):
            index = source.tokens[index].partner
        elif source.text(index) == "<" and _opens_template(source, index, end):
            index = source.closing_angle(index)
        else:
            yield index
        index += 1


def _opens_template(source: Source, index: int, end: int) -> bool:
    closing = source.closing_angle(index)
    return index < closing < end and source.text(closing + 1) in ("(", "::") and source.is_name(index - 1)


def _shared_floats(source: Source, items: Sequence[Item]) -> frozenset[str]:
    """Names in all of a source that stand for floating-point values: functions, and members of structs."""
    names = {"float", "half", "bfloat", "compute_t"}
    for item in items:
        floats, _ = _declared(source, item)
        opening = {source.text(i) for i in range(item.start, min(item.end, item.start + 12))}
        names |= floats if "struct" in opening else floats & {item.declares}
    return frozenset(names)


def _declared(source: Source, item: Item) -> tuple[frozenset[str], frozenset[str]]:
    """Two sets of names declared in an item: those with a floating-point type only, and those with another type."""
    floats: set[str] = set()
    others: set[str] = set()
    for index in range(item.start + 1, item.end):
        if not source.is_name(index) or source.tokens[index].in_attribute:
            continue
        at = index - 1
        while source.text(at) in ("*", "&", "const"):
            at -= 1
        if source.is_name(at) and not source.is_keyword(at) and source.text(at) not in SPACES:
            is_float = _FLOAT_TYPE.fullmatch(source.text(at)) is not None
            (floats if is_float else others).add(source.text(index))
    return frozenset(floats - others), frozenset(others)
