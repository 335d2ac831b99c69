"""The table of element-wise ops, as data that every target shares; `ops/elementwise.py` fills it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.graph.dtypes import as_int32
from npu_compiler.program.functions import Function, called_functions
from npu_compiler.program.kernels import KERNELS, Family, Grid, KernelCall, KernelDecl
from npu_compiler.program.operands import parse_operands
from npu_compiler.program.views import collapse

_OPERATIONS = re.compile(r"[a-z_]\w*\(|[-+*/?<>&|^~%]|[=!]=")


@dataclass(frozen=True)
class Elementwise:
    """An element-wise op.

    Attributes:
        operands: The schema's argument names that may be tensors.
        expr: The result in C, over floats `a`, `b`, `c` (the operands in order) and the attributes. Besides C's math
            library a target has `floor_div(a, b)` and `floor_mod(a, b)`, torch's floor division and remainder, and the
            functions of `program/functions.py`.
        integer: The result in C over ints, for when no operand is a float; None if ints become floats first. Besides
            operators a target has `int_pow` and, with quotient 0 and remainder `a` for a divisor of 0, `trunc_div`,
            `trunc_mod`, `floor_div` and `floor_mod`.
        torch: Dotted torch function, called with the operands and the attributes as keywords.
        attrs: Attribute → default.
        masks: Whether a number such as -1e9 stands for minus infinity (see `dtypes.saturate`), since the op passes it
            on or adds it; ops that would scale by it must not.
        bytes: Whether its operands may be stored as int8 and uint8 too.
    """

    name: str
    operands: tuple[str, ...]
    expr: str
    integer: str | None
    torch: str
    attrs: Mapping[str, float | bool] = field(default_factory=dict)
    masks: bool = False
    bytes: bool = False

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions of `program/functions.py` that `expr` needs."""
        return called_functions(self.expr)

    @property
    def operations(self) -> int:
        """Work per element: the number of operators and function calls in `expr`, at least one."""
        return max(1, len(_OPERATIONS.findall(self.expr)))


ELEMENTWISE: dict[str, Elementwise] = {}

# The activations that products and convolutions apply to their results: name → element-wise op. The native CPU kernels
# number them in this order, and take the first two for limits of their argument.
ACTIVATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "gelu": "gelu_erf",
    "gelu_tanh": "gelu_tanh",
    "silu": "silu",
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
    "sigmoid": "sigmoid",
}
# The element-wise ops that multiply an activated operand with another one: op → name of the activation.
GATES = {"silu_mul": "silu", "gelu_mul": "gelu", "gelu_tanh_mul": "gelu_tanh"}
ACTIVATION = f"s none {' '.join(ACTIVATIONS)}"  # the format of the parameter that chooses one of them
ACTIVATION_OF = {op: name for name, op in ACTIVATIONS.items()}


def activation_rule(op: str) -> Callable[[Mapping[str, Any]], str | None] | None:
    """The `Op.activation` of an element-wise op: a function from attributes to its name in `ACTIVATIONS`.

    None if the op is no activation.
    """
    if op == "hardtanh":
        return lambda attrs: "relu6" if (attrs.get("min_val", -1), attrs.get("max_val", 1)) == (0, 6) else None
    name = ACTIVATION_OF.get(op)
    return None if name is None else lambda attrs: name


@dataclass(frozen=True)
class ElementwiseKernel(KernelDecl):
    """The kernel of an element-wise op in one of its four forms.

    Operands are packed or strided, and all of them are tensors or some are numbers.

    Attributes:
        op: The element-wise op.
        is_strided: Whether operands are walked by their strides; else all of them are packed.
        function: The name of the shader function, which serves both tensors and numbers.
    """

    op: Elementwise = field(kw_only=True)
    is_strided: bool = field(kw_only=True)
    function: str = field(kw_only=True)

    def __str__(self) -> str:
        inputs, outputs = (" ".join(map(str, operands)) for operands in (self.inputs, self.outputs))
        return f"{self.name}: {inputs} -> {outputs}, scalars, {self.op.expr}"

    def parameters(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `fields` for a call's parameters; the value of an operand that is no tensor is a number."""
        scalars = [0 if x is None else x for x in params["scalars"]]
        scalars += [0] * (3 - len(scalars))
        present = {f"has_{name}": x is None for name, x in zip("abc", params["scalars"], strict=False)}
        attrs = [as_float32(params[name]) for name in self.op.attrs]
        return {
            "has_b": False,
            "has_c": False,
            **present,
            "scalars": [as_float32(x) for x in scalars],
            "int_scalars": [as_int32(x) for x in scalars],
            "attrs": attrs + [0.0] * (3 - len(attrs)),
        }

    def parameter_problem(self, call: KernelCall) -> str | None:
        scalars, attrs = call.params.get("scalars"), {name: call.params.get(name) for name in self.op.attrs}
        if call.params.keys() != {"scalars", *attrs} or not isinstance(scalars, (list, tuple)):
            return f"its parameters are {', '.join(call.params)}, not scalars{''.join(f', {name}' for name in attrs)}"
        numbers = [x for x in scalars if x is not None] + list(attrs.values())
        if not all(isinstance(x, (bool, int, float)) for x in numbers):
            return f"its parameters {dict(call.params)!r:.80} are not all numbers"
        if len(scalars) != len(self.op.operands) or scalars.count(None) != len(call.inputs):
            return f"its {len(call.inputs)} inputs and its scalars {scalars!r:.80} are not its operands"
        return None

    def _walked_rank(self, call: KernelCall) -> int:
        views = (*call.inputs, *call.outputs)
        return len(collapse(views[0].shape, *(view.strides for view in views))[0])


ELEMENTWISE_KERNELS: dict[str, ElementwiseKernel] = {}


def add_elementwise(op: Elementwise) -> None:
    """Enter an op into the table, and declare the kernels of its four forms."""
    ELEMENTWISE[op.name] = op
    for is_strided in (False, True):
        kind = f"{':fibuc' * op.bytes}{'[*s]' if is_strided else '[.*s]'}"
        inputs, outputs = parse_operands(f"a?{kind} b?{kind} c?{kind} -> out{kind}")
        for has_scalars in (False, True):
            name = elementwise_kernel_name(op.name, has_scalars=has_scalars, is_strided=is_strided)
            ELEMENTWISE_KERNELS[name] = ElementwiseKernel(
                name,
                Family.ELEMENTWISE,
                inputs=inputs,
                outputs=outputs,
                fields={"scalars": "3f", "int_scalars": "3i", "attrs": "3f"},
                grid=Grid.PLANES if is_strided else Grid.QUADS,
                counted=True,
                op=op,
                is_strided=is_strided,
                function=elementwise_kernel_name(op.name, has_scalars=False, is_strided=is_strided),
            )


def elementwise_kernel_name(op: str, *, has_scalars: bool, is_strided: bool) -> str:
    return f"{op}{'_scalar' * has_scalars}{'_broadcast' * is_strided}_kernel"


def elementwise_kernel(call: KernelCall) -> ElementwiseKernel | None:
    """The declaration of a call's kernel if it is element-wise, else None.

    Each output element of such a kernel depends only on the inputs' elements at the same place.
    """
    return ELEMENTWISE_KERNELS.get(call.kernel)


def declaration(call: KernelCall) -> KernelDecl:
    """The declaration of an op-level call's kernel.

    Raises:
        KeyError: no op-level kernel has that name; a target has named or generated it.
    """
    return ELEMENTWISE_KERNELS.get(call.kernel) or KERNELS[call.kernel]


def as_float32(value: float) -> float:
    """The nearest float32; infinite beyond its range, as in a comparison of float32 values with this one."""
    return ctypes.c_float(value).value
