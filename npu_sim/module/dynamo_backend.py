"""`torch.compile(model, backend="npu_sim")`: the graphs that TorchDynamo captures, run as compiled programs.

TorchDynamo passes a module's parameters as arguments of every call. Here they are treated as weights, loaded once for
each set of tensors passed; a buffer that changes between calls, such as a recurrent state, is treated as an input.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from npu_compiler.errors import ConstraintError, InputError, IRError
from npu_compiler.graph.symbolic import KEY, evaluate, is_symbolic
from npu_compiler.passes.quantize import Quantization
from npu_runtime.device import Device
from npu_sim.module.capture import Captured, capture
from npu_sim.module.hardware import device_name, dtype_name, open_backend
from npu_sim.module.plans import PROGRAMS
from npu_sim.module.programs import Compiled, Programs, Settings
from npu_sim.module.report import ProgramReport, program_reports
from npu_sim.module.shared_weights import SharedWeights
from npu_sim.module.structure import NUMBER, number_of
from npu_sim.module.trace import Trace, first_line

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CHANGES = 3  # of a buffer between calls, until it is an argument


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(..., options=...)`; None and defaults mean the same as in `npu_sim.compile`."""

    device: Device | str | None = None
    dtype: str | torch.dtype | None = None
    programs: int = PROGRAMS
    quantization: Quantization | None = None


def backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile`, in which this function is registered as the backend `npu_sim`.

    A graph that needs gradients, or that cannot be expressed as a program, is run by PyTorch instead, with a warning
    that gives the reason.

    Args:
        graph_module: The graph that TorchDynamo captured.
        example_inputs: The arguments of the captured call.
        options: `dtype`, `device`, `programs` and `quantization`, as for `npu_sim.compile`. None: the defaults.
        mode: A mode of `torch.compile`, or None. It has no effect: overhead is always reduced, and kernels are always
            chosen by measuring. It is accepted because callers such as `generate()` of transformers pass it to every
            backend.

    Raises:
        InputError: there is no such option or mode.
        DeviceError: there is no such device.
    """
    names = [field.name for field in fields(Options)]
    unknown = sorted((options or {}).keys() - set(names))
    if unknown:
        raise InputError(f"backend 'npu_sim' has no option '{unknown[0]}'; it has {', '.join(names)}")
    if mode not in (None, *_MODES):
        raise InputError(f"torch.compile has no mode '{mode}'; it has {', '.join(_MODES)}")
    return compile_graph(graph_module, Options(**(options or {})))


def break_reason(graph_module: GraphModule) -> str | None:
    """Return the reason and source line of the graph break that ends a graph.

    None if the graph ends where the traced function returns.
    """
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = f" ({reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno})" if reason.user_stack else ""
    return f"{first_line(reason.reason)}{where}"


def compile_graph(graph_module: GraphModule, options: Options) -> Subgraph | Callable[..., Any]:
    """Compile a captured graph to a callable; PyTorch's own if the graph needs gradients or cannot be a program."""
    if torch.is_grad_enabled() and _needs_gradient(graph_module):
        _warn("backend 'npu_sim' is for inference: PyTorch runs graphs that need gradients; use torch.no_grad()")
        return graph_module.forward
    try:
        captured = capture(graph_module)
        settings = Settings(
            open_backend(options.device or device_name(captured.device)),
            captured.device,
            dtype_name(options.dtype),
            options.programs,
            options.quantization,
        )
        return Subgraph(captured, settings, graph_module.forward)
    except IRError as error:
        _warn(f"backend 'npu_sim' leaves a graph to PyTorch: {error}")
        return graph_module.forward


def _needs_gradient(graph_module: GraphModule) -> bool:
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


@cache
def _warn(message: str) -> None:
    """Show a warning, only once for each message."""
    warnings.warn(message, stacklevel=2)


@dataclass(frozen=True)
class _WeightSet:
    """A graph's programs with one set of weights.

    Attributes:
        programs: The programs.
        stamps: For each weight, values that change when the weight is written or moved.
        references: Weak references to the module's own tensors; the set is dropped when one of them is freed.
    """

    programs: Programs
    stamps: list[tuple[int, int]]
    references: tuple[weakref.ref[torch.Tensor], ...]


def _stamps(weights: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the address of each weight and the number of times it was written.

    That number is 0 for tensors made in inference mode, for which PyTorch does not count.
    """
    try:
        return [(x.data_ptr(), x._version) for x in weights]
    except RuntimeError:  # of tensors made in inference mode it does not
        return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in weights]


class Subgraph:
    """A captured graph as a callable with the graph's arguments and results.

    It may be called from several threads; calls run one at a time.

    Attributes:
        failure: The reason why PyTorch runs the graph instead of the device. None: the device runs it.
    """

    def __init__(self, captured: Captured, settings: Settings, eager: Callable[..., Any]) -> None:
        self._captured, self._settings, self._eager = captured, settings, eager
        self._changes: Counter[int] = Counter()
        self.failure: str | None = None
        self._numbers = [
            position
            for position, value in enumerate(captured.values)
            if isinstance(value, torch.Tensor) and value.device != captured.device
        ]
        self._take(captured.static)

    def _take(self, static: frozenset[int]) -> None:
        """Compile the graph with the arguments at these positions as weights, except for those that it changes."""
        traced = self._captured.trace(static, "graph")
        self._trace: Trace = traced
        places = {name: position for position, name in enumerate(self._captured.names)}
        self._inputs = [(meta["name"], places[meta["name"]]) for meta in traced.ir["graph_inputs"]]
        self._static = tuple(places[name] for name in traced.ir["weight_name_mapping"] if name in places)
        self._places = places
        self._written = [name for _, name in traced.written]
        self._is_plain = all(leaf.output == index and leaf.value is None for index, leaf in enumerate(traced.outputs))
        self._compiled = Compiled(traced, self._settings)
        self._sets: dict[tuple[int, ...], _WeightSet] = {}

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the graph and return its results.

        Raises:
            InputError: an argument holds a number that the program's input cannot represent.
            DeviceError: the device failed.
        """
        with self._settings.backend.lock:
            if self.failure is not None:
                return self._run_eagerly(args)
            weights = tuple([args[position] for position in self._static])
            loaded = self._sets.get(tuple(map(id, weights)))
            if loaded is None or loaded.stamps != _stamps(weights):
                loaded = self._load(args, weights, loaded)
            inputs = {name: args[position] for name, position in self._inputs}
            if self._written and loaded.programs.shared(inputs) is not None:
                return self._run_eagerly(args)
            if self._numbers:
                inputs |= {self._captured.names[x]: args[x].to(self._captured.device) for x in self._numbers}
            sizes = self._captured.sizes.values()
            key = tuple([args[x] if dim is None else args[x].shape[dim] for x, dim in sizes])
            try:
                loaded.programs.runner(key)
            except (IRError, ConstraintError) as error:
                self.failure = str(error)
                _warn(f"backend 'npu_sim' leaves a graph to PyTorch: {error}")
                return self._run_eagerly(args)
            outputs = loaded.programs.run(key, inputs)
        if self._is_plain:
            return outputs[: len(self._trace.outputs)]
        return self._results(loaded.programs, args, key, inputs, outputs)

    def _run_eagerly(self, args: Sequence[Any]) -> Sequence[Any]:
        result: Sequence[Any] = self._eager(*args)
        return result

    def _results(
        self,
        programs: Programs,
        args: Sequence[Any],
        key: tuple[int, ...],
        inputs: dict[str, torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> list[Any]:
        def own(name: str) -> torch.Tensor:
            return args[self._places[name]] if name in self._places else self._captured.constants[name]

        results: list[Any] = []
        for leaf in self._trace.outputs:
            if leaf.output is not None:
                output = outputs[leaf.output]
                results.append(number_of(output) if leaf.value == NUMBER else output)
            elif leaf.source is not None:
                results.append(programs.source(leaf.source, key, inputs, outputs, own))
            elif is_symbolic(leaf.value):
                results.append(evaluate(leaf.value[KEY], dict(zip(self._captured.symbols, key, strict=True))))
            else:
                results.append(leaf.value)
        return results

    def _load(
        self, args: Sequence[Any], weights: tuple[torch.Tensor, ...], weight_set: _WeightSet | None
    ) -> _WeightSet:
        """Load the weights of a call, which are new tensors or have been written since the last call.

        Args:
            weight_set: The programs with the old values of the same tensors. None: the tensors are new.
        """
        if weight_set is not None:
            for position, before, now in zip(self._static, weight_set.stamps, _stamps(weights), strict=True):
                self._changes[position] += before != now
        fleeting = [x for x in self._static if self._changes[x] >= _CHANGES and not isinstance(args[x], nn.Parameter)]
        if fleeting:
            self._take(frozenset(self._static).difference(fleeting))
            weights = tuple([args[position] for position in self._static])
        ids = tuple(map(id, weights))
        names = {self._captured.names[x]: args[x] for x in self._static}
        sets, changes = self._sets, self._changes

        def drop(position: int) -> Callable[[object], None]:
            def forget(_: object) -> None:
                sets.pop(ids, None)
                changes[position] += 1

            return forget

        constants = self._trace.weights | self._trace.constants
        tensors = {name: value.detach() for name, value in names.items()} | constants
        cache = SharedWeights(self._settings.backend, names | constants)
        loaded_set = _WeightSet(
            Programs(self._trace, self._settings, tensors, self._captured.symbols, self._compiled, cache),
            _stamps(weights),
            tuple(weakref.ref(args[x], drop(x)) for x in self._static),
        )
        self._sets[ids] = loaded_set
        return loaded_set

    def release(self) -> None:
        """Free the programs and their memory, which TorchDynamo would keep with the graph."""
        self._sets.clear()
        self._compiled.clear()

    def programs(self) -> tuple[ProgramReport, ...]:
        """Return a report of each program: which nodes run on the device, and why others do not."""
        settings = self._settings
        with settings.backend.lock:
            plans = self._compiled.plans()
        return program_reports(self._captured.symbols, plans)
