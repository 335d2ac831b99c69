"""Products of 9 to 64 rows by warpgroups, or of up to 128 with a weight in few bits, bound by reading their weight.

The kernels also compute the norm before and the gate after the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from cuda_compiler.rules.gates import GATED, template_operands
from cuda_compiler.rules.streamed import suits_streaming
from cuda_compiler.specialization.gpu import CLUSTERS, CLUSTERS_SHARING, REGISTERS, WARP, memory_of_each
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

MOST_NORMED_ROWS = 32  # with more, multiplying x with the gains as it is copied takes longer than a kernel of its own
_FEWEST_ROWS, MOST_ROWS = 9, 64  # with fewer, the streaming kernel is as fast; with more, cuBLASLt
_FEWEST_BYTES = 1 << 20  # of the weight: smaller ones leave most multiprocessors idle
_MOST_ELEMENTS = 1 << 31  # of an operand, whose offsets have 32 bits
_THREADS = 256  # a warpgroup that multiplies, two warps that copy the weight, two that copy x
_PRODUCT_ROWS = 64  # of a warpgroup's products, of which some may be in vain
_SLABS = 2  # of 64 terms, in a step
_SLAB_TERMS, _SLAB_BYTES = 64, 128  # of a row
_MOST_COLUMNS = 256  # whose sums a warpgroup holds
_EXCHANGED = 3  # bytes of operands that could be read while a cluster exchanges a byte of its sums
_EXCHANGE = 8192  # and while its blocks wait for each other
_FEWEST_STAGES, _MOST_STAGES = 3, 8
_BARRIER_BYTES = 16  # of a stage
_OTHER_REGISTERS = 34  # of a thread, beside those of its sums

# Of products with codes.
_FEWEST_CODE_ROWS, _MOST_CODE_ROWS = 2, 128
_FEWEST_CODE_BYTES = 1 << 18
# Up to so many rows, codes of at most so many bytes and terms are read as fast by the streaming kernel.
_STREAMED_ROWS, _STREAMED_BYTES, _STREAMED_TERMS = 16, 1 << 23, 4096
_MOST_CODE_COLUMNS = 256  # of a block
_MOST_TURNS = 3  # in which blocks may follow each other, so that they are narrow enough
_GROUP_TERMS = 32
_WARPGROUP = 4 * WARP
_COPYING_WARPS = 4
_MOST_CODE_REGISTERS = 64  # of a thread, beside those of its sums
_MOST_RESIDENT = 3
_SIDES = ("scales", "offset")
_STAGED_CODES = 48 * 1024  # bytes of codes of a multiprocessor's blocks that are on their way, at most
# Fitted to 135 measured products, which they predict within 10 %. Bytes in a nanosecond: codes from memory; all that a
# multiprocessor reads; and sums from others of a cluster.
_MEMORY_RATE, _READING_RATE, _SUMS_RATE = 2800, 100, 22
# Nanoseconds of a step alone, of a warpgroup's step beside others, and of each row in both; of what comes before and
# after; and of each block of a cluster.
_STEP_TIME, _WARPGROUP_TIME, _ROW_TIME, _BLOCK_TIME, _CLUSTER_TIME = 300, 250, 1.8, 1400, 190


@dataclass(frozen=True)
class WarpgroupDivision:
    """The division of a product among blocks, as `templates/matmul/linear_wgmma.cu` describes it.

    Attributes:
        splits, clusters: Number of blocks per cluster, and of clusters.
        width: Columns of the result that a cluster computes.
        stages: Number of steps of the summation that the ring in shared memory has room for.
        shared: Bytes of shared memory of a block.
        resident: Blocks that a multiprocessor has room for: with two, those of the next kernel can begin.
        threads: Threads of a block.
    """

    splits: int
    clusters: int
    width: int
    stages: int
    shared: int
    resident: int
    threads: int = _THREADS


def suits_warpgroups(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> bool:
    """Whether this kernel can compute a product, and is expected to be the fastest for its size.

    Args:
        inputs: The product's operands by name.
    """
    x, weight, data = (inputs.get(name) for name in ("x", "weight", "data"))
    if x is None or not make.gpu.has_warpgroups or x.dtype not in HALF_DTYPES:
        return False
    if x.strides[1] != 1 or vector_width(x) < 8 or vector_width(call.outputs[0]) < 4 or _extent(x) >= _MOST_ELEMENTS:
        return False
    if data is not None:
        suits = _suits_codes(call, x, data, [view for name in _SIDES if (view := inputs.get(name)) is not None])
        few = call.params["m"] <= _STREAMED_ROWS and call.params["k"] <= _STREAMED_TERMS
        suits = suits and not (few and data.numel <= _STREAMED_BYTES and suits_streaming(make, call, inputs))
    else:
        suits = (
            weight is not None
            and _FEWEST_ROWS <= call.params["m"] <= MOST_ROWS
            and weight.dtype == x.dtype
            and weight.strides[1] == 1
            and vector_width(weight) >= 8
            and call.params["k"] % 8 == 0
            and weight.numel * 2 >= _FEWEST_BYTES
            and _extent(weight) < _MOST_ELEMENTS
        )
    return suits and _division(make, call, inputs) is not None


def _extent(view: View) -> int:
    return view.shape[0] * view.strides[0]


def _suits_codes(call: KernelCall, x: View, data: View, sides: list[View]) -> bool:
    """Whether the kernel can read codes, and their scales and offsets in whole words."""
    k, count = call.params["k"], call.params["groups"]
    group, step = k // count, _SLABS * _SLAB_TERMS
    held = max(1, step // group) if count > 1 else 1  # of a row, in a step
    return (
        _FEWEST_CODE_ROWS <= call.params["m"] <= _MOST_CODE_ROWS
        and k % step == 0
        and (count == 1 or group % step == 0 or (group % _GROUP_TERMS == 0 and step % group == 0))
        and (call.params["offsets"] != "minimum" or sides[0].dtype == x.dtype)
        and data.numel >= _FEWEST_CODE_BYTES
        and vector_width(data) >= 16
        and _extent(data) < _MOST_ELEMENTS
        and all(side.is_contiguous and side.offset * itemsize(side.dtype) % 16 == 0 for side in sides)
        and count % held == 0
    )


def _has_one_scale(call: KernelCall) -> bool:
    """Whether a scale multiplies the finished sum of a row."""
    return bool(call.params["groups"] == 1 and call.params["offsets"] != "minimum")


def _division(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> WarpgroupDivision | None:
    m, n, k = (call.params[name] for name in "mnk")
    gated, shared_memory = call.kernel in GATED.values(), make.gpu.shared_memory
    if "codes" not in call.params:
        return divided(m, n, k, gated, shared_memory)
    names = _SIDES[1:] if _has_one_scale(call) else _SIDES
    sizes = [itemsize(view.dtype) for name in names if (view := inputs.get(name)) is not None]
    count, step = call.params["groups"], _SLABS * _SLAB_TERMS
    held = max(1, step * count // k) if count > 1 else 1
    row = step * CODE_FORMATS[call.params["codes"]].bits // 8
    return divided_codes(m, n, k, gated, shared_memory, row, sum(max(4, size * held) for size in sizes))


def warpgroup_product(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], norm: KernelCall | None = None
) -> KernelCall:
    """The call of the kernel for a product for which `suits_warpgroups` holds.

    Args:
        inputs: x, the weight, bias, residual.
        norm: The bfloat16 RMSNorm that computes x, without an offset to its gains, for the kernel to apply; None for
            none.
    """
    division = _division(make, call, inputs)
    assert division is not None
    file, names = "matmul/linear_wgmma.cu", ["weight"]
    inputs, constants = template_operands(call, inputs, norm)
    if "codes" in call.params:
        file, names = "matmul/linear_wgmma_codes.cu", ["data", *_SIDES]
        constants["pack"] = 8
    constants |= {
        "splits": division.splits,
        "width": division.width,
        "stages": division.stages,
        "slabs": _SLABS,
        "shared": division.shared,
        "ahead": all(view is None or make.never_written(view) for view in map(inputs.get, names)),
    }
    joined = make.kernel(
        call,
        file,
        function="linear_wgmma",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(division.clusters, 1, division.splits),
        block=(division.threads, 1, 1),
        shared=division.shared,
        constants=constants,
        min_blocks=division.resident,
        cluster=division.splits,
    )
    return replace(joined, bytes_moved=sum(map(distinct_bytes, (*joined.inputs, *joined.outputs))))


@cache
def divided(m: int, n: int, k: int, gated: bool, shared_memory: int) -> WarpgroupDivision | None:
    """The division of a product in which a block reads the fewest bytes; None if none fits.

    Of equal ones, one is chosen of which two blocks fit on a multiprocessor.

    Args:
        m, n, k: Rows and columns of the result, and terms of a sum.
        gated: Whether the weight holds the rows of a gate, then those of what it multiplies.
        shared_memory: Bytes of shared memory that a block may have.
    """
    return min(_divisions(m, n, k, gated, shared_memory), key=lambda division: division[0], default=(0, None))[1]


def _divisions(m: int, n: int, k: int, gated: bool, shared_memory: int) -> Iterator[tuple[int, WarpgroupDivision]]:
    """All divisions that fit, each after its cost: the bytes that a block could read in the time that it runs.

    Arguments as in `divided`.
    """
    unit, parts = (4, 2) if gated else (8, 1)
    steps, held = groups(k, _SLABS * _SLAB_TERMS), 8 * groups(m, 8)
    for splits in CLUSTERS:
        for resident, room in ((2, CLUSTERS_SHARING), (1, CLUSTERS)):
            width = unit * groups(groups(n, room[splits]), unit)
            columns, own = parts * width, groups(steps, splits)
            stage = _SLABS * _SLAB_BYTES * (held + columns)
            beyond = max(_PRODUCT_ROWS - held - columns, 0)
            rest = _SLAB_BYTES * (beyond + 1) + 4 * held
            fitting = (memory_of_each(shared_memory, resident) - rest) // (stage + _BARRIER_BYTES)
            stages = min(fitting, max(own, _FEWEST_STAGES), _MOST_STAGES)
            registers = resident * _THREADS * (columns // 2 + _OTHER_REGISTERS)
            if (
                n % unit == 0
                and splits <= steps
                and columns <= _MOST_COLUMNS
                and stages >= _FEWEST_STAGES
                and stages * stage >= 4 * m * (columns + 4)  # the ring has room for the sums
                and (resident == 1 or registers <= REGISTERS)
            ):
                exchanged = _EXCHANGED * 4 * m * columns + _EXCHANGE if splits > 1 else 0
                shared = stages * (stage + _BARRIER_BYTES) + rest
                division = WarpgroupDivision(splits, groups(n, width), width, stages, shared, resident)
                yield own * stage + exchanged, division


@cache
def divided_codes(
    m: int, n: int, k: int, gated: bool, shared_memory: int, row: int, sides: int
) -> WarpgroupDivision | None:
    """The division of a product with codes that takes the least time, by an estimate; None if none fits.

    Args:
        m, n, k, gated, shared_memory: As in `divided`.
        row: Bytes of codes of a row of the weight, in a step.
        sides: Bytes of shared memory for a row's scales and offsets in a step.
    """
    found = _code_divisions(m, n, k, gated, shared_memory, row, sides)
    return min(found, key=lambda each: (each[0], each[1].clusters, -each[1].resident), default=(0, None))[1]


def _code_divisions(
    m: int, n: int, k: int, gated: bool, shared_memory: int, row: int, sides: int
) -> Iterator[tuple[float, WarpgroupDivision]]:
    """All divisions that fit, each after the nanoseconds that it takes, by an estimate.

    Arguments as in `divided_codes`.
    """
    steps, held = k // (_SLABS * _SLAB_TERMS), 8 * groups(m, 8)
    unit, parts = (8, 2) if gated else (16, 1)
    registers = held // 2 + _MOST_CODE_REGISTERS
    whole = range(_PRODUCT_ROWS, _MOST_CODE_COLUMNS + 1, _PRODUCT_ROWS)
    for splits, resident in product(CLUSTERS, range(1, _MOST_RESIDENT + 1)):
        own_columns = (groups(n, CLUSTERS[splits] * turns) for turns in range(1, _MOST_TURNS + 1))
        shares = {parts * unit * groups(each, unit) for each in own_columns}
        for columns in sorted({share for share in shares if share < _MOST_CODE_COLUMNS} | {*whole}):
            warpgroups = groups(columns, _PRODUCT_ROWS)
            threads = warpgroups * _WARPGROUP + _COPYING_WARPS * WARP
            copied = columns * (row + sides) + _SLABS * _SLAB_BYTES * held
            stage = 1024 * groups(_SLABS * _SLAB_BYTES * held + warpgroups * _PRODUCT_ROWS * (row + sides) + 32, 1024)
            rest = _SLAB_BYTES + 4 * held + 1024
            room = (memory_of_each(shared_memory, resident) - rest) // (stage + _BARRIER_BYTES)
            stages = min(room, _MOST_STAGES, max(_FEWEST_STAGES, _STAGED_CODES // (resident * columns * row)))
            stages = max(stages, groups(4 * m * (columns + 4), stage))  # the ring has room for the sums
            if (
                n % 4
                or splits > steps
                or not _FEWEST_STAGES <= stages <= room
                or resident * threads * registers > REGISTERS
            ):
                continue
            clusters, own = groups(n, columns // parts), groups(steps, splits)
            loads = groups(clusters, CLUSTERS[splits])  # blocks of a multiprocessor
            waves = groups(loads, resident)
            time = _BLOCK_TIME * waves + max(
                parts * n * (row + sides) * steps / _MEMORY_RATE,
                loads * own * copied / _READING_RATE,
                loads * own * warpgroups * (_WARPGROUP_TIME + _ROW_TIME * held),
                waves * own * (_STEP_TIME + _ROW_TIME * held),
            )
            if splits > 1:
                time += _CLUSTER_TIME * (1 + loads) + loads * 4 * m * columns / _SUMS_RATE
            shared = stages * (stage + _BARRIER_BYTES) + rest
            yield time, WarpgroupDivision(splits, clusters, columns // parts, stages, shared, resident, threads)
