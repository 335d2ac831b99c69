"""Fuses the choice of experts (the largest elements of each row, and their weights) into one kernel.

Given:   p = softmax(x);  order = argsort(p);  v = gather(p, order[:, :k]);  s = sum(v);  w = v / s
Result:  order, w = route(x)

Otherwise these are five kernels, each of which takes longer to launch than to run. The softmax may be missing, or
follow the choice; so may the division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

KERNEL = "route"
MOST_EXPERTS, MOST_CHOICES = 1024, 32  # a warp has a row in registers, and a lane has one of its choices

_Readers = Mapping[str, Sequence[int]]


def join_routing(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with each choice of experts as one call."""
    readers: dict[str, list[int]] = {view.buffer: [-1] for view in plan.output_views.values()}
    for index, call in enumerate(plan.calls):
        for name in {view.buffer for view in call.inputs}:
            readers.setdefault(name, []).append(index)
    calls: list[KernelCall | None] = list(plan.calls)
    for index, call in enumerate(plan.calls):
        route = _Route.at(plan.calls, index, readers) if call.kernel == "argsort_kernel" else None
        if route is not None:
            for place in route.places:
                calls[place] = None
            calls[index] = route.joined(plan.calls)
    return replace(plan, calls=[call for call in calls if call is not None])


@dataclass
class _Route:
    """The calls that choose experts.

    Attributes:
        places: Indices of the calls.
        x: The rows [T, experts] whose largest elements are chosen.
        order: The numbers of the chosen experts, [T, choices].
        weights: What the choices become, [T, choices].
        before, after: Whether a softmax of all elements, and of the chosen ones, is computed.
        divides: Whether the chosen elements are divided by their sum.
    """

    places: list[int]
    x: View
    order: View
    weights: View
    before: bool = False
    after: bool = False
    divides: bool = False
    _node: str = field(default="", repr=False)

    @staticmethod
    def at(calls: Sequence[KernelCall], index: int, readers: _Readers) -> _Route | None:
        """The choice that sorts by the call at `index`, or None if that is no choice."""
        (x,), (order,) = calls[index].inputs, calls[index].outputs
        gathers = [place for place in readers.get(order.buffer, ()) if place >= 0 and _gathers(calls[place], x, order)]
        if x.rank != 2 or x.strides[1] != 1 or x.shape[1] > MOST_EXPERTS or len(gathers) != 1:
            return None
        (gather,) = gathers
        chosen, values = calls[gather].inputs[1], calls[gather].outputs[0]
        others = [place for place in readers[order.buffer] if place != gather]
        if not calls[index].params["descending"] or chosen.shape[1] > MOST_CHOICES or -1 in others:
            return None
        if not all(_within(view, order, chosen.shape[1]) for place in others for view in calls[place].inputs):
            return None
        route = _Route([index, gather], x, chosen, values, _node=calls[index].node)
        route._take_softmax(calls, index, readers)
        route._take_weights(calls, readers)
        return route

    def _take_softmax(self, calls: Sequence[KernelCall], index: int, readers: _Readers) -> None:
        """Take the softmax that makes `x`, if nothing else reads it and its input is there still."""
        place = next((i for i in range(index - 1, -1, -1) if self._writes(calls[i], self.x)), -1)
        if place < 0 or calls[place].kernel != "softmax_kernel" or len(calls[place].inputs) != 1:
            return
        (logits,), (result,) = calls[place].inputs, calls[place].outputs
        if sorted(readers[self.x.buffer]) != sorted(self.places) or result != self.x or result.dtype != "float32":
            return
        changed = any(self._writes(call, logits) for call in calls[place + 1 : index])
        if logits.rank != 2 or logits.strides[1] != 1 or calls[place].params["scale"] != 1.0 or changed:
            return
        self.places.append(place)
        self.x, self.before = logits, True

    def _take_weights(self, calls: Sequence[KernelCall], readers: _Readers) -> None:
        """Take what makes weights of the chosen elements, as long as nothing else reads these."""
        values = self.weights
        following = sorted(readers.get(values.buffer, ()))
        if len(following) == 1 and following[0] >= 0:
            call = calls[following[0]]
            if call.kernel == "softmax_kernel" and call.inputs == (values,) and call.params["scale"] == 1.0:
                self._take(following, call.outputs[0], after=True)
                return
        if len(following) == 2 and following[0] >= 0 and values.dtype == "float32":
            total, quotient = (calls[place] for place in following)
            if _sums(total, values) and _divides(quotient, values, total.outputs[0]):
                if readers.get(total.outputs[0].buffer) != [following[1]]:
                    return
                self._take(following, quotient.outputs[0], divides=True)
        cast = readers.get(self.weights.buffer, ())
        if len(cast) == 1 and cast[0] >= 0 and _is_plain(calls[cast[0]], "copy", (self.weights,)):
            self._take(cast, calls[cast[0]].outputs[0])

    def _take(self, places: Sequence[int], weights: View, *, after: bool = False, divides: bool = False) -> None:
        if weights.shape != self.weights.shape:
            return
        self.places.extend(places)
        self.weights, self.after, self.divides = weights, self.after or after, self.divides or divides

    @staticmethod
    def _writes(call: KernelCall, view: View) -> bool:
        return any(other.buffer == view.buffer for other in call.outputs)

    def joined(self, calls: Sequence[KernelCall]) -> KernelCall:
        params = {"before": self.before, "after": self.after, "divides": self.divides}
        outputs = (self.order, self.weights)
        moved = sum(distinct_bytes(view) for view in (self.x, *outputs))
        flops = sum(calls[place].flops for place in self.places)
        return KernelCall(KERNEL, "", (self.x,), outputs, params, self._node, flops, moved)


def _gathers(call: KernelCall, x: View, order: View) -> bool:
    """Whether a call gathers the elements of x that come first in their order."""
    if call.kernel != "gather_kernel" or call.inputs[0] != x or call.params["dim"] != 1:
        return False
    index = call.inputs[1]
    alike = (index.buffer, index.offset, index.strides) == (order.buffer, order.offset, order.strides)
    return alike and index.rank == 2 and index.shape[0] == order.shape[0]


def _within(view: View, order: View, choices: int) -> bool:
    """Whether a view of the orders' buffer holds nothing but first elements of them; other views are not looked at."""
    if view.buffer != order.buffer:
        return True
    width = order.strides[0]
    inner = [(size, step) for size, step in zip(view.shape, view.strides, strict=True) if size > 1 and step % width]
    first = (view.offset - order.offset) % width
    return first + sum((size - 1) * step for size, step in inner) < choices


def _sums(call: KernelCall, values: View) -> bool:
    total = call.outputs[0]
    along_rows = call.inputs == (values,) and call.kernel == "sum_kernel" and call.params["reduce_dims"] == 1
    return along_rows and total.dtype == "float32" and total.numel == values.shape[0]


def _divides(call: KernelCall, values: View, total: View) -> bool:
    if len(call.inputs) != 2 or not _is_plain(call, "true_divide", call.inputs) or call.inputs[0] != values:
        return False
    divisor = call.inputs[1]
    steps = tuple(step for size, step in zip(divisor.shape, divisor.strides, strict=True) if size > 1)
    wanted = tuple(step for size, step in zip(values.shape, (1, 0), strict=True) if size > 1)
    same = (divisor.buffer, divisor.offset, steps) == (total.buffer, total.offset, wanted)
    return same and call.outputs[0].dtype == "float32"


def _is_plain(call: KernelCall, name: str, inputs: tuple[View, ...]) -> bool:
    """Whether a call is an element-wise op of views alone."""
    decl = elementwise_kernel(call)
    plain = decl is not None and decl.op.name == name and call.inputs == inputs
    return plain and all(scalar is None for scalar in call.params["scalars"])
