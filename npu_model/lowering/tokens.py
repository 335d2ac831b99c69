"""`without_idle_tokens`: removes tokens that no instruction waits for, and fences that do nothing without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_model.isa.instructions import Fence, Loop, Node, Section, TileProgram, Token, instructions


def without_idle_tokens(program: TileProgram) -> TileProgram:
    """Remove tokens from sections that raise them only after the last count that some instruction waits for.

    Counts include all times that a token was raised since the program's start, so only the last ones can be removed.
    """
    needed: dict[Token, int] = {}
    for section in (*program.preload, *program.sections):
        for instruction, counts in instructions(section.body):
            for wait in instruction.waits:
                needed[wait.token] = max(needed.get(wait.token, 0), wait.count.bounds(counts)[1])
    raised: dict[Token, int] = {}
    preload = tuple(_trimmed(section, needed, raised) for section in program.preload)
    return replace(
        program, preload=preload, sections=tuple(_trimmed(section, needed, raised) for section in program.sections)
    )


def _trimmed(section: Section, needed: Mapping[Token, int], raised: dict[Token, int]) -> Section:
    idle = {token for token in _raised(section.body) if raised.get(token, 0) >= needed.get(token, 0)}
    for token, times in _raised(section.body).items():
        raised[token] = raised.get(token, 0) + times
    return replace(section, body=_without(section.body, idle))


def _raised(nodes: Sequence[Node], times: int = 1) -> dict[Token, int]:
    totals: dict[Token, int] = {}
    for node in nodes:
        inner = _raised(node.body, times * node.count) if isinstance(node, Loop) else dict.fromkeys(node.signals, times)
        for token, count in inner.items():
            totals[token] = totals.get(token, 0) + count
    return totals


def _without(nodes: Sequence[Node], tokens: set[Token]) -> tuple[Node, ...]:
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            result.append(Loop(node.count, _without(node.body, tokens)))
            continue
        kept = tuple(token for token in node.signals if token not in tokens)
        if kept or node.waits or not isinstance(node, Fence):
            result.append(node if len(kept) == len(node.signals) else replace(node, signals=kept))
    return tuple(result)
