"""Places tensors in the buffers that copies would move them to, such as concatenations.

Given:   y = conv2d(x);  z = conv2d(y);  t[:, :16] = copy(y);  t[:, 16:] = copy(z)
Result:  t[:, :16] = conv2d(x);  t[:, 16:] = conv2d(t[:, :16])

Given:   t[:, :16] = copy(x);  t[:, 16:] = copy(y);  u[:, :16] = copy(x);  u[:, 16:32] = copy(y);  u[:, 32:] = copy(z)
Result:  x, y and z are computed in u, and t is u[:, :32]

The second is what DenseNet does: each concatenation begins with the one before it, so that all lie in the longest.

Given:   x = matmul(a, b);  s = copy(x[1:]);  s[:, 1:] = s[:, 1:] + c;  y = copy(x);  y[1:] = copy(s)
Result:  y = matmul(a, b);  y[1:, 1:] = y[1:, 1:] + c

That is what remains of an update of a slice in place, whose old values nobody reads later.

Given:   y = conv2d(x);  z = conv2d(y[:, 16:]);  t[:, :16] = copy(y[:, :16]);  t[:, 16:] = copy(z)
Result:  y = conv2d(x);  z = conv2d(y[:, 16:]);  y[:, 16:] = copy(z)

Here t is y, as in blocks that keep a half of their input and replace the other, if nothing reads that half later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod

from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View, collapse

WIDEST_ACCESS = 8  # elements that a GPU's kernel may read or write at a time

Takes = Callable[[KernelCall, KernelCall], bool]
"""Whether a target's kernels can compute a call, given first as it was and then with other strides."""


def place_in_targets(
    plan: ExecutionPlan, takes: Takes, widest: int = WIDEST_ACCESS, apart: Collection[str] = ()
) -> ExecutionPlan:
    """The plan without copies whose source can be computed in the copy's target, where its readers read it too.

    The copy must cover all of the source that is used, and nothing else may write that part of the target before the
    source is last read. A tensor with several copies is placed in the target of the first; the others then copy from
    there. A source that is itself a copy of that part of the target is that part. Buffers of sources disappear.

    Args:
        widest: Elements of the widest access that has to be aligned; placed tensors allow as wide ones as before.
        apart: Buffers in which nothing is placed.
    """
    placing = _Placing(plan, takes, widest)
    for index in range(len(placing.calls)):
        call = placing.calls[index]
        if call is not None and is_copy(call):
            placing.join_neighbours(index)
            if call.outputs[0].buffer not in apart:
                placing.place(index)
    for index in range(len(placing.calls)):
        call = placing.calls[index]
        if call is not None and is_copy(call) and call.outputs[0].buffer not in apart:
            placing.unite(index)
    calls = [call for call in placing.calls if call is not None]
    left = {view.buffer for call in (*plan.prologue, *calls) for view in (*call.inputs, *call.outputs)}
    moved = {view.buffer for call in plan.calls for view in (*call.inputs, *call.outputs)} - left
    buffers = {name: buffer for name, buffer in plan.buffers.items() if name not in moved}
    return replace(plan, calls=calls, buffers=buffers)


def is_copy(call: KernelCall) -> bool:
    """Whether a call copies elements as they are, or converts their dtype."""
    decl = elementwise_kernel(call)
    return decl is not None and decl.op.name == "copy" and list(call.params["scalars"]) == [None]


def takes_as_declared(before: KernelCall, after: KernelCall) -> bool:
    """Whether the kernel's declaration allows each view of `after` that differs from that of `before`.

    Views must also keep the width of vector accesses. A view whose predecessor went beyond the declaration may too:
    targets that generate kernels have other layouts.
    """
    decl = KERNELS.get(before.kernel)
    if decl is None:
        return elementwise_kernel(before) is not None
    pairs = zip(decl.bind(before), decl.bind(after), (*decl.inputs, *decl.outputs), strict=True)
    return all(
        old is None or new is None or old == new or bool(operand.problem(old, {})) or not operand.problem(new, {})
        for old, new, operand in pairs
    )


class _Placing:
    """The calls of a plan, some already placed; None where a copy has been dropped."""

    def __init__(self, plan: ExecutionPlan, takes: Takes, widest: int) -> None:
        self._plan, self._takes, self._widest = plan, takes, widest
        self._kept = {view.buffer for view in plan.output_views.values()}
        self.calls: list[KernelCall | None] = list(plan.calls)
        self._touching: dict[str, set[int]] = {}
        for index, call in enumerate(plan.calls):
            self._index(index, call)

    def _index(self, index: int, call: KernelCall) -> None:
        for view in (*call.inputs, *call.outputs):
            self._touching.setdefault(view.buffer, set()).add(index)

    def _replace(self, index: int, call: KernelCall | None) -> None:
        before = self.calls[index]
        assert before is not None
        for view in (*before.inputs, *before.outputs):
            self._touching[view.buffer].discard(index)
        self.calls[index] = call
        if call is not None:
            self._index(index, call)

    def _at(self, index: int) -> KernelCall:
        call = self.calls[index]
        assert call is not None
        return call

    def join_neighbours(self, index: int) -> None:
        """Make one copy of the copy at `index` and those right after it that continue it in source and target."""
        for after in range(index + 1, len(self.calls)):
            following = self.calls[after]
            if following is None:
                continue
            joined = _joined(self._at(index), following) if is_copy(following) else None
            if joined is None:
                return
            self._replace(after, None)
            self._replace(index, joined)

    def place(self, index: int) -> None:
        """Compute the source of the copy at `index` in its target, and drop the copy, if that is possible."""
        copy = self._at(index)
        source, target = copy.inputs[0].buffer, copy.outputs[0].buffer
        owner = self._plan.buffers[target]
        movable = self._plan.buffers[source].kind == "arena" and source not in self._kept
        if not movable or source == target or owner.kind not in ("arena", "output"):
            return
        others = sorted(self._touching[source] - {index})
        if not others or others[0] > index:
            return  # it is computed once for all runs
        begin = others.pop(0) if _is_inverse(self._at(others[0]), copy) else None
        moved = self._moved(others, index)
        if moved is None or not self._is_spared(copy.outputs[0], index, begin, max([index, *others])):
            return
        if begin is not None and not self._may_update(index, moved, copy.outputs[0]):
            return
        for at, placed in moved.items():
            self._replace(at, placed)
        for dropped in (index, begin):
            if dropped is not None:
                self._replace(dropped, None)

    def unite(self, index: int) -> None:
        """Make one buffer of the source and the target of the copy at `index`, and drop the copy, if that is possible.

        The copied elements must have the same place in both, and nothing else may be written there. Other calls must
        write the target only after all of the source is written, and only over elements that nothing reads any more.
        """
        copy = self._at(index)
        source, target = copy.inputs[0], copy.outputs[0]
        owners = [self._plan.buffers[view.buffer] for view in (source, target)]
        movable = source.buffer not in self._kept and source.buffer != target.buffer
        alike = prod(owners[0].alloc_shape) == prod(owners[1].alloc_shape)
        if not (movable and alike and all(owner.kind == "arena" for owner in owners)):
            return
        if not _are_same(replace(source, buffer=target.buffer), target):
            return
        others = sorted(self._touching[source.buffer] - {index})
        moved = {at: _renamed(self._at(at), source.buffer, target.buffer) for at in others}
        written = [at for at in others if any(view.buffer == source.buffer for view in self._at(at).outputs)]
        if not written or written[-1] > index:
            return
        for at in self._touching[target.buffer] - {index}:
            for view in self._at(at).outputs:
                if view.buffer != target.buffer:
                    continue
                read = (each for later in others if later >= at for each in moved[later].inputs)
                lost = any(each.buffer == target.buffer and not are_apart(each, view) for each in read)
                if at <= written[-1] or lost or not are_apart(view, target):
                    return
        for at, call in moved.items():
            self._replace(at, call)
        self._replace(index, None)

    def _moved(self, others: Sequence[int], index: int) -> dict[int, KernelCall] | None:
        """The calls that touch the source of the copy at `index`, touching its target instead; None if some cannot."""
        copy = self._at(index)
        source, target = copy.inputs[0], copy.outputs[0]
        moved = {}
        for at in others:
            call = self._at(at)
            placed = _placed(call, source, target, self._widest)
            too_late = at > index and any(view.buffer == source.buffer for view in call.outputs)
            if placed is None or too_late or not (is_copy(call) or self._takes(call, placed)):
                return None
            moved[at] = placed
        return moved

    def _is_spared(self, target: View, index: int, begin: int | None, end: int) -> bool:
        """Whether no call but the copies at `index` and `begin` writes the target between `begin` and `end`.

        Args:
            begin: Index of the call from which on the target must keep its values; None for the first of all.
        """
        return not any(
            view.buffer == target.buffer and not are_apart(view, target)
            for at in self._touching[target.buffer] - {index, begin}
            if (begin is None or at > begin) and at <= end
            for view in self._at(at).outputs
        )

    def _may_update(self, index: int, moved: dict[int, KernelCall], target: View) -> bool:
        """Whether no call before `index` reads elements of the target that one of the `moved` calls has changed before.

        An element-wise call may read the elements that it changes itself.
        """
        for at, call in moved.items():
            changed = [view for view in call.outputs if view.buffer == target.buffer]
            for reader in self._touching[target.buffer] if changed else ():
                read = [view for view in self._at(reader).inputs if view.buffer == target.buffer]
                if not at <= reader < index or all(are_apart(one, other) for one in read for other in changed):
                    continue
                in_place = reader == at and elementwise_kernel(call) is not None
                if not in_place or any(not _are_same(one, other) for one in read for other in changed):
                    return False
        return True


def _is_inverse(first: KernelCall, second: KernelCall) -> bool:
    """Whether the first call copies elements from where the copy `second` returns them to."""
    return (
        is_copy(first)
        and _are_same(first.inputs[0], second.outputs[0])
        and _are_same(first.outputs[0], second.inputs[0])
    )


def _are_same(first: View, second: View) -> bool:
    """Whether two views have the same elements in the same order."""
    same = (first.buffer, first.dtype, first.offset) == (second.buffer, second.dtype, second.offset)
    return same and collapse(first.shape, first.strides) == collapse(second.shape, second.strides)


def _placed(call: KernelCall, source: View, target: View, widest: int) -> KernelCall | None:
    """The call with each view of the source's buffer replaced by the same elements of `target`; None if some cannot."""
    sides: list[tuple[View, ...]] = []
    for views in (call.inputs, call.outputs):
        side = []
        for view in views:
            moved = moved_view(view, source, target) if view.buffer == source.buffer else view
            if moved is None or moved is not view and not is_as_wide(moved, view, widest):
                return None
            side.append(moved)
        sides.append(tuple(side))
    return replace(call, inputs=sides[0], outputs=sides[1])


def _renamed(call: KernelCall, old: str, new: str) -> KernelCall:
    """The call with the buffer `new` in place of `old`."""
    sides = (
        tuple(replace(view, buffer=new) if view.buffer == old else view for view in views)
        for views in (call.inputs, call.outputs)
    )
    return replace(call, inputs=next(sides), outputs=next(sides))


def is_as_wide(moved: View, view: View, widest: int = WIDEST_ACCESS) -> bool:
    """Whether vector accesses to `moved`, of up to `widest` elements, can be as wide as those to `view`."""
    steps = zip(moved.strides, view.strides, view.shape, strict=True)
    same = all((new == 1) == (old == 1) for new, old, size in steps if size > 1)
    return same and _access(moved, widest) >= _access(view, widest)


def _access(view: View, width: int) -> int:
    """The number of neighbouring elements, up to `width`, that aligned accesses reach wherever a row begins."""
    steps = [stride for size, stride in zip(view.shape, view.strides, strict=True) if size > 1 and stride != 1]
    while any(step % width for step in (view.offset, *steps)):
        width //= 2
    return width


def _joined(first: KernelCall, second: KernelCall) -> KernelCall | None:
    """One copy for two whose views continue each other along the same dimension; None if they do not."""
    views = [(a, b) for a, b in ((first.inputs[0], second.inputs[0]), (first.outputs[0], second.outputs[0]))]
    (source, next_source), (target, next_target) = views
    if source.buffer == target.buffer or source.dtype != target.dtype:
        return None
    for dim in range(source.rank):
        if all(_continues(before, after, dim) for before, after in views):
            length = source.shape[dim] + next_source.shape[dim]
            shape = (*source.shape[:dim], length, *source.shape[dim + 1 :])
            moved = first.bytes_moved + second.bytes_moved
            return replace(
                first,
                inputs=(replace(source, shape=shape),),
                outputs=(replace(target, shape=shape),),
                flops=first.flops + second.flops,
                bytes_moved=moved,
            )
    return None


def _continues(before: View, after: View, dim: int) -> bool:
    """Whether `after` begins where `before` ends along a dimension, and is as large in all others."""
    return (
        (before.buffer, before.dtype, before.rank) == (after.buffer, after.dtype, after.rank)
        and before.strides[dim] == after.strides[dim]
        and other_dims(before, dim) == other_dims(after, dim)
        and after.offset == before.offset + before.shape[dim] * before.strides[dim]
    )


def other_dims(view: View, dim: int) -> list[tuple[int, int]]:
    """Sizes and strides of a view's other dimensions; with a single element, the stride does not matter and is 0."""
    steps = enumerate(zip(view.shape, view.strides, strict=True))
    return [(size, stride if size > 1 else 0) for at, (size, stride) in steps if at != dim]


def are_apart(first: View, second: View) -> bool:
    """Whether two views of a buffer are provably disjoint.

    They are if one ends before the other begins, or if they are different columns of the same rows, for some length of
    a row.
    """
    if _end(first) <= second.offset or _end(second) <= first.offset:
        return first.dtype == second.dtype
    steps = {
        stride for view in (first, second) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1
    }
    for row in steps - {0, 1}:
        (begin, end), (other_begin, other_end) = (_columns(view, row) for view in (first, second))
        if max(end, other_end) <= row and (end <= other_begin or other_end <= begin):
            return True
    return False


def _end(view: View) -> int:
    """The place after the last element."""
    return view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True)) + 1


def _columns(view: View, row: int) -> tuple[int, int]:
    """The range of columns that a view covers in rows of `row` elements; it ends beyond them if a row is left."""
    begin = end = view.offset % row
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size > 1 and stride % row:
            end += (size - 1) * stride
    return begin, end + 1


def moved_view(part: View, source: View, target: View) -> View | None:
    """The view of `target` that corresponds to a view of elements of `source`; None if no strides express it."""
    if part.dtype != source.dtype or source.dtype != target.dtype:
        return None
    sizes, (steps, target_steps) = collapse(source.shape, source.strides, target.strides)
    order = sorted(range(len(sizes)), key=lambda dim: steps[dim], reverse=True)
    rest, offset, reach = part.offset - source.offset, target.offset, [0] * len(sizes)
    for dim in order:
        if steps[dim] == 0 or rest < 0:
            return None
        reach[dim], rest = divmod(rest, steps[dim])
        offset += reach[dim] * target_steps[dim]
    strides = []
    for size, stride in zip(part.shape, part.strides, strict=True):
        along = [dim for dim in order if steps[dim] <= stride and stride % steps[dim] == 0][:1]
        if size > 1 and not along:
            return None
        for dim in along:
            reach[dim] += (size - 1) * (stride // steps[dim])
        strides.append(stride // steps[along[0]] * target_steps[along[0]] if along else stride)
    if rest or any(last >= size for last, size in zip(reach, sizes, strict=True)):
        return None
    return View(target.buffer, part.shape, tuple(strides), offset, part.dtype)
