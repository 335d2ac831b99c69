"""Steps of an epilogue: element-wise calls behind a convolution, or before its residual, that its kernel can compute.

Behind a squeeze-and-excitation, whose kernel is declared nowhere and has neither activation nor residual, likewise.

Given:   t = x * s;  c = conv2d(u, v);  d = relu(c) ** 2 * a + t, where s has an element for each channel and a has one
Result:  d = conv2d(u, v, a, x, s), with the epilogue  x * s;  relu;  ** 2;  * a;  +
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from cuda_compiler.rules.conv import RESIDUAL_LAST
from cuda_compiler.rules.epilogues import EPILOGUE, Argument, Epilogue, Step, epilogue_of, operands_of
from cuda_compiler.specialization.activations import kernels_have, op_of
from npu_compiler.graph.dtypes import is_float
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import Shape, View


def with_step(call: KernelCall, after: KernelCall) -> KernelCall | None:
    """The convolution with an element-wise call that reads its result as the last step of its epilogue.

    None if its kernels cannot compute that.
    """
    product, out = call.outputs[0], after.outputs[0]
    own = [view for view in after.inputs if view.buffer == product.buffer]
    if product.dtype != out.dtype or not product.is_dense or not is_run(out, product.numel):
        return None
    if any(view.offset != product.offset or not is_run(view, product.numel) for view in own):
        return None
    epilogue, operands = _begun(call)
    step = _step(after, product, epilogue, operands, {product.buffer: epilogue.result})
    if step is None:
        return None
    target = replace(product, buffer=out.buffer, offset=out.offset)
    return replace(_with(call, (*epilogue.steps, step), operands), outputs=(target,), node=after.node)


def with_residual_computed(call: KernelCall, before: KernelCall) -> KernelCall | None:
    """The convolution that itself computes its residual, which is the result of the element-wise call `before`.

    None if its kernels cannot do that.
    """
    epilogue, operands = _begun(call)
    residual, made = residual_of(call), before.outputs[0]
    if residual is None or (made.dtype, made.offset) != (residual.dtype, residual.offset):
        return None
    if not residual.is_dense or not is_run(made, residual.numel):
        return None
    (name,) = [name for name, view in operands.items() if view == residual]
    del operands[name]
    step = _step(before, call.outputs[0], epilogue, operands, {})
    if step is None:
        return None
    steps = [replace(s, arguments=tuple(step.name if x == name else x for x in s.arguments)) for s in epilogue.steps]
    return _with(call, (step, *steps), operands)


def residual_of(call: KernelCall) -> View | None:
    """The image that is added to a convolution's result, or is read by its epilogue; None if there is none."""
    residual = KERNELS[call.kernel].inputs_of(call)["residual"]
    views = [residual] if residual is not None else operands_of(call).values()
    return next((view for view in views if _is_laid_as(view, call.outputs[0])), None)


def is_run(view: View, numel: int) -> bool:
    """Whether the view's elements, in row-major order, are `numel` consecutive elements of memory."""
    return view.is_contiguous and view.numel == numel


def _begun(call: KernelCall) -> tuple[Epilogue, dict[str, View]]:
    """The epilogue of a convolution and its operands by name, with the activation and the residual as its steps."""
    if (epilogue := epilogue_of(call)) is not None:
        return epilogue, operands_of(call)
    if call.kernel not in KERNELS:
        return Epilogue(), {}
    residual, activation = KERNELS[call.kernel].inputs_of(call)["residual"], call.params["activation"]
    operands = {} if residual is None else {"operand0": residual}
    epilogue = Epilogue()
    for is_last in (False, True):
        if residual is not None and (RESIDUAL_LAST in call.params) == is_last:
            epilogue = Epilogue((*epilogue.steps, epilogue.step("add", (epilogue.result, "operand0"), {"alpha": 1.0})))
        if activation != "none" and not is_last:
            op, attrs = op_of(activation)
            epilogue = Epilogue((*epilogue.steps, epilogue.step(op.name, (epilogue.result,), attrs)))
    return epilogue, operands


def _with(call: KernelCall, steps: tuple[Step, ...], operands: Mapping[str, View]) -> KernelCall:
    """The convolution with these steps and operands as its epilogue, and without any other."""
    own = len(call.inputs) - len(operands_of(call)) - int(call.params.get("has_residual", 0))
    params = {name: value for name, value in call.params.items() if name != RESIDUAL_LAST}
    params |= {"activation": "none", "has_residual": 0} if call.kernel in KERNELS else {}
    params[EPILOGUE] = Epilogue(steps, tuple(operands))
    return replace(call, inputs=(*call.inputs[:own], *operands.values()), params=params)


def _step(
    call: KernelCall, out: View, epilogue: Epilogue, operands: dict[str, View], values: Mapping[str, str]
) -> Step | None:
    """An element-wise call as a step of an epilogue; None if kernels lack its op or cannot read its operands.

    Args:
        out: The convolution's result.
        operands: The epilogue's operands by name, to which those of the call are added.
        values: Names of the values in buffers that the epilogue need not read.
    """
    decl = elementwise_kernel(call)
    if decl is None or not kernels_have(decl.op):
        return None
    arguments: list[Argument] = []
    views = iter(call.inputs)
    for scalar in call.params["scalars"]:
        view = next(views) if scalar is None else None
        if view is None:
            arguments.append(float(scalar))
        elif view.buffer in values:
            arguments.append(values[view.buffer])
        elif (operand := _spread(view, out)) is None:
            return None
        else:
            name = next((name for name, other in operands.items() if other == operand), None)
            name = name or next(name for number in count() if (name := f"operand{number}") not in operands)
            operands[name] = operand
            arguments.append(name)
    if sum(_repeats_none(view) for view in operands.values()) > 1:
        return None
    return epilogue.step(decl.op.name, arguments, {name: float(call.params[name]) for name in decl.op.attrs})


def _spread(view: View, out: View) -> View | None:
    """An operand of an element-wise call over `out`, which walks its memory in order, in the shape of `out`.

    None unless it is one element of floats, one for each channel, or an image that lies in memory as `out` does.
    """
    order = sorted(range(out.rank), key=lambda dim: (-out.strides[dim], out.shape[dim] > 1))
    spread = view.reshape(tuple(out.shape[dim] for dim in order)) if is_float(view.dtype) else None
    if spread is None:
        return None
    strides = [0] * out.rank
    for dim, size, stride in zip(order, spread.shape, spread.strides, strict=True):
        strides[dim] = stride if size > 1 else 0
    operand = replace(spread, shape=out.shape, strides=tuple(strides))
    is_vector = not any(stride for dim, stride in enumerate(strides) if dim != 1)
    return operand if is_vector or operand.dtype == out.dtype and _is_laid_as(operand, out) else None


def _steps_between(view: View) -> Shape:
    """The strides of the dimensions with more than one element."""
    return tuple(stride for size, stride in zip(view.shape, view.strides, strict=True) if size > 1)


def _is_laid_as(view: View, out: View) -> bool:
    return _steps_between(view) == _steps_between(out) and view.dtype == out.dtype


def _repeats_none(view: View) -> bool:
    """Whether an operand has an element for each one of the result: whether it is an image."""
    return 0 not in _steps_between(view)
