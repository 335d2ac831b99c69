"""Sums over ranks (GPUs of a group), fused with the residual and the norm, in kernels that read the other GPUs' memory.

With two ranks and large summands, the product is computed in two halves of rows. The first half is copied from GPU to
GPU while the second is computed, so the sum reads only the second half over the link between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.cuda_program import KernelLaunch, LaunchKind, PeerExchange, kernel_launch_of
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_PACK = 8  # elements of an access
_NOTICE_BYTES = 32
_NOTICES = 2  # kinds of them, from each rank to each other one
_HELD = 2  # packs of a row that a thread holds
_MOST_THREADS = 1024  # of a block, and of the blocks of a multiprocessor together
# That a GPU reads of several others: of more, NCCL sends less, each sum once instead of all summands.
_MOST_BYTES = 1 << 20
# Results of half of a product: with fewer, such as 128 tiles of 128 by 256, it would leave multiprocessors idle.
_LEAST_RESULTS = 1 << 22


@dataclass(frozen=True)
class RankSum:
    """The sum of all ranks' summands and a residual: an all-reduce and the addition that follows it.

    Attributes:
        summand, residual, out: Views of one shape: this rank's summand, the residual and the sum.
        ranks: Number of ranks.
        node: Name of the graph node of the addition.
    """

    summand: View
    residual: View
    out: View
    ranks: int
    node: str


def find_rank_sum(
    calls: Sequence[KernelCall], at: int, shape: tuple[int, ...] | None, readers: Counter[str]
) -> RankSum | None:
    """The rank sum that calls `at` and `at + 1` compute; None unless they are an all-reduce and an addition to it.

    Args:
        shape: Shape to give the operands; None means rows of the addition's last dimension.
        readers: Buffer → how many calls and program outputs read it.
    """
    if at + 2 > len(calls):
        return None
    reduction, addition = calls[at : at + 2]
    sum_kernel = elementwise_kernel(addition)
    if reduction.kernel != "all_reduce_kernel" or sum_kernel is None or sum_kernel.op.name != "add":
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


def join_rank_sums(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with each sum over ranks fused with the residual and the RMSNorm that follow it, as one kernel.

    Given:  matmul → s; all_reduce(s) → t; add(r, t) → h; rmsnorm(h) → y
    Result: matmul → s; rank_sum(s, r) → h, y

    With two ranks and large summands:
    Result: matmul → s[:half]; peer_copy(s[:half]) → c; matmul → s[half:]; rank_sum(s, r, c) → h, y
    """
    if not make.gpu.reaches_peers:
        return plan
    readers = plan.count_readers()
    all_found = [find_rank_sum(plan.calls, index, None, readers) for index in range(len(plan.calls))]
    sums = {
        index: rank_sum for index, rank_sum in enumerate(all_found) if rank_sum is not None and _suits(rank_sum, plan)
    }
    last = max(sums, default=-1)
    result: list[KernelCall] = []
    previous: View | None = None
    index = 0
    while index < len(plan.calls):
        if index not in sums:
            result.append(plan.calls[index])
            index += 1
            continue
        rank_sum, is_last = sums[index], index == last
        index += 2
        norm = plan.calls[index] if index < len(plan.calls) else None
        if norm is not None and not _normalizes(norm, rank_sum.out):
            norm = None
        index += norm is not None
        copied = None
        if result and _suits_halves(result[-1], rank_sum, readers):
            first, second = _halves(result.pop())
            copy = _peer_copy(rank_sum, first, make)
            copied = copy.outputs[0]
            result += [first, copy, second]
        result.append(_rank_sum(rank_sum, norm, copied, previous, is_last, make))
        previous = rank_sum.summand
    return replace(plan, calls=result)


def _suits_halves(product: KernelCall, rank_sum: RankSum, readers: Counter[str]) -> bool:
    """Whether a product should compute its summands in two halves: there are two ranks, and the halves are large."""
    if product.kernel != "matmul_kernel" or product.outputs[0] != rank_sum.summand:
        return False
    rows, width = rank_sum.summand.shape
    large = rows % 2 == 0 and rows // 2 * width >= _LEAST_RESULTS
    return (
        large and rank_sum.ranks == 2 and readers[rank_sum.summand.buffer] == 1 and not product.params["has_residual"]
    )


def _halves(product: KernelCall) -> tuple[KernelCall, KernelCall]:
    """The calls that compute the first and the second half of a product's rows."""
    (x, *others), out = product.inputs, product.outputs[0]
    rows = out.shape[0]
    halves = []
    for start in (0, rows // 2):
        inputs = (x.slice(0, start, start + rows // 2), *others)
        outputs = (out.slice(0, start, start + rows // 2),)
        half = replace(
            product,
            inputs=inputs,
            outputs=outputs,
            params={**product.params, "m": rows // 2},
            flops=product.flops // 2,
            bytes_moved=sum(map(distinct_bytes, (*inputs, *outputs))),
        )
        halves.append(half)
    return halves[0], halves[1]


def _peer_copy(rank_sum: RankSum, product: KernelCall, make: Specializer) -> KernelCall:
    """The call that copies the result of this product on the other rank to a buffer of this rank."""
    own = product.outputs[0]
    peers, turns = _exchange_buffers(rank_sum, make)
    copied = make.temporary(f"{rank_sum.node}.copied", own.shape, own.dtype)
    copy = make.kernel(
        KernelCall("peer_copy", "", (), (), {}, rank_sum.node),
        "movement/peer_copy.cu",
        grid=(1, 1, 1),
        block=(WARP, 1, 1),
        inputs={"x": own, "peers": peers},
        outputs={"copied": copied, "turns": turns},
        constants={"ranks": rank_sum.ranks},
    )
    return _exchanging(_launched(copy, LaunchKind.PEER_COPY), rank_sum.ranks, peers, own)


def _exchange_buffers(rank_sum: RankSum, make: Specializer) -> tuple[View, View]:
    """Two persistent operands of a kernel that exchanges values: the other ranks' addresses, and its counters."""
    return make.counters(f"{rank_sum.node}.peers", 2 * (2 * rank_sum.ranks + 2)), make.counters(
        f"{rank_sum.node}.turns", 2
    )


def _exchanging(call: KernelCall, ranks: int, peers: View, read: View) -> KernelCall:
    """The call with the parameters of a `PeerExchange`, in which the other ranks read the operand `read`."""
    inputs = call.inputs
    exchange = PeerExchange(ranks, _NOTICES * ranks * _NOTICE_BYTES, inputs.index(peers), inputs.index(read))
    return replace(call, params={**call.params, **exchange.params()})


def _launched(call: KernelCall, kind: LaunchKind) -> KernelCall:
    """The call with `kind` as the kind of its launch."""
    launch: KernelLaunch = replace(kernel_launch_of(call), kind=kind)
    return replace(call, params={**call.params, **launch.params()})


def _suits(rank_sum: RankSum, plan: ExecutionPlan) -> bool:
    views = (rank_sum.summand, rank_sum.residual, rank_sum.out)
    size = (rank_sum.ranks - 1) * 2 * rank_sum.summand.numel
    return (
        rank_sum.out.dtype in HALF_DTYPES
        and all(view.dtype == rank_sum.out.dtype and _is_packed(view) for view in views)
        and plan.buffers[rank_sum.summand.buffer].kind == "arena"
        and (rank_sum.ranks == 2 or size <= _MOST_BYTES)
    )


def _is_packed(view: View) -> bool:
    return view.is_contiguous and view.shape[-1] % _PACK == 0 and vector_width(view) >= _PACK


def _normalizes(call: KernelCall, out: View) -> bool:
    if call.kernel != "rmsnorm_kernel":
        return False
    x, gain, *_ = KERNELS[call.kernel].bind(call)
    result = call.outputs[0]
    return x == out and result.dtype == out.dtype and _is_packed(result) and (gain is None or gain.is_contiguous)


def _rank_sum(
    rank_sum: RankSum,
    norm: KernelCall | None,
    copied: View | None,
    previous: View | None,
    is_last: bool,
    make: Specializer,
) -> KernelCall:
    """The call of the kernel that adds up all ranks' summands and the residual, and applies `norm` if there is one.

    Args:
        norm: The RMSNorm of the sum; None if none follows.
        copied: The first half of the other rank's rows, if a peer copy has brought it; None otherwise.
        previous: The summands of the preceding rank sum; None for the first one. Other ranks may read them until this
            kernel has heard from those ranks, so they are an operand, which keeps their memory alive.
        is_last: Whether no rank sum follows, so that this kernel has to wait until all ranks have read its summands.
    """
    rows, width = rank_sum.out.shape
    threads = min(groups(groups(width // _PACK, _HELD), WARP) * WARP, _MOST_THREADS)
    blocks = _MOST_THREADS // threads  # of a multiprocessor
    bound = KERNELS[norm.kernel].bind(norm) if norm is not None else ()
    peers, turns = _exchange_buffers(rank_sum, make)
    gain = bound[1] if bound else None
    inputs = {
        "x": rank_sum.summand,
        "residual": rank_sum.residual,
        "gain": gain,
        "copied": copied,
        "previous": previous,
        "peers": peers,
    }
    outputs = {"out": rank_sum.out, "normalized": norm.outputs[0] if norm is not None else None, "turns": turns}
    kernel = make.kernel(
        KernelCall("rank_sum", "", (), (), {}, rank_sum.node, rank_sum.out.numel * rank_sum.ranks),
        "norms/rank_sum.cu",
        grid=(min(rows, MULTIPROCESSORS * blocks), 1, 1),
        block=(threads, 1, 1),
        min_blocks=blocks,
        inputs=inputs,
        outputs=outputs,
        constants={
            "ranks": rank_sum.ranks,
            "is_last": is_last,
            "rows": rows,
            "width": width,
            "eps": float(norm.params["eps"]) if norm is not None else 0.0,
            "gain_offset": float(norm.params["weight_offset"]) if norm is not None else 0.0,
            "team_warps": threads // WARP,
            "team_lanes": WARP,
            "teams": 1,
        },
    )
    if copied is not None:
        kernel = _launched(kernel, LaunchKind.AFTER_COPIES)
    return _exchanging(kernel, rank_sum.ranks, peers, rank_sum.summand)
