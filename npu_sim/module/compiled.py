"""`npu_sim.compile`: a PyTorch module as a callable that runs on a device."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.graph.reader import read_ir
from npu_compiler.graph.symbolic import specialize
from npu_compiler.partitioner import partition
from npu_compiler.passes.precision import native_dtype
from npu_runtime import Device
from npu_runtime.executor import Arena
from npu_runtime.hardware import Hardware
from npu_sim.module.arguments import Arguments, Results
from npu_sim.module.library_models import is_library_hook
from npu_sim.module.report import Report, report
from npu_sim.module.runner import Loaded, Runner
from npu_sim.module.shapes import InputShapes, Key, dimension_names, flat_dimensions
from npu_sim.module.trace import Trace, export, load_exported, trace
from npu_sim.module.watch import WeightWatch, current_tensors, live_tensor

if TYPE_CHECKING:
    from npu_compiler.graph.model import IRGraph

PROGRAMS = 8


def compile(
    module: nn.Module | ExportedProgram | str | Path,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    dynamic_shapes: Any = None,
    programs: int = PROGRAMS,
) -> CompiledModule:
    """Compile a PyTorch module for inference.

    What comes back is called as the module is and returns what the module returns: tensors on the same torch device, in
    the same structure. The module itself is not modified and keeps its weights.

    Args:
        module: A module in eval mode with all its tensors on one device; an `ExportedProgram`; or a `.pt2` file.
        args: Example positional arguments (a tensor stands for a tuple of one). Other values than tensors become a part
            of the compiled graph. Not for an `ExportedProgram`, which has its own.
        kwargs: Example keyword arguments.
        device: A device's name, as for `npu_runtime.Device`. Default: the GPU for CUDA tensors, else the CPU.
        dtype: Compute dtype: `float16`, `bfloat16` or `float32`. Default: the module's own.
        dynamic_shapes: Which sizes may change between calls, as `torch.export.export` takes it. There is one program
            for each combination of sizes, made at its first call.
        programs: How many programs to keep; the one that has not been used for longest is dropped.

    Raises:
        IRError: PyTorch cannot trace the module as one graph, for the reason given.
        InputError: the module is in training mode, has hooks, or has tensors on several devices or of a dtype for which
            there are no programs.
        DeviceError: there is no such device.
    """
    if isinstance(module, nn.Module):
        given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        check_module(module, (given, kwargs or {}))
        exported = export(module, given, kwargs, dynamic_shapes=dynamic_shapes)
        dims = flat_dimensions(module.forward, given, kwargs or {}, dynamic_shapes)
        return CompiledModule(trace(exported, type(module).__name__), module, device, dtype, dims, programs)
    if args or kwargs or dynamic_shapes is not None:
        raise InputError("an exported program has its own example arguments and dynamic shapes; give none")
    program = module if isinstance(module, ExportedProgram) else load_exported(module)
    name = Path(module).stem if isinstance(module, (str, Path)) else "exported"
    return CompiledModule(trace(program, name), None, device, dtype, (), programs)


class CompiledModule:
    """A traced module on a device, called as the module is.

    Calls from several threads queue. Each returns new tensors.

    Attributes:
        trace: The graph, symbolic where sizes may change.
        device: The torch device of arguments and results.
        backend: The device that runs the programs.
    """

    def __init__(
        self,
        traced: Trace,
        module: nn.Module | None,
        device: str | None,
        dtype: str | torch.dtype | None,
        dims: Sequence[Any] = (),
        programs: int = PROGRAMS,
    ) -> None:
        self.trace, self._module, self._limit = traced, module, programs
        self.device = _torch_device(traced)
        self.backend = open_backend(device or device_name(self.device))
        self._dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        forward = None if module is None else inspect.signature(module.forward)
        self._arguments = Arguments(forward, traced.inputs, traced.in_spec)
        self._results = Results(traced.outputs, traced.out_spec)
        described = traced.ir["graph_inputs"]
        paths = [leaf.path for leaf in traced.inputs if leaf.name is not None]
        self._shapes = InputShapes(described, paths, traced.ranges, dimension_names(described, dims), self.device)
        self._names = [meta["name"] for meta in described]
        self._updated = [(index, name) for index, name in traced.written if name in self._names]
        self._stored = [(index, key) for index, key in traced.written if key not in self._names]
        self._runners: OrderedDict[Key, Runner] = OrderedDict()
        self._arena = Arena(self.backend)
        self._take_weights(traced.weights | traced.constants)
        if not traced.is_dynamic:
            with self.backend.lock:
                self._runner(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result.

        Raises:
            InputError: an argument does not fit.
            DeviceError: the device failed.
        """
        tensors = self._arguments.tensors(args, kwargs)
        key = self._shapes.check(tensors)
        inputs = dict(zip(self._names, tensors, strict=True))
        with self.backend.lock:
            if self._watch.has_changed():
                self.refresh()
            runner = self._runners.get(key) or self._runner(key)
            if len(self._runners) > 1:
                self._runners.move_to_end(key)
            outputs = runner(inputs)
            for index, name in self._updated:
                if outputs[index] is not inputs[name]:
                    inputs[name].copy_(outputs[index])
            for index, weight in self._stored:
                self._tensors[weight].copy_(outputs[index])
        return self._results.of(outputs, lambda name: inputs[name] if name in inputs else self._own(name))

    def _own(self, key: str) -> torch.Tensor:
        """The module's own parameter or buffer."""
        return self._tensors[key] if self._module is None else live_tensor(self._module, key, self._tensors[key])

    def refresh(self) -> None:
        """Load the module's weights again, as they are now.

        A call does so by itself where PyTorch tells that they were written or replaced; what is written through
        `Tensor.data` it does not tell.
        """
        with self.backend.lock:
            known = self._tensors if self._module is None else current_tensors(self._module, self._tensors)
            constants = {key: known[key] for key in self.trace.constants}
            same = all(torch.equal(known[key], value) for key, value in self._constants.items())
            self._take_weights(known)
            if not same:
                self._set_constants(constants)
                self._runners.clear()
            for runner in self._runners.values():
                runner.refresh()

    def report(self) -> Report:
        """What runs where, and why: for each program, its partitions, and the reason of each node off the device."""
        with self.backend.lock:
            plans = {key: runner.plan for key, runner in self._runners.items()}
        names = [self._shapes.names[symbol] for symbol in self._shapes.symbols]
        return report(self.trace.ir["model_name"], self.backend.device, str(self.device), names, plans)

    def _take_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._constants = {key: tensors[key].clone() for key in self.trace.constants}
        self._watch = WeightWatch(self._module, tensors)
        weights = {key: tensors[key] for key in self.trace.weights}
        if not hasattr(self, "_loaded"):
            self._loaded = Loaded(self.backend, weights, self.device, self._arena, {})
        else:
            self._loaded.weights = weights
            self._loaded.cache.clear()

    def _set_constants(self, values: Mapping[str, torch.Tensor]) -> None:
        from npu_runtime.torch_arrays import tensor_to_numpy

        for key, value in values.items():
            self.trace.ir["constants"][key]["data"] = tensor_to_numpy(value.cpu())

    def _runner(self, key: Key) -> Runner:
        """The program for these sizes, made if need be."""
        if key not in self._runners:
            sizes = dict(zip(self._shapes.symbols, key, strict=True))
            graph = read_ir(specialize(self.trace.ir, sizes) if sizes else self.trace.ir)
            plan = partition(graph, compute_dtype=self._compute_dtype(graph))
            self._runners[key] = Runner(plan, self._loaded, [name for _, name in self._updated])
            while len(self._runners) > self._limit:
                self._runners.popitem(last=False)
        return self._runners[key]

    def _compute_dtype(self, graph: IRGraph) -> str:
        if self._dtype is not None:
            return self._dtype
        own = native_dtype(graph)
        return own if own in HALF_DTYPES else "float32"


def check_module(module: nn.Module, arguments: Any = ()) -> None:
    """Refuse a module that cannot be compiled as it is.

    Raises:
        InputError: it is in training mode, has hooks, or has tensors on several devices or of quantized dtypes.
    """
    if module.training:
        raise InputError(f"{type(module).__name__} is in training mode; call .eval() first: programs are for inference")
    for name, part in module.named_modules():
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if not all(map(is_library_hook, hooks)):
            where = f"module '{name}'" if name else type(module).__name__
            raise InputError(f"{where} has forward hooks, which a compiled graph would not call; remove them first")
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    leaves = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    devices: dict[torch.device, str] = {}
    for what, tensor in [*((f"'{name}'", x) for name, x in tensors.items()), *(("an argument", x) for x in leaves)]:
        devices.setdefault(tensor.device, what)
        if tensor.is_quantized:
            raise InputError(f"{what} is a quantized tensor of PyTorch ({tensor.dtype}), which has no form in IR")
    if len(devices) > 1:
        listed = ", ".join(f"{what} on {device}" for device, what in devices.items())
        raise InputError(f"all tensors have to be on one device, but there are {listed}")
    if any(device.type == "meta" for device in devices):
        raise InputError("the module is on the meta device and has no weights; materialize it first")


@cache
def open_backend(name: str) -> Hardware:
    """The device of that name; all compiled modules of the process share it."""
    return Device(name).backend


def device_name(device: torch.device) -> str:
    """The device that runs programs on the tensors of a torch device."""
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    return "metal" if device.type == "mps" else "cpu"


def _torch_device(traced: Trace) -> torch.device:
    for tensor in (traced.weights | traced.constants).values():
        return tensor.device
    return traced.example_device
