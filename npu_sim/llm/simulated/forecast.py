"""`likely_programs`: the step programs that serving a trace will probably need, so that they can be simulated early.

The first requests of the trace are served with rough prices of steps, from the chip's peak rates alone. Real steps are
slower, so that batches are larger and need further programs; these are simulated when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from npu_compiler.graph.dtypes import itemsize
from npu_sim.llm.graph import ContiguousShape
from npu_sim.llm.simulated.programs import ProgramCost, StepGraph
from npu_sim.llm.simulated.requests import TimedRequest
from npu_sim.llm.simulated.serving import PoolSettings, serve_requests
from npu_sim.llm.simulated.step_prices import StepPrices

_REQUESTS = 500  # they meet nearly all programs, and serving them takes less time than simulating one


def likely_programs(
    requests: Sequence[TimedRequest], settings: PoolSettings, steps: StepGraph
) -> Iterable[ContiguousShape]:
    """The shapes of step programs that serving these requests will probably need, in the order of their first use."""
    estimates = Estimates(steps)
    prices = StepPrices(estimates, settings.max_batch, settings.max_tokens, settings.context_length)
    serve_requests(requests[:_REQUESTS], prices, settings)
    return estimates.shapes


class Estimates:
    """Rough costs of step programs, from a chip's peak rates.

    Attributes:
        shapes: The programs whose costs have been requested, in this order.
    """

    def __init__(self, steps: StepGraph) -> None:
        self.shapes: dict[ContiguousShape, None] = {}
        chip, dtype = steps.chip, steps.options.compute_dtype
        assert dtype is not None  # it is the checkpoint's
        self._bandwidth = 1e9 * chip.outside.bandwidth_gb_s
        self._rate = chip.peak_macs(dtype) * 1e9 * chip.clock_ghz or math.inf
        self._itemsize = itemsize(dtype)
        self._weights = sum(math.prod(weight["shape"]) for weight in steps.ir["weights"])
        caches = [given["shape"] for given in steps.ir["graph_inputs"] if len(given["shape"]) == 4]
        self._row = sum(math.prod(size for size in shape if isinstance(size, int)) for shape in caches)

    def prepare(self, shapes: Iterable[ContiguousShape]) -> None:
        """Do nothing: a formula takes no time."""

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The estimated time of one run of the program for that shape, without energy."""
        self.shapes[shape] = None
        rows = shape.sequences * shape.tokens
        attention = self._seconds(shape.sequences * shape.rows * self._row, rows * shape.rows * self._row)
        return ProgramCost(attention, 0.0, self._seconds(self._weights, rows * self._weights), 0.0)

    def _seconds(self, values: int, products: int) -> float:
        return max(values * self._itemsize / self._bandwidth, products / self._rate)
