"""`CompiledModule.save`: writing a compiled module to a `.npumod` file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat, quantize
from npu_compiler.version import __version__
from npu_runtime.torch_arrays import tensor_to_numpy
from npu_sim.module.report import OffDevice
from npu_sim.module.runner import Runner
from npu_sim.module.saved_file import (
    GraphInput,
    SavedModule,
    SavedProgram,
    StoredTensor,
    Symbol,
    part_name,
    write_module,
)
from npu_sim.module.shapes import Key
from npu_sim.module.signature import parameters_of
from npu_sim.module.structure import OutputLeaf
from npu_sim.module.tensors import PytreeStructure, argument_structures
from npu_sim.module.trace import Trace

_UNLIMITED = 2**62  # PyTorch's "no limit" is near 2**63


@dataclass(frozen=True)
class FewBits:
    """Weights that the device stores quantized, in few bits.

    Attributes:
        formats: Key → the weight's format.
        stored: Key → the quantized weight, for those that the model had quantized already.
    """

    formats: Mapping[str, QuantizedFormat]
    stored: Mapping[str, QuantizedArray]


def save_module(
    path: Path,
    traced: Trace,
    weights: Mapping[str, torch.Tensor],
    signature: inspect.Signature | None,
    titles: Mapping[str, str],
    dtype: str | None,
    runners: Mapping[Key, Runner],
    few_bits: FewBits,
) -> None:
    """Write a compiled module to a `.npumod` file.

    Args:
        path: The file.
        traced: The module's graph.
        weights: Key → the module's current tensor.
        signature: The signature of `forward`. None: not known.
        titles: Symbol → its name in messages.
        dtype: The compute dtype that the user asked for. None: the graph's own.
        runners: The programs compiled so far, by sizes.
        few_bits: The weights that the device stores in few bits.

    Raises:
        InputError: the file cannot be written, or the format cannot represent a dtype or structure of the module.
    """
    ir = traced.ir
    outputs, results = _computed(traced)
    read = traced.read_keys()
    tensors, names = _stored({key: value for key, value in weights.items() if key in read})
    returned = _returned(traced, results)
    keys = {name: key for name, key in ir["weight_name_mapping"].items() if name in returned}
    _divide(tensors, names, {names.get(key) for key in keys.values()}, few_bits)
    constants = {key: f"constant {key}" for key in traced.constants if key in read}
    for key, name in constants.items():
        tensors[name] = _array(np.asarray(ir["constants"][key]["data"]), ir["constants"][key])
    positional, keywords = argument_structures(traced.in_spec)
    emptied = {key: {**ir["constants"][key], "data": None} for key in constants}
    plain = {**ir, "graph_outputs": outputs, "constants": emptied}
    module = SavedModule(
        name=ir["model_name"],
        compiler_version=__version__,
        ir=json.dumps(plain, separators=(",", ":")).encode(),
        graph_inputs=tuple(
            GraphInput(x["name"], tuple(x["shape"]), x["dtype"], traced.strides.get(x["name"]))
            for x in ir["graph_inputs"]
        ),
        symbols=tuple(_symbol(name, titles[name], *limits) for name, limits in traced.ranges.items()),
        weights=names,
        constants=constants,
        keys=keys,
        dtype=dtype,
        formats={key: format for key, format in few_bits.formats.items() if key in names},
        signature=None if signature is None else parameters_of(signature),
        positional=tuple(structure.tree() for structure in positional),
        keywords={name: structure.tree() for name, structure in keywords.items()},
        inputs=traced.inputs,
        outputs=results,
        result=PytreeStructure(traced.out_spec).tree(),
        written=traced.written,
        off_device=_off_device(runners),
        programs=() if traced.views else _programs(runners),
    )
    write_module(path, module, tensors)


def _returned(traced: Trace, results: tuple[OutputLeaf, ...]) -> set[str | None]:
    """Return the graph's names of inputs and weights that a call returns unchanged, or changes."""
    return {leaf.source for leaf in results} | {name for _, name in traced.written}


def _divide(
    tensors: dict[str, StoredTensor], names: Mapping[str, str], returned: Set[str | None], few_bits: FewBits
) -> None:
    """Replace tensors that the device stores in few bits by their codes, scales and zero points.

    A tensor stays if a call returns or changes it, or if two keys with different formats share it.

    Args:
        tensors: The file's tensors by name; changed.
        names: Key → name in `tensors`.
        returned: Names of tensors that a call returns or changes.
    """
    formats, stored = few_bits.formats, few_bits.stored
    whole = returned | {name for key, name in names.items() if formats.get(key) != formats.get(name)}
    for name in formats.keys() & tensors.keys() - whole:
        tensors |= _parts(name, tensors.pop(name), formats[name], stored.get(name))


def _parts(
    key: str, tensor: StoredTensor, format: QuantizedFormat, stored: QuantizedArray | None
) -> dict[str, StoredTensor]:
    """Return codes, scales and zero points of a weight as tensors to write.

    Args:
        stored: The quantized weight. None: it is quantized from `tensor` when its first part is written.
    """
    whole = cache(lambda: stored or quantize(tensor.read(), format))
    shapes = format.parts((tensor.shape[0], tensor.shape[1]))
    return {
        part_name(key, part): StoredTensor(dtype, shape, lambda part=part: whole().part(part))  # type: ignore[misc]
        for part, (shape, dtype) in shapes.items()
    }


def _computed(traced: Trace) -> tuple[list[dict[str, Any]], tuple[OutputLeaf, ...]]:
    """Return the graph's outputs and the leaves of the result, with views of other tensors made outputs."""
    outputs = list(traced.ir["graph_outputs"])
    places: dict[str, int] = {}
    for name in traced.views:
        if name in traced.passed:
            places[name] = len(outputs)
            outputs.append(traced.passed[name])
    leaves = [OutputLeaf(output=places[leaf.source]) if leaf.source in places else leaf for leaf in traced.outputs]
    return outputs, tuple(leaves)


def _stored(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors to write by name, and key → name; tied weights share a name."""
    tensors: dict[str, StoredTensor] = {}
    names: dict[str, str] = {}
    first_keys: dict[Any, str] = {}
    for key, tensor in weights.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        names[key] = first_keys.setdefault(place, key) if tensor.numel() else key
        if names[key] == key:
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[key] = StoredTensor(dtype, tuple(tensor.shape), partial(_elements, tensor))
    return tensors, names


def _elements(tensor: torch.Tensor) -> np.ndarray:
    return tensor_to_numpy(tensor.cpu())


def _array(array: np.ndarray, meta: Mapping[str, Any]) -> StoredTensor:
    return StoredTensor(meta["dtype"], tuple(meta["shape"]), lambda: array)


def _symbol(name: str, title: str, low: int, high: int | None) -> Symbol:
    return Symbol(name, title, low, None if high is None or high >= _UNLIMITED else high)


def _off_device(runners: Mapping[Key, Runner]) -> tuple[OffDevice, ...]:
    """Return the nodes that PyTorch runs in any of the programs compiled so far."""
    nodes = {}
    for runner in runners.values():
        for node in runner.plan.graph.nodes:
            if node.name in runner.plan.reasons:
                nodes[node.name] = OffDevice(node.name, node.op_type, runner.plan.reasons[node.name])
    return tuple(nodes.values())


def _programs(runners: Mapping[Key, Runner]) -> tuple[SavedProgram, ...]:
    """Return the compiled programs of those plans that consist of a single program and nothing else."""
    programs = []
    for key, runner in runners.items():
        graph = runner.plan.graph
        if len(runner.programs) == len(runner.plan.partitions) == 1:
            (program,) = runner.programs
            if {*graph.outputs} <= {*graph.inputs, *(spec.name for spec in program.output_specs)}:
                programs.append(SavedProgram(key, program.target, tuple(graph.outputs), program.to_bytes()))
    return tuple(programs)
