"""The compiled programs of a traced graph: one for each combination of sizes, compiled on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.autograd.graph import increment_version

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import QuantizedArray
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.passes.quantize import Quantization
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.hardware import Hardware
from npu_runtime.program_run import Arena
from npu_sim.module.choosing import fastest_plan
from npu_sim.module.plans import PROGRAMS, plan_for
from npu_sim.module.runner import Loaded, Runner, Values
from npu_sim.module.shapes import Key
from npu_sim.module.storages import overlaps_itself
from npu_sim.module.trace import Trace
from npu_sim.module.views import Step, replay

Own = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings with which a traced graph is compiled.

    Attributes:
        backend: The device that runs the programs.
        device: The torch device of arguments, weights and results.
        dtype: Compute dtype; None for the graph's own.
        limit: Maximum number of programs to keep.
        quantization: Formats of weights in few bits (see `npu_compiler.compile`). None: weights are not quantized.
    """

    backend: Hardware
    device: torch.device
    dtype: str | None = None
    limit: int = PROGRAMS
    quantization: Quantization | None = None


class Compiled:
    """Cache of a traced graph's plans and compiled programs, which several sets of weights may share."""

    def __init__(self, traced: Trace, settings: Settings) -> None:
        self._trace, self._settings = traced, settings
        self._compiled: OrderedDict[Key, tuple[PartitionPlan, list[CompiledProgram] | None]] = OrderedDict()

    def plan(self, symbols: tuple[str, ...], key: Key) -> tuple[PartitionPlan, list[CompiledProgram] | None]:
        """Return the plan for these sizes, and its programs; None for the programs if they have not been compiled yet.

        Args:
            symbols: The symbolic sizes.
            key: The values of the symbols.
        """
        if key not in self._compiled:
            sizes = dict(zip(symbols, key, strict=True))
            chosen = self._settings
            plan = plan_for(self._trace.ir, sizes, chosen.dtype, chosen.backend.target, chosen.quantization)
            self.keep(key, plan, None)
        return self._compiled[key]

    def keep(self, key: Key, plan: PartitionPlan, programs: list[CompiledProgram] | None) -> None:
        self._compiled[key] = plan, programs
        while len(self._compiled) > self._settings.limit:
            self._compiled.popitem(last=False)

    def clear(self) -> None:
        self._compiled.clear()

    def plans(self) -> dict[Key, PartitionPlan]:
        return {key: plan for key, (plan, _) in self._compiled.items()}


class Programs:
    """A traced graph's programs, one for each combination of sizes, with one set of weights and one memory arena.

    The least recently used program is dropped beyond the limit. The caller holds the backend's lock.

    Args:
        traced: The graph.
        settings: The settings to compile with.
        weights: Key → tensor, for the graph's weights and constants.
        symbols: The symbolic sizes, in the order in which a key gives their values.
        compiled: Compiled programs to share with other sets of weights. None: nothing is shared.
        cache: Weights on the device (see `load_weights`). None: a new cache.
        stored: The weights that are quantized already; the tensors under their keys are not read.
    """

    def __init__(
        self,
        traced: Trace,
        settings: Settings,
        weights: Mapping[str, torch.Tensor],
        symbols: tuple[str, ...],
        compiled: Compiled | None = None,
        cache: MutableMapping[str, DeviceBuffer] | None = None,
        stored: Mapping[str, QuantizedArray] = MappingProxyType({}),
    ) -> None:
        self._trace, self._settings, self.symbols = traced, settings, symbols
        self._updated = traced.written
        self.compiled = compiled or Compiled(traced, settings)
        arena = Arena(settings.backend)
        self._loaded = Loaded(settings.backend, {}, settings.device, arena, {} if cache is None else cache)
        self._stored = stored
        self._take(weights)
        self._keys: dict[str, str] = traced.ir["weight_name_mapping"]
        self.runners: OrderedDict[Key, Runner] = OrderedDict()
        self._steps: dict[Key, dict[str, tuple[Step, ...]]] = {}

    def replace_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Use these weights from the next call on."""
        self._loaded.cache.clear()
        self._take(weights)
        for runner in self.runners.values():
            runner.refresh()

    def _take(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(weights)
        own = {key: value for key, value in weights.items() if key not in self._trace.constants}
        self._loaded.weights = {**own, **self._stored}
        read = self._trace.read_keys() - self._stored.keys() if self._updated else set()
        self._memory = _by_storage(x for key, x in weights.items() if key in read)

    def shared(self, inputs: Values) -> str | None:
        """Return a name, for messages, of an input that the graph changes and whose memory is shared, or None.

        It is shared if another input or a weight uses the same memory. The graph is traced without such sharing, so it
        would use the other tensor's old values.
        """
        written = [name for _, name in self._updated if name in inputs]
        name = _overlapping(inputs, written)
        if name is None:
            name = next((x for x in written if _overlaps_any(inputs[x], self._memory)), None)
        key = self._trace.state.get(name or "")
        return name and (f"argument '{name}'" if key is None else f"'{key}'")

    def plans(self) -> list[PartitionPlan]:
        """Return the plans of the programs compiled so far."""
        return [runner.plan for runner in self.runners.values()]

    def clear(self) -> None:
        """Drop all programs, because constants of the graph have changed."""
        self.runners.clear()
        self._steps.clear()
        self.compiled.clear()

    def run(self, key: Key, inputs: Values) -> list[torch.Tensor]:
        """Run the graph and return its outputs; inputs that the graph changes in place are updated.

        Args:
            key: The values of the symbolic sizes.
            inputs: Input name → tensor.

        Raises:
            InputError: an input that the graph changes shares memory with another, or another argument does not fit.
            DeviceError: the device failed.
        """
        if self._updated:
            shared = self.shared(inputs)
            if shared is not None:
                raise InputError(f"{shared} is changed in place, but shares memory with another; give a copy")
            for _, name in self._updated:
                if not inputs[name].is_contiguous() and overlaps_itself(inputs[name]):
                    raise InputError(
                        f"argument '{name}' is changed in place, but its elements share memory; give a copy"
                    )
        runner = self.runners.get(key) or self.runner(key)
        if len(self.runners) > 1:
            self.runners.move_to_end(key)
        outputs = runner(inputs)
        for index, name in self._updated:
            if outputs[index] is not inputs[name]:
                inputs[name].copy_(outputs[index])
            elif not inputs[name].is_inference():
                increment_version(inputs[name])  # so that whoever else reads it as a weight notices
        return outputs

    def runner(self, key: Key) -> Runner:
        """Return the program for these sizes, compiled now if it was not before."""
        if key not in self.runners:
            plan, programs = self.compiled.plan(self.symbols, key)
            backend, updated = self._settings.backend, [name for _, name in self._updated]
            has_npu = any(part.device == "npu" for part in plan.partitions)
            # A program that a call waits for does not stop to time kernels.
            with backend.without_trials() if self.runners else nullcontext():
                if programs is None and has_npu and plan.is_open and backend.makes_trials and not self.runners:
                    runner = fastest_plan(plan, self._loaded, updated, self._settings.quantization)
                else:
                    runner = Runner(plan, self._loaded, updated, programs)
            self.compiled.keep(key, runner.plan, runner.programs)
            self.runners[key] = runner
            while len(self.runners) > self._settings.limit:
                dropped, _ = self.runners.popitem(last=False)
                self._steps.pop(dropped, None)
        return self.runners[key]

    def source(self, name: str, key: Key, inputs: Values, outputs: list[torch.Tensor], own: Own) -> torch.Tensor:
        """Return a result that is no graph output: an input, a weight, or a view of an input, a weight or an output.

        Args:
            name: Name of the input, the weight or the view.
            key: The values of the symbolic sizes.
            own: Returns the module's own tensor for a weight's key.
        """
        view = self._trace.views.get(name)
        if view is None:
            key_of = self._keys.get(name) or self._trace.state.get(name)
            return inputs[name] if key_of is None else own(key_of)
        if key not in self._steps:
            sizes = dict(zip(self.symbols, key, strict=True))
            device = self._settings.device
            self._steps[key] = {name: view.steps(sizes, device) for name, view in self._trace.views.items()}
        base = (
            outputs[view.output]
            if view.output is not None
            else self.source(str(view.source), key, inputs, outputs, own)
        )
        return replay(base, self._steps[key][name])


def _overlapping(inputs: Values, written: list[str]) -> str | None:
    """Return an input that is written and whose memory overlaps another input's; None if there is none."""
    places: dict[int, list[str]] = {}
    for name, value in inputs.items():
        places.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    for name in written:
        for other in places[inputs[name].untyped_storage().data_ptr()]:
            if other != name and _overlap(inputs[name], inputs[other]):
                return name
    return None


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Group tensors by the address of their storage."""
    tensors_at: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        tensors_at.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return tensors_at


def _overlaps_any(value: torch.Tensor, others: Mapping[int, list[torch.Tensor]]) -> bool:
    return any(_overlap(value, other) for other in others.get(value.untyped_storage().data_ptr(), ()))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors overlap."""
    if not a.numel() or not b.numel():
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(value: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr() + (last + 1) * value.element_size()
