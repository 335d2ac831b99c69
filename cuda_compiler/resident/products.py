"""The product phase: which products a resident kernel can do, and how their weights are divided among the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.resident.layout import LINE_BYTES, SLOT_BYTES, THREADS, UNIT_ROWS, WARPS, whole_lines
from cuda_compiler.resident.phases import IN_FLIGHT, MOST_IN_FLIGHT, Phase, Stream
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups, vector_width
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

PRODUCTS = ("matmul_kernel", "matmul_vec_kernel", "gated_matmul_vec_kernel")
MAX_ROWS = 8
_MAX_STAGED_BYTES = 64 * 1024  # of a product's input that a block holds in shared memory
_MOST_UNITS = 8  # of a batch
CONSTANT = ("gain", "bias")  # operands that are prefetched
_NOT_NORMED = {"normed": False, "norm_eps": 0.0, "gain_offset": 0.0}


def product_phase(plan: ExecutionPlan, call: KernelCall, norm: KernelCall | None = None) -> Phase | None:
    """The phase of a product of a few rows and of the RMSNorm of its input, if there is one.

    None if the weight cannot be streamed, or the input does not fit in a block.
    """
    inputs, constants = product_operands(call, norm)
    x, weight = inputs["x"], inputs["weight"]
    assert x is not None and weight is not None
    m, n, k = (call.params[name] for name in "mnk")
    gated = call.kernel == "gated_matmul_vec_kernel"
    pack = 16 // itemsize(weight.dtype)
    row_bytes = k * itemsize(weight.dtype)
    direct = norm is None and m * row_bytes > _MAX_STAGED_BYTES
    if (
        not can_receive(inputs, m, k)
        or not (direct or fits_shared(inputs, m, k))
        or not plan.buffers[weight.buffer].is_constant
        or x.dtype != weight.dtype
        or min(vector_width(weight), pack) < pack
        or weight.strides[0] != k
    ):
        return None
    own = own_rows(n, UNIT_ROWS // 2 if gated else UNIT_ROWS)
    unit_rows = 2 * own if gated else own
    chunk = chunk_bytes(row_bytes, unit_rows, SLOT_BYTES)
    stream = in_chunks(Stream(groups(n, own), unit_rows, own, n, row_bytes, chunk), chunk)
    pairs = min(_MOST_UNITS, THREADS // (own * m), groups(stream.units, MULTIPROCESSORS) + 1) // 2
    batch = 2 * max(pairs, 1)  # a block takes units in pairs, and a thread finishes a result of a batch
    constants |= {"gated": gated, **stream_constants(stream), "chunk_packs": stream.chunk_bytes // 16, "batch": batch}
    constants["direct"] = direct
    sums = 4 * 2 * WARPS * UNIT_ROWS * m * batch
    x_bytes = 16 if direct else m * groups(row_bytes, LINE_BYTES) * LINE_BYTES
    scratch = x_bytes + 4 * WARPS + sums
    return Phase(
        call,
        "resident/product.cu",
        "product",
        inputs,
        {"out": call.outputs[0]},
        constants,
        whole_lines(scratch),
        (*CONSTANT, "weight"),
        stream=stream,
        streamed=("weight",),
    )


def product_operands(
    call: KernelCall, norm: KernelCall | None
) -> tuple[dict[str, View | None], dict[str, bool | int | float]]:
    """A product's operands by name, with the input and gain of the RMSNorm before it, and that norm's constants."""
    bound = KERNELS[call.kernel].inputs_of(call)
    constants: dict[str, bool | int | float] = dict(_NOT_NORMED)
    x, gain = bound.pop("x"), None
    if norm is not None:
        x, gain = KERNELS[norm.kernel].bind(norm)[:2]
        offset = norm.params["weight_offset"]
        constants = {"normed": True, "norm_eps": norm.params["eps"], "gain_offset": offset}
    addends = {name: bound.pop(name, None) for name in ("bias", "residual")}
    return {"x": x, "gain": gain, **bound, **addends}, constants


def fits_shared(inputs: dict[str, View | None], m: int, k: int) -> bool:
    """Whether the input x [m, k] of a product fits in a block's shared memory."""
    x = inputs["x"]
    assert x is not None
    return m * k * itemsize(x.dtype) <= _MAX_STAGED_BYTES


def can_receive(inputs: dict[str, View | None], m: int, k: int) -> bool:
    """Whether a product phase can read the input x [m, k]: it has few rows, made of aligned packs of 16 bytes."""
    x, gain = inputs["x"], inputs["gain"]
    assert x is not None
    pack = 16 // itemsize(x.dtype)
    return (
        m <= MAX_ROWS
        and x.dtype in HALF_DTYPES
        and k % pack == 0
        and vector_width(x) >= pack
        and (gain is None or vector_width(gain) >= pack)
    )


def stream_constants(stream: Stream) -> dict[str, bool | int | float]:
    """The constants of a stream that every product phase compiles in, with mailboxes off until `connect_mailboxes`."""
    return {
        "units": stream.units,
        "is_long": stream.is_long,
        "unit_rows": stream.unit_rows,
        "units_together": stream.units_together,
        "from_mailbox": False,
        "to_mailbox": False,
        "backoff_ns": 0,
    }


def own_rows(rows: int, most: int) -> int:
    """Rows that a block processes at a time of a weight with `rows` rows, at most `most` and more than half of that.

    The busiest multiprocessor has as few rows as possible.
    """

    def busiest(own: int) -> int:
        return groups(groups(rows, own), MULTIPROCESSORS) * own

    return min(range(most, most // 2, -1), key=busiest)


def in_chunks(stream: Stream, chunk: int) -> Stream:
    """The stream with rows in chunks of so many bytes; whole rows, which are contiguous, are copied together."""
    if stream.row_bytes <= chunk and stream.row_bytes % LINE_BYTES == 0:
        stream = replace(stream, chunk_bytes=stream.row_bytes, copied_rows=stream.own_rows)
    else:
        stream = replace(stream, chunk_bytes=chunk)
    slots = [groups(count * SLOT_BYTES, stream.slot_bytes) for count in (IN_FLIGHT, MOST_IN_FLIGHT)]
    return replace(stream, in_flight=slots[0], most_in_flight=slots[1])


def fit_slots(phases: Sequence[Phase]) -> list[Phase]:
    """The phases, with long rows of 16-bit weights in chunks that fit a slot for the largest unit of whole rows.

    Slots are as large as the largest of them, so others would waste room.
    """
    dense = [phase.stream for phase in phases if phase.stream is not None and not phase.stream.sides]
    slot = max((stream.slot_bytes for stream in dense if stream.chunk_bytes >= stream.row_bytes), default=SLOT_BYTES)
    result = []
    for phase in phases:
        stream = phase.stream
        if stream is not None and not stream.sides and stream.chunk_bytes < stream.row_bytes:
            least = stream.unit_rows * WARPS * LINE_BYTES
            stream = in_chunks(stream, chunk_bytes(stream.row_bytes, stream.unit_rows, max(slot, least)))
            phase = replace(
                phase, stream=stream, constants={**phase.constants, "chunk_packs": stream.chunk_bytes // 16}
            )
        result.append(phase)
    return result


def chunk_bytes(row_bytes: int, unit_rows: int, slot: int) -> int:
    """Bytes of a weight row that are copied at a time: the row in as few chunks as fit a slot, of about equal size."""
    group = WARPS * LINE_BYTES
    needed = groups(row_bytes, group)
    return groups(needed, groups(needed, slot // unit_rows // group)) * group
