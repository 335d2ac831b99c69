"""Tracing of a PyTorch module, or of a `torch.export` program, to IR and the tensors that belong to it."""

from __future__ import annotations

import logging
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature, InputKind, OutputKind
from torch.utils import _pytree as pytree

from npu_compiler.errors import FixedSizeError, IRError
from npu_compiler.graph.symbolic import is_symbolic
from npu_sim.collector import collector_paused
from npu_sim.module.fx_reader import (
    ADVICE,
    UNBACKED,
    Nodes,
    Reference,
    Value,
    constant_of,
    depends_on_data,
    plain_number,
)
from npu_sim.module.library_models import register_caches
from npu_sim.module.own_decompositions.recurrent import lstm_shapes
from npu_sim.module.quiet import quiet_tracing
from npu_sim.module.structure import NUMBER, InputLeaf, OutputLeaf
from npu_sim.module.substitutes import Substitutes
from npu_sim.module.views import AliasedView, check_replayable
from npu_sim.module.watch import tensors_in_attributes

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import Node

LARGE = 2**16  # elements; constants above are loaded like weights, so that programs do not each contain them


@dataclass(frozen=True)
class Trace:
    """A traced module.

    Attributes:
        ir: IR in torch_ir's schema; sizes may be symbolic (see `npu_compiler.graph.symbolic`). Constants are arrays.
        weights: Key → the module's own tensor, for parameters, buffers and large constants.
        constants: The buffers whose values are constants in the IR, by key.
        inputs: The leaves of (args, kwargs), in order; `in_spec` is their structure.
        outputs: The leaves of the result; `out_spec` is their structure.
        written: (the graph's output, name of the graph input or weight) for each tensor that a call changes in place.
        ranges: Symbol → its smallest and largest value (None: no limit).
        example_sizes: Symbol → its value in the example that was traced.
        example_device: The torch device of the inputs.
        passed: The results that are graph inputs, weights or views, as the IR describes them, by `OutputLeaf.source`.
        views: Name → view, for results that share memory with an input, a weight or an output.
        state: Graph input → key, for parameters and buffers that a call changes, which are inputs after those of a
            call.
        plain: The trace in which the tensors of `state` are weights; None if there are none.
        strides: Graph input → its strides, for inputs whose strides decide which memory a call changes: `reshape`
            returns a view of some tensors and a copy of others.
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
    example_sizes: dict[str, int]
    example_device: torch.device
    passed: dict[str, dict[str, Any]]
    views: dict[str, AliasedView] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    plain: Trace | None = None
    strides: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def is_dynamic(self) -> bool:
        return bool(self.ranges)

    def read_keys(self) -> set[str]:
        """The keys of the weights that the graph reads, returns or writes."""
        names = {meta["name"] for node in self.ir["nodes"] for meta in node["inputs"]}
        names |= {meta["name"] for meta in self.ir["graph_outputs"]}
        names |= {leaf.source for leaf in self.outputs if leaf.source is not None} | {name for _, name in self.written}
        return {key for name, key in self.ir["weight_name_mapping"].items() if name in names or key in names}


@contextmanager
def tracing() -> Iterator[None]:
    """A context for `torch.export`, without gradients, warnings and garbage collection."""
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
    """Export a module for inference by `torch.export.export`; the module is not modified.

    Raises:
        FixedSizeError: the module does not take all sizes that `dynamic_shapes` allows.
        IRError: PyTorch cannot export the module as one graph.
    """
    for value in (*args, *(kwargs or {}).values()):
        _register_dataclasses(value)
    register_caches(module)
    args, kwargs = distinct_examples(module, tuple(args), dict(kwargs or {}))
    seen = module.register_forward_hook(lambda _module, _inputs, result: _register_dataclasses(result))
    held = {id(x) for x in (*module.parameters(), *module.buffers())}
    plain = [x for part in module.modules() for _, x in tensors_in_attributes(part) if id(x) not in held]
    try:
        with unchanged(plain), tracing(), quiet_tracing(), Substitutes(), lstm_shapes():
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
            return exported.run_decompositions({}) if _holds_vmap(exported) else exported
    except Exception as error:  # whatever the module's own code and PyTorch's tracing raise
        kind = FixedSizeError if _FIXED_SIZES in str(error) else IRError
        raise kind(f"PyTorch cannot export {type(module).__name__} as one graph: {problem_of(error)}") from error
    finally:
        seen.remove()


@contextmanager
def unchanged(tensors: Iterable[Any]) -> Iterator[None]:
    """Restore, at the end of this context, tensors among the given values that tracing has written to.

    PyTorch traces parameters, buffers and arguments without their data, but runs in-place ops on other tensors of a
    module, such as those in plain attributes and lists.
    """
    plain = [x for x in tensors if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided]
    before = [(x, x.detach().clone()) for x in plain if x.device.type != "meta"]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if not torch.equal(tensor, value):
                    tensor.detach().copy_(value)


def distinct_examples(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the examples with a new tensor in place of one that is given twice, or that is a parameter or buffer.

    `torch.export` identifies tensors by identity: it would treat both as one input, in every call. The new tensor has
    the same sizes and strides, and no values, which tracing does not read.
    """
    seen = {id(x) for x in (*module.parameters(), *module.buffers())}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = _blank_like(leaf) if id(leaf) in seen else leaf
            seen.add(id(leaf))
    own_args, own_kwargs = pytree.tree_unflatten(leaves, structure)
    return own_args, own_kwargs


def _blank_like(value: torch.Tensor) -> torch.Tensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return value.detach().clone()
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _holds_vmap(exported: ExportedProgram) -> bool:
    """Whether calls of functorch (`vmap`) remain in the graph; a second trace replaces them by ordinary ops."""
    targets = (node.target for node in exported.graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", None) == "torch._functorch.predispatch" for target in targets)


def first_line(error: Exception | str) -> str:
    """Return the first line of a message that is not blank; the error's type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def problem_of(error: Exception) -> str:
    """Explain why PyTorch could not trace something, in words that do not assume knowledge of its internals."""
    if _FIXED_SIZES in str(error):
        return f"dynamic_shapes allows sizes that the module does not take{_suggested_sizes(str(error))}"
    is_about_data = any(word in f"{type(error).__name__} {error}".lower() for word in _DATA_DEPENDENT)
    if not is_about_data:
        return first_line(error)
    return f"data-dependent control flow, or a size that depends on the values of a tensor{_place_of(error)}; {ADVICE}"


_FIXED_SIZES = "Constraints violated"
_DATA_DEPENDENT = ("unbacked", "data-dependent", "data dependent", "datadependent")


def _suggested_sizes(message: str) -> str:
    """Return the sizes that PyTorch suggests in an error, such as `; PyTorch suggests batch = 2`; empty if none."""
    lines = message.partition("Suggested fixes:\n")[2].split("\n\n")[0].splitlines()
    return f"; PyTorch suggests {', '.join(map(str.strip, lines))}" if lines else ""


def _place_of(error: Exception) -> str:
    """Return the user's source line that caused an error, such as ` (model.py:12)`; empty if there is none."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames if not frame.filename.startswith(own)]
    return f" ({places[-1][0]}:{places[-1][1]})" if places else ""


def _register_dataclasses(value: Any) -> None:
    """Register the dataclasses in a value with PyTorch's pytree, which `torch.export` requires."""
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
    """Load the exported program in a `.pt2` file.

    Raises:
        IRError: there is no such file, or it is not a `.pt2` file.
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


def trace_module(exported: ExportedProgram, name: str) -> Trace:
    """Trace an exported program; parameters and buffers that a call changes become inputs of the graph.

    So the graph's weights never change. `plain` of the result is the trace in which they are weights.
    """
    traced = trace(exported, name)
    written = {x for _, x in traced.written if x in traced.ir["weight_name_mapping"]}
    return replace(trace(exported, name, written), plain=traced) if written else traced


def trace(exported: ExportedProgram, name: str, changing: Set[str] = frozenset()) -> Trace:
    """Convert an exported program to IR.

    Args:
        exported: The program.
        name: Name of the model.
        changing: The graph's names of parameters and buffers that become inputs of the graph.

    Raises:
        IRError: IR cannot express an op of the program, such as control flow that depends on data.
    """
    with unchanged(exported.constants.values()):
        return _trace(exported, name, changing)


def _trace(exported: ExportedProgram, name: str, changing: Set[str]) -> Trace:
    signature, module = exported.graph_signature, exported.graph_module
    nodes = Nodes.of(module)
    state = {**exported.state_dict, **exported.constants}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        nodes.take_name(node.name)
    paths = _paths(exported.call_spec.in_spec)
    values, leaves, keys = _read_arguments(exported, placeholders, paths, state, changing)
    given = {leaf.name for leaf in leaves}
    inputs = [x for x in values if isinstance(x, Reference) and x.name in given]
    _check_inputs_are_distinct(exported, placeholders, paths, state)
    returned = nodes.read(module, values)
    results = _read_returned([returned] if isinstance(returned, Reference) else returned, signature)
    read = read_results(nodes, results, values)
    changed = {keys[name] for _, name in read.written if name in keys}
    weights, constants = _split(keys, state, exported, changed)
    described = {keys[x.name]: {**x.meta(as_input=False), "name": keys[x.name]} for x in values if _is_weight(x)}
    ir: dict[str, Any] = {
        "model_name": name,
        "pytorch_version": torch.__version__,
        "graph_inputs": [x.meta(as_input=False) for x in (*inputs, *(x for x in values if _is_named(x, changing)))],
        "graph_outputs": [x.meta() for x in read.outputs],
        "weights": list(described.values()),
        "weight_name_mapping": {tensor: key for tensor, key in keys.items() if tensor not in changing},
        "nodes": nodes.described(),
        "composites": nodes.composites,
    }
    if constants:
        ir["constants"] = {key: constant_of(value) for key, value in constants.items()}
    return Trace(
        ir,
        weights,
        constants,
        tuple(leaves),
        exported.call_spec.in_spec,
        read.leaves,
        exported.call_spec.out_spec,
        read.written,
        (ranges := _ranges(exported)),
        _example_sizes(inputs, ranges),
        inputs[0].value.device if inputs else torch.device("cpu"),
        read.passed,
        read.views,
        {tensor: keys[tensor] for tensor in keys if tensor in changing},
        strides={
            x.name: tuple(plain_number(stride, f"input '{x.name}'") for stride in x.value.stride())
            for x in values
            if isinstance(x, Reference) and x.producer is not None and x.name in nodes.fixed_strides()
        },
    )


def _read_arguments(
    exported: ExportedProgram,
    placeholders: Sequence[Node],
    paths: Sequence[str],
    state: Mapping[str, Any],
    changing: Set[str],
) -> tuple[list[Any], list[InputLeaf], dict[str, str]]:
    """Return the value of each placeholder, the leaves of a call's arguments, and name → key of the `state` tensors.

    Raises:
        IRError: an entry of `state` is not a tensor.
    """
    values: list[Any] = []
    leaves: list[InputLeaf] = []
    keys: dict[str, str] = {}
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind is not InputKind.USER_INPUT:
            tensor = state.get(spec.target)
            if not isinstance(tensor, torch.Tensor) or not isinstance(value, torch.Tensor):
                raise IRError(f"'{spec.target}' is a {type(tensor).__name__}, not a tensor, which IR has no form for")
            keys[node.name] = str(spec.target)
            values.append(Reference(node.name, value, node.name if node.name in changing else None))
        elif isinstance(value, torch.Tensor):
            leaves.append(InputLeaf(node.name, None, paths[len(leaves)]))
            values.append(Reference(node.name, value, node.name))
        else:
            leaves.append(InputLeaf(None, value, paths[len(leaves)]))
            values.append(value)
    return values, leaves, keys


def _read_returned(returned: Sequence[Any], signature: ExportGraphSignature) -> list[Any]:
    """Return a call's results, in order, among the values that the graph returns.

    Raises:
        IRError: the program was not exported for inference, or returns a symbolic size.
    """
    results = []
    for value, output in zip(returned, signature.output_specs, strict=True):
        if output.kind is not OutputKind.USER_OUTPUT:
            raise IRError(f"the exported program has an output of kind {output.kind.name}; export it for inference")
        results.append(output.arg.value if isinstance(output.arg, ConstantArgument) else value)
        if is_symbolic(results[-1]):
            raise IRError("the module returns a size that changes with the shapes of its inputs, not a tensor")
    return results


def _check_inputs_are_distinct(
    exported: ExportedProgram, placeholders: Sequence[Node], paths: Sequence[str], state: Mapping[str, Any]
) -> None:
    """Check that `torch.export` did not merge two inputs, or an input and a parameter, that were one example tensor.

    Raises:
        IRError: one of the two is not used in the graph, since the other stands for both.
    """
    if exported.example_inputs is None:
        return
    specs = exported.graph_signature.input_specs
    given: list[Node] = []
    inputs: dict[int, tuple[str, Node]] = {}
    for node, spec in zip(placeholders, specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            given.append(node)
        else:
            inputs[id(state.get(spec.target))] = f"'{spec.target}'", node
    for example, node, path in zip(pytree.tree_leaves(exported.example_inputs), given, paths, strict=True):
        if not isinstance(example, torch.Tensor):
            continue
        other, twin = inputs.setdefault(id(example), (f"'{path}'", node))
        if bool(twin.users) != bool(node.users):
            raise IRError(
                f"the example of input '{path}' was the same tensor as {other} when the program was exported, so that "
                "PyTorch made them one input; export it again with a tensor of its own for each"
            )


@dataclass(frozen=True)
class ReadResults:
    """A graph's results; `outputs` are the graph's output tensors, and the other attributes are those of `Trace`."""

    leaves: tuple[OutputLeaf, ...]
    outputs: tuple[Reference, ...]
    written: tuple[tuple[int, str], ...]
    passed: dict[str, dict[str, Any]]
    views: dict[str, AliasedView]


def read_results(nodes: Nodes, results: Sequence[Value], given: Sequence[Value]) -> ReadResults:
    """Determine which results are computed, and which share memory with an argument, a weight or each other.

    Args:
        nodes: The graph's nodes, already converted.
        results: The values that the graph returns.
        given: The values of the graph's placeholders.
    """
    results = [nodes.whole(x) for x in results]
    sources = {x.name: x for x in given if isinstance(x, Reference)}
    outputs: dict[str, Reference] = {}
    passed: dict[str, dict[str, Any]] = {}
    views: dict[str, AliasedView] = {}
    leaves: list[OutputLeaf] = []

    def index_of(reference: Reference) -> int:
        outputs.setdefault(reference.name, reference)
        return list(outputs).index(reference.name)

    def root_of(reference: Reference) -> str:
        return nodes.root.get(reference.name, reference.name)

    shown = {x.name: x for x in results if isinstance(x, Reference)}
    sharing = Counter(root_of(x) for x in shown.values())
    for value in results:
        if depends_on_data(value):
            leaves.append(OutputLeaf(output=index_of(_number(nodes, value)), value=NUMBER))
            continue
        if not isinstance(value, Reference):
            leaves.append(OutputLeaf(value=value))
            continue
        root = root_of(value)
        is_given = root in sources
        if not is_given and (value.name == root or sharing[root] == 1):
            leaves.append(OutputLeaf(output=index_of(value)))
            continue
        if value.name != root:
            index = None if is_given else index_of(nodes.references[root])
            path = nodes.lineage(value.name)
            check_replayable(path)
            views[value.name] = AliasedView(root if is_given else None, index, path)
        passed[value.name] = value.meta()
        leaves.append(OutputLeaf(source=value.name))
    written = [(index_of(sources[name]), name) for name in sorted(nodes.written & sources.keys())]
    return ReadResults(tuple(leaves), tuple(outputs.values()), tuple(written), passed, views)


def _number(nodes: Nodes, value: Any) -> Reference:
    """Return the tensor whose one element a returned number is.

    Raises:
        IRError: the number is computed from such elements in Python.
    """
    number = nodes.numbers.get(str(value.node.expr))
    if number is None:
        raise IRError(
            "the module returns a number that Python computes from the values of tensors; compute it with tensors and "
            f"return its item(), or {ADVICE}"
        )
    return number


def plain_ir(traced: Trace) -> dict[str, Any]:
    """Return the IR with all tensors that the module returns as its outputs, in order.

    Results in a dict are named by its keys; keys of nested dicts are joined by dots.

    Raises:
        IRError: sizes are symbolic.
    """
    if traced.is_dynamic:
        raise IRError("the exported program has dynamic shapes; npu_sim.compile() makes programs for their sizes")
    computed = traced.ir["graph_outputs"]
    results = []
    names = []
    placed = pytree.tree_unflatten(list(range(traced.out_spec.num_leaves)), traced.out_spec)
    paths, _ = pytree.tree_flatten_with_path(placed)
    for leaf, (path, _) in zip(traced.outputs, paths, strict=True):
        if leaf.output is not None or leaf.source is not None:
            results.append(computed[leaf.output] if leaf.output is not None else traced.passed[str(leaf.source)])
            names.append(
                ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
            )
    ir = {**traced.ir, "graph_outputs": results}
    if traced.out_spec.type is not None and issubclass(traced.out_spec.type, Mapping) and len(set(names)) == len(names):
        ir["output_names"] = names
    return ir


def ir_of_exported(exported: ExportedProgram) -> dict[str, Any]:
    """Return the IR of an exported program with static shapes. Errors as in `trace` and `plain_ir`."""
    return plain_ir(trace(exported, "exported"))


def ir_of_file(path: str | Path) -> dict[str, Any]:
    """Return the IR of a `.pt2` file. Errors as in `load_exported`, `trace` and `plain_ir`."""
    return plain_ir(trace(load_exported(path), Path(path).stem))


def _is_named(value: object, names: Set[str]) -> bool:
    return isinstance(value, Reference) and value.name in names


def _is_weight(value: object) -> bool:
    return isinstance(value, Reference) and value.producer is None


def _paths(spec: pytree.TreeSpec) -> list[str]:
    """Return the position of each leaf in (args, kwargs), in words: `args[0]['mask']` or `mask`."""
    placed = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    placed_leaves, _ = pytree.tree_flatten_with_path(placed)
    words = []
    for path, _ in placed_leaves:
        first, *rest = path
        which = rest[0]
        is_argument = getattr(first, "idx", 0) == 0
        start = f"args[{getattr(which, 'idx', '')}]" if is_argument else str(getattr(which, "key", which))
        words.append(start + pytree.keystr(tuple(rest[1:])))
    return words


def _split(
    keys: Mapping[str, str], state: Mapping[str, Any], exported: ExportedProgram, written: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split the tensors under `keys` into weights to load, and those whose values become constants of the graph.

    Args:
        keys: Name in the graph → key in `state`.
        written: Keys of the tensors that the graph changes, which are weights.

    Returns:
        Both by key.
    """
    saved = exported.state_dict.keys()
    weights: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(keys.values()):
        tensor = state[key].detach()
        is_constant = key not in saved and key not in written and tensor.numel() <= LARGE and not tensor.is_meta
        (constants if is_constant else weights)[key] = tensor
    return weights, constants


def _example_sizes(inputs: Sequence[Reference], ranges: Mapping[str, tuple[int, int | None]]) -> dict[str, int]:
    """Return symbol → its value in the example or, if the file does not record it, a small value of its range."""
    example_sizes = {symbol: max(low, 2) for symbol, (low, _) in ranges.items()}
    sizes: list[Any] = [size for x in inputs for size in x.value.shape if type(size) is not int]
    for size in sizes:
        if str(size.node.expr) in example_sizes and size.node.has_hint():
            example_sizes[str(size.node.expr)] = int(size.node.hint)
    return example_sizes


def _ranges(exported: ExportedProgram) -> dict[str, tuple[int, int | None]]:
    ranges = {}
    for symbol, limits in exported.range_constraints.items():
        if not symbol.is_Symbol or str(symbol).startswith(UNBACKED):
            continue  # of an expression of others, or dependent on data, which is refused where it is read
        upper = limits.upper
        ranges[str(symbol)] = (int(limits.lower), int(upper) if upper.is_Integer else None)
    return ranges
