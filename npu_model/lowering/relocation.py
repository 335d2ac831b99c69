"""`Relocation`: moves instructions written for one chip to a core, or to other addresses, of a larger chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    core_of,
    kind_of,
)
from npu_model.lowering.emitter import Touch


@dataclass(frozen=True)
class Relocation:
    """A mapping of cores, addresses, tokens and buffer names.

    Attributes:
        cores: Core → new core; cores that are not listed stay.
        shifts: Memory → bytes that are added to addresses in it.
        tokens: Number that is added to the numbers of tokens.
        buffers: Prefix of the names of DRAM buffers.
    """

    cores: Mapping[str, str] = field(default_factory=dict)
    shifts: Mapping[Space, int] = field(default_factory=dict)
    tokens: int = 0
    buffers: str = ""

    def touches(self, touches: Sequence[Touch]) -> tuple[Touch, ...]:
        """Relocate the byte ranges that a section accesses; only engines and cores change, not addresses."""
        return tuple(
            replace(
                touch,
                engine=self._engine(touch.engine),
                name=touch.name if touch.space.is_shared else self._core(touch.name),
            )
            for touch in touches
        )

    def raised(self, raised: Mapping[Token, int]) -> dict[Token, int]:
        """Relocate the tokens that a section raises."""
        return {self._token(token): count for token, count in raised.items()}

    def program(self, program: TileProgram) -> TileProgram:
        """Relocate a whole program."""
        return replace(
            program,
            buffers=tuple(replace(buffer, name=self.buffers + buffer.name) for buffer in program.buffers),
            preload=tuple(map(self.section, program.preload)),
            sections=tuple(map(self.section, program.sections)),
        )

    def section(self, section: Section) -> Section:
        """Relocate a section."""
        return replace(section, body=self.nodes(section.body))

    def nodes(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Relocate instructions and loops."""
        return tuple(
            Loop(node.count, self.nodes(node.body)) if isinstance(node, Loop) else self._instruction(node)
            for node in nodes
        )

    def _instruction(self, instruction: Instruction) -> Instruction:
        moved = replace(
            instruction,
            engine=self._engine(instruction.engine),
            waits=tuple(Wait(self._token(wait.token), wait.count) for wait in instruction.waits),
            signals=tuple(self._token(token) for token in instruction.signals),
        )
        if isinstance(moved, Transfer):
            index = None if moved.index is None else self._tile(moved.index)
            source, target, *others = (self._tile(tile) for tile in (moved.source, *moved.writes))
            return replace(moved, source=source, target=target, others=tuple(others), index=index)
        if isinstance(moved, Multiply):
            zeros = None if moved.right_zeros is None else self._tile(moved.right_zeros)
            left, right, sums = (self._tile(tile) for tile in (moved.left, moved.right, moved.sums))
            return replace(moved, left=left, right=right, sums=sums, right_zeros=zeros)
        if isinstance(moved, Compute):
            inputs = tuple(self._tile(tile) for tile in moved.inputs)
            return replace(moved, inputs=inputs, stores=tuple((r, self._tile(tile)) for r, tile in moved.stores))
        return moved

    def _core(self, core: str) -> str:
        return self.cores.get(core, core)

    def _engine(self, engine: str) -> str:
        core = self._core(core_of(engine))
        return f"{core}.{kind_of(engine)}" if core else engine

    def _token(self, token: Token) -> Token:
        return Token(self._engine(token.engine), token.number + self.tokens)

    def _tile(self, tile: Tile) -> Tile:
        if tile.space.has_buffers:
            return replace(tile, buffer=self.buffers + tile.buffer) if self.buffers else tile
        core = "" if tile.space is Space.L2 else self._core(tile.buffer)
        return replace(tile, buffer=core, address=tile.address + self.shifts.get(tile.space, 0))


def to_core(core: str) -> Relocation:
    """The relocation of instructions written for a chip of one core to a core of a larger chip."""
    return Relocation({"": core})


__all__ = ["Relocation", "to_core"]
