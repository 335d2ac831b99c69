"""`to_core`: instructions that were written for a chip of one core, on a core of a chip of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from npu_model.isa.instructions import (
    Compute,
    Instruction,
    Loop,
    Multiply,
    Node,
    Section,
    Space,
    Tile,
    TileProgram,
    Token,
    Transfer,
    Wait,
)
from npu_model.lowering.emitter import Draft


def draft_on(draft: Draft, core: str) -> Draft:
    """A section on a core: its engines and tokens are the core's, as are places in memories that name no core."""
    touches = tuple(
        replace(
            touch,
            engine=f"{core}.{touch.engine}",
            name=touch.name if touch.space is Space.DRAM else touch.name or core,
        )
        for touch in draft.touches
    )
    raised = {_token(token, core): count for token, count in draft.raised.items()}
    return replace(draft, body=to_core(draft.body, core), touches=touches, raised=raised)


def program_on(program: TileProgram, core: str, digest: str) -> TileProgram:
    """A whole program on a core of a chip of that digest."""

    def moved(sections: Sequence[Section]) -> tuple[Section, ...]:
        return tuple(replace(section, body=to_core(section.body, core)) for section in sections)

    return replace(program, digest=digest, preload=moved(program.preload), sections=moved(program.sections))


def to_core(nodes: Sequence[Node], core: str) -> tuple[Node, ...]:
    """The instructions on a core."""
    return tuple(
        Loop(node.count, to_core(node.body, core)) if isinstance(node, Loop) else _moved(node, core) for node in nodes
    )


def _moved(instruction: Instruction, core: str) -> Instruction:
    moved = replace(
        instruction,
        engine=f"{core}.{instruction.engine}",
        waits=tuple(Wait(_token(wait.token, core), wait.count) for wait in instruction.waits),
        signals=tuple(_token(token, core) for token in instruction.signals),
    )
    if isinstance(moved, Transfer):
        index = None if moved.index is None else _tile(moved.index, core)
        return replace(moved, source=_tile(moved.source, core), target=_tile(moved.target, core), index=index)
    if isinstance(moved, Multiply):
        zeros = None if moved.right_zeros is None else _tile(moved.right_zeros, core)
        left, right, sums = (_tile(tile, core) for tile in (moved.left, moved.right, moved.sums))
        return replace(moved, left=left, right=right, sums=sums, right_zeros=zeros)
    if isinstance(moved, Compute):
        inputs = tuple(_tile(tile, core) for tile in moved.inputs)
        return replace(moved, inputs=inputs, stores=tuple((r, _tile(tile, core)) for r, tile in moved.stores))
    return moved


def _token(token: Token, core: str) -> Token:
    return Token(f"{core}.{token.engine}", token.number)


def _tile(tile: Tile, core: str) -> Tile:
    return tile if tile.space is Space.DRAM or tile.buffer else replace(tile, buffer=core)


__all__ = ["draft_on", "program_on", "to_core"]
