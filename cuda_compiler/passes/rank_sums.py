"""Sums over ranks, with the residual and the norm behind them, in one kernel that reads the other GPUs' memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.cuda_program import PeerExchange
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_PACK = 8  # elements of an access
_NOTICE_BYTES = 32
_NOTICES = 2  # of each rank to each other one
_HELD = 2  # packs of a row that a thread holds
_MOST_THREADS = 1024  # of a block, and of the blocks of a multiprocessor together
# That a GPU reads of several others: of more, NCCL sends less, each sum once instead of all summands.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class RankSum:
    """The sum of the ranks' summands and a residual: an all-reduce and the addition behind it.

    Attributes:
        summand, residual, out: All of one shape.
        ranks: How many take part.
        node: Of the addition.
    """

    summand: View
    residual: View
    out: View
    ranks: int
    node: str


def find_rank_sum(
    calls: Sequence[KernelCall], at: int, shape: tuple[int, ...] | None, readers: Counter[str]
) -> RankSum | None:
    """The sum that the calls `at` and `at + 1` make, if they make one.

    Args:
        shape: Of the operands; by default rows of the last dimension that the addition has.
        readers: Buffer → how many calls and program outputs read it.
    """
    if at + 2 > len(calls):
        return None
    reduction, addition = calls[at : at + 2]
    made = elementwise_kernel(addition)
    if reduction.kernel != "all_reduce_kernel" or made is None or made.op.name != "add":
        return None
    (summand,), total, out = reduction.inputs, reduction.outputs[0], addition.outputs[0]
    plain = len(addition.inputs) == 2 and addition.params.get("alpha", 1) == 1
    others = [view for view in addition.inputs if view.buffer != total.buffer]
    if not plain or len(others) != 1 or readers[total.buffer] != 1 or out.numel != summand.numel:
        return None
    wanted = shape or (out.numel // out.shape[-1], out.shape[-1])
    views = [view.reshape(wanted) for view in (summand, *others, out)]
    if None in views:
        return None
    x, residual, target = (view for view in views if view is not None)
    return RankSum(x, residual, target, int(reduction.params["ranks"]), addition.node)


def join_rank_sums(plan: ExecutionPlan, make: Specializer) -> list[KernelCall]:
    """The plan's calls, with each sum over ranks, the residual and the RMSNorm behind it as one kernel.

    Given:  gemm → s; all_reduce(s) → t; add(r, t) → h; rmsnorm(h) → y
    Result: gemm → s; rank_sum(s, r) → h, y
    """
    if not make.reaches_peers:
        return plan.calls
    readers = plan.count_readers()
    result: list[KernelCall] = []
    index = 0
    while index < len(plan.calls):
        found = find_rank_sum(plan.calls, index, None, readers)
        if found is None or not _suits(found, plan):
            result.append(plan.calls[index])
            index += 1
            continue
        index += 2
        norm = plan.calls[index] if index < len(plan.calls) else None
        if norm is not None and not _normalizes(norm, found.out):
            norm = None
        index += norm is not None
        result.append(_rank_sum(found, norm, make))
    return result


def _suits(found: RankSum, plan: ExecutionPlan) -> bool:
    views = (found.summand, found.residual, found.out)
    size = (found.ranks - 1) * 2 * found.summand.numel
    return (
        found.out.dtype in HALF_DTYPES
        and all(view.dtype == found.out.dtype and _is_packed(view) for view in views)
        and plan.buffers[found.summand.buffer].kind == "arena"
        and (found.ranks == 2 or size <= _MOST_BYTES)
    )


def _is_packed(view: View) -> bool:
    return view.is_contiguous and view.shape[-1] % _PACK == 0 and vector_width(view) >= _PACK


def _normalizes(call: KernelCall, out: View) -> bool:
    if call.kernel != "rmsnorm_kernel":
        return False
    x, gain, *_ = KERNELS[call.kernel].bind(call)
    made = call.outputs[0]
    return x == out and made.dtype == out.dtype and _is_packed(made) and (gain is None or gain.is_contiguous)


def _rank_sum(found: RankSum, norm: KernelCall | None, make: Specializer) -> KernelCall:
    rows, width = found.out.shape
    threads = min(groups(groups(width // _PACK, _HELD), WARP) * WARP, _MOST_THREADS)
    blocks = _MOST_THREADS // threads  # of a multiprocessor
    bound = KERNELS[norm.kernel].bind(norm) if norm is not None else ()
    peers = make.counters(f"{found.node}.peers", 2 * (2 * found.ranks + 2))
    turns = make.counters(f"{found.node}.turns", 2)
    inputs = {"x": found.summand, "residual": found.residual, "gain": bound[1] if bound else None, "peers": peers}
    outputs = {"out": found.out, "normalized": norm.outputs[0] if norm is not None else None, "turns": turns}
    made = make.kernel(
        KernelCall("rank_sum", "", (), (), {}, found.node, found.out.numel * found.ranks),
        "norms/rank_sum.cu",
        grid=(min(rows, MULTIPROCESSORS * blocks), 1, 1),
        block=(threads, 1, 1),
        min_blocks=blocks,
        inputs=inputs,
        outputs=outputs,
        constants={
            "ranks": found.ranks,
            "rows": rows,
            "width": width,
            "eps": float(norm.params["eps"]) if norm is not None else 0.0,
            "gain_offset": float(norm.params["weight_offset"]) if norm is not None else 0.0,
            "team_warps": threads // WARP,
            "team_lanes": WARP,
            "teams": 1,
        },
    )
    exchange = PeerExchange(
        found.ranks, _NOTICES * found.ranks * _NOTICE_BYTES, made.inputs.index(peers), made.inputs.index(found.summand)
    )
    return replace(made, params={**made.params, **exchange.params()})
