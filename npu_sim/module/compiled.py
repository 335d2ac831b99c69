"""`npu_sim.compile`: the compilation of a PyTorch module to a callable that runs on a device."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from npu_compiler.errors import InPlaceError, InputError, IRError
from npu_compiler.graph.quantization import QuantizedArray
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.passes.quantize import Quantization
from npu_runtime.device import Device
from npu_sim.checkpoints.torchao_tensors import dense_stand_ins, quantized_parameters
from npu_sim.module.arguments import Arguments, Results
from npu_sim.module.buckets import Bucketing, Buckets
from npu_sim.module.device_module import DeviceModule
from npu_sim.module.dynamo_backend import Options
from npu_sim.module.fx_reader import constant_of
from npu_sim.module.graph_breaks import BrokenModule
from npu_sim.module.hardware import device_name, dtype_name, open_backend
from npu_sim.module.library_models import is_library_hook
from npu_sim.module.plans import PROGRAMS
from npu_sim.module.programs import Programs, Settings
from npu_sim.module.report import Report, program_reports
from npu_sim.module.saved import unpickled
from npu_sim.module.shapes import Key, dimension_names, same_layout
from npu_sim.module.tensors import PytreeStructure, TensorShapes, argument_structures, flat_dimensions
from npu_sim.module.trace import Trace, export, load_exported, trace_module
from npu_sim.module.watch import PlainTensors, WeightWatch, live_tensor
from npu_sim.onnx.sources import SUFFIX as ONNX
from npu_sim.onnx.sources import load as load_onnx


def compile(
    module: nn.Module | ExportedProgram | str | Path,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: Device | str | None = None,
    dtype: str | torch.dtype | None = None,
    dynamic_shapes: Any = None,
    buckets: Mapping[str, Buckets] | None = None,
    programs: int = PROGRAMS,
    quantization: Quantization | None = None,
) -> CompiledModule | BrokenModule:
    """Compile a PyTorch module for inference.

    What comes back is called as the module is and returns what the module returns: tensors on the same torch device, in
    the same structure. The module itself is not modified and keeps its weights. One that PyTorch cannot trace as one
    graph is compiled in several, with Python in between: `report()` lists why.

    Args:
        module: A module in eval mode with all its tensors on one device; an `ExportedProgram`; a `.pt2` or
            an `.onnx` file.
        args: Example positional arguments (a tensor stands for a tuple of one). Other values than tensors become a part
            of the compiled graph. Not for an `ExportedProgram`, which has its own; an ONNX model needs some only where
            its sizes are dynamic.
        kwargs: Example keyword arguments.
        device: An `npu_runtime.Device`, or the name of one. Default: the GPU for CUDA tensors, else the CPU.
        dtype: Compute dtype: `float16`, `bfloat16` or `float32`. Default: the module's own.
        dynamic_shapes: The sizes that may change between calls, as `torch.export.export` takes them. There is one
            program for each combination of sizes, made at its first call.
        buckets: Name of a dynamic size (of its `torch.export.Dim`) → the sizes to which it is rounded up, so that fewer
            programs are made; only for modules that ignore what a mask hides.
        programs: Maximum number of programs to keep; the least recently used one is dropped.
        quantization: Formats of weights in few bits: `int4`, `int8` or `fp8` for all linear layers, or a format for
            each of some parameters (see `npu_compiler.compile`). Weights that torchao has quantized stay as they are.

    Raises:
        IRError: PyTorch can trace no part of the module, for the reason given.
        InputError: the module is in training mode, has hooks, or has tensors on several devices or of a dtype for which
            there are no programs; or a weight cannot be stored as `quantization` says.
        DeviceError: there is no such device.
    """
    options = Options(device, dtype, programs, quantization)
    if isinstance(module, nn.Module):
        given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        return _compile_module(module, given, kwargs or {}, options, dynamic_shapes, buckets)
    if not isinstance(module, (ExportedProgram, str, Path)):
        raise InputError(
            f"cannot compile a {type(module).__name__}: give a torch.nn.Module, an ExportedProgram, or the path of a "
            ".pt2 or .onnx file"
        )
    if isinstance(module, (str, Path)) and Path(module).suffix == ONNX:
        if kwargs or dynamic_shapes is not None or buckets:
            raise InputError(
                "an ONNX model is compiled for static shapes: give examples of its inputs, in order, as args"
            )
        return _compile_onnx(module, (args,) if isinstance(args, torch.Tensor) else tuple(args), options)
    if args or kwargs or dynamic_shapes is not None or buckets:
        raise InputError("an exported program has its own example arguments and dynamic shapes; give none")
    program = module if isinstance(module, ExportedProgram) else load_exported(module)
    name = Path(module).stem if isinstance(module, (str, Path)) else "exported"
    return CompiledModule(trace_module(program, name), None, options)


def _compile_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    dynamic_shapes: Any,
    buckets: Mapping[str, Buckets] | None,
) -> CompiledModule | BrokenModule:
    """Compile a module as one graph if PyTorch can trace it so, else as several."""
    check_module(module, (args, kwargs))
    stored = quantized_parameters(module)
    if stored:
        if options.quantization is not None:
            raise InputError(
                f"{type(module).__name__} is quantized already; leave out quantization={options.quantization!r:.80}"
            )
        options = replace(options, quantization={key: array.format for key, array in stored.items()})
    try:
        with dense_stand_ins(module, stored):
            exported = export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
        traced = trace_module(exported, type(module).__name__)
    except IRError as error:
        obstacle = error
    else:
        dims = flat_dimensions(module.forward, args, kwargs, dynamic_shapes)
        try:
            return CompiledModule(traced, module, options, dims, buckets, stored)
        except InPlaceError as error:
            obstacle = error
    if buckets or stored:
        raise obstacle
    return _with_breaks(module, args, kwargs, options, dynamic_shapes is not None, obstacle)


def _compile_onnx(path: str | Path, args: tuple[Any, ...], options: Options) -> CompiledModule:
    """Compile an ONNX file, for the shapes of the example arguments or, without any, for the model's own."""
    model = load_onnx(path, examples=args)
    return CompiledModule(trace_module(export(model, model.examples), model.name), model, options)


def _with_breaks(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, dynamic: bool, error: IRError
) -> BrokenModule:
    """Compile a module as several graphs.

    Args:
        dynamic: Whether sizes may change between calls.
        error: The reason why it cannot be traced as one graph.
    """
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    device = next((x.device for x in tensors if isinstance(x, torch.Tensor)), torch.device("cpu"))
    broken = BrokenModule(module, device, options, dynamic, str(error))
    broken.try_out(args, kwargs)
    return broken


class CompiledModule(DeviceModule):
    """A traced module on a device; it is called like the original module.

    It may be called from several threads; calls run one at a time. Each returns new tensors. A copy (`copy.deepcopy`)
    has weights of its own. `pickle` writes the saved form, which is unpickled as a `LoadedModule`.

    Attributes:
        trace: The graph, symbolic where sizes may change.
        device: The torch device of arguments and results.
        backend: The device that runs the programs.
    """

    def __init__(
        self,
        traced: Trace,
        module: nn.Module | None,
        options: Options,
        dims: Sequence[Any] = (),
        buckets: Mapping[str, Buckets] | None = None,
        stored: Mapping[str, QuantizedArray] = MappingProxyType({}),
    ) -> None:
        super().__init__(module)
        self.trace, self._options, self._dims, self._bucket_sizes = traced, options, dims, buckets
        self.device = _torch_device(traced)
        self.backend = open_backend(options.device or device_name(self.device))
        self._signature = None if module is None else inspect.signature(module.forward)
        self._arguments = Arguments(self._signature, traced.inputs, *argument_structures(traced.in_spec), torch.Tensor)
        self._results = Results(traced.outputs, PytreeStructure(traced.out_spec))
        paths = [leaf.path for leaf in traced.inputs if leaf.name is not None]
        described, state = traced.ir["graph_inputs"][: len(paths)], traced.ir["graph_inputs"][len(paths) :]
        self._state = [(meta["name"], traced.state[meta["name"]], tuple(meta["shape"])) for meta in state]
        strides = {index: traced.strides[x["name"]] for index, x in enumerate(described) if x["name"] in traced.strides}
        titles = dimension_names(described, dims)
        self._shapes = TensorShapes(described, paths, traced.ranges, titles, self.device, strides)
        self._buckets = Bucketing(buckets, traced, self._shapes, paths) if buckets else None
        self._names = [meta["name"] for meta in described]
        self._dtype = dtype_name(options.dtype)
        settings = Settings(self.backend, self.device, self._dtype, options.programs, options.quantization)
        tensors = traced.weights | traced.constants
        self._stored = stored
        self._plain = PlainTensors(module, {key: x for key, x in tensors.items() if key not in stored})
        self._programs = Programs(traced, settings, tensors, self._shapes.symbols, stored=stored)
        self._watch(tensors)
        shared = self._programs.shared(self._state_tensors())
        if shared is not None:
            raise InPlaceError(f"{shared} is changed in place, but shares memory with another parameter or buffer")
        example = tuple(traced.example_sizes[symbol] for symbol in self._shapes.symbols)
        with self.backend.lock:
            self._programs.runner(example if self._buckets is None else self._buckets.rounded(example))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Return a compiled module with the same graph and device and with a copy of the weights."""
        module = copy.deepcopy(self._module, memo)
        held = {} if module is None else module.state_dict(keep_vars=True)
        traced = _with_tensors(self.trace, held)
        return CompiledModule(traced, module, self._options, self._dims, self._bucket_sizes, self._stored)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return the content of a saved file, and the function that loads it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "module.npumod"
            self.save(path)
            return unpickled, (path.read_bytes(),)

    def extra_repr(self) -> str:
        return f"{self.trace.ir['model_name']} on {self.backend.device}"

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._programs.tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its result.

        Raises:
            InputError: an argument does not fit the traced graph.
            DeviceError: the device failed.
        """
        tensors = self._arguments.tensors(args, kwargs)
        key = self._shapes.check(tensors)
        if self._buckets is not None:
            return self._results.of(self._run_bucket(tensors, key), self._own)
        inputs = dict(zip(self._names, tensors, strict=True))
        if self._state:
            inputs |= self._state_tensors()
        with self.backend.lock:
            if self._watched.has_changed():
                self.refresh()
            outputs = self._programs.run(key, inputs)
        return self._results.of(outputs, lambda name: self._programs.source(name, key, inputs, outputs, self._own))

    def _run_bucket(self, tensors: Sequence[torch.Tensor], key: Key) -> list[torch.Tensor]:
        """Run a call whose sizes are rounded up to buckets, and return the outputs cut to the original sizes."""
        assert self._buckets is not None
        rounded = self._buckets.rounded(key)
        inputs = dict(zip(self._names, self._buckets.padded(tensors, rounded), strict=True))
        with self.backend.lock:
            if self._watched.has_changed():
                self.refresh()
            return self._buckets.cut(self._programs.run(rounded, inputs), key)

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensors of the module's buffers that the graph changes.

        Raises:
            InputError: a buffer's shape or strides differ from those that the module was compiled for.
        """
        tensors = {}
        for name, key, shape in self._state:
            value = tensors[name] = self._own(key).detach()
            if value.shape != shape:
                raise InputError(
                    f"'{key}' has shape {list(value.shape)}, but the module was compiled for {list(shape)}"
                )
            strides = self.trace.strides.get(name)
            if strides is not None and not same_layout(value, strides):
                raise InputError(
                    f"'{key}' has strides {list(value.stride())}, but the module was compiled for {list(strides)}"
                )
        return tensors

    def _own(self, key: str) -> torch.Tensor:
        """Return the module's current parameter or buffer of that key."""
        tensor = self._programs.tensors[key]
        return tensor if self._module is None else live_tensor(self._module, key, tensor, self._plain)

    def refresh(self) -> None:
        """Load the module's current weights again.

        A call does so itself when PyTorch reports that a weight was written or replaced; writes through `Tensor.data`
        are not reported, so call this after them.

        Raises:
            InputError: a submodule was replaced, so that the module's code may have changed.
            WeightError: a weight's shape has changed, or a constant of the graph has other values.
        """
        with self.backend.lock:
            new_part = self._watched.new_part
            if new_part is not None:
                raise InputError(f"submodule '{new_part}' was replaced after the module was compiled; compile it again")
            tensors = self._programs.tensors
            if self._module is not None:
                tensors = {key: x if key in self._stored else self._own(key).detach() for key, x in tensors.items()}
            if not all(torch.equal(tensors[key], value) for key, value in self._constants.items()):
                for traced in (self.trace, self.trace.plain or self.trace):
                    traced.ir["constants"] = {key: constant_of(tensors[key]) for key in traced.constants}
                self._programs.clear()
            self._programs.replace_weights(tensors)
            self._watch(tensors)

    def save(self, path: str | Path) -> None:
        """Write one file (`.npumod`) that `npu_sim.load` runs without PyTorch: graph, weights and compiled programs.

        The weights are written with their current values. An existing file stays until the new one is on the disk.

        Raises:
            InputError: the file cannot be written, or cannot represent a dtype or a structure that the module uses.
        """
        from npu_sim.module.saving import FewBits, save_module

        with self.backend.lock:
            if self._watched.has_changed():
                self.refresh()
            shared = self._programs.shared(self._state_tensors())
            if shared is not None:
                raise InputError(f"a file cannot hold that {shared}, which a call changes, shares memory with another")
            traced = self.trace.plain or self.trace
            tensors, runners = self._programs.tensors, {} if self.trace.plain else self._programs.runners
            formats = {key: format for plan in self._programs.plans() for key, format in plan.formats.items()}
            names = self._shapes.names
            few_bits = FewBits(formats, self._stored)
            save_module(Path(path), traced, tensors, self._signature, names, self._dtype, runners, few_bits)

    @property
    def ran(self) -> PartitionPlan:
        """The division of the last call's graph between device and PyTorch.

        Raises `InputError` before the first call.
        """
        if not self._programs.runners:
            raise InputError(f"'{self.trace.ir['model_name']}' has not been called")
        return next(reversed(self._programs.runners.values())).plan

    def report(self) -> Report:
        """Return, for each program, its partitions and the reason for each node that is not on the device."""
        with self.backend.lock:
            plans = {key: runner.plan for key, runner in self._programs.runners.items()}
        names = [self._shapes.names[symbol] for symbol in self._shapes.symbols]
        return Report(
            self.trace.ir["model_name"],
            self.backend.device,
            str(self.device),
            program_reports(names, plans),
            simulated_seconds=self.backend.simulated_seconds,
        )

    def _watch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._constants = {key: tensors[key].clone() for key in self.trace.constants}
        state = self.trace.state.values()
        unwatched = {*state, *self._stored}
        watched = {key: x for key, x in tensors.items() if key not in unwatched}
        self._watched = WeightWatch(self._module, watched, self._plain)


def _with_tensors(traced: Trace, held: Mapping[str, torch.Tensor]) -> Trace:
    """Return a trace that uses the given tensors; keys without a given tensor get a copy of the trace's own."""

    def of_copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: held[key].detach() if key in held else x.clone() for key, x in tensors.items()}

    plain = None if traced.plain is None else _with_tensors(traced.plain, held)
    return replace(traced, weights=of_copy(traced.weights), constants=of_copy(traced.constants), plain=plain)


def check_module(module: nn.Module, arguments: Any = ()) -> None:
    """Check that a module can be compiled.

    Args:
        module: The module.
        arguments: Example arguments, whose tensors must be on the module's device.

    Raises:
        InputError: the module is in training mode, has hooks, or has tensors on several devices or of quantized dtypes.
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


def _torch_device(traced: Trace) -> torch.device:
    for tensor in (traced.weights | traced.constants).values():
        return tensor.device
    return traced.example_device
