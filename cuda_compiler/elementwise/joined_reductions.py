"""Joins reductions of rows with the element-wise groups around them: one kernel reads each row and applies the result.

Given:  t = x * w;  m = mean(t, dim=-1);  (u = t - m; y = u * s)
Result: (t = x * w; m = mean(t, dim=-1); u = t - m; y = u * s)

Several reductions of the same rows are joined, and rows may be any dimensions, such as the pixels and channels of a
group. What a reduction needs of the element-wise calls is computed for it again, so that rows of any length fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cuda_compiler.elementwise.grouping import MAX_READS, Group, Place, Rows, merge, place_of
from npu_compiler.graph.dtypes import is_float, itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, collapse, contiguous_strides, numel

KINDS = {
    "sum_kernel": "Total",
    "mean_kernel": "Mean",
    "prod_kernel": "Factors",
    "var_kernel": "Variance",
    "std_kernel": "Deviation",
    "max_kernel": "Greatest",
    "min_kernel": "Least",
    "norm_kernel": "Norm",
    "logsumexp_kernel": "Exponentials",
}
"""Kernel of a reduction that may be joined → the C struct of its state (`reductions/states.cuh`)."""

_REACH = 48  # groups between those that are joined
_LONGEST = 32 * 1024  # elements of a row, which one block works on
_FEW = 16  # rows; fewer leave most of the GPU idle
_SHORT = 8 * 1024  # elements of a row where rows are few
_SIDE_BY_SIDE = 32  # bytes of a row that lie together, as memory reads them, unless there is little to read in all
_LITTLE = 2**20  # bytes
_LITTLE_READ = 2**22  # bytes, with those that are read beside them

_Dims = list[tuple[int, int]]


def join_reductions(groups: Sequence[Group]) -> list[Group]:
    """The groups, with reductions and the element-wise groups before and behind them as one."""
    left: list[Group | None] = list(groups)
    for index, group in enumerate(groups):
        chain = _begun(left, index) if left[index] is group and _is_joinable(group) else None
        if chain is None:
            continue
        _extend(chain, left)
        joined = chain.group()
        if joined is not None:
            for member in chain.members:
                left[member] = None
            left[chain.at] = joined
    return [group for group in left if group is not None]


def _is_joinable(group: Group) -> bool:
    """Whether a group is a reduction of floats that no rule has made a kernel of yet, over rows for one block each."""
    call = group.calls[0]
    if call.kernel not in KINDS or call.source or group.rows is not None:
        return False
    (x,), (out,) = call.inputs, call.outputs
    if not (is_float(x.dtype) and is_float(out.dtype) and 0 < out.numel < x.numel and _is_dense(out)):
        return False
    width = x.numel // out.numel
    if width > _LONGEST or (out.numel < _FEW and width > _SHORT):
        return False
    _, reduced = _rows_by(x.strides, call)
    together, whole = (itemsize(x.dtype) * count for count in (reduced[-1][0] if reduced[-1][1] == 1 else 1, x.numel))
    if together >= min(_SIDE_BY_SIDE, width * itemsize(x.dtype)):
        return True
    little = whole <= _LITTLE or whole * _SIDE_BY_SIDE <= _LITTLE_READ * together
    return together > itemsize(x.dtype) and little


def _is_dense(view: View) -> bool:
    """Whether a view's elements lie one behind the other in its own order."""
    return place_of(view).strides in ((), (1,))


def _rows_by(steps: Sequence[int], call: KernelCall) -> tuple[_Dims, _Dims]:
    """The kept and the reduced dimensions of a reduction as (size, step), merged where possible, the latter by steps.

    Args:
        steps: The step of each dimension of the operand.
    """
    dims = list(zip(call.inputs[0].shape, steps, strict=True))
    at = len(dims) - call.params["reduce_dims"]
    return _merged(dims[:at]), _merged(sorted(dims[at:], key=lambda dim: -dim[1]))


def _merged(dims: _Dims) -> _Dims:
    sizes, (steps,) = collapse([size for size, _ in dims], [step for _, step in dims])
    return list(zip(sizes, steps, strict=True))


def _numbered(x: View, known: Mapping[Place, View]) -> tuple[View, Sequence[int]] | None:
    """A view of a reduction's operand by the elements' numbers, and the steps of its dimensions in these numbers.

    Args:
        known: The places of which each element has the number of its own, and a view of each.

    Returns:
        None if the operand has no known place.
    """
    if place_of(x) in known:
        return known[place_of(x)], contiguous_strides(x.shape)
    whole = known.get(Place(x.buffer, x.dtype, x.offset, (x.numel,), (1,)))
    order = sorted(range(x.rank), key=lambda dim: -x.strides[dim])
    return (whole, x.strides) if whole is not None and x.permute(order).is_contiguous else None


@dataclass(eq=False)
class _Chain:
    """Groups that are to be joined, the one at `at` among them, where the joined one will stand.

    Attributes:
        members: The indices of the groups.
        rows: The kept and the reduced dimensions of the rows as (size, step), with steps by the numbers of elements.
        calls: The calls in order.
        work: The element-wise ones as a group, if there are any.
        operands: View of a reduction's result → view of its operand by the elements' numbers.
        known: The places of which each element has the number of its own, and a view of each.
    """

    at: int
    members: list[int]
    rows: tuple[_Dims, _Dims]
    calls: list[KernelCall]
    work: Group | None
    operands: dict[View, View]
    known: dict[Place, View]

    def joins(self, group: Group) -> bool:
        """Take a group, if it reduces the same rows or goes on with what is known of them."""
        if group.is_elementwise:
            work = self._goes_on(group) and (merge(self.work, group) if self.work is not None else group)
            if not work:
                return False
            self.work = work
            self.known |= _numbered_places(group)
        else:
            call = group.calls[0]
            found = _numbered(call.inputs[0], self.known) if _is_joinable(group) else None
            if found is None or _rows_by(found[1], call) != self.rows:
                return False
            self.operands[call.outputs[0]] = found[0]
        self.calls = [*self.calls, *group.calls]
        return True

    def _goes_on(self, group: Group) -> bool:
        """Whether an element-wise group numbers its elements in the same way and reads only results of its own rows."""
        if group.numel != numel([size for dims in self.rows for size, _ in dims]):
            return False
        if not any(place in self.known for place in _numbered_places(group)):
            return False
        results = {view.buffer: view for view in self.operands}
        made = results.keys() | (self.work.written_buffers if self.work is not None else set())
        apart = group.written_buffers.isdisjoint([*results, *(view.buffer for view in self.operands.values())])
        apart = apart and not any(view.buffer in results for view in group.inner_loads)
        by_rows = all(self._is_by_rows(view, results[view.buffer]) for view in group.reads if view.buffer in results)
        return apart and by_rows and not group.read_buffers.isdisjoint(made)

    def _is_by_rows(self, view: View, result: View) -> bool:
        """Whether a view has, at the number of each element, a reduction's result of that element's row."""
        read = list(zip(view.shape, contiguous_strides(view.shape), view.strides, strict=True))
        kept, reduced = self.rows
        behind = contiguous_strides([size for size, _ in kept])
        made = [(size, step, own) for (size, step), own in zip(kept, behind, strict=True)]
        made += [(size, step, 0) for size, step in reduced]
        bounds = {step for size, step, _ in (*read, *made) if size > 1}
        same = (view.dtype, view.offset) == (result.dtype, result.offset)
        return same and (digits := _digits(read, bounds)) is not None and digits == _digits(made, bounds)

    def group(self) -> Group | None:
        """The chain as one group; None if there is nothing to join or a kernel would have too many operands."""
        names = {view.buffer for view in self.operands}
        own = self.work or Group([])
        made = {place_of(view) for view in own.writes}
        reads = {place_of(view): view for view in own.reads if view.buffer not in names}
        reads |= {place: view for view in self.operands.values() if (place := place_of(view)) not in made}
        if len(self.members) == 1 or len(reads) + len(own.writes) + len(names) > MAX_READS:
            return None
        kept, reduced = map(_view_of, self.rows)
        rows = Rows(kept, reduced, tuple(self.operands.values()))
        return Group(self.calls, list(reads.values()), [*own.writes, *self.operands], own.inlined, rows=rows)


def _view_of(dims: _Dims) -> View:
    """A view of no buffer with some dimensions."""
    return View("", tuple(size for size, _ in dims), tuple(step for _, step in dims), 0, "float32")


def _numbered_places(group: Group) -> dict[Place, View]:
    """The places that an element-wise group accesses at each element's own number, and a view of each."""
    views = [view for view in (*group.reads, *group.writes) if view.buffer not in group.inlined]
    return {place: view for view in views if 0 not in (place := place_of(view)).strides}


def _digits(dims: Iterable[tuple[int, int, int]], bounds: Collection[int]) -> dict[int, tuple[int, int]] | None:
    """A map from numbers to offsets by the digits of the numbers: the step of each → its size, and its step by offset.

    Args:
        dims: The map's dimensions as (size, step by number, step by offset).
        bounds: The steps of all digits.

    Returns:
        None if a dimension is no whole number of digits.
    """
    digits = {}
    for size, step, own in dims:
        cuts = sorted({step, step * size, *(bound for bound in bounds if step < bound < step * size)})
        for low, high in pairwise(cuts):
            if low % step or high % low:
                return None
            digits[low] = (high // low, own * (low // step))
    return digits


def _begun(left: Sequence[Group | None], index: int) -> _Chain | None:
    """The chain of a reduction, with the group before that computes its operand; None if no group shares its order."""
    reduction = left[index]
    assert reduction is not None
    (call,), (x,) = reduction.calls, reduction.calls[0].inputs
    writers = [at for at in range(max(0, index - _REACH), index) if _touches(left[at], x.buffer, writes=True)]
    others = [at for at in range(index + 1, min(len(left), index + 1 + _REACH)) if _touches(left[at], x.buffer)]
    for at in (*writers, *others):
        neighbour = left[at]
        if neighbour is None or not neighbour.is_elementwise or neighbour.numel != x.numel:
            continue
        known = _numbered_places(neighbour)
        found = _numbered(x, {place: view for place, view in known.items() if view.buffer == x.buffer})
        if found is None:
            continue
        rows, operands = _rows_by(found[1], call), {call.outputs[0]: found[0]}
        if at > index:
            return _Chain(index, [index], rows, [call], None, operands, {place_of(found[0]): found[0]})
        between = [group for group in left[at + 1 : index] if group is not None]
        moves_down = not any(neighbour.conflicts(group) for group in between)
        if len(writers) == 1 and (moves_down or not any(reduction.conflicts(group) for group in between)):
            stands = index if moves_down else at
            return _Chain(stands, [at, index], rows, [*neighbour.calls, call], neighbour, operands, known)
    return None


def _touches(group: Group | None, buffer: str, writes: bool = False) -> bool:
    """Whether a group writes a buffer or, unless only that counts, reads it."""
    return group is not None and (buffer in group.written_buffers or (not writes and buffer in group.read_buffers))


def _extend(chain: _Chain, left: Sequence[Group | None]) -> None:
    """Take the groups behind the chain that may be joined with it."""
    for at in range(chain.at + 1, min(len(left), chain.at + 1 + _REACH)):
        group = left[at]
        if group is None or at in chain.members:
            continue
        members = [left[member] for member in chain.members]
        between = [each for each in left[chain.at + 1 : at] if each is not None and each not in members]
        moves_up = not any(group.conflicts(other) for other in between)
        moves_down = not any(member.conflicts(other) for other in between for member in members if member is not None)
        if (moves_up or moves_down) and chain.joins(group):
            chain.members.append(at)
            chain.at = chain.at if moves_up else at
