"""Program scope: reads the attributes of a source, and splits it into declarations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from metal_emulator.translation.tokens import Source, Token

Attributes: TypeAlias = dict[int, list[list[Token]]]


@dataclass(frozen=True)
class Item:
    """A declaration at program scope: tokens [start, end).

    Attributes:
        names: All names that occur in it.
        declares: The name of the function, type or constant that it declares; "" for anything else.
    """

    start: int
    end: int
    names: frozenset[str]
    declares: str


def take_attributes(source: Source) -> Attributes:
    """Blank every `[[…]]`; return the attributes by the index of the token before the first of them."""
    attributes: Attributes = {}
    index, owner = 0, -1
    while index < len(source.tokens):
        if source.text(index) == "[" and source.text(index + 1) == "[":
            end = source.tokens[index].partner
            content = source.tokens[index + 2 : end - 1]
            attributes.setdefault(owner, []).extend(_split(content))
            for token in source.tokens[index : end + 1]:
                token.in_attribute = True
            source.blank(index, end + 1)
            index = end + 1
        else:
            owner = index
            index += 1
    return attributes


def split_items(source: Source) -> Iterator[Item]:
    """The declarations of a source, in order."""
    start = index = 0
    while index < len(source.tokens):
        token = source.tokens[index]
        if token.text == "namespace" and "{" in (source.text(index + 1), source.text(index + 2)):
            # The contents of a namespace are items too; its closing brace ends an item by itself.
            index = start = index + (2 if source.text(index + 1) == "{" else 3)
            continue
        ends = token.text == ";" or (token.text == "}" and token.kind == "op")
        if token.kind == "op" and token.text in "([{" and token.partner > index:
            index = token.partner
            ends = token.text == "{" and source.text(index + 1) != ";"
        index += 1
        if ends:
            yield _item(source, start, index)
            start = index
    if start < index:
        yield _item(source, start, index)


def _item(source: Source, start: int, end: int) -> Item:
    names = frozenset(t.text for t in source.tokens[start:end] if t.kind == "name" and not t.in_attribute)
    declares = ""
    index = start
    while index < end and not declares:
        token = source.tokens[index]
        if token.in_attribute:
            index = token.partner + 1 if token.text == "[" else index + 1
            continue
        if token.text == "template" and source.text(index + 1) == "<":
            index = source.closing_angle(index + 1) + 1
            continue
        is_next = index + 1 < end and not source.tokens[index + 1].in_attribute
        following = source.text(index + 1) if is_next else ""
        if token.kind == "name" and (
            (following == "(" and token.text not in ("alignas", "decltype"))
            or (following in ("=", ";", "[") and token.text != "operator")
            or (source.text(index - 1) in ("struct", "class", "enum") and following in ("{", ":"))
            or (following == "<" and source.text(source.closing_angle(index + 1) + 1) == "(")
        ):
            declares = token.text
        index += 1
    return Item(start, end, names, declares)


def parameters(source: Source, item: Item) -> list[tuple[int, int]]:
    """The token ranges [start, end) of a function's parameters, without their attributes."""
    opening = next(
        i
        for i in range(item.start, item.end)
        if source.text(i) == "(" and not source.tokens[i].in_attribute and source.text(i - 1) != "alignas"
    )
    ranges, start, index = [], opening + 1, opening + 1
    end = source.tokens[opening].partner
    while index <= end:
        text = source.text(index)
        if text == "<":
            index = source.closing_angle(index)
        elif text in ("(", "[") and source.tokens[index].partner > index and not source.tokens[index].in_attribute:
            index = source.tokens[index].partner
        elif text == "," and not source.tokens[index].in_attribute or index == end:
            stop = next((i for i in range(start, index) if source.tokens[i].in_attribute), index)
            if stop > start:
                ranges.append((start, stop))
            start = index + 1
        index += 1
    return ranges


def _split(tokens: list[Token]) -> list[list[Token]]:
    """The attributes within one `[[…]]`, each as a list of tokens."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
