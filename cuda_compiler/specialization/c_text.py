"""C text that is compiled into a kernel: types, literals, offsets, operand structs, parameters, the signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuda_compiler.specialization.activations import op_of
from cuda_compiler.specialization.sizes import WIDEST_VECTOR, Size3, vector_width
from npu_compiler.graph.dtypes import HALF_DTYPES, as_int32
from npu_compiler.program.elementwise import Elementwise
from npu_compiler.program.kernels import KernelCall, KernelDecl
from npu_compiler.program.views import View, collapse

TYPES = {
    "float32": "float",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "int",
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
}


def specialized(
    call: KernelCall,
    decl: KernelDecl | None,
    inputs: Mapping[str, View | None],
    outputs: Mapping[str, View | None],
    constants: Mapping[str, bool | int | float],
) -> str:
    """The C definitions that a template refers to: a struct per operand, the call's parameters, further constants."""
    return "\n".join(
        [
            *(_operand_struct(name, view) for name, view in (*inputs.items(), *outputs.items())),
            _parameters(
                decl.fields if decl is not None else {},
                call.params,
                rounds=all(view is None or view.dtype in HALF_DTYPES for view in outputs.values()),
            ),
            *(f"constexpr {_typed(name, value)};\n" for name, value in constants.items()),
        ]
    )


def index_type(views: list[View]) -> str:
    """The C declaration of `index_t`, wide enough to index every element of every view."""
    extent = max((_extent(view) for view in views), default=0)
    return f"typedef {'unsigned' if extent < 2**31 else 'unsigned long long'} index_t;\n"


def _extent(view: View) -> int:
    return max(view.span, view.numel)


def offset_text(view: View, index: str) -> str:
    """A C expression for the offset in memory of the element of a view with row-major number `index`."""
    if view.numel == 0:
        return "0"
    sizes, (strides,) = collapse(view.shape, view.strides)
    terms = []
    behind = 1
    for dim in range(len(sizes) - 1, -1, -1):
        place = index if behind == 1 else f"{index} / {behind}u"
        place = place if dim == 0 else f"{place} % {sizes[dim]}u"
        behind *= sizes[dim]
        if strides[dim]:
            terms.append(place if strides[dim] == 1 else f"{place} * {strides[dim]}u")
    return " + ".join(terms) or "0"


def float_text(value: float) -> str:
    """An exact float32 literal, valid in a `constexpr` for infinities and NaN too."""
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if not np.isfinite(number):
        return f"__builtin_bit_cast(float, {int(number.view(np.uint32)):#x}u)"
    return f"{number!s}f"


def int_text(value: int) -> str:
    """A C literal of an int32; for the least one, which has no literal, an expression."""
    value = as_int32(value)
    return f"({value + 1} - 1)" if value == -(2**31) else str(value)


def _typed(name: str, value: bool | int | float) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    if isinstance(value, float):
        return f"float {name} = {float_text(value)}"
    return f"int {name} = {int_text(value)}"


def geometry_text(name: str, view: View) -> str:
    """The C definitions for an operand of which a kernel needs the shape and the dtype, but no element."""
    return _operand_struct(name, view) + f"constexpr const {TYPES[view.dtype]} *{name} = nullptr;\n"


def _operand_struct(name: str, view: View | None) -> str:
    title = name[0].upper() + name[1:]
    if view is None:
        return f"""struct {title} {{
    using type = float;
    static constexpr bool present = false;
    static constexpr bool contiguous = true;
    static constexpr int rank = 0;
    static constexpr int vector = {WIDEST_VECTOR};
    __device__ static constexpr index_t size(int) {{ return 1; }}
    __device__ static constexpr index_t stride(int) {{ return 0; }}
    __device__ static index_t offset(index_t) {{ return 0; }}
}};
constexpr const float *{name} = nullptr;
"""
    sizes, strides = (", ".join(f"{x}u" for x in xs) or "1u" for xs in (view.shape, view.strides))
    return f"""struct {title} {{
    using type = {TYPES[view.dtype]};
    static constexpr bool present = true;
    static constexpr bool contiguous = {str(view.is_contiguous).lower()};
    static constexpr int rank = {view.rank};
    static constexpr int vector = {vector_width(view)};
    static constexpr index_t numel = {view.numel}u;
    __device__ static constexpr index_t size(int dim) {{ constexpr index_t x[] = {{{sizes}}}; return x[dim]; }}
    __device__ static constexpr index_t stride(int dim) {{ constexpr index_t x[] = {{{strides}}}; return x[dim]; }}
    __device__ static index_t offset(index_t index) {{ return {offset_text(view, "index")}; }}
}};
"""


# Parameters that name an activation, and the functions that a template finds for them.
_FUNCTIONS = {"activation": "activate", "gate": "gate"}


# What stands for an element-wise op where its result is rounded to 16 bits: op → C expression.
_NEAR = {
    "sigmoid": "near_sigmoid(a)",
    "silu": "a * near_sigmoid(a)",
    "silu_mul": "a * near_sigmoid(a) * b",
    "clamped_silu_mul": "(a > limit ? limit : a) * near_sigmoid(alpha * (a > limit ? limit : a))"
    " * ((b < -limit ? -limit : b > limit ? limit : b) + 1)",
    "gelu_erf": "near_gelu(a)",
    "gelu_mul": "near_gelu(a) * b",
    "gelu_tanh": "near_gelu_tanh(a)",
}


# What stands for an element-wise op in every kernel: compilers do not turn a power into products by themselves.
_PRODUCTS = {"pow": "b == 2.0f ? a * a : b == 3.0f ? a * a * a : pow(a, b)"}


def expression(op: Elementwise, rounds: bool) -> str:
    """The C expression of an element-wise op, faster and less exact if the result is rounded to 16 bits.

    Args:
        rounds: Whether the result is rounded to 16 bits.
    """
    expr = _PRODUCTS.get(op.name, op.expr)
    return _NEAR.get(op.name, expr) if rounds else expr


def function_text(name: str, op: Elementwise, attrs: Mapping[str, float], rounds: bool) -> str:
    """The C definition of an element-wise op of floats as a device function.

    Args:
        rounds: As in `expression`.
    """
    named = "".join(f"const float {attr} = {float_text(value)}; " for attr, value in attrs.items())
    operands = ", ".join(f"float {letter}" for letter, _ in zip("abc", op.operands, strict=False))
    return f"__device__ __forceinline__ float {name}({operands}) {{ {named}return {expression(op, rounds)}; }}\n"


def _parameters(fields: Mapping[str, str], params: Mapping[str, Any], rounds: bool) -> str:
    """The C definitions of a call's parameters, in namespace `param`, and of its activations as functions.

    A declared parameter that the call lacks has none: its rule left it out, and the template does not mention it.

    Args:
        rounds: Whether the results are rounded to 16 bits.
    """
    given = [(name, fmt) for name, fmt in fields.items() if fmt == "?" or name in params]
    lines = [line for name, fmt in given for line in _parameter(name, fmt, params)]
    text = "namespace param {\n" + "".join(f"{line}\n" for line in lines) + "}\n"
    for param, function in _FUNCTIONS.items():
        if param in params:
            op, attrs = op_of(params[param])
            text += function_text(function, op, attrs, rounds)
            text += f"constexpr int {param}_operands = {len(op.operands)};\n"
    return text


# The C type of a parameter, and how its values are written, by the last letter of its format.
_LITERALS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "f": ("float", float_text),
    "i": ("int", int_text),
    "I": ("unsigned", lambda value: f"{int(value)}u"),
}


def _parameter(name: str, fmt: str, params: Mapping[str, Any]) -> list[str]:
    if fmt == "?":
        return [f"constexpr bool {name} = {str(bool(params.get(name))).lower()};"]
    if fmt[0] == "s":
        names = fmt.split()[1:]
        kind = f"{name.capitalize()}Kind"
        return [
            f"enum class {kind} {{ {', '.join(f'{each}_' for each in names)} }};",
            *([f"constexpr {kind} {name} = {kind}::{params[name]}_;"] if params[name] in names else []),
        ]
    kind, text = _LITERALS[fmt[-1]]
    value = params[name]
    if isinstance(value, (list, tuple)):
        items = ", ".join(text(each) for each in value)
        return [f"__device__ constexpr {kind} {name}(int i) {{ constexpr {kind} x[] = {{{items}}}; return x[i]; }}"]
    return [f"constexpr {kind} {name} = {text(value)};"]


def shared_buffers(inputs: Mapping[str, View | None], outputs: Mapping[str, View | None]) -> set[str]:
    """Buffers that are both read and written, or written under two names."""
    written = [view.buffer for view in outputs.values() if view is not None]
    read = {view.buffer for view in inputs.values() if view is not None}
    return {name for name in written if name in read or written.count(name) > 1}


def kernel_signature(
    inputs: Mapping[str, View | None],
    outputs: Mapping[str, View | None],
    shared: set[str],
    block: Size3,
    min_blocks: int,
    cluster: int,
    maps: Sequence[str],
) -> str:
    """The C macros with which a template begins its kernel.

    A kernel that begins with `KERNEL` waits for the preceding kernel at once. One that begins with `WAITING_KERNEL`
    calls `begin_in_turn` when it needs that kernel's results, and has parameters for tensor maps.
    """
    arguments: dict[str, str] = {}
    for side, const in ((inputs, "const "), (outputs, "")):
        for name, view in side.items():
            if view is not None:
                alone = "" if view.buffer in shared else "__restrict__ "
                arguments[name] = f"{const}{TYPES[view.dtype]} *{alone}{name}"
    threads = block[0] * block[1] * block[2]
    bounds = f"{threads}" if min_blocks == 1 else f"{threads}, {min_blocks}"
    attributes = f"CLUSTER({cluster}) " if cluster > 1 else ""
    attributes += f"__launch_bounds__({bounds})"
    declared = ", ".join(arguments.values())
    mapped = "".join(f", const __grid_constant__ TensorMap {name}_map" for name in maps)
    body = f"__device__ __forceinline__ void name##_body({declared})"
    return f"""constexpr int THREADS = {threads};
#define WAITING_KERNEL(name) extern "C" __global__ void {attributes} name({declared}{mapped})
#define KERNEL(name) {body}; \\
    WAITING_KERNEL(name) {{ begin_in_turn(); name##_body({", ".join(arguments)}); }} \\
    {body}
"""
