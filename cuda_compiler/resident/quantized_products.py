"""The product phase of a quantized weight, whose codes, scales and offsets share the ring of slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuda_compiler.resident.layout import LINE_BYTES, QUANTIZED_SLOT_BYTES, THREADS, WARPS, whole_lines
from cuda_compiler.resident.phases import Phase, Side, Stream
from cuda_compiler.resident.products import (
    CONSTANT,
    SQUARES_BYTES,
    InputNorms,
    can_receive,
    chunk_bytes,
    fits_shared,
    product_operands,
    stream_constants,
)
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

QUANTIZED_PRODUCTS = ("quantized_matmul_kernel", "quantized_matmul_vec_kernel", "quantized_gated_matmul_vec_kernel")
_SPAN_BYTES = 16  # of codes that one lane multiplies with a part of x that has a scale of its own
_COPY_BYTES = 16  # that copies begin and end at multiples of
_MOST_ROWS = 32  # of a unit: a lane of the fetching warp copies a row
_SLOT_COST = 2048  # what a slot costs beside its bytes, in bytes
_COPY_COST = 1460  # what is read while the fetching warp starts a copy: 41 ns on an H200
_TILE_COST = 8192  # the same of the products of a tile with what all warps take of a row at a time
_TILE_ROWS = 16
_MOST_UNITS = 8  # of a batch
_PARTS = ("data", "scales", "offset")


@dataclass(frozen=True)
class ExpertMatrices:
    """The matrices of experts that a weight consists of, one below the other.

    Attributes:
        rows: Number of rows of each matrix; of a gated product's, of each half.
        choices: Number of experts that a product reads.
        side_by_side: Whether their rows make one row of the product; else each has results of its own.
        interleaved: Whether the rows of a gated product's halves alternate.
    """

    rows: int
    choices: int
    side_by_side: bool = False
    interleaved: bool = False


def quantized_product_phase(
    plan: ExecutionPlan, call: KernelCall, norms: InputNorms, experts: ExpertMatrices | None = None
) -> Phase | None:
    """The phase of a product of a few rows and a quantized weight, and of the norms of its input.

    None if the weight cannot be streamed.

    Args:
        experts: The experts that the weight belongs to; None: it is one matrix.
    """
    inputs, outputs, constants = product_operands(call, norms)
    m, n, k = (call.params[name] for name in "mnk")
    gated = call.kernel == "quantized_gated_matmul_vec_kernel"
    parts = {name: view for name in _PARTS if (view := inputs[name]) is not None}
    bits = CODE_FORMATS[call.params["codes"]].bits
    span, group = _SPAN_BYTES * 8 // bits, k // call.params["groups"]
    width = k // experts.choices if experts is not None and experts.side_by_side else k
    if (
        not can_receive(inputs, m, k)
        or not fits_shared(inputs, m, k)
        or not all(plan.buffers[view.buffer].is_constant and _is_aligned(view) for view in parts.values())
        or width % span
        or group % span
    ):
        return None
    most = min(_MOST_ROWS // (2 if gated else 1), THREADS // m)
    if experts is None:
        possible = [stream for own in range(most, 0, -1) for stream in _streams(call, parts, own, gated, group)]
    else:
        possible = list(_expert_streams(call, parts, most, gated, experts))
    if not possible:
        return None
    stream = min(possible, key=_busiest_bytes)
    batch = min(_MOST_UNITS, THREADS // (stream.own_rows * m))  # a thread finishes a result of a batch
    line_bytes = _line_bytes(stream, m)
    scales, offsets = (*stream.sides, Side())[:2]
    constants |= {
        "gated": gated,
        **stream_constants(stream),
        "interleaved": experts is not None and experts.interleaved,
        "line_bytes": line_bytes,
        "chunk_bytes": stream.chunk_bytes,
        "copied_rows": stream.copied_rows,
        "side_rows": stream.side_rows,
        "batch": batch,
        **_side_constants("scale", scales),
        **_side_constants("offset", offsets),
    }
    staged = groups(stream.row_bytes, line_bytes) * line_bytes  # bytes of codes that x is multiplied with
    if stream.row_experts > 1:
        staged = stream.row_experts * _line_turns(stream.chunk_bytes, line_bytes) * WARPS * line_bytes
    x_bytes = staged * 2 * 8 // bits
    scale_bytes = staged // _SPAN_BYTES * 8
    sums = 4 * 2 * WARPS * stream.unit_rows * m * batch
    return Phase(
        call,
        "resident/quantized_product.cu",
        "product",
        inputs,
        outputs,
        constants,
        whole_lines(m * (x_bytes + scale_bytes) + SQUARES_BYTES + sums),
        (*CONSTANT, *parts),
        stream=stream,
        streamed=tuple(parts),
    )


def _is_aligned(view: View) -> bool:
    return view.is_contiguous and view.offset * itemsize(view.dtype) % _COPY_BYTES == 0


def _streams(call: KernelCall, parts: dict[str, View], own: int, gated: bool, group: int) -> Iterator[Stream]:
    """The ways to stream a weight in units of `own` rows; none if a slot cannot hold whole quantization groups of them.

    If whole rows fit in a slot, one copy takes all rows of a unit, which are contiguous. If not, each row's chunk is a
    copy of its own. Scales and offsets are then copied with each chunk, either for whole rows at once or for the
    chunk's groups.
    """
    n, count = call.params["n"], call.params["groups"]
    row_bytes = parts["data"].shape[1]
    unit_rows = 2 * own if gated else own
    stream = Stream(groups(n, own), unit_rows, own, n, row_bytes, row_bytes, own, own, 1)
    if row_bytes * unit_rows <= QUANTIZED_SLOT_BYTES:
        yield _with_sides(stream, parts)
    elif QUANTIZED_SLOT_BYTES // unit_rows >= WARPS * LINE_BYTES:
        chunk = chunk_bytes(row_bytes, unit_rows, QUANTIZED_SLOT_BYTES)
        elements = chunk * call.params["k"] // row_bytes
        if count == 1 or elements % group == 0:
            stream = replace(stream, chunk_bytes=chunk, copied_rows=1)
            yield _with_sides(stream, parts)
            if count > 1:
                yield _with_sides(replace(stream, side_rows=1), parts, elements // group)


def _expert_streams(
    call: KernelCall, parts: dict[str, View], most: int, gated: bool, experts: ExpertMatrices
) -> Iterator[Stream]:
    """The ways to stream the matrices of chosen experts, whose rows fit in a slot; none if they cannot be streamed.

    Args:
        most: Maximum number of rows, or of pairs of rows of a gated product, of a unit.
    """
    row_bytes, n = parts["data"].shape[1], call.params["n"]
    sides = [view.shape[1] * itemsize(view.dtype) for name, view in parts.items() if name != "data"]
    if any(experts.rows * size % _COPY_BYTES for size in sides):  # copies of them begin alike in all matrices
        return
    for own in range(most, 0, -1):
        unit_rows = 2 * own if gated else own
        if row_bytes * unit_rows > QUANTIZED_SLOT_BYTES or (not experts.side_by_side and experts.rows % own):
            continue
        rows = 2 * experts.rows if experts.interleaved else experts.rows
        run = unit_rows if experts.interleaved else own
        stream = Stream(groups(n, own), unit_rows, run, rows, row_bytes, row_bytes, run, run, 1)
        if experts.side_by_side:
            stream = replace(stream, expert_rows=experts.rows, row_experts=experts.choices)
        else:
            matrix_rows = 2 * experts.rows if gated else experts.rows
            stream = replace(stream, expert_rows=matrix_rows, expert_units=experts.rows // own)
        yield _with_sides(stream, parts)


def _line_bytes(stream: Stream, m: int) -> int:
    """Bytes of each row of a weight that a warp takes at a time: half a line where all warps are busier so."""
    half, chunk = LINE_BYTES // 2, stream.chunk_bytes
    halves = m == 1 and chunk == stream.row_bytes and _line_turns(chunk, half) < 2 * _line_turns(chunk, LINE_BYTES)
    return half if halves else LINE_BYTES


def _line_turns(chunk: int, line_bytes: int) -> int:
    """Maximum number of lines of a chunk that a warp takes."""
    return groups(groups(chunk, line_bytes), WARPS)


def _with_sides(stream: Stream, parts: dict[str, View], chunk_groups: int = 0) -> Stream:
    """The stream with the places of scales and offsets in a slot, behind the rows' codes.

    Args:
        chunk_groups: Number of groups in a chunk of a row, if a slot holds only their scales; 0 if it holds whole
            rows'.
    """
    count = parts["scales"].shape[1]
    lines = groups(min(stream.chunk_bytes, stream.row_bytes), LINE_BYTES)
    place = (stream.unit_rows - 1) * stream.chunk_bytes + lines * LINE_BYTES  # lines are read whole
    sides = []
    for name in _PARTS[1:]:
        if name in parts:
            size = itemsize(parts[name].dtype)
            part = (chunk_groups or count) * size
            copied = count * size * (stream.side_rows - 1) + part
            stride = groups(copied + 2 * _COPY_BYTES - 2, _COPY_BYTES) * _COPY_BYTES
            sides.append(Side(count * size, chunk_groups * size, part, place, stride))
            place += stream.unit_rows // stream.side_rows * stride
    return replace(stream, sides=tuple(sides))


def _busiest_bytes(stream: Stream) -> int:
    """The estimated cost of the busiest multiprocessor, in bytes that it could read in the same time."""
    chunks = groups(stream.row_bytes, stream.chunk_bytes) * stream.row_experts
    side_copies = stream.unit_rows // stream.side_rows
    copies = stream.unit_rows // stream.copied_rows + len(stream.sides) * side_copies
    side_bytes = sum(side_copies * side.stride for side in stream.sides)
    turns = groups(stream.row_bytes, WARPS * LINE_BYTES) * stream.row_experts
    products = groups(stream.unit_rows, _TILE_ROWS) * turns * _TILE_COST
    read = stream.unit_rows * stream.row_bytes * stream.row_experts + chunks * side_bytes
    unit = max(read, chunks * copies * _COPY_COST) + chunks * _SLOT_COST + products
    return groups(stream.units, MULTIPROCESSORS) * unit


def _side_constants(name: str, side: Side) -> dict[str, bool | int | float]:
    return {
        f"{name}_row": side.row_bytes,
        f"{name}_chunk": side.chunk_bytes,
        f"{name}_place": side.place,
        f"{name}_stride": side.stride,
    }
