"""Sums over ranks inside a resident kernel: a product whose summands the ranks exchange before they go on.

The numbers I11 and I23 are those of the invariants in `templates/resident/grid.cuh`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.resident.phases import Phase
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel

_WORD = 8  # bytes of a summand and its tag
_TAKEN = 2  # calls after the product


def with_rank_sum(
    calls: Sequence[KernelCall], at: int, product: KernelCall, readers: Counter[str]
) -> tuple[int, KernelCall, int]:
    """A product with what the calls from `at` on do with it, where these add up the ranks' products and a residual.

    Given:  linear(x, w) -> s; all_reduce(s) -> t; add(r, t) -> out
    Result: linear(x, w) + r -> out, with its sums exchanged

    Returns:
        How many calls are taken, the product, and the number of ranks; 0, the same product and 1 where they do not.
    """
    nothing = (0, product, 1)
    if at + _TAKEN > len(calls) or product.params.get("has_residual") or product.params["activation"] != "none":
        return nothing
    reduction, addition = calls[at : at + _TAKEN]
    made = elementwise_kernel(addition)
    if reduction.kernel != "all_reduce_kernel" or made is None or made.op.name != "add":
        return nothing
    summand, total, out = product.outputs[0], reduction.outputs[0], addition.outputs[0]
    plain = len(addition.inputs) == 2 and addition.params.get("alpha", 1) == 1
    alone = readers[summand.buffer] == readers[total.buffer] == 1
    if not plain or not alone or reduction.inputs[0].buffer != summand.buffer or out.numel != summand.numel:
        return nothing
    others = [view for view in addition.inputs if view.buffer != total.buffer]
    shaped = [view.reshape(summand.shape) for view in (*others, out)]
    if len(others) != 1 or None in shaped or not summand.is_contiguous:
        return nothing
    residual, target = (view for view in shaped if view is not None)
    params = {**product.params, "has_residual": 1}
    joined = replace(product, inputs=(*product.inputs, residual), outputs=(target,), params=params, node=addition.node)
    return _TAKEN, joined, int(reduction.params["ranks"])


def exchanging(phase: Phase, ranks: int) -> Phase:
    """The phase of a product whose sums are those of so many ranks."""
    if ranks == 1:
        return phase
    out = phase.outputs["out"]
    assert out is not None
    return replace(phase, exchanged=numel(out.shape), ranks=ranks)


def connect_ranks(phases: Sequence[Phase], make: Specializer, node: str) -> tuple[list[Phase], dict[str, int]]:
    """The phases with the operand through which they find the other ranks, and what the runtime has to know of it.

    That operand has the address of each rank's memory, this rank, and the address of a word that the host sets when the
    others are gone, 8 bytes each.
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


def exchanges(call: KernelCall) -> bool:
    """Whether a resident kernel exchanges values with other ranks."""
    return "exchange_bytes" in call.params
