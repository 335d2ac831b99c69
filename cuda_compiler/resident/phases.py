"""The phases of a resident kernel, and the mail between them: what one makes goes to the next ahead of the barrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from cuda_compiler.specialization.c_text import TYPES, specialized
from cuda_compiler.specialization.template_files import kernel_text
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

PATIENCE = 1000  # nanoseconds; looking for what is not there yet slows down those who still make it
_LONG_BYTES = 16 << 20  # of a weight, from which on it is a long one


@dataclass(frozen=True)
class Stream:
    """How the blocks share a product's weight; the members of `Stream` in `resident.cuh`."""

    units: int
    unit_rows: int
    own_rows: int
    rows: int
    row_bytes: int
    chunk_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Of all rows, and of their partners."""
        return self.units * self.unit_rows * self.row_bytes

    @property
    def is_long(self) -> bool:
        """Whether blocks are busy with it for so long that they want more slots, and end at different times."""
        return self.weight_bytes > _LONG_BYTES

    def __str__(self) -> str:
        return f"{{{', '.join(str(getattr(self, member.name)) for member in fields(self))}}}"


@dataclass(frozen=True)
class Phase:
    """What all blocks do between two barriers.

    Attributes:
        call: The op-level call whose parameters are compiled in.
        file, function: The template, and what of it.
        inputs, outputs: Operand name → view, None for an absent one.
        constants: Compiled in besides the parameters.
        scratch: Bytes of shared memory that it uses; its `Scratch` is not larger.
        early: Operands that are read ahead, so no earlier phase of the same kernel may write them.
        early_bytes: Bytes of shared memory for what of these is kept; its `Early` is not larger.
        letters: How many letters of 8 bytes its blocks send each other.
        stream: How `weight` is shared out, for phases that stream one.
    """

    call: KernelCall
    file: str
    function: str
    inputs: Mapping[str, View | None]
    outputs: Mapping[str, View | None]
    constants: Mapping[str, bool | int | float]
    scratch: int
    early: tuple[str, ...] = ()
    early_bytes: int = 0
    letters: int = 0
    stream: Stream | None = None

    @property
    def operands(self) -> dict[str, View]:
        return {name: view for name, view in (*self.inputs.items(), *self.outputs.items()) if view is not None}

    def text(self) -> str:
        """The phase's code; phases of equal text share it."""
        operands = "".join(
            f", {'const ' if name in self.inputs else ''}{TYPES[view.dtype]} *{name}"
            for name, view in self.operands.items()
        )
        function = "__device__ __forceinline__ void"
        return "\n".join(
            [
                specialized(self.call, KERNELS[self.call.kernel], self.inputs, self.outputs, self.constants),
                f"#define LOOK_AHEAD {function} look_ahead(Ahead &ahead{operands})",
                f"#define PHASE(name) {function} name(Ring &ring, Grid &grid, Ahead &ahead, char *shared{operands})",
                kernel_text(self.file, self.function),
                "#undef LOOK_AHEAD",
                "#undef PHASE\n",
            ]
        )


def with_mail(phases: Sequence[Phase]) -> tuple[list[Phase], int]:
    """The phases, with mail from one to the next where that reads it, and how many values are sent at most."""
    result, most = list(phases), 0
    for index, after in enumerate(phases[1:], 1):
        before = result[index - 1]
        out = before.outputs["out"]
        assert out is not None
        reads = ("x",) if after.stream else ("unrotated", "key_source", "value_source")
        read = [view for name in reads if (view := after.inputs[name]) is not None]
        # The other operands are read before the barrier.
        written = {view.buffer for view in before.outputs.values() if view is not None}
        others = {view.buffer for name, view in after.inputs.items() if view is not None and name not in reads}
        if written & others or not _fits_mail(out) or not all(_is_part(view, out) for view in read):
            continue
        if after.stream and not (read[0].is_contiguous and (read[0].numel, read[0].offset) == (out.numel, out.offset)):
            continue
        # Attention sends letters and renews its cache before the barrier.
        renewed = {view.buffer for name, view in after.outputs.items() if view is not None and name != "out"}
        if (before.letters and after.letters) or renewed & {view.buffer for view in before.operands.values()}:
            continue
        inputs = after.inputs if after.stream else {**after.inputs, "sent": out}
        result[index - 1] = replace(before, constants={**before.constants, "mails": True})
        constants = {**after.constants, "mailed": True}
        if before.stream and after.stream and before.stream.is_long:
            constants["patience"] = PATIENCE
        result[index] = replace(after, inputs=inputs, constants=constants)
        most = max(most, out.numel)
    return result, most


def _fits_mail(out: View) -> bool:
    """Whether the elements lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(out.strides, out.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return out.dtype in HALF_DTYPES and out.strides[-1] == 1


def _is_part(view: View, out: View) -> bool:
    """Whether a view is a part of a result that can be read eight values at a time."""
    eight = all(size == 1 or stride % 8 == 0 for size, stride in zip(view.shape[:-1], view.strides, strict=False))
    return (
        (view.buffer, view.dtype) == (out.buffer, out.dtype)
        and eight
        and view.strides[-1] == 1
        and view.shape[-1] % 16 == 0
        and (view.offset - out.offset) % 8 == 0
    )
