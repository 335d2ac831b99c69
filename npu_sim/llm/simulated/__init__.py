"""Serving on a simulated chip: the engine's scheduler runs on a virtual clock, with step times from the simulator."""

from npu_sim.llm.simulated.forecast import likely_programs
from npu_sim.llm.simulated.programs import ProgramCost, SimulatedPrograms
from npu_sim.llm.simulated.requests import TimedRequest, poisson_requests, read_requests
from npu_sim.llm.simulated.result import Quantiles, ServingResult
from npu_sim.llm.simulated.serving import PoolSettings, serve_requests
from npu_sim.llm.simulated.step_prices import Cost, StepPrices

__all__ = [
    "Cost",
    "PoolSettings",
    "ProgramCost",
    "Quantiles",
    "ServingResult",
    "SimulatedPrograms",
    "StepPrices",
    "TimedRequest",
    "likely_programs",
    "poisson_requests",
    "read_requests",
    "serve_requests",
]
