"""The product phase: which products a resident kernel can do, and how their weights are divided among the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.resident.layout import LINE_BYTES, SLOT_BYTES, THREADS, UNIT_ROWS, WARPS, whole_lines
from cuda_compiler.resident.phases import IN_FLIGHT, MOST_IN_FLIGHT, Phase, Stream, is_long
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups, vector_width
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

PRODUCTS = ("matmul_kernel", "matmul_vec_kernel", "gated_matmul_vec_kernel")
MAX_ROWS = 8
_MAX_STAGED_BYTES = 64 * 1024  # of a product's input that a block holds in shared memory
_MOST_UNITS = 8  # of a batch
SQUARES_BYTES = 2 * 4 * WARPS  # of the C struct `Squares`
CONSTANT = ("gain", "base_gain", "bias")  # operands that are prefetched
_NOT_NORMED = {"normed": False, "norm_eps": 0.0, "gain_offset": 0.0, "base_eps": 0.0, "base_gain_offset": 0.0}


@dataclass(frozen=True)
class InputNorms:
    """The calls before a product that make its input, which its phase computes too.

    Attributes:
        norm: The RMSNorm of the input; None if there is none.
        added: The RMSNorm of what the phase reads, to which `addition` adds the residual; None if there is none.
        addition: That addition, whose result is stored, as others may read it.
    """

    norm: KernelCall | None = None
    added: KernelCall | None = None
    addition: KernelCall | None = None

    @property
    def count(self) -> int:
        """Number of calls."""
        return sum(call is not None for call in (self.norm, self.added, self.addition))


def input_norms(plan: ExecutionPlan, index: int, readers: Counter[str]) -> InputNorms:
    """The norms, from the call at `index` on, whose result the call behind them reads; none if there are no such calls.

    Given:  rmsnorm(y) -> n; add(r, n) -> s; rmsnorm(s) -> x; linear(x, w)
    Result: norm: rmsnorm(s); added: rmsnorm(y); addition: add(r, n)

    Either norm may be missing: the last one, or the first one together with the addition.

    Args:
        readers: Buffer → how many operands of calls and program outputs read it.
    """
    calls = [*plan.calls[index : index + 4], None, None, None, None]
    first, following = calls[0], calls[1]
    if first is None or first.kernel != "rmsnorm_kernel" or following is None or not _is_inner(plan, first, readers):
        return InputNorms()
    if not _adds(following, first):
        return InputNorms(first) if following.inputs[0] == first.outputs[0] else InputNorms()
    whole, norm, product = following.outputs[0].reshape(first.outputs[0].shape), calls[2], calls[3]
    if whole is None or norm is None:
        return InputNorms()
    if norm.kernel == "rmsnorm_kernel" and product is not None and norm.inputs[0] == whole:
        ends = _is_inner(plan, norm, readers) and product.inputs[0] == norm.outputs[0]
        return InputNorms(norm, first, following) if ends else InputNorms()
    return InputNorms(None, first, following) if norm.inputs[0] == whole else InputNorms()


def _is_inner(plan: ExecutionPlan, norm: KernelCall, readers: Counter[str]) -> bool:
    """Whether one call alone reads the result of a norm."""
    name = norm.outputs[0].buffer
    return readers[name] == 1 and plan.buffers[name].kind == "arena"


def _adds(call: KernelCall, norm: KernelCall) -> bool:
    """Whether a call adds a norm's result, in its own order, to as many other values of its dtype."""
    kernel, normal = elementwise_kernel(call), norm.outputs[0]
    if kernel is None or kernel.op.name != "add" or len(call.inputs) != 2 or call.params.get("alpha", 1) != 1:
        return False
    views = (*call.inputs, *call.outputs)
    alike = all(view.is_contiguous and (view.numel, view.dtype) == (normal.numel, normal.dtype) for view in views)
    return alike and [view.buffer for view in call.inputs].count(normal.buffer) == 1


def product_phase(plan: ExecutionPlan, call: KernelCall, norms: InputNorms) -> Phase | None:
    """The phase of a product of a few rows and of the norms of its input.

    None if the weight cannot be streamed, or the input does not fit in a block.
    """
    weight, n, k = KERNELS[call.kernel].inputs_of(call)["weight"], call.params["n"], call.params["k"]
    assert weight is not None
    gated = call.kernel == "gated_matmul_vec_kernel"
    row_bytes = k * itemsize(weight.dtype)
    own = own_rows(n, most_rows(n, row_bytes, gated))
    stream = Stream(groups(n, own), 2 * own if gated else own, own, n, row_bytes, 0)
    return stream_phase(plan, call, norms, stream) if weight.strides[0] == k else None


def stream_phase(plan: ExecutionPlan, call: KernelCall, norms: InputNorms, stream: Stream) -> Phase | None:
    """The phase of a product of a few rows and of the norms of its input; None as in `product_phase`.

    Args:
        stream: Division of the weight among the blocks; its chunks are chosen here.
    """
    inputs, outputs, constants = product_operands(call, norms)
    x, weight = inputs["x"], inputs["weight"]
    assert x is not None and weight is not None
    m, k = call.params["m"], call.params["k"]
    gated, own = call.kernel == "gated_matmul_vec_kernel", stream.own_rows
    pack = 16 // itemsize(weight.dtype)
    row_bytes = k * itemsize(weight.dtype)
    direct = norms.count == 0 and m * row_bytes > _MAX_STAGED_BYTES
    if (
        not can_receive(inputs, m, k)
        or not (direct or fits_shared(inputs, m, k))
        or not plan.buffers[weight.buffer].is_constant
        or x.dtype != weight.dtype
        or min(vector_width(weight), pack) < pack
    ):
        return None
    stream = in_chunks(stream, chunk_bytes(stream.row_bytes, stream.unit_rows, SLOT_BYTES))
    pairs = min(_MOST_UNITS, THREADS // (own * m), groups(stream.units, MULTIPROCESSORS) + 1) // 2
    batch = 2 * max(pairs, 1)  # a block takes units in pairs, and a thread finishes a result of a batch
    constants |= {"gated": gated, **stream_constants(stream), "chunk_packs": stream.chunk_bytes // 16, "batch": batch}
    constants["direct"] = direct
    sums = 4 * 2 * WARPS * UNIT_ROWS * m * batch
    x_bytes = 16 if direct else m * groups(row_bytes, LINE_BYTES) * LINE_BYTES
    scratch = x_bytes + SQUARES_BYTES + sums
    return Phase(
        call,
        "resident/product.cu",
        "product",
        inputs,
        outputs,
        constants,
        whole_lines(scratch),
        (*CONSTANT, "weight"),
        stream=stream,
        streamed=("weight",),
    )


def product_operands(
    call: KernelCall, norms: InputNorms
) -> tuple[dict[str, View | None], dict[str, View | None], dict[str, bool | int | float]]:
    """A product's inputs and outputs by name, with those of the norms before it, and the norms' constants."""
    bound = KERNELS[call.kernel].inputs_of(call)
    constants: dict[str, bool | int | float] = dict(_NOT_NORMED)
    x, gain, base, base_gain, whole = bound.pop("x"), None, None, None, None
    assert x is not None
    rows = x.shape
    if (norm := norms.norm) is not None:
        x, gain = KERNELS[norm.kernel].bind(norm)[:2]
        constants |= {"normed": True, "norm_eps": norm.params["eps"], "gain_offset": norm.params["weight_offset"]}
    if (added := norms.added) is not None and norms.addition is not None:
        x, base_gain = KERNELS[added.kernel].bind(added)[:2]
        (residual,) = (view for view in norms.addition.inputs if view.buffer != added.outputs[0].buffer)
        base, whole = residual.reshape(rows), norms.addition.outputs[0].reshape(rows)
        constants |= {"base_eps": added.params["eps"], "base_gain_offset": added.params["weight_offset"]}
    addends = {name: bound.pop(name, None) for name in ("bias", "residual")}
    inputs = {"x": x, "gain": gain, "base": base, "base_gain": base_gain, **bound, **addends}
    return inputs, {"out": call.outputs[0], "whole": whole}, constants


def fits_shared(inputs: dict[str, View | None], m: int, k: int) -> bool:
    """Whether the input x [m, k] of a product fits in a block's shared memory."""
    x = inputs["x"]
    assert x is not None
    return m * k * itemsize(x.dtype) <= _MAX_STAGED_BYTES


def can_receive(inputs: dict[str, View | None], m: int, k: int) -> bool:
    """Whether a product phase can read the input x [m, k]: it has few rows, made of aligned packs of 16 bytes."""
    x = inputs["x"]
    assert x is not None
    pack = 16 // itemsize(x.dtype)
    others = (inputs[name] for name in ("gain", "base", "base_gain"))
    return (
        m <= MAX_ROWS
        and x.dtype in HALF_DTYPES
        and k % pack == 0
        and all(view is None or vector_width(view) >= pack for view in (x, *others))
    )


def stream_constants(stream: Stream) -> dict[str, bool | int | float]:
    """The constants of a stream that every product phase compiles in, with mailboxes off until `connect_mailboxes`."""
    return {
        "units": stream.units,
        "is_long": is_long(stream.weight_bytes),
        "unit_rows": stream.unit_rows,
        "units_together": stream.units_together,
        "from_mailbox": False,
        "to_mailbox": False,
        "backoff_ns": 0,
        "of_experts": stream.expert_rows > 0,
        "expert_units": stream.expert_units,
        "row_experts": stream.row_experts,
        "interleaved": False,
    }


def most_rows(rows: int, row_bytes: int, gated: bool) -> int:
    """Maximum number of rows, or of pairs of rows of a gated product, of a unit of a weight in 16 bits.

    Of a long weight no more than fit a slot whole, if that is half a unit or more: whole rows are fetched together,
    parts of them one by one. On an H200, a step of 12 layers of Qwen3-4B takes a tenth less for it, and one of six
    layers of Gemma 3 4B 28 % less; Llama 3.2 1B, where this included weights that are not long, took 1.5 % more.
    """
    matrices = 2 if gated else 1
    most, whole = UNIT_ROWS // matrices, SLOT_BYTES // max(row_bytes * matrices, 1)  # a sum of no terms has no bytes
    pays = is_long(matrices * rows * row_bytes) and row_bytes % LINE_BYTES == 0
    return whole if pays and most // 2 <= whole < most else most


def own_rows(rows: int, most: int, matrix_rows: int = 0) -> int:
    """Rows that a block processes at a time of a weight with `rows` rows, at most `most` and more than half of that.

    The busiest multiprocessor has as few rows as possible.

    Args:
        matrix_rows: Where rows are those of several matrices, the rows of each, so that no unit has rows of two of
            them. The number may be less than half of `most` then.
    """

    def busiest(own: int) -> int:
        return groups(groups(rows, own), MULTIPROCESSORS) * own

    possible = [own for own in range(most, most // 2, -1) if matrix_rows % own == 0]
    return min(possible, key=busiest) if possible else own_rows(rows, most // 2, matrix_rows)


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
