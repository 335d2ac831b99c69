"""`divided`: splits a kernel call into calls that each compute a part of its result, for several cores.

The part of each operand that is needed follows from the kernel's declaration: `x[m,k] weight[n,k] -> out[m,n]` is
divided along `n` by dividing the weight. Only dimensions along which elements of the result are independent are
divided. Rows of images, whose windows overlap, are divided by the rules of cascades.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import Family, KernelCall, KernelDecl
from npu_compiler.program.views import View
from npu_model.lowering.cascades import compact, part_of, with_views

_IMAGE = 4  # dimensions of a batch of images: image, channel, row, column


class Way(StrEnum):
    """Dimension along which the results of calls are divided."""

    ROWS = "rows"
    COLUMNS = "columns"
    HEADS = "heads"


Ranges: TypeAlias = Mapping[str, tuple[int, int]]
"""A declared size, or group of sizes with an index (`s.1`) → a part of it: the first element and one past the last."""

_OTHERS = {
    Way.ROWS: (Way.ROWS, Way.COLUMNS, Way.HEADS),
    Way.COLUMNS: (Way.COLUMNS, Way.ROWS, Way.HEADS),
    Way.HEADS: (Way.HEADS, Way.COLUMNS, Way.ROWS),
}
_GATED_ROWS = "rows"  # size of a gated product's weight: rows of the gate, then as many of what it multiplies
# Sizes of which consecutive items read one item of another size: heads of queries share a head of keys, and the rows
# that experts compute share the row of their token.
_SHARED = {"h": "shared", "m": "r"}
# Sizes of batches: each item of the result needs the same item of all operands that have the size, and no other.
_BATCHES: Mapping[Family, Sequence[str]] = {
    Family.MATMUL: ("m", "lead.0"),
    Family.CONV: ("n",),
    Family.POOL: ("n",),
    Family.ATTENTION: ("b",),
    Family.REDUCTION: ("kept.0", "s.0"),
    Family.NORM: ("rows", "n"),
    Family.SOFTMAX: ("s.0",),
    Family.ROPE: ("s.0",),
    Family.INDEXING: ("s.0",),
    Family.ELEMENTWISE: ("s.0",),
}
# Sizes along which results can be divided, by family and way. The first dimensions of a group are those of a matrix.
_SIZES: Mapping[Family, Mapping[Way, Sequence[str]]] = {
    Family.MATMUL: {Way.ROWS: ("m",), Way.COLUMNS: ("n",), Way.HEADS: ("lead.0", "lead.1")},
    Family.CONV: {Way.COLUMNS: ("o",)},
    Family.POOL: {Way.COLUMNS: ("c",)},
    Family.ATTENTION: {Way.HEADS: ("h",)},
    Family.REDUCTION: {Way.ROWS: ("kept.0", "s.0"), Way.COLUMNS: ("kept.1",), Way.HEADS: ("kept.1", "s.1")},
    Family.NORM: {Way.ROWS: ("rows",)},
    Family.SOFTMAX: {Way.ROWS: ("s.2", "s.1", "s.0"), Way.HEADS: ("s.1",)},
    Family.ROPE: {Way.ROWS: ("s.2", "s.1", "s.0"), Way.HEADS: ("s.1",)},
}


def divided(call: KernelCall, way: Way, count: int) -> list[KernelCall]:
    """Split a call into at most `count` parts, in the order of its result; the call itself if it cannot be divided.

    If it cannot be divided in the way asked for, the other ways are tried.
    """
    for each in _OTHERS[way]:
        cuts = sorted(_cuts(call, each), key=lambda cut: -min(cut.size, count))
        for parts in (_parts(cut, count) for cut in cuts):
            if parts:
                return parts
    return [call]


def batch_of(call: KernelCall) -> int:
    """Size of the outermost dimension of a call's result, 1 for a scalar."""
    return call.outputs[0].shape[0] if call.outputs and call.outputs[0].shape else 1


def pieces_of_batch(call: KernelCall, count: int) -> list[KernelCall] | None:
    """Split a call along the outermost dimension of its result into `count` equal parts.

    None if it cannot be divided so.
    """
    if len(call.outputs) != 1 or batch_of(call) % count:
        return None
    kernel, size, rank = declaration(call), batch_of(call), call.outputs[0].rank
    names = [n for n in _BATCHES.get(kernel.family, ()) if _dims(kernel.outputs[0].sizes, n, rank) == [0]]
    if not names:
        return None
    (name,) = names
    cut = _NamedCut(call, kernel, name, size, 1)
    parts = [cut(first, first + size // count) for first in range(0, size, size // count)]
    return None if None in parts else [part for part in parts if part is not None]


@dataclass(frozen=True)
class _Cut:
    """A way to divide a call: the size of the divided dimension, and a function from a range to the call for that part.

    The function returns None for a range that the kernel cannot compute.
    """

    size: int
    part: Callable[[int, int], KernelCall | None]


def _parts(cut: _Cut, count: int) -> list[KernelCall]:
    if cut.size < 2:
        return []
    each = -(-cut.size // count)
    parts = [cut.part(first, min(cut.size, first + each)) for first in range(0, cut.size, each)]
    return [] if None in parts else [part for part in parts if part is not None]


def _cuts(call: KernelCall, way: Way) -> Iterator[_Cut]:
    kernel = declaration(call)
    if len(call.outputs) != 1 or 0 in call.outputs[0].shape:
        return
    shape = call.outputs[0].shape
    if way is Way.ROWS and kernel.family in (Family.CONV, Family.POOL) and len(shape) == _IMAGE:
        yield _Cut(shape[2], lambda first, stop: _rows(call, (first, stop)))
    for name in _names(call, kernel, way):
        dims = _dims(kernel.outputs[0].sizes, name, len(shape))
        if len(dims) == 1:
            unit = _unit(call, kernel, shape[dims[0]])
            cut = _NamedCut(call, kernel, name, shape[dims[0]], unit)
            yield _Cut(shape[dims[0]] // unit, cut)


def _rows(call: KernelCall, rows: tuple[int, int]) -> KernelCall | None:
    part = part_of(call, 2, rows)
    return None if part is None else part.call


def _names(call: KernelCall, kernel: KernelDecl, way: Way) -> Sequence[str]:
    """The declared sizes of a kernel along which its result can be divided in this way."""
    if kernel.family is not Family.ELEMENTWISE:
        return _SIZES.get(kernel.family, {}).get(way, ())
    rank = call.outputs[0].rank
    if rank == _IMAGE:
        dims: Sequence[int] = {Way.ROWS: (2, 0), Way.COLUMNS: (1,), Way.HEADS: (1,)}[way]
    else:
        dims = {Way.ROWS: range(rank - 1), Way.COLUMNS: [rank - 1], Way.HEADS: [1]}[way]
    return [f"s.{dim}" for dim in dims if 0 <= dim < rank]


def _dims(sizes: Sequence[str] | None, name: str, rank: int) -> list[int]:
    """The dimensions of an operand that have a size, given by its name, or by its group and an index (`s.1`)."""
    if sizes is None:
        return []
    group, _, place = name.partition(".")
    beyond = rank - len(sizes)  # dimensions of the group, where there is one, less the one of a single size
    first = next((index for index, size in enumerate(sizes) if size.startswith("*")), len(sizes))
    if not place:
        return [index if index < first else index + beyond for index, size in enumerate(sizes) if size == name]
    if f"*{group}" not in sizes or int(place) > beyond:
        return []
    return [first + int(place)]


def _unit(call: KernelCall, kernel: KernelDecl, size: int) -> int:
    """Granularity of the division: the outputs of a group of a grouped convolution are kept together, otherwise 1."""
    groups = _groups(call, kernel)
    return 1 if groups == 1 else size // groups


def _groups(call: KernelCall, kernel: KernelDecl) -> int:
    """Number of groups of a convolution; 1 for other kernels."""
    return int(call.params.get("groups", 1)) if kernel.family is Family.CONV else 1


@dataclass(frozen=True)
class _NamedCut:
    """Parts of a call along one of its declared sizes, in multiples of `unit` elements."""

    call: KernelCall
    kernel: KernelDecl
    name: str
    total: int
    unit: int

    def __call__(self, first: int, stop: int) -> KernelCall | None:
        call, kernel = self.call, self.kernel
        first, stop = first * self.unit, stop * self.unit
        others = self._others(first, stop)
        if others is None:
            return None
        ranges = {self.name: (first, stop), **others}
        bound = zip(kernel.inputs, kernel.bind(call), strict=False)
        inputs = [_sliced(view, operand.sizes, ranges) for operand, view in bound if view is not None]
        outputs = [_sliced(call.outputs[0], kernel.outputs[0].sizes, ranges)]
        part = with_views(call, inputs, outputs, self._params(first, stop))
        if self._is_gated:  # a kernel for the part alone would have the rows of both halves side by side
            bound = zip(kernel.inputs, kernel.bind(call), strict=False)
            own = {**ranges, _GATED_ROWS: (0, 2 * (stop - first))}
            inputs = [_sliced(view, operand.sizes, own) for operand, view in bound if view is not None]
        dense_inputs, dense_outputs = ([compact(v, v.buffer)[0] for v in views] for views in (inputs, outputs))
        packed = with_views(part, dense_inputs, dense_outputs, {})  # the NPU reads operands with any strides
        return part if kernel.problem(packed) is None else None

    @property
    def _is_gated(self) -> bool:
        """Whether the call is a gated product divided along its results, each of which reads two rows of the weight."""
        return self.name == "n" and any(_GATED_ROWS in (operand.sizes or ()) for operand in self.kernel.inputs)

    @property
    def _groups(self) -> int:
        """Number of groups of a convolution among which the cut divides its outputs; 1 for other cuts."""
        return _groups(self.call, self.kernel) if self.name in _SIZES[Family.CONV][Way.COLUMNS] else 1

    def _params(self, first: int, stop: int) -> dict[str, object]:
        params = self.call.params
        if self.name in params:
            return {self.name: stop - first}
        if self.name.startswith("lead."):
            return {"batch": int(params["batch"]) * (stop - first) // self.total}
        return {"groups": (stop - first) // self.unit} if self._groups > 1 else {}

    def _others(self, first: int, stop: int) -> Ranges | None:
        """The ranges of other sizes that follow from a range of this one.

        None if the kernel cannot compute such a part.
        """
        views = self.kernel.inputs_of(self.call)
        group, _, place = self.name.partition(".")
        if self._is_gated:
            return {_GATED_ROWS: (first, self.total + stop)}
        if group == "kept":
            return {f"whole.{place}": (first, stop)}
        if (count := self._count(_SHARED.get(self.name))) is not None:
            each = self.total // count
            own = first // each, -(-stop // each)
            is_whole = first % each == 0 == stop % each
            return {_SHARED[self.name]: own} if is_whole or own[1] - own[0] == 1 else None
        groups = self._groups
        if groups > 1 and (x := views["x"]) is not None:
            channels = x.shape[1] // groups
            return {"c": (first // self.unit * channels, stop // self.unit * channels)}
        return {}

    def _count(self, size: str | None) -> int | None:
        """A declared size of the call, None if no input has it."""
        for operand, view in zip(self.kernel.inputs, self.kernel.bind(self.call), strict=False):
            if size is not None and view is not None and (dims := _dims(operand.sizes, size, view.rank)):
                return view.shape[dims[0]]
        return None


def _sliced(view: View, sizes: Sequence[str] | None, ranges: Ranges) -> View:
    for name, (first, stop) in ranges.items():
        for dim in _dims(sizes, name, view.rank):
            view = view.slice(dim, first, stop)
    return view


__all__ = ["Way", "batch_of", "divided", "pieces_of_batch"]
