"""The resident kernel's grid barrier, mailboxes and tagged sums, in every order in which a few blocks can go on.

A model check of `twins.accesses`. An access happens at once and for all blocks, as the release and the acquire of the
barrier provide for whatever it separates. The numbers I9, I13, … are those of `templates/resident/grid.cuh`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import pytest

from cuda_compiler.resident.mailboxes import MAILBOXES
from cuda_compiler.resident.twins import accesses

Access: TypeAlias = tuple[str, int]
SIGN = 2**31


@dataclass(frozen=True)
class Protocol:
    """Model of a resident kernel: steps connected by a mailbox with the next one, and steps that exchange tagged sums.

    Attributes:
        idle: A block that needs no message, so it does not wait for any.
        edit: Change of a step's accesses that breaks the protocol.
        first_arrival: Block 0's addend to the barrier's counter, for a number of blocks.
    """

    connected: Sequence[bool]
    exchanges: Sequence[bool]
    blocks: int = 2
    mailboxes: int = MAILBOXES
    idle: int = -1
    edit: Callable[[list[Access]], list[Access]] = lambda step: step
    first_arrival: Callable[[int], int] = lambda blocks: SIGN - (blocks - 1)

    def program(self, first: int, block: int) -> list[tuple[int, str, int, int]]:
        """A block's accesses in a run whose first step is number `first`: step, kind, mailbox, the other block."""
        found = []
        for index, exchanges in enumerate(self.exchanges):
            connected = [index > 0 and self.connected[index - 1], index < len(self.connected) and self.connected[index]]
            step = first + index
            for kind, number in self.edit([*accesses(step, *connected, exchanges, self.mailboxes)]):
                if kind == "wait":
                    number -= first  # before the kernel's first step all steps are over
                if kind == "receive" and block == self.idle:
                    continue
                others = range(self.blocks) if kind.startswith("receive") else [0]
                found += [(step, kind, number, other) for other in others]
        return found

    def rounds(self) -> list[tuple[int, str, int, int]]:
        """The accesses of a block's barrier warp: two for each round, which separates two steps."""
        return [
            (index, kind, index, 0) for index in range(len(self.exchanges) - 1) for kind in ("begin round", "end round")
        ]


@dataclass(frozen=True)
class Memory:
    """The barrier's counter, [mailbox][block] the number of the step that wrote a message or 0, [block] a tag."""

    counter: int
    messages: tuple[tuple[int, ...], ...]
    tags: tuple[int, ...]

    def with_message(self, mailbox: int, block: int, value: int) -> Memory:
        row = (*self.messages[mailbox][:block], value, *self.messages[mailbox][block + 1 :])
        return replace(self, messages=(*self.messages[:mailbox], row, *self.messages[mailbox + 1 :]))


def access(
    memory: Memory, protocol: Protocol, block: int, at: tuple[int, str, int, int], sign: int, partner: int
) -> Memory | None:
    """The memory after a block's access, None while it has to poll on; asserts what the invariants promise of it.

    Args:
        sign: The sign of the barrier's counter at the start of the run.
        partner: Number of rounds that the block's barrier warp has seen end or, if this is the barrier warp, of steps
            that the block has ended.
    """
    step, kind, number, other = at
    match kind:
        case "wait":
            return memory if partner >= number + 1 else None
        case "arrive":
            return memory
        case "begin round":
            if partner < number + 1:
                return None
            amount = protocol.first_arrival(protocol.blocks) if block == 0 else 1
            return replace(memory, counter=(memory.counter + amount) % (2 * SIGN))
        case "end round":  # the counter's sign says only whether an even number of rounds is over (I10)
            return memory if memory.counter // SIGN == (sign + number + 1) % 2 else None
        case "send tagged":
            return replace(memory, tags=(*memory.tags[:block], step, *memory.tags[block + 1 :]))
        case "receive tagged":
            assert memory.tags[other] <= step, "a tagged sum is overwritten before all blocks have read it (I17)"
            return memory if memory.tags[other] == step else None
        case "send":
            assert memory.messages[number][block] == 0, "a mailbox is filled before it is empty (I13)"
            return memory.with_message(number, block, step)
        case "receive":
            assert memory.messages[number][other] in (0, step - 1), "a mailbox holds another step's message (I13)"
            return memory if memory.messages[number][other] else None
        case _:  # a block empties other places than it fills
            return memory.with_message(number, (block + 1) % protocol.blocks, 0)


def check_run(protocol: Protocol, memory: Memory, first: int) -> set[Memory]:
    """Return all contents of memory after a run; assert that no order of accesses breaks an invariant or hangs."""
    blocks, sign = protocol.blocks, memory.counter // SIGN
    programs = [*(protocol.program(first, block) for block in range(blocks)), *[protocol.rounds()] * blocks]
    # Before each access: the steps that a block has ended, or the rounds that its barrier warp has.
    ended = [
        [sum(kind in ("arrive", "end round") for _, kind, _, _ in program[:place]) for place in range(len(program) + 1)]
        for program in programs
    ]
    ends, seen, todo = set(), set(), [((0,) * (2 * blocks), memory)]
    while todo:
        places, memory = todo.pop()
        following = []
        for block, place in enumerate(places):
            if place < len(programs[block]):
                other = (block + blocks) % (2 * blocks)
                partner = ended[other][places[other]]
                after = access(memory, protocol, block % blocks, programs[block][place], sign, partner)
                if after is not None:
                    following.append(((*places[:block], place + 1, *places[block + 1 :]), after))
        if all(place == len(program) for place, program in zip(places, programs, strict=True)):
            ends.add(memory)
        else:
            assert following, "all blocks poll for what nobody writes any more"
        todo += [state for state in following if state not in seen]
        seen.update(following)
    return ends


def check(protocol: Protocol) -> None:
    """Two runs, one after the other, from zeros on."""
    memory = Memory(0, ((0,) * protocol.blocks,) * protocol.mailboxes, (0,) * protocol.blocks)
    for run in range(2):
        (memory,) = check_run(protocol, memory, 1 + run * len(protocol.exchanges))


# Two steps that both exchange tagged sums are not connected (`connect_mailboxes`).
WIRINGS = [
    (connected, exchanges)
    for connected in product((False, True), repeat=3)
    for exchanges in product((False, True), repeat=4)
    if not any(connected[i] and exchanges[i] and exchanges[i + 1] for i in range(3))
]


@pytest.mark.parametrize("idle", [-1, 0])
def test_every_wiring_of_four_steps_keeps_the_invariants(idle: int) -> None:
    for wiring in WIRINGS:
        check(Protocol(*wiring, idle=idle))


@pytest.mark.parametrize("idle", [-1, 0])
@pytest.mark.parametrize("exchanges", [(False, False, False, False), (False, True, False, True)])
def test_three_blocks_keep_the_invariants(exchanges: tuple[bool, ...], idle: int) -> None:
    check(Protocol((True, True, True), exchanges, blocks=3, idle=idle))


def moved(kind: str, before: str) -> Callable[[list[Access]], list[Access]]:
    """A step in which one access comes before another."""

    def edit(step: list[Access]) -> list[Access]:
        rest = [access for access in step if access[0] != kind]
        place = next((i for i, access in enumerate(rest) if access[0] == before), len(rest))
        return [*rest[:place], *(access for access in step if access[0] == kind), *rest[place:]]

    return edit


CHAIN = Protocol((True, True, True), (False, False, False, False), idle=0)
BROKEN = {
    "two mailboxes": (replace(CHAIN, mailboxes=2), "poll"),
    "a mailbox filled before the barrier": (replace(CHAIN, edit=moved("send", before="wait")), "I13|poll"),
    "a mailbox emptied before the barrier": (replace(CHAIN, edit=moved("empty", before="wait")), "poll"),
    "a barrier after the step": (replace(CHAIN, edit=moved("wait", before="arrive")), "I13|poll"),
    "a barrier that everybody adds 1 to": (replace(CHAIN, first_arrival=lambda blocks: 1), "poll"),
    "a sign that changes too early": (replace(CHAIN, first_arrival=lambda blocks: SIGN), "I13|poll"),
    "sums exchanged in connected steps": (replace(CHAIN, exchanges=(True, True, False, False)), "I17"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_sees_a_broken_protocol(name: str) -> None:
    protocol, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check(protocol)
