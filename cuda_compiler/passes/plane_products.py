"""Multiplies over a dimension that is not the last one where the operands lie, instead of copying them around it.

Given:   x: [16, 196, 768];  t = copy(x.transpose(1, 2));  y = matmul(t as [12288, 196], w: [196, 196]) + b
         z = u * (y as [16, 768, 196]).transpose(1, 2)
Result:  y = plane_product(x, w) + b: [16, 196, 768], which is w · x for each image;  z = u * y

Token mixing, talking heads and linears between two permutations are such products. The result is stored in the order in
which its readers walk it. 1 × 1 convolutions of few channels among softmaxes and products are plane products too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cuda_compiler.op_classify import classify, is_elementwise
from cuda_compiler.passes.copies import drop_copies
from cuda_compiler.rules.matmul import VECTOR_ROWS, cublas_activates
from cuda_compiler.rules.planes import PLANE_PRODUCT, keeps_in_registers
from npu_compiler.graph.dtypes import is_float, itemsize
from npu_compiler.program.kernels import KERNELS, Family, KernelCall, readers_and_writers
from npu_compiler.program.placement import is_copy, moved_view, takes_as_declared
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View, collapse, contiguous_strides, numel

_PRODUCTS, _CONVOLUTION = ("matmul_kernel", "matmul_notrans_kernel"), "conv2d_kernel"
_BATCHED = "batched_matmul_kernel"
_OF_SCORES = {_BATCHED, "softmax_kernel", "masked_softmax_kernel"}
_READERS = (Family.MATMUL, Family.SOFTMAX, Family.REDUCTION)
_FEWEST_PLACES = 16  # side by side


def keep_scores_in_planes(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with 1 × 1 convolutions of few channels, whose results only softmaxes and products read, in planes.

    Around all other convolutions are images, which tensor cores read with channels innermost.
    """
    readers: dict[str, set[str]] = {}
    for call in plan.calls:
        for view in call.inputs:
            readers.setdefault(view.buffer, set()).add(call.kernel)
    kept = {view.buffer for view in plan.output_views.values()}
    calls = [
        (_mixing(call) or call)
        if call.kernel == _CONVOLUTION
        and call.outputs[0].buffer not in kept
        and readers.get(call.outputs[0].buffer, set()) <= _OF_SCORES
        else call
        for call in plan.calls
    ]
    return replace(plan, calls=calls)


def _mixing(call: KernelCall) -> KernelCall | None:
    """A 1 × 1 convolution of few channels as a product in planes; None for any other one."""
    x, weight, *bias = call.inputs
    params = call.params
    taps = {*weight.shape[2:], *params["stride"], params["groups"]}
    if taps != {1} or any(params["padding"]) or params["has_residual"] or not keeps_in_registers(weight):
        return None
    planes, target = _image_planes(x), _image_planes(call.outputs[0])
    if planes is None or target is None or planes.shape[2] < _FEWEST_PLACES:
        return None
    return _product(call, planes, weight.select(3, 0).select(2, 0), bias, target)


def form_plane_products(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with products over the dimension before the last, where that spares copies or steps across memory.

    From the last call to the first, since a product in planes lets the one before it leave its result in planes.
    """
    forming = _Forming(plan)
    for index, call in reversed(list(enumerate(plan.calls))):
        product = _Rows.of(call, plan)
        if product is not None:
            forming.turn(index, product)
    if forming.calls == plan.calls:
        return plan
    calls = [call for call in forming.calls if call is not None]
    return drop_copies(replace(plan, calls=calls, buffers=forming.buffers))


@dataclass(frozen=True)
class _Rows:
    """The product out [m, n] = act(x [m, k] · weight [n, k]ᵀ + bias [n]) of many rows; `bias` may be empty."""

    x: View
    weight: View
    bias: Sequence[View]
    out: View
    activation: str

    @staticmethod
    def of(call: KernelCall, plan: ExecutionPlan) -> _Rows | None:
        """The product that a call computes, in one floating-point dtype; None if it is none, or adds a residual."""
        if call.kernel in _PRODUCTS:
            x, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
            assert x is not None and weight is not None and out is not None
            addends = () if bias is None else (bias,)
            product = _Rows(x, weight, addends, out, call.params["activation"])
            fits = residual is None
        elif call.kernel == _BATCHED:
            x, weight, out = (each.reshape(each.shape[-2:]) for each in (*call.inputs, *call.outputs))
            if x is None or weight is None or out is None:
                return None
            product = _Rows(x, weight.transpose(0, 1), (), out, "none")
            fits = call.params["scale"] == 1 and plan.buffers[weight.buffer].is_constant
        else:
            return None
        fits = fits and is_float(product.x.dtype) and product.x.shape[0] > VECTOR_ROWS
        return product if fits and product.x.dtype == product.weight.dtype == product.out.dtype else None


@dataclass(frozen=True)
class _Source:
    """Planes [b, k, s] that a copy makes the rows [b · s, k] of, and the index of the copy."""

    copy: int
    planes: View


@dataclass(frozen=True)
class _Result:
    """A result's readers, with the result in planes.

    Attributes:
        places: Number of places that lie side by side in a plane.
        readers: The calls that read it, by index.
        is_walked: Whether a call other than a product in planes reads it faster than before.
    """

    places: int
    readers: Mapping[int, KernelCall]
    is_walked: bool


class _Forming:
    """A plan under construction; None where a copy has been dropped."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.calls: list[KernelCall | None] = list(plan.calls)
        self.buffers = dict(plan.buffers)
        self._kept = {view.buffer for view in plan.output_views.values()}
        self._reads, self._writes = readers_and_writers(plan.calls)

    def turn(self, index: int, product: _Rows) -> None:
        """Replace a product of rows by one in planes if its operand is a copy of planes, or its readers want planes."""
        x, weight, out = product.x, product.weight, product.out
        movable = self._is_whole(out) and self._writes[out.buffer] == {index}
        result, source = self._result(out) if movable else None, self._uncopied(index, x)
        if source is not None and (
            source.planes.buffer == out.buffer or result is not None and source.planes.shape[2] != result.places
        ):
            source = None
        few = keeps_in_registers(weight)
        one_sided = not few and _activates(product)  # a product by cuBLASLt may have planes on one side only
        if source is not None and (result is not None or one_sided):
            operand = source.planes
        elif source is None and result is not None and one_sided and result.is_walked:
            operand = _in_rows(x, result.places)
        else:
            return
        target = _in_rows(out, operand.shape[2])
        if result is not None:
            target = replace(target, strides=contiguous_strides(target.shape))
        aligned = _is_aligned(target) and (source is None or _is_aligned(operand))
        if not few and not aligned:
            return
        self.calls[index] = _product(self._at(index), operand, weight, product.bias, target)
        if source is not None:
            self.calls[source.copy] = None
            self._reads[operand.buffer] = self._reads[operand.buffer] - {source.copy} | {index}
            del self.buffers[x.buffer]
        if result is not None:
            self.buffers[out.buffer] = replace(self.buffers[out.buffer], alloc_shape=target.shape)
            for at, reader in result.readers.items():
                self.calls[at] = reader

    def _is_whole(self, view: View) -> bool:
        """Whether a view is row-major and covers a whole buffer that lives within a run."""
        buffer = self.buffers[view.buffer]
        is_inner = buffer.kind == "arena" and view.buffer not in self._kept
        return is_inner and view.is_contiguous and view.offset == 0 and numel(buffer.alloc_shape) == view.numel

    def _uncopied(self, index: int, rows: View) -> _Source | None:
        """The planes that the rows of the product at `index` are copied from.

        None unless the product is the only reader of the copy, and could as well read the planes.
        """
        writers = self._writes.get(rows.buffer, set())
        if not self._is_whole(rows) or len(writers) != 1 or self._reads[rows.buffer] != {index}:
            return None
        (at,) = writers
        copy = self.calls[at]
        if copy is None or not is_copy(copy) or not self._is_whole(copy.outputs[0]):
            return None
        source, channels = copy.inputs[0], rows.shape[1]
        if source.dtype != rows.dtype or source.shape[-1] != channels or channels == 1:
            return None
        sizes, (steps,) = collapse(source.shape[:-1], source.strides[:-1])
        overwritten = any(at < writer < index for writer in self._writes.get(source.buffer, ()))
        if not 0 < len(sizes) <= 2 or steps[-1] != 1 or overwritten:
            return None
        if sizes[-1] < _FEWEST_PLACES or source.strides[-1] < sizes[-1]:
            return None
        images, stride = (sizes[0], steps[0]) if len(sizes) == 2 else (1, sizes[0] * channels)
        shape, strides = (images, channels, sizes[-1]), (stride, source.strides[-1], 1)
        return _Source(at, replace(source, shape=shape, strides=strides))

    def _result(self, rows: View) -> _Result | None:
        """The readers of a product's result [b · s, n], reading it from planes [b, n, s].

        None unless one of them walks it faster there, and none slower.
        """
        reads = [
            (at, view)
            for at in sorted(self._reads.get(rows.buffer, ()))
            for view in self._at(at).inputs
            if view.buffer == rows.buffer
        ]
        counts = {_places(view, rows.shape[1]) for _, view in reads}
        places = counts.pop() if len(counts) == 1 else 0
        if places < _FEWEST_PLACES or rows.shape[0] % places:
            return None
        source = _in_rows(rows, places)
        target = replace(source, strides=contiguous_strides(source.shape))
        readers: dict[int, KernelCall] = {}
        gains = set()
        for at, view in reads:
            moved, reader = moved_view(view, source, target), self._at(at)
            if moved is None or _inner_step(moved) != 1:
                return None
            if _inner_step(view) != 1:
                gains.add(reader.kernel)
            before = readers.get(at, reader)
            inputs = tuple(moved if each == view else each for each in before.inputs)
            readers[at] = replace(before, inputs=inputs)
        fits = all(_takes(self._at(at), reader) for at, reader in readers.items())
        return _Result(places, readers, gains != {PLANE_PRODUCT}) if gains and fits else None

    def _at(self, index: int) -> KernelCall:
        call = self.calls[index]
        assert call is not None
        return call


def _product(call: KernelCall, x: View, weight: View, bias: Sequence[View], out: View) -> KernelCall:
    params = {"activation": call.params.get("activation", "none")}
    return replace(call, kernel=PLANE_PRODUCT, source="", inputs=(x, weight, *bias), outputs=(out,), params=params)


def _takes(before: KernelCall, after: KernelCall) -> bool:
    """Whether a reader of a result is none of images, and can read it with other strides."""
    if before.kernel == PLANE_PRODUCT:
        return True
    return (is_elementwise(before) or classify(before) in _READERS) and takes_as_declared(before, after)


def _activates(product: _Rows) -> bool:
    """Whether cuBLASLt can apply a product's activation."""
    return product.activation == "none" or cublas_activates(product.activation, product.out.dtype)


def _in_rows(rows: View, places: int) -> View:
    """Rows [b · s, c] as [b, c, s], where they lie.

    Args:
        places: The size s.
    """
    count, channels = rows.shape
    step, inner = rows.strides
    return replace(rows, shape=(count // places, channels, places), strides=(places * step, inner, step))


def _image_planes(image: View) -> View | None:
    """An image [b, c, h, w] as [b, c, h · w]; None unless the pixels of a channel lie side by side."""
    planes = image.reshape((*image.shape[:2], numel(image.shape[2:])))
    return planes if planes is not None and planes.strides[2] == 1 else None


def _places(view: View, channels: int) -> int:
    """The size s of the planes [c, s] that a view of rows [b · s, c] walks one after the other; 0 if it does not.

    These are its last dimensions, as far as each is a step through whole rows.

    Args:
        channels: The size c.
    """
    reached = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size == 1:
            continue
        if stride != channels * reached:
            break
        reached *= size
    return reached if reached > 1 else 0


def _inner_step(view: View) -> int:
    """The stride of the last dimension of more than one element."""
    return next((stride for size, stride in zip(view.shape[::-1], view.strides[::-1], strict=True) if size > 1), 1)


def _is_aligned(view: View) -> bool:
    """Whether each stretch of neighbouring elements of a tensor begins at a multiple of 16 bytes."""
    width = max(1, 16 // itemsize(view.dtype))
    return not any(step % width for step in (view.offset, *(stride for stride in view.strides if stride != 1)))
