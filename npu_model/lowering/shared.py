"""`Shared`: a cache of lowering results that many chips have in common, for sweeps over chips."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from npu_compiler.program.kernels import KernelCall
    from npu_compiler.program.plan import ExecutionPlan
    from npu_model.isa.instructions import TileProgram
    from npu_model.lowering.cascades import Steps, Stripes
    from npu_model.lowering.emitter import DoesNotFit, Draft
    from npu_model.lowering.mapper import Sketch

MOST_DRAFTS = 20_000  # some tens of megabytes
MOST_CHAINS = 2_000
MOST_LINKED = 24  # some thousands of instructions each
MOST_STEPS = 200  # each holds the list of a plan's calls and its buffers

_Source = TypeVar("_Source")
_Result = TypeVar("_Result")


class Derived(Generic[_Source, _Result]):
    """A cache of results that depend on an object and a key; it is emptied when it holds too many.

    Objects are compared by identity, since comparing calls and plans by value takes longer than the cache saves.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: dict[tuple[int, Hashable], tuple[_Source, _Result]] = {}

    def get(self, source: _Source, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """The cached result for an object and a key; computed by `make` if absent."""
        entry = self._results.get((id(source), key))
        if entry is None:
            if len(self._results) >= self._most:
                self._results.clear()
            entry = self._results[id(source), key] = source, make()  # keeps the object, whose id is not used again
        return entry[1]


@dataclass
class Shared:
    """A cache of lowering results for any number of chips.

    Attributes:
        sketches: Amounts of work of tilings (`Sketch`), or the error that a tiling does not fit.
        signatures: Number of a call's kernel, parameters, shapes, strides and aliasing (`number` of them).
        drafts: Sections of calls (`Draft`), by tiling and locations of operands.
        stripes: Calls and buffers of a plan's cascades; None for impossible ones.
        linked: Tile programs of plans, by tilings and places; the chip's name in them is that of the first chip.
        steps: Plans with some chains in stripes (`Steps`), by the cascades; None for impossible ones.
    """

    sketches: dict[object, Sketch | DoesNotFit] = field(default_factory=dict)
    signatures: Derived[KernelCall, int] = field(default_factory=lambda: Derived(MOST_DRAFTS))
    drafts: Derived[KernelCall, Draft] = field(default_factory=lambda: Derived(MOST_DRAFTS))
    stripes: Derived[ExecutionPlan, Stripes | None] = field(default_factory=lambda: Derived(MOST_CHAINS))
    steps: Derived[ExecutionPlan, Steps | None] = field(default_factory=lambda: Derived(MOST_STEPS))
    linked: Derived[ExecutionPlan, TileProgram] = field(default_factory=lambda: Derived(MOST_LINKED))
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, key: Hashable) -> int:
        """A number that stands for a key, equal for equal keys; numbers are compared faster than long keys."""
        return self._numbers.setdefault(key, len(self._numbers))


__all__ = ["Derived", "Shared"]
