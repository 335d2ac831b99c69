"""Sums over ranks inside a resident kernel: a product phase exchanges sums with the other GPUs.

The numbers I11 and I23 are those of the invariants in `templates/resident/grid.cuh`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.passes.rank_sums import find_rank_sum
from cuda_compiler.resident.phases import Phase
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel

_WORD = 8  # bytes of a summand and its tag
_TAKEN = 2  # calls after the product


def with_rank_sum(
    calls: Sequence[KernelCall], at: int, product: KernelCall, readers: Counter[str]
) -> tuple[int, KernelCall, int]:
    """The product fused with the all-reduce and the addition at `at`, if these sum its result over ranks.

    Given:  linear(x, w) -> s; all_reduce(s) -> t; add(r, t) -> out
    Result: linear(x, w) + r -> out, with its sums exchanged

    Returns:
        The number of fused calls, the fused product, and the number of ranks; or 0, `product` itself and 1.
    """
    nothing = (0, product, 1)
    summand = product.outputs[0]
    if product.params.get("has_residual") or product.params["activation"] != "none" or readers[summand.buffer] != 1:
        return nothing
    rank_sum = find_rank_sum(calls, at, summand.shape, readers)
    if rank_sum is None or rank_sum.summand.buffer != summand.buffer or not summand.is_contiguous:
        return nothing
    params = {**product.params, "has_residual": 1}
    inputs = (*product.inputs, rank_sum.residual)
    joined = replace(product, inputs=inputs, outputs=(rank_sum.out,), params=params, node=rank_sum.node)
    return _TAKEN, joined, rank_sum.ranks


def exchanging(phase: Phase, ranks: int) -> Phase:
    """The phase of a product that adds up the sums of all ranks; with one rank, the phase unchanged."""
    if ranks == 1:
        return phase
    out = phase.outputs["out"]
    assert out is not None
    return replace(phase, exchanged=numel(out.shape), ranks=ranks)


def connect_ranks(phases: Sequence[Phase], make: Specializer, node: str) -> tuple[list[Phase], dict[str, int]]:
    """The phases with a `peers` operand where they exchange sums, and the other fields of `PeerExchange`.

    The fields are empty if no phase exchanges sums.
    """
    exchanged, ranks = max(phase.exchanged for phase in phases), max(phase.ranks for phase in phases)
    if ranks == 1:
        return list(phases), {}
    peers = make.counters(f"{node}.peers", 2 * (ranks + 2))
    connected = [
        replace(
            phase,
            inputs={**phase.inputs, "peers": peers if phase.ranks > 1 else None},
            constants={**phase.constants, "ranks": phase.ranks},
        )
        if phase.stream is not None
        else phase
        for phase in phases
    ]
    return connected, {"ranks": ranks, "exchange_bytes": 2 * ranks * exchanged * _WORD}
