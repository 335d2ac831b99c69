"""The two routes from a module to results (`compile` and `backend`) that are tested, and how results are judged."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import npu_sim
from benchmarks.architectures.models import Architecture, NotBuilt, build, reason_of, run
from npu_compiler.errors import NPUError
from npu_sim.verify.criteria import compare_output

# Of float32, whose sums another order rounds otherwise: largest RMS error of an output, relative to its RMS.
MOST_FLOAT32_ERROR = 1e-4

RIGHT, WRONG, REFUSED, CRASHED, UNBUILT = "right", "wrong", "refused", "crashed", "unbuilt"


@dataclass
class Outcome:
    """Outcome of one architecture on one route.

    Attributes:
        model_type: The name of the model type.
        route: `compile` or `backend`.
        device: The device.
        dtype: The compute dtype.
        status: `right`; `wrong`: the results differ from PyTorch's; `refused`: an `NPUError` gives the reason;
            `crashed`: any other error, a time-out or the end of the process; `unbuilt`: no module that runs in eager
            PyTorch.
        reason: The reason why it is not right.
        inputs: Names of the arguments.
        pearson: The lowest Pearson r of its float outputs with eager PyTorch in float32. None: nothing was compared.
        error: The largest RMS error of its float outputs, relative to the RMS of the reference. None: nothing was
            compared.
        largest: The largest error of a value, relative to the largest value of that output. None: nothing was compared.
        nodes: Number of the graph's nodes; `on_device` of them ran on the device.
        graphs: The number of graphs that `torch.compile` captured; there is one graph break fewer.
        cpu: Reason and op → the number of nodes that were not on the device for that reason.
        seconds: Time of the attempt.
    """

    model_type: str
    route: str
    device: str
    dtype: str
    status: str = CRASHED
    reason: str = ""
    inputs: str = ""
    pearson: float | None = None
    error: float | None = None
    largest: float | None = None
    nodes: int = 0
    on_device: int = 0
    graphs: int = 1
    cpu: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Placement:
    """Number of a model's nodes on the device, and reasons why the others are not, on one route."""

    nodes: int
    on_device: int
    graphs: int
    cpu: Mapping[str, int]


Route = Callable[[Any, Mapping[str, Any], Architecture, str], tuple[tuple[Tensor, ...], Callable[[], Placement]]]


def through_compile(
    module: Any, kwargs: Mapping[str, Any], model: Architecture, device: str
) -> tuple[tuple[Tensor, ...], Callable[[], Placement]]:
    """Run a module through `npu_sim.compile`; return its results and a function that counts where nodes ran."""
    compiled = npu_sim.compile(module, (), kwargs, device=device)
    answer = run(compiled, kwargs)
    report = compiled.report()
    return answer, lambda: _placement(report.programs, 1 + len(report.graph_breaks))


def through_backend(
    module: Any, kwargs: Mapping[str, Any], model: Architecture, device: str
) -> tuple[tuple[Tensor, ...], Callable[[], Placement]]:
    """Run a module through `torch.compile` with the backend `npu_sim`, which allows graph breaks.

    Returns its results and a function that counts where nodes ran.
    """
    compiled: list[tuple[Any, int]] = []

    def noted(graph_module: Any, inputs: Sequence[Any]) -> Any:
        callable_graph = npu_sim.backend(graph_module, inputs, options={"device": device})
        compiled.append((callable_graph, sum(node.op.startswith("call") for node in graph_module.graph.nodes)))
        return callable_graph

    torch._dynamo.reset()
    answer = run(torch.compile(module, backend=noted), kwargs)

    def placement() -> Placement:
        programs = [program for callable_graph, _ in compiled for program in _programs(callable_graph)]
        eager = sum(size for callable_graph, size in compiled if not _programs(callable_graph))
        return _placement(programs, len(compiled), eager)

    return answer, placement


def _programs(callable_graph: Any) -> Sequence[Any]:
    """Return the programs of a captured graph; empty if PyTorch runs it."""
    return callable_graph.programs() if hasattr(callable_graph, "programs") else ()


def _placement(programs: Sequence[Any], graphs: int, eager: int = 0) -> Placement:
    """Count nodes by where they ran.

    Args:
        programs: Reports of the programs.
        graphs: Number of captured graphs.
        eager: Number of nodes in graphs that PyTorch runs as a whole.
    """
    cpu = Counter(f"{node.op}: {node.reason}" for program in programs for node in program.off_device)
    if eager:
        cpu["a graph that PyTorch runs"] = eager
    nodes = sum(program.nodes for program in programs) + eager
    return Placement(nodes, nodes - sum(cpu.values()), graphs, cpu)


ROUTES: dict[str, Route] = {"compile": through_compile, "backend": through_backend}


def attempt(model_type: str, route: str, device: str, dtype: str) -> Outcome:
    """Run one architecture through one route and return the outcome; no error is raised."""
    outcome, start = Outcome(model_type, route, device, dtype), time.perf_counter()
    try:
        model = build(model_type)
    except Exception as error:  # of any of several hundred models
        outcome.status, outcome.reason = UNBUILT, str(error) if isinstance(error, NotBuilt) else reason_of(error)
        return outcome
    outcome.inputs = ", ".join(model.kwargs)
    try:
        module, kwargs = _moved(model, device, dtype)
        half = model.expected if dtype == "float32" else _eager(module, kwargs)
        if not all(bool(x.isfinite().all()) for x in half if x.is_floating_point()):
            raise NotBuilt(f"PyTorch's own answer in {dtype} is not finite")
        answer, placement = ROUTES[route](module, kwargs, model, device)
        where = placement()
        outcome.nodes, outcome.on_device, outcome.graphs = where.nodes, where.on_device, where.graphs
        outcome.cpu = dict(where.cpu)
        judge(outcome, answer, model.expected, half)
    except NotBuilt as error:
        outcome.status, outcome.reason = UNBUILT, str(error)
    except NPUError as error:
        outcome.status, outcome.reason = REFUSED, reason_of(error)
    except Exception as error:  # whatever it is, it is no clear error
        outcome.status, outcome.reason = CRASHED, reason_of(error)
    outcome.seconds = time.perf_counter() - start
    return outcome


def judge(outcome: Outcome, answer: tuple[Tensor, ...], expected: tuple[Tensor, ...], half: tuple[Tensor, ...]) -> None:
    """Compare results with eager PyTorch's, by the criteria of `npu_sim.verify`, and record the outcome.

    In a 16-bit dtype, the error of an output with respect to float32 may be 1.25 times PyTorch's error in that dtype;
    in float32, its relative RMS error is at most `MOST_FLOAT32_ERROR`.

    Args:
        outcome: The outcome; changed.
        answer: The results.
        expected: Eager PyTorch's results in float32.
        half: Eager PyTorch's results in the outcome's dtype.
    """
    if len(answer) != len(expected):
        outcome.status, outcome.reason = WRONG, f"{len(answer)} tensors came back instead of {len(expected)}"
        return
    problems: list[str] = []
    for index, (ours, exact, near) in enumerate(zip(answer, expected, half, strict=True)):
        if ours.shape != exact.shape:
            problems.append(f"output {index} has shape {tuple(ours.shape)} instead of {tuple(exact.shape)}")
            continue
        problems += _compare(outcome, index, *(_array(x) for x in (ours, exact, near)))
    outcome.status, outcome.reason = (WRONG, "; ".join(problems)) if problems else (RIGHT, "")


def _compare(outcome: Outcome, index: int, ours: Any, exact: Any, near: Any) -> list[str]:
    report = compare_output(f"output {index}", [ours], [exact], [near], outcome.dtype)
    problems = list(report.problems)
    if exact.dtype.kind == "f":
        finite = np.isfinite(exact) & np.isfinite(ours)
        scale = float(np.sqrt(np.mean(np.square(exact[finite], dtype=np.float64)))) if finite.any() else 0.0
        peak = float(np.abs(exact[finite]).max()) if finite.any() else 0.0
        error = report.rms_error / scale if scale else report.rms_error
        off = float(np.abs(ours[finite] - exact[finite]).max()) / peak if peak else 0.0
        outcome.error, outcome.largest = max(outcome.error or 0.0, error), max(outcome.largest or 0.0, off)
        if report.pearson is not None:
            outcome.pearson = min(1.0 if outcome.pearson is None else outcome.pearson, report.pearson)
        if outcome.dtype == "float32" and error <= MOST_FLOAT32_ERROR:
            problems = [x for x in problems if not x.startswith("the RMS error")]
    return [f"output {index}: {problem}" for problem in problems]


def _array(value: Tensor) -> Any:
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _eager(module: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return eager PyTorch's results in the module's own dtype. Raises `NotBuilt` if PyTorch cannot run it."""
    try:
        return run(module, kwargs)
    except Exception as error:  # of any of several hundred models; what PyTorch does not run is not compared
        raise NotBuilt(f"eager PyTorch does not run it in this dtype: {reason_of(error)}") from error


def _moved(model: Architecture, device: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Return the module and its arguments on the torch device, with floats in the dtype."""
    place, to = "cuda" if device.startswith("cuda") else "cpu", getattr(torch, dtype)
    kwargs = {
        name: x.to(place, to if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
        for name, x in model.kwargs.items()
    }
    return model.module.to(place, to), kwargs
