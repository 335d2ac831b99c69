"""Epilogues: element-wise ops that the kernel of a convolution applies to its result, as data and as C text.

The operands of an epilogue are the call's last inputs, views [N, C, H, W] whose strides are 0 where they repeat: a
single element, one for each channel, or an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cuda_compiler.rules.channel_packs import channels_last
from cuda_compiler.specialization.c_text import float_text, function_text
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import ELEMENTWISE, as_float32
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

EPILOGUE = "epilogue"  # the parameter of a call that holds its `Epilogue`
RESULT = "value"  # the name of the convolution's own result

Argument: TypeAlias = str | float


@dataclass(frozen=True)
class Step:
    """An element-wise op of an epilogue.

    Attributes:
        name: Name of the step's result.
        op: Name of the op.
        arguments: The op's operands in order: numbers, and names of values.
        attrs: Name and value of each of the op's attributes.
    """

    name: str
    op: str
    arguments: tuple[Argument, ...]
    attrs: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Epilogue:
    """Element-wise ops in order, the last of which makes the final result.

    Attributes:
        operands: Names of the operands, in the order of the call's last inputs.
    """

    steps: tuple[Step, ...] = ()
    operands: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """The name of the final result."""
        return self.steps[-1].name if self.steps else RESULT

    def step(self, op: str, arguments: Sequence[Argument], attrs: Mapping[str, float]) -> Step:
        """A new step, with a name that no other has, to be put among them."""
        return Step(f"made{len(self.steps)}", op, tuple(arguments), tuple(attrs.items()))


def epilogue_of(call: KernelCall) -> Epilogue | None:
    """The epilogue of a call; None if it has none."""
    epilogue = call.params.get(EPILOGUE)
    assert epilogue is None or isinstance(epilogue, Epilogue)
    return epilogue


def operands_of(call: KernelCall) -> dict[str, View]:
    """The operands of a call's epilogue by name, as [N, C, H, W]; empty if it has no epilogue."""
    epilogue = epilogue_of(call)
    names = epilogue.operands if epilogue is not None else ()
    return dict(zip(names, call.inputs[len(call.inputs) - len(names) :], strict=True))


def kernel_options(call: KernelCall, inputs: Mapping[str, View | None] | None = None) -> dict[str, Any]:
    """The arguments of `Specializer.kernel` for a call with an epilogue; none for one without.

    Args:
        inputs: The kernel's other inputs by name; None means those of its declaration.
    """
    epilogue = epilogue_of(call)
    if epilogue is None:
        return {}
    operands = {name: channels_last(view) for name, view in operands_of(call).items()}
    out = call.outputs[0]
    text = _text(epilogue, out.shape[3], rounds=out.dtype in HALF_DTYPES)
    own = KERNELS[call.kernel].inputs_of(call) if inputs is None else inputs
    return {"inputs": {**own, **operands}, "definitions": text}


def _text(epilogue: Epilogue, columns: int, rounds: bool) -> str:
    """The C definition of `Epilogue`, which a kernel applies to its results, and of `EPILOGUE`, the kernel's own one.

    Args:
        columns: Width of the images.
        rounds: Whether the final result is rounded to 16 bits.
    """
    functions: list[str] = []
    lines: list[str] = []
    for number, step in enumerate(epilogue.steps):
        functions.append(function_text(f"op{number}", ELEMENTWISE[step.op], dict(step.attrs), rounds))
        arguments = ", ".join(x if isinstance(x, str) else float_text(as_float32(x)) for x in step.arguments)
        lines.append(f"            const float {step.name} = op{number}({arguments});\n")
    names = epilogue.operands
    titles = {name: name[0].upper() + name[1:] for name in names}
    members = "".join(f"    const {titles[name]}::type *{name};\n" for name in names)
    loads = "".join(
        f"        float {name}s[count];\n"
        f"        load_at<{titles[name]}, {columns}>({name}s, {name}, image, channel, pixel);\n"
        for name in names
    )
    own = "".join(f"            const float {name} = {name}s[i];\n" for name in names)
    return (
        template_text("conv/epilogue.cuh")
        + "".join(functions)
        + f"""struct Epilogue {{
{members}    template <int count>
    __device__ __forceinline__ void apply(
        float (&values)[count], unsigned image, unsigned channel, unsigned pixel
    ) const {{
{loads}#pragma unroll
        for (int i = 0; i < count; i++) {{
            const float {RESULT} = values[i];
{own}{"".join(lines)}            values[i] = {epilogue.result};
        }}
    }}
}};
#define EPILOGUE Epilogue{{{", ".join(names)}}}
"""
    )
