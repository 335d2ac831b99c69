"""`Shared`: results of lowering that many chips have in common, so that a sweep works them out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from npu_compiler.program.kernels import KernelCall
    from npu_compiler.program.plan import ExecutionPlan
    from npu_model.lowering.cascades import Stripes
    from npu_model.lowering.emitter import DoesNotFit, Draft
    from npu_model.lowering.mapper import Sketch

MOST_DRAFTS = 20_000  # some tens of megabytes
MOST_CHAINS = 2_000

_Source = TypeVar("_Source")
_Result = TypeVar("_Result")


class Derived(Generic[_Source, _Result]):
    """Results that depend on an object and a key; all are forgotten when there are too many.

    Objects are told apart by their identity, since comparing calls and plans takes longer than what is saved.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: dict[tuple[int, Hashable], tuple[_Source, _Result]] = {}

    def get(self, source: _Source, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """The result for an object and a key, from `make` the first time."""
        entry = self._results.get((id(source), key))
        if entry is None:
            if len(self._results) >= self._most:
                self._results.clear()
            entry = self._results[id(source), key] = source, make()  # keeps the object, whose id is not used again
        return entry[1]


@dataclass
class Shared:
    """Results of lowering for any number of chips.

    Attributes:
        sketches: Tilings of calls as they are emitted, by what they depend on.
        drafts: Sections of calls, by tiling and places.
        stripes: Calls and buffers of a plan's cascades.
    """

    sketches: dict[object, Sketch | DoesNotFit] = field(default_factory=dict)
    drafts: Derived[KernelCall, Draft] = field(default_factory=lambda: Derived(MOST_DRAFTS))
    stripes: Derived[ExecutionPlan, Stripes | None] = field(default_factory=lambda: Derived(MOST_CHAINS))


__all__ = ["Derived", "Shared"]
