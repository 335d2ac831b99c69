"""Products of 17 to 128 rows by warpgroups, bound by reading their weight; with the norm before, the gate behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from cuda_compiler.rules.gates import GATED
from cuda_compiler.specialization.gpu import HOPPER, MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.views import View

_FEWEST_ROWS, _MOST_ROWS = 17, 128  # with fewer, the streaming kernel does; with more, cuBLASLt is bound by arithmetic
_FEWEST_BYTES = 1 << 20  # of the weight: smaller ones leave most multiprocessors idle
_WARPGROUP, _WARPGROUP_ROWS = 128, 64
_SLABS = {1: 2, 2: 2, 4: 2, 8: 2}
_ALONE = {1: 132, 2: 66, 4: 30, 8: 14}
_LEAST2 = 3
_WEIGHT_THREADS = 64
_ROW_BYTES = 128
_CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 32, 8: 16}  # blocks of a cluster → clusters there is room for
_MOST_COLUMNS = 256  # whose sums a warpgroup holds
_EXCHANGE = 8192  # bytes that could be read while the blocks of a cluster wait for each other
_FEWEST_STAGES, _MOST_STAGES = 3, 8
_OTHER_REGISTERS = 34  # of a thread, beside those of its sums
_REGISTERS = 1 << 16  # of a multiprocessor


@dataclass(frozen=True)
class Division:
    """How a product is divided among blocks, as `templates/matmul/linear_wgmma.cu` describes it.

    Attributes:
        splits, clusters: Blocks of a cluster, and the number of clusters.
        width: Columns of the result that a cluster has.
        stages: Steps of 64 terms that the ring has room for.
        shared: Bytes of shared memory of a block.
        resident: Blocks that a multiprocessor has room for, so that those of the next kernel can begin.
    """

    splits: int
    clusters: int
    width: int
    stages: int
    shared: int
    resident: int
    slabs: int


def suits_warpgroups(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> bool:
    """Whether a product is one that this kernel makes faster than others, by its operands' names."""
    x, weight, residual = (inputs.get(name) for name in ("x", "weight", "residual"))
    if x is None or weight is None or make.capability != HOPPER or x.dtype not in HALF_DTYPES:
        return False
    return (
        _FEWEST_ROWS <= call.params["m"] <= _MOST_ROWS
        and weight.dtype == x.dtype
        and all(view.strides[1] == 1 and vector_width(view) >= 8 for view in (x, weight))
        and vector_width(call.outputs[0]) >= 4
        and (residual is None or residual.strides[1] == 1)
        and weight.numel * 2 >= _FEWEST_BYTES
        and _division(make, call) is not None
    )


def _division(make: Specializer, call: KernelCall) -> Division | None:
    m, n, k = (call.params[name] for name in "mnk")
    return divided(m, n, k, call.kernel in GATED.values(), make.shared_memory)


def warpgroup_product(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], norm: KernelCall | None = None
) -> KernelCall:
    """A product for which `suits_warpgroups` holds.

    Args:
        inputs: x, the weight, bias, residual.
        norm: The RMSNorm that makes x, of bfloat16 and without an offset to its gains; the product takes its place.
    """
    x, gain = inputs["x"], None
    if norm is not None:
        x, gain = KERNELS[norm.kernel].bind(norm)[:2]
    found, weight = _division(make, call), inputs["weight"]
    assert found is not None and weight is not None
    constants: dict[str, bool | int | float] = {
        "gated": call.kernel in GATED.values(),
        "normed": norm is not None,
        "norm_eps": float(norm.params["eps"]) if norm is not None else 0.0,
        "splits": found.splits,
        "width": found.width,
        "stages": found.stages,
        "slabs": found.slabs,
        "x_threads": _x_threads(call.params["m"]),
        "ahead": weight.buffer in make.constants,
    }
    made = make.kernel(
        call,
        "matmul/linear_wgmma.cu",
        function="linear_wgmma",
        inputs={**inputs, "x": x, "gain": gain},
        outputs={"out": call.outputs[0]},
        grid=(found.clusters, 1, found.splits),
        block=(_threads(call.params["m"]), 1, 1),
        shared=found.shared,
        constants=constants,
        min_blocks=found.resident,
        cluster=found.splits,
    )
    return replace(made, bytes_moved=sum(map(distinct_bytes, (*made.inputs, *made.outputs))))


def _x_threads(m: int) -> int:
    """Threads that copy x."""
    return _WARPGROUP // 2 if m <= _WARPGROUP_ROWS else _WARPGROUP


def _threads(m: int) -> int:
    return groups(m, _WARPGROUP_ROWS) * _WARPGROUP + _x_threads(m) + _WEIGHT_THREADS


@cache
def divided(m: int, n: int, k: int, gated: bool, shared_memory: int) -> Division | None:
    """The division in which a block reads the least; None where there is none.

    Two blocks fit a multiprocessor if their registers allow it, so that those of the next kernel can begin.
    """
    unit, of_both = (4, 2) if gated else (8, 1)
    if n % unit:
        return None
    held = 8 * groups(m, 8)
    found = []
    for splits in _CLUSTERS:
        for resident, counts in ((2, _CLUSTERS), (1, _ALONE)):
            width = unit * groups(groups(n, counts[splits]), unit)
            columns = of_both * width
            slabs = _SLABS[splits]
            steps = groups(k, 64 * slabs)
            if columns > _MOST_COLUMNS or splits > steps:
                continue
            own = groups(steps, splits)
            stage = slabs * _ROW_BYTES * (held + columns)
            beyond = max(_WARPGROUP_ROWS * groups(m, _WARPGROUP_ROWS) - held - columns, 0)

            def shared(stages: int) -> int:
                return stages * (stage + 16) + _ROW_BYTES * (beyond + 1) + 4 * held

            if resident == 2 and 2 * _threads(m) * (columns // 2 + _OTHER_REGISTERS) > _REGISTERS:
                continue
            fewest = _LEAST2 if resident == 2 else _FEWEST_STAGES
            fitting = [n for n in range(fewest, _MOST_STAGES + 1) if shared(n) * resident <= shared_memory]
            stages = max((n for n in fitting if n < own + 1 or n == fewest), default=0)
            if not stages or stages * stage < 4 * m * (columns + 4):
                continue
            exchanged = 4 * m * columns + _EXCHANGE if splits > 1 else 0
            cost = own * slabs * _ROW_BYTES * (held + columns) + exchanged
            found.append((cost, -resident, Division(splits, groups(n, width), width, stages, shared(stages), resident, slabs)))
    return min(found, key=lambda x: x[:2])[2] if found else None
