"""Factors by which computing takes longer than a chip's description says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_compiler import CompileOptions, compile
from npu_model.chip import Chip
from npu_model.measured import in_dtype
from npu_model.simulation import simulate
from npu_model.work import call_work
from npu_sim.calibration.measuring import FEW_BLOCKS, Block

_WITHIN = 0.03  # a block that the description predicts so well needs no factor
_LEAST = 0.1  # factor
_HIDDEN = 0.1  # computing that is a smaller share of a block says nothing of its own rate


def factors(chip: Chip, blocks: Sequence[Block]) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Factors by which computing takes longer than a chip's description says, for each call of the probes' kinds.

    The other calls of a block are simulated with the factors found before.

    Args:
        blocks: Measured blocks; those of the first dtype stand for the dtypes that have none.

    Returns:
        The value of `Chip.measured`.
    """
    samples: dict[str, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in blocks:
        kind = each.probe.kind
        own = samples[kind if each.dtype == blocks[0].dtype else in_dtype(kind, each.dtype)]
        blocks_run = FEW_BLOCKS[1]
        program = compile(each.probe.ir(blocks_run), options=CompileOptions(compute_dtype=each.dtype))
        works = [call_work(call).operations for call in program.kernels]
        block = range(len(works) - len(works) // blocks_run, len(works))
        of_kind = [index for index in block if works[index].kind == kind]
        of_kind = [index for index in of_kind if works[index].sizes not in own] or of_kind
        shown = {works[index].sizes for index in of_kind}
        before = {sizes: own.pop(sizes, []) for sizes in shown}
        own.update({sizes: [1.0] for sizes in shown})
        result = simulate(program, replace(chip, measured=_table(samples)))
        predicted = sum(chip.seconds(result.calls[index].cycles) for index in block)
        computing = sum(
            chip.seconds(result.calls[index].array_cycles + result.calls[index].vector_cycles) for index in of_kind
        )
        others = sum(chip.seconds(result.calls[index].cycles) for index in block if index not in of_kind)
        launches = 1e-6 * sum(
            chip.launch.cost_us + chip.launch.product_us * (result.calls[index].array_cycles > 0) for index in of_kind
        )
        if abs(each.seconds / predicted - 1) < _WITHIN or (
            each.seconds < predicted and computing < _HIDDEN * predicted
        ):
            factor = 1.0
        elif each.seconds > predicted:  # all the time is computing, which hides the transfers
            factor = max(1.0, (each.seconds - others - launches) / computing)
        else:
            factor = max(_LEAST, (computing + each.seconds - predicted) / computing)
        own.update({sizes: [*before[sizes], factor] for sizes in shown})
    return _table(samples)


def _table(
    samples: Mapping[str, Mapping[tuple[int, ...], Sequence[float]]],
) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Each kind's rows of sizes and factor, the geometric mean of those samples."""
    return {
        kind: tuple((*map(float, sizes), math.prod(each) ** (1 / len(each))) for sizes, each in rows.items())
        for kind, rows in samples.items()
        if rows
    }
