"""The phases of a resident kernel as code and operands; a phase is the work of all blocks between two barriers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from cuda_compiler.specialization.c_text import TYPES, specialized
from cuda_compiler.specialization.template_files import kernel_text
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

BACKOFF_NS = 1000  # polling for what is not there yet slows down the blocks that are still writing it
IN_FLIGHT = 2  # slots being copied; the ring has as many at least, because a product holds two at a time
MOST_IN_FLIGHT = 4  # while a block goes through a long weight
_LONG_BYTES = 16 << 20  # of a weight, from which on it is a long one


def is_long(weight_bytes: int) -> bool:
    """Whether a weight is so large that more slots in flight pay, and that blocks finish far apart."""
    return weight_bytes > _LONG_BYTES


@dataclass(frozen=True)
class Side:
    """The scales or offsets of the rows of a quantized weight, as they are streamed.

    The members are those of the C struct `Side` in `tables.cuh`.
    """

    row_bytes: int = 0
    chunk_bytes: int = 0
    part_bytes: int = 0
    place: int = 0
    stride: int = 0

    def __str__(self) -> str:
        return _initializer(self)


@dataclass(frozen=True)
class Stream:
    """The division of a product's weight among the blocks, which stream it; the C struct `Stream` in `tables.cuh`.

    Attributes:
        expert_rows: Number of rows from an expert's first row to the next one's; 0: the weight has no experts.
        expert_units: Number of units that each chosen expert has; 0: units are not divided among experts.
        row_experts: Number of chosen experts whose rows, one chunk each, make a row; 1: rows are whole.
    """

    units: int
    unit_rows: int
    own_rows: int
    rows: int
    row_bytes: int
    chunk_bytes: int
    copied_rows: int = 1
    side_rows: int = 1
    units_together: int = 2
    in_flight: int = IN_FLIGHT
    most_in_flight: int = MOST_IN_FLIGHT
    sides: tuple[Side, ...] = ()
    expert_rows: int = 0
    expert_units: int = 0
    row_experts: int = 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole weight; of a gated product, of both halves; of experts' weights, of the chosen ones."""
        return self.units * self.unit_rows * self.row_bytes * self.row_experts

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot of the ring needs for a unit's rows, or for their codes, scales and offsets."""
        ends = [side.place + -(-self.unit_rows // self.side_rows) * side.stride for side in self.sides]
        return max(ends, default=self.unit_rows * self.chunk_bytes)

    def __str__(self) -> str:
        return _initializer(self)


def _initializer(struct: Side | Stream) -> str:
    """The C initializer of a struct, with its members in order."""
    members = (getattr(struct, member.name) for member in fields(struct))
    texts = (f"{{{', '.join(map(str, each))}}}" if isinstance(each, tuple) else str(each) for each in members)
    return f"{{{', '.join(texts)}}}"


@dataclass(frozen=True)
class Phase:
    """The work of all blocks between two grid barriers, as a template with operands and constants.

    Attributes:
        call: The op-level call whose parameters are compiled in.
        file, function: The template file, and the function in it.
        inputs, outputs: Operand name → view; None for an absent operand.
        constants: Constants that are compiled in besides the call's parameters.
        scratch: Bytes of shared memory for the phase's C struct `Scratch`, at least its size.
        prefetched: Operands that are read ahead of the step, so no earlier phase of the kernel may write them (I6).
        prefetched_bytes: Bytes of shared memory for the C struct `Prefetched`, which keeps small ones of these
            operands.
        partials: Number of tagged partial sums, of 8 bytes each, that its blocks exchange.
        exchanged: Number of sums that it exchanges with other ranks.
        ranks: Number of ranks that it exchanges sums with, itself included.
        choices: Number of experts that it chooses.
        stream: Division of the weight among the blocks; None if the phase streams no weight.
        streamed: The names of the operands that are streamed: the weight, its scales, its offsets.
    """

    call: KernelCall
    file: str
    function: str
    inputs: Mapping[str, View | None]
    outputs: Mapping[str, View | None]
    constants: Mapping[str, bool | int | float]
    scratch: int
    prefetched: tuple[str, ...] = ()
    prefetched_bytes: int = 0
    partials: int = 0
    exchanged: int = 0
    ranks: int = 1
    choices: int = 0
    stream: Stream | None = None
    streamed: tuple[str, ...] = ()

    @property
    def operands(self) -> dict[str, View]:
        return {name: view for name, view in (*self.inputs.items(), *self.outputs.items()) if view is not None}

    def text(self) -> str:
        """The CUDA C of the phase's device functions; two phases whose texts are equal use one copy of them."""
        operands = "".join(
            f", {'const ' if name in self.inputs else ''}{TYPES[view.dtype]} *{name}"
            for name, view in self.operands.items()
        )
        function = "__device__ __forceinline__ void"
        return "\n".join(
            [
                specialized(self.call, KERNELS[self.call.kernel], self.inputs, self.outputs, self.constants),
                f"#define PREFETCH {function} prefetch(PrefetchQueue &queue{operands})",
                f"#define PHASE(name) {function} name("
                f"Ring &ring, Grid &grid, PrefetchQueue &queue, char *shared{operands})",
                kernel_text(self.file, self.function, frozenset(self.call.params)),
                "#undef PREFETCH",
                "#undef PHASE\n",
            ]
        )
