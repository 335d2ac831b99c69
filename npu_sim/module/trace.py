"""Tracing: from a PyTorch module, or what `torch.export` made of one, to IR and the tensors that belong to it."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from npu_compiler.errors import InputError, IRError
from npu_compiler.graph.symbolic import is_symbolic
from npu_sim.collector import collector_paused
from npu_sim.module.fx_reader import UNBACKED, Nodes, Reference, dtype_of, sizes_of
from npu_sim.module.library_models import is_of_transformers, patched_for_export

if TYPE_CHECKING:
    from torch import nn

LARGE = 2**16  # elements; constants above are loaded like weights, so that programs do not each contain them


@dataclass(frozen=True)
class InputLeaf:
    """A leaf of a call's arguments.

    Attributes:
        name: The graph input's, for a tensor; None for a value that tracing has made a part of the graph.
        value: That value.
        path: Where the leaf is in the arguments, in words.
    """

    name: str | None
    value: Any
    path: str


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of a call's result.

    Attributes:
        output: The index of the graph's output, for a tensor that is computed.
        source: The graph input's name, or the weight's key, where the result is that very tensor.
        value: Of a result that is no tensor.
    """

    output: int | None = None
    source: str | None = None
    value: Any = None


@dataclass(frozen=True)
class Trace:
    """A traced module.

    Attributes:
        ir: In the schema of torch_ir; sizes may be symbolic (see `npu_compiler.graph.symbolic`). Constants are arrays.
        weights: Key → the module's own tensor, for parameters, buffers and large constants.
        constants: The buffers whose values are constants in the IR, by key.
        inputs: The leaves of (args, kwargs), in order; `in_spec` is their structure.
        outputs: The leaves of the result; `out_spec` is their structure.
        written: (the graph's output, graph input or weight key) for each tensor that a call changes in place.
        ranges: Symbol → its smallest and largest value (None: no limit).
        example_device: The torch device of the inputs.
        passed: The outputs that are graph inputs or weights as they are, as the IR describes them, by `source`.
    """

    ir: dict[str, Any]
    weights: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    inputs: tuple[InputLeaf, ...]
    in_spec: pytree.TreeSpec
    outputs: tuple[OutputLeaf, ...]
    out_spec: pytree.TreeSpec
    written: tuple[tuple[int, str], ...]
    ranges: dict[str, tuple[int, int | None]]
    example_device: torch.device
    passed: dict[str, dict[str, Any]]

    @property
    def is_dynamic(self) -> bool:
        return bool(self.ranges)


@contextmanager
def tracing() -> Iterator[None]:
    """What `torch.export` runs under: no gradients, no warnings and no garbage collection."""
    with collector_paused(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def export(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """`torch.export.export` for inference; the module is not modified.

    Raises:
        IRError: PyTorch cannot export the module as one graph.
    """
    for value in (*args, *(kwargs or {}).values()):
        _register_dataclasses(value)
    seen = module.register_forward_hook(lambda _module, _inputs, result: _register_dataclasses(result))
    try:
        with tracing():
            call = (module, tuple(args), dict(kwargs or {}))
            try:
                exported = torch.export.export(*call, dynamic_shapes=dynamic_shapes)
            except Exception:
                if not is_of_transformers(module):
                    raise
                with patched_for_export(module):
                    exported = torch.export.export(*call, dynamic_shapes=dynamic_shapes)
                if _asserts_data(exported):  # what replaced a part is right only then, and programs do not check it
                    raise
            return exported.run_decompositions({}) if _holds_vmap(exported) else exported
    except Exception as error:  # whatever the module's own code and PyTorch's tracing raise
        raise IRError(f"PyTorch cannot export {type(module).__name__} as one graph: {first_line(error)}") from error
    finally:
        seen.remove()


def _asserts_data(exported: ExportedProgram) -> bool:
    """Whether the graph checks values, not only shapes."""
    targets = (str(node.target) for node in exported.graph.nodes if node.op == "call_function")
    return any("_assert_scalar" in target or "_assert_async" in target for target in targets)


def _holds_vmap(exported: ExportedProgram) -> bool:
    """Whether calls of functorch are left in the graph, which a second tracing replaces by what they do."""
    targets = (node.target for node in exported.graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", None) == "torch._functorch.predispatch" for target in targets)


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _register_dataclasses(value: Any) -> None:
    """Make dataclasses known to PyTorch's pytree, as `torch.export` asks of whoever passes them."""
    from dataclasses import fields, is_dataclass

    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(value))
        children = [getattr(value, x.name) for x in fields(value)]
    else:
        return
    for child in children:
        _register_dataclasses(child)


def load_exported(path: str | Path) -> ExportedProgram:
    """The content of a `.pt2` file.

    Raises:
        IRError: there is no such file, or it is none.
    """
    if not Path(path).is_file():
        raise IRError(f"cannot read '{path}': there is no such file")
    if not zipfile.is_zipfile(path):
        raise IRError(f"'{path}' is not a .pt2 file, which is a zip archive")
    logger = logging.getLogger("torch.export")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)  # what it logs of a file that it cannot read, the error says
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(str(path))
    except Exception as error:  # zipfile, pickle, JSON and version errors
        raise IRError(f"'{path}' is not a .pt2 file that this PyTorch reads: {first_line(error)}") from error
    finally:
        logger.setLevel(level)


def trace(exported: ExportedProgram, name: str) -> Trace:
    """Read an exported program.

    Raises:
        IRError: IR has no form for an op in it, such as control flow that depends on data.
    """
    signature, module = exported.graph_signature, exported.graph_module
    nodes = Nodes()
    state = {**exported.state_dict, **exported.constants}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        nodes.take_name(node.name)
    values: list[Any] = []
    inputs: list[Reference] = []
    leaves: list[InputLeaf] = []
    keys: dict[str, str] = {}
    paths = _paths(exported.call_spec.in_spec)
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind is not InputKind.USER_INPUT:
            tensor = state.get(spec.target)
            if not isinstance(tensor, torch.Tensor) or not isinstance(value, torch.Tensor):
                raise IRError(f"'{spec.target}' is a {type(tensor).__name__}, not a tensor, which IR has no form for")
            keys[node.name] = str(spec.target)
            values.append(Reference(node.name, value, None))
        elif isinstance(value, torch.Tensor):
            leaves.append(InputLeaf(node.name, None, paths[len(leaves)]))
            inputs.append(Reference(node.name, value, node.name))
            values.append(inputs[-1])
        else:
            leaves.append(InputLeaf(None, value, paths[len(leaves)]))
            values.append(value)
    returned = nodes.read(module, values)
    results = [returned] if isinstance(returned, Reference) else list(returned)
    graph_outputs: list[Reference] = []
    outputs: list[OutputLeaf] = []
    names = {reference.name for reference in inputs}
    for value, output in zip(results, signature.output_specs, strict=True):
        is_user = output.kind is OutputKind.USER_OUTPUT
        if isinstance(value, Reference) and is_user:
            if value.name in names or value.name in keys:
                outputs.append(OutputLeaf(source=keys.get(value.name, value.name)))
                continue
            outputs.append(OutputLeaf(output=len(graph_outputs)))
            graph_outputs.append(value)
        elif is_user:
            known = output.arg.value if isinstance(output.arg, ConstantArgument) else value
            if is_symbolic(known):
                raise IRError("the module returns a size that changes with the shapes of its inputs, not a tensor")
            outputs.append(OutputLeaf(value=known))
        else:
            raise IRError(f"the exported program has an output of kind {output.kind.name}; export it for inference")
    sources = {reference.name: reference for reference in inputs} | {
        x.name: x for x in values if isinstance(x, Reference)
    }
    written = []
    for changed in sorted(nodes.written & (names | keys.keys())):
        written.append((len(graph_outputs), keys.get(changed, changed)))
        graph_outputs.append(sources[changed])
    passed = {
        leaf.source: {**sources[key].meta(), "name": key}
        for leaf in outputs
        for key in ([leaf.source] if leaf.source in sources else [x for x, y in keys.items() if y == leaf.source])
        if leaf.source is not None
    }
    weights, constants = _split(keys, state, exported, {x for _, x in written})
    described = {keys[x.name]: {**x.meta(as_input=False), "name": keys[x.name]} for x in values if _is_weight(x)}
    ir: dict[str, Any] = {
        "model_name": name,
        "pytorch_version": torch.__version__,
        "graph_inputs": [x.meta(as_input=False) for x in inputs],
        "graph_outputs": [x.meta() for x in graph_outputs],
        "weights": list(described.values()),
        "weight_name_mapping": keys,
        "nodes": nodes.nodes,
    }
    if constants:
        from npu_runtime.torch_arrays import tensor_to_numpy

        ir["constants"] = {
            key: {"data": tensor_to_numpy(value.cpu()), "dtype": dtype_of(value), "shape": sizes_of(value)}
            for key, value in constants.items()
        }
    return Trace(
        ir,
        weights,
        constants,
        tuple(leaves),
        exported.call_spec.in_spec,
        tuple(outputs),
        exported.call_spec.out_spec,
        tuple(written),
        _ranges(exported),
        inputs[0].value.device if inputs else torch.device("cpu"),
        passed,
    )


def plain_ir(traced: Trace) -> dict[str, Any]:
    """The IR by itself: with all tensors that the module returns as its outputs, in order.

    Those in a dict are called by its keys, with the keys of what is nested behind a dot.

    Raises:
        IRError: sizes are symbolic.
    """
    if traced.is_dynamic:
        raise IRError("the exported program has dynamic shapes; npu_sim.compile() makes programs for their sizes")
    computed = traced.ir["graph_outputs"]
    found = []
    names = []
    placed = pytree.tree_unflatten(list(range(traced.out_spec.num_leaves)), traced.out_spec)
    paths, _ = pytree.tree_flatten_with_path(placed)
    for leaf, (path, _) in zip(traced.outputs, paths, strict=True):
        if leaf.output is not None or leaf.source is not None:
            found.append(computed[leaf.output] if leaf.output is not None else traced.passed[str(leaf.source)])
            names.append(
                ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
            )
    ir = {**traced.ir, "graph_outputs": found}
    if traced.out_spec.type is not None and issubclass(traced.out_spec.type, Mapping) and len(set(names)) == len(names):
        ir["output_names"] = names
    return ir


def ir_of_exported(exported: ExportedProgram) -> dict[str, Any]:
    """The IR of an exported program of static shapes. Errors as in `trace` and `plain_ir`."""
    return plain_ir(trace(exported, "exported"))


def ir_of_file(path: str | Path) -> dict[str, Any]:
    """The IR of a `.pt2` file. Errors as in `load_exported`, `trace` and `plain_ir`."""
    return plain_ir(trace(load_exported(path), Path(path).stem))


def _is_weight(value: object) -> bool:
    return isinstance(value, Reference) and value.producer is None


def _paths(spec: pytree.TreeSpec) -> list[str]:
    """A leaf's place in (args, kwargs), in words: `args[0]['mask']` or `mask`."""
    placed = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    found, _ = pytree.tree_flatten_with_path(placed)
    words = []
    for path, _ in found:
        first, *rest = path
        which = rest[0]
        is_argument = getattr(first, "idx", 0) == 0
        start = f"args[{getattr(which, 'idx', '')}]" if is_argument else str(getattr(which, "key", which))
        words.append(start + pytree.keystr(tuple(rest[1:])))
    return words


def _split(
    keys: Mapping[str, str], state: Mapping[str, Any], exported: ExportedProgram, written: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors that are loaded as weights, and those whose values are constants of the graph."""
    saved = exported.state_dict.keys()
    weights: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(keys.values()):
        tensor = state[key].detach()
        is_constant = key not in saved and key not in written and tensor.numel() <= LARGE and not tensor.is_meta
        (constants if is_constant else weights)[key] = tensor
    return weights, constants


def _ranges(exported: ExportedProgram) -> dict[str, tuple[int, int | None]]:
    ranges = {}
    for symbol, limits in exported.range_constraints.items():
        if str(symbol).startswith(UNBACKED):
            continue  # depends on data; a size that does is refused where it is read
        upper = limits.upper
        ranges[str(symbol)] = (int(limits.lower), int(upper) if upper.is_finite else None)
    return ranges


__all__ = ["InputError", "InputLeaf", "OutputLeaf", "Trace", "export", "load_exported", "trace", "tracing"]
