"""Products of 9 to 64 rows by warpgroups, bound by reading their weight.

The kernels also compute the norm before and the gate after the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from cuda_compiler.rules.gates import GATED, template_operands
from cuda_compiler.specialization.gpu import CLUSTERS, CLUSTERS_SHARING, memory_of_each
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

MOST_NORMED_ROWS = 32  # with more, multiplying x with the gains as it is copied takes longer than a kernel of its own
_FEWEST_ROWS, _MOST_ROWS = 9, 64  # with fewer, the streaming kernel is as fast; with more, cuBLASLt
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
_REGISTERS = 1 << 16  # of a multiprocessor


@dataclass(frozen=True)
class WarpgroupDivision:
    """The division of a product among blocks, as `templates/matmul/linear_wgmma.cu` describes it.

    Attributes:
        splits, clusters: Number of blocks per cluster, and of clusters.
        width: Columns of the result that a cluster computes.
        stages: Number of steps of the summation that the ring in shared memory has room for.
        shared: Bytes of shared memory of a block.
        resident: Blocks that a multiprocessor has room for: with two, those of the next kernel can begin.
    """

    splits: int
    clusters: int
    width: int
    stages: int
    shared: int
    resident: int


def suits_warpgroups(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> bool:
    """Whether this kernel can compute a product, and is expected to be the fastest for its size.

    Args:
        inputs: The product's operands by name.
    """
    x, weight = (inputs.get(name) for name in ("x", "weight"))
    if x is None or weight is None or not make.gpu.has_warpgroups or x.dtype not in HALF_DTYPES:
        return False
    return (
        _FEWEST_ROWS <= call.params["m"] <= _MOST_ROWS
        and weight.dtype == x.dtype
        and all(view.strides[1] == 1 and vector_width(view) >= 8 for view in (x, weight))
        and vector_width(call.outputs[0]) >= 4
        and call.params["k"] % 8 == 0
        and weight.numel * 2 >= _FEWEST_BYTES
        and max(view.shape[0] * view.strides[0] for view in (x, weight)) < _MOST_ELEMENTS
        and _division(make, call) is not None
    )


def _division(make: Specializer, call: KernelCall) -> WarpgroupDivision | None:
    m, n, k = (call.params[name] for name in "mnk")
    return divided(m, n, k, call.kernel in GATED.values(), make.gpu.shared_memory)


def warpgroup_product(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], norm: KernelCall | None = None
) -> KernelCall:
    """The call of the kernel for a product for which `suits_warpgroups` holds.

    Args:
        inputs: x, the weight, bias, residual.
        norm: The bfloat16 RMSNorm that computes x, without an offset to its gains, for the kernel to apply; None for
            none.
    """
    division, weight = _division(make, call), inputs["weight"]
    assert division is not None and weight is not None
    inputs, constants = template_operands(call, inputs, norm)
    constants |= {
        "splits": division.splits,
        "width": division.width,
        "stages": division.stages,
        "slabs": _SLABS,
        "shared": division.shared,
        "ahead": make.never_written(weight),
    }
    product = make.kernel(
        call,
        "matmul/linear_wgmma.cu",
        function="linear_wgmma",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(division.clusters, 1, division.splits),
        block=(_THREADS, 1, 1),
        shared=division.shared,
        constants=constants,
        min_blocks=division.resident,
        cluster=division.splits,
    )
    return replace(product, bytes_moved=sum(map(distinct_bytes, (*product.inputs, *product.outputs))))


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
                and (resident == 1 or registers <= _REGISTERS)
            ):
                exchanged = _EXCHANGED * 4 * m * columns + _EXCHANGE if splits > 1 else 0
                shared = stages * (stage + _BARRIER_BYTES) + rest
                division = WarpgroupDivision(splits, groups(n, width), width, stages, shared, resident)
                yield own * stage + exchanged, division
