"""`npu_sim.load`: a saved module as a callable on any device, without PyTorch."""

from __future__ import annotations

import json
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, InputError, ProgramFormatError, WeightError, reading
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.installing import install_command
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.cpu.arrays import with_strides
from npu_runtime.device import Device
from npu_runtime.hardware import Hardware
from npu_runtime.packing import to_numpy
from npu_runtime.pytorch import find_torch
from npu_runtime.weight_loader import MappedCheckpoint
from npu_sim.module.arguments import Arguments, Results
from npu_sim.module.hardware import open_backend
from npu_sim.module.loaded_programs import DeviceProgram, Memory, MixedPlan, Value
from npu_sim.module.plans import PROGRAMS, plan_for
from npu_sim.module.saved_file import SavedProgram, read_module, stored_weight
from npu_sim.module.shapes import InputShapes, Key, same_layout
from npu_sim.module.signature import signature_of

if TYPE_CHECKING:
    from npu_compiler.partitioner import PartitionPlan

_ON_HOST = (1, 3)  # DLPack's numbers for the CPU, and for its memory that GPUs reach
_AnyProgram = TypeVar("_AnyProgram", DeviceProgram, MixedPlan)


class _HasArray(type):
    def __instancecheck__(cls, value: object) -> bool:
        return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


class ArrayLike(metaclass=_HasArray):
    """An array or tensor that NumPy can read by `__array__` or DLPack, such as a device buffer or a torch tensor."""


def load(
    path: str | Path,
    device: Device | str | None = None,
    *,
    allow_code: bool = False,
    dlpack: bool = False,
    programs: int = PROGRAMS,
    classes: Sequence[type] = (),
) -> LoadedModule:
    """Load a module that `CompiledModule.save` wrote.

    Neither tracing nor PyTorch is needed, unless the module has nodes that the device cannot run. Programs in the file
    are used if they were compiled for this device and, if they contain code, were made by somebody whom this user
    trusts. Otherwise, and for other sizes of the inputs, programs are compiled from the graph in the file.

    Args:
        path: A `.npumod` file.
        device: An `npu_runtime.Device`, or the name of one. Default: the best one on this machine.
        allow_code: Run code in the file, whoever made it, instead of compiling the graph again.
        dlpack: Return device buffers, which support DLPack, in the dtypes that the device stores; by default, NumPy
            arrays in PyTorch's dtypes.
        programs: Maximum number of programs to keep, if sizes may change; the least recently used one is dropped.
        classes: Namedtuples and dataclasses of yours that results may be. Of the classes that the file names, only
            those of PyTorch, transformers and similar libraries are created; others are replaced by namedtuples and
            dicts with the same fields.

    Raises:
        ProgramFormatError: the file is missing, truncated, damaged, of another format version, or inconsistent.
        DeviceError: there is no such device, or the module needs PyTorch and it is not installed.
    """
    backend = open_backend(device)
    return LoadedModule(Path(path), backend, allow_code=allow_code, dlpack=dlpack, programs=programs, classes=classes)


def unpickled(content: bytes) -> LoadedModule:
    """Load a module from the content of its file, on the best device; `pickle` calls this for a `CompiledModule`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.npumod"
        path.write_bytes(content)
        return load(path)


class LoadedModule:
    """A saved module on a device, called like the original module, with arrays instead of tensors.

    An argument may be a NumPy array, a device buffer, or anything with `__array__` or `__dlpack__`, such as a torch
    tensor. It may be called from several threads; calls run one at a time. Each returns new arrays.

    Attributes:
        content: The file's description of the module.
        backend: The device that runs the programs.
    """

    def __init__(
        self,
        path: Path,
        backend: Hardware,
        *,
        allow_code: bool = False,
        dlpack: bool = False,
        programs: int = PROGRAMS,
        classes: Sequence[type] = (),
    ) -> None:
        self.content, checkpoint = read_module(path)
        self.backend = backend
        self._path, self._allow_code, self._dlpack, self._limit = path, allow_code, dlpack, max(programs, 1)
        with reading(self._invalid):
            self._open(checkpoint, classes)

    def _open(self, checkpoint: MappedCheckpoint, classes: Sequence[type]) -> None:
        content, backend = self.content, self.backend
        if content.off_device:
            self._need_torch({f"{node.node} ({node.op})": node.reason for node in content.off_device})
        try:
            self._weights = {key: stored_weight(content, key, checkpoint) for key in content.weights}
            self._constants = {key: checkpoint[name] for key, name in content.constants.items()}
        except (WeightError, InputError) as error:
            raise self._invalid(str(error)) from error
        try:
            signature = None if content.signature is None else signature_of(content.signature)
        except ProgramFormatError as error:
            raise self._invalid(str(error)) from error
        self._arguments = Arguments(signature, content.inputs, content.positional, content.keywords, ArrayLike)
        self._results = Results(content.outputs, content.result.with_classes(classes))
        self._paths = [leaf.path for leaf in content.inputs if leaf.name is not None]
        self._shapes = InputShapes(
            [(meta.shape, numpy_dtype(meta.dtype)) for meta in content.graph_inputs],
            self._paths,
            {symbol.name: (symbol.low, symbol.high) for symbol in content.symbols},
            {symbol.name: symbol.title for symbol in content.symbols},
            {index: meta.strides for index, meta in enumerate(content.graph_inputs) if meta.strides is not None},
        )
        self._names = [meta.name for meta in content.graph_inputs]
        self._updated = [(index, self._names.index(name)) for index, name in content.written if name in self._names]
        self._stored = [(index, content.keys[name]) for index, name in content.written if name not in self._names]
        self._saved = {saved.sizes: saved for saved in content.programs if saved.target in backend.runs_targets}
        self._programs: OrderedDict[Key, DeviceProgram | MixedPlan] = OrderedDict()
        self._memory = Memory(backend, self._weights)
        first = next(iter(self._saved), None) if content.symbols else ()
        if first is not None:
            with backend.lock:
                self._program(first)

    def _invalid(self, problem: str) -> ProgramFormatError:
        return ProgramFormatError(f"'{self._path}' is not a valid module: {problem}")

    def _need_torch(self, reasons: Mapping[str, str]) -> None:
        if find_torch() is None:
            listed = "; ".join(f"{node}: {reason}" for node, reason in reasons.items())
            raise DeviceError(
                f"'{self._path}' has nodes that the device does not run, and PyTorch, which would, is not "
                f"installed ({install_command('torch')}): {listed}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its result.

        Raises:
            InputError: an argument does not fit the graph.
            DeviceError: the device failed.
        """
        return self._call(self._arguments.tensors(args, kwargs))

    @property
    def ran(self) -> CompiledProgram | PartitionPlan:
        """The program of the last call, or its plan if PyTorch runs some nodes.

        Raises `InputError` before the first call.
        """
        if not self._programs:
            raise InputError(f"'{self._path}' has not been called")
        return next(reversed(self._programs.values())).made

    def call_leaves(self, leaves: Sequence[Any]) -> Any:
        """Run the module on the leaves of its arguments, in order of `content.inputs`, and return its result."""
        return self._call(self._arguments.chosen(leaves))

    def laid_out(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return arrays for the graph's inputs, copied if the graph needs other strides.

        Args:
            arrays: Name in the graph → array.

        Raises:
            InputError: an array does not fit, or there is no memory for its strides.
        """
        given = dict(arrays)
        key = self._shapes.check([given[name] for name in self._names])
        for index, strides in self._shapes.strides(key).items():
            name = self._names[index]
            try:
                given[name] = _with_strides(given[name], strides)
            except (MemoryError, OverflowError, ValueError) as error:
                raise InputError(f"there is no memory for input '{name}' with strides {strides}") from error
        return given

    def _call(self, given: list[Any]) -> Any:
        for _, place in self._updated:
            _check_writable(given, place, self._paths[place])
        values = [self._value(x, path) for x, path in zip(given, self._paths, strict=True)]
        key = self._shapes.check([self._seen(index, value) for index, value in enumerate(values)])
        self._shapes.check_strides([x if hasattr(x, "stride") else y for x, y in zip(given, values, strict=True)], key)
        with self.backend.lock:
            with reading(self._invalid):
                program = self._programs.get(key) or self._program(key)
                self._programs.move_to_end(key)
                outputs = program(dict(zip(self._names, values, strict=True)))
            for index, place in self._updated:
                _write_back(given[place], outputs[index], program.specs[index])
            for index, weight in self._stored:
                self._weights[weight] = _host(outputs[index], program.specs[index])
            if self._stored:
                self._reload({weight for _, weight in self._stored})
            results = [self._result(x, spec) for x, spec in zip(outputs, program.specs, strict=True)]
        sources = dict(zip(self._names, given, strict=True))
        with reading(self._invalid):
            return self._results.of(
                results, lambda name: sources[name] if name in sources else self._result(self._own(name), None)
            )

    def _own(self, name: str) -> np.ndarray:
        """Return the weight or constant of that name in the graph."""
        key = self.content.keys[name]
        return to_numpy(self._weights[key]) if key in self._weights else self._constants[key]

    def _value(self, given: Any, path: str) -> Value:
        """Return an argument as an array or device buffer.

        Raises:
            InputError: its memory can be read only by the library that it belongs to.
        """
        if isinstance(given, (np.ndarray, DeviceBuffer)):
            return given
        try:
            is_exported = hasattr(given, "__dlpack_device__")
            if is_exported and given.__dlpack_device__()[0] not in _ON_HOST:
                here = self.backend.from_dlpack(given)
                return to_numpy(given) if here is None else here
            return np.from_dlpack(given) if is_exported and not hasattr(given, "__array__") else to_numpy(given)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            kind = type(given).__name__
            raise InputError(f"argument '{path}' is a {kind} that NumPy cannot read: {error}") from error

    def _seen(self, index: int, value: Value) -> Any:
        """Return an input's shape and dtype, to compare with the graph's; a buffer counts as of the graph's dtype."""
        if isinstance(value, np.ndarray):
            return value
        meta = self.content.graph_inputs[index]
        return _Seen(value.shape, numpy_dtype(meta.dtype))

    def _result(self, value: Value, spec: TensorSpec | None) -> Value:
        """Return a copy of an output that the caller can keep."""
        if not self._dlpack:
            return _host(value, spec)
        return self.backend.allocate_buffer(value) if isinstance(value, np.ndarray) else value.copy()

    def _reload(self, keys: set[str]) -> None:
        """Load the weights again that a call has changed."""
        self._memory.forget(buffer for program in self._programs.values() for buffer in program.reads(keys))
        for program in self._programs.values():
            program.refresh()

    def _program(self, key: Key) -> DeviceProgram | MixedPlan:
        """Return the program for these sizes, from the file if possible, else compiled."""
        saved = self._saved.get(key)
        # A program that a call waits for does not stop to time kernels.
        with self.backend.without_trials() if self._programs else nullcontext():
            stored = None if saved is None else self._from_file(saved)
            program = self._programs[key] = self._compiled(key) if stored is None else stored
        while len(self._programs) > self._limit:
            self._programs.popitem(last=False)
        return program

    def _from_file(self, saved: SavedProgram) -> DeviceProgram | None:
        """Return a program from the file; None if its format or its code cannot be used here."""
        try:
            program = CompiledProgram.from_bytes(saved.content, str(self._path), self._allow_code)
            if self.backend.config.programs_are_code:
                program.trust.check(program.name)
        except ProgramFormatError:
            return None  # in another version's format, or code by somebody unknown
        return self._checked(DeviceProgram(program, saved.outputs, {}, self._memory, self._donors()))

    def _compiled(self, key: Key) -> DeviceProgram | MixedPlan:
        sizes = dict(zip(self._shapes.symbols, key, strict=True))
        plan = plan_for(self._ir, sizes, self.content.dtype, self.backend.target, self.content.formats)
        if [part.device for part in plan.partitions] != ["npu"]:
            if plan.reasons:
                self._need_torch(plan.reasons)
            return self._checked(MixedPlan(plan, self._memory))
        program = plan.compile(plan.partitions[0], self.backend.target)
        graph = plan.graph
        others = {name: graph.constants[name] for name in graph.outputs if name in graph.constants}
        others |= {
            x: to_numpy(self._weights[next(graph.weights[x].keys())]) for x in graph.outputs if x in graph.weights
        }
        return self._checked(DeviceProgram(program, graph.outputs, others, self._memory, self._donors()))

    def _donors(self) -> set[str]:
        return {self._names[place] for _, place in self._updated}

    def _checked(self, program: _AnyProgram) -> _AnyProgram:
        """Return the program if its inputs and outputs match the module's graph, else raise `ProgramFormatError`."""
        metas = {meta.name: meta for meta in self.content.graph_inputs}
        used = [leaf.output for leaf in self.content.outputs if leaf.output is not None]
        used += [index for index, _ in self.content.written]
        fits = all(
            spec.name in metas
            and spec.dtype == metas[spec.name].dtype
            and len(spec.shape) == len(metas[spec.name].shape)
            for spec in program.input_specs
        )
        if (
            not fits
            or not program.unknown <= metas.keys()
            or not all(0 <= index < len(program.specs) for index in used)
        ):
            raise self._invalid("its program has other inputs or outputs than its graph")
        return program

    @cached_property
    def _ir(self) -> dict[str, Any]:
        try:
            ir = json.loads(self.content.ir)
        except (ValueError, RecursionError) as error:
            raise self._invalid(f"its IR is not JSON: {error}") from error
        if not isinstance(ir, dict):
            raise self._invalid("its IR is no object")
        constants = {
            key: {"data": value, "dtype": value.dtype.name, "shape": list(value.shape)}
            for key, value in self._constants.items()
        }
        return ir | ({"constants": constants} if constants else {})


class _Seen(NamedTuple):
    """Shape and dtype of an input, in the form that `InputShapes` compares."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _with_strides(array: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """Return the array, or a copy with the given strides if it has others."""
    if same_layout(array, strides):
        return array
    last = sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    memory = np.zeros(last + 1, array.dtype)
    copy = with_strides(memory, array.shape, strides)
    copy[...] = array
    return copy


def _host(value: Value, spec: TensorSpec | None) -> np.ndarray:
    """Return a new array in PyTorch's dtype."""
    return value.to_numpy(spec) if isinstance(value, DeviceBuffer) else np.array(value)


def _check_writable(given: Sequence[Any], place: int, path: str) -> None:
    """Raise `InputError` if an argument that the module changes in place is read-only or shares memory with another."""
    value, problem = given[place], f"argument '{path}' is changed in place, but"
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise InputError(f"{problem} is a read-only array; give a writable one")
    elif not isinstance(value, DeviceBuffer) and not hasattr(value, "copy_"):
        raise InputError(f"{problem} is a {type(value).__name__}; give a NumPy array, torch tensor or device buffer")
    others = [*given[:place], *given[place + 1 :]]
    arrays = [x for x in others if isinstance(x, np.ndarray) and isinstance(value, np.ndarray)]
    if any(x is value for x in others) or any(np.may_share_memory(x, value) for x in arrays):
        raise InputError(f"{problem} shares memory with another; give a copy")


def _write_back(given: Any, result: Value, spec: TensorSpec | None) -> None:
    """Copy the module's new value of an argument into the caller's array, buffer or tensor."""
    if isinstance(given, DeviceBuffer):
        if isinstance(result, np.ndarray) or (result.dtype, result.alloc_shape) != (given.dtype, given.alloc_shape):
            given.write(_host(result, spec))
        elif result.native_handle is not given.native_handle:
            given.copy_from(result)
    elif isinstance(given, np.ndarray):
        np.copyto(given, _host(result, spec))
    else:
        from npu_runtime.torch_arrays import numpy_to_tensor

        given.copy_(numpy_to_tensor(_host(result, spec)))
