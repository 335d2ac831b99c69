"""Read `torch_ir` IR (a JSON file, its dict, or the IR object) into an `IRGraph`, checking every field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.errors import IRError, reading
from npu_compiler.graph.dtypes import INT64_MAX, INT64_MIN, KNOWN_DTYPES, numpy_dtype
from npu_compiler.graph.model import Composite, IRGraph, OpNode, TensorSpec, unique_name, unique_names
from npu_compiler.graph.weight_recipe import from_key

IR_SOURCES = "npu_simulation.ir_sources"


def read_ir(source: str | Path | Mapping[str, Any] | Any) -> IRGraph:
    """Build an `IRGraph` from a path to IR JSON, an IR dict, or an object with `to_dict()`.

    Packages can add other sources: an entry point of the group `npu_simulation.ir_sources`, named by a file's suffix
    (`pt2`) or an object's class (`ExportedProgram`), is a function from such a path or object to an IR dict.

    Raises:
        IRError: the file cannot be read or is not JSON; a field is missing or of the wrong kind; a shape is
            negative or symbolic; a dtype is unknown; an input dangles; names repeat; the graph has a cycle.
    """
    if isinstance(source, IRGraph):
        return source
    converter = _converter(source)
    if converter is not None:
        source = converter(source)
    elif isinstance(source, (str, Path)):
        source = _load_json(Path(source))
    elif not isinstance(source, Mapping):
        if not hasattr(source, "to_dict"):
            raise IRError(f"cannot read IR from a {type(source).__name__}: give a path, a dict, or a torch_ir IR")
        source = source.to_dict()
    with reading(lambda reason: IRError(f"the IR is malformed: {reason}")):
        return _Reader(source).read()


def _converter(source: object) -> Callable[[Any], Mapping[str, Any]] | None:
    """The function of an installed package that converts a source to an IR dict.

    None if the source is IR, or unknown.
    """
    is_path = isinstance(source, (str, Path))
    kind = Path(str(source)).suffix.removeprefix(".") if is_path else type(source).__name__
    if kind in ("", "json", "dict", "IR"):
        return None
    reader = next(iter(entry_points(group=IR_SOURCES, name=kind)), None)
    return None if reader is None else reader.load()


def _load_json(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise IRError(f"cannot read IR file '{path}': {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise IRError(f"'{path}' is not an IR file: it is not UTF-8 text") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IRError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise IRError(f"'{path}' holds a JSON {type(data).__name__}, not an IR object")
    return data


class _Reader:
    """One pass over the IR dict, which resolves references to producers to unique tensor names."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.tensors: dict[str, TensorSpec] = {}
        self.weights: dict[str, str] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.produced: dict[tuple[str, int], str] = {}

    def read(self) -> IRGraph:
        for key in ("graph_inputs", "graph_outputs", "nodes"):
            if not isinstance(self.data.get(key), list):
                raise IRError(f"IR field '{key}' is missing or not a list")
        inputs = [self._read_input(meta) for meta in self.data["graph_inputs"]]
        self._read_weights()
        raw_nodes = [self._check_node(index, raw) for index, raw in enumerate(self.data["nodes"])]
        seen: set[str] = set()
        for raw in raw_nodes:
            if raw["name"] in seen:
                raise IRError(f"node '{raw['name']}': the name is used twice")
            seen.add(raw["name"])
        outputs_of = {raw["name"]: self._read_outputs(raw) for raw in raw_nodes}
        nodes = [self._read_node(raw, outputs_of[raw["name"]]) for raw in raw_nodes]
        outputs = [self._read_graph_output(meta) for meta in self.data["graph_outputs"]]
        graph = IRGraph(
            name=str(self.data.get("model_name") or "model"),
            nodes=topological_order(nodes),
            tensors=self.tensors,
            inputs=inputs,
            outputs=outputs,
            output_names=self._read_output_names(outputs),
            weights={name: from_key(key) for name, key in self.weights.items()},
            constants=self.constants,
            native_dtype=str(self.data.get("native_dtype") or ""),
        )
        return replace(graph, composites=self._read_composites(graph))

    def _read_composites(self, graph: IRGraph) -> tuple[Composite, ...]:
        """The graph's composites: ops that were decomposed, and whose outputs nodes of the graph compute."""
        by_name, composites, taken = {node.name: node for node in graph.nodes}, [], set[str]()
        for index, raw in enumerate(self.data.get("composites") or []):
            raw_node = self._check_node(index, raw.get("node") if isinstance(raw, Mapping) else None)
            where = f"composite '{raw_node['name']}'"
            parts = raw.get("parts")
            if not isinstance(parts, (list, tuple)) or not all(name in by_name and name not in taken for name in parts):
                raise IRError(f"{where}: field 'parts' is not a list of nodes of the graph, each in one composite")
            if raw_node["name"] in by_name:
                raise IRError(f"{where}: a node of the graph has the same name")
            taken.update(parts)
            nodes = [node for node in graph.nodes if node.name in parts]
            made = {name for node in nodes for name in node.outputs}
            outputs = tuple(self._resolve(meta, where) for meta in raw_node["outputs"])
            if not outputs or not made.issuperset(outputs) or len(set(outputs)) < len(outputs):
                raise IRError(f"{where}: its outputs are not tensors that its parts make")
            node = self._read_node(raw_node, outputs)
            if made.intersection(node.inputs):
                raise IRError(f"{where}: it reads what its own parts make")
            composites.append(Composite(node, _subgraph(node, nodes, graph)))
        return tuple(composites)

    def _read_output_names(self, outputs: list[str]) -> list[str]:
        """The names that the IR gives to its outputs; if it gives none, those of the tensors."""
        given = self.data.get("output_names")
        if given is None:
            return unique_names(outputs)
        is_list = isinstance(given, (list, tuple)) and all(isinstance(name, str) and name for name in given)
        if not is_list or len(given) != len(outputs) or len(set(given)) != len(given):
            raise IRError(f"IR field 'output_names' does not give each of the {len(outputs)} outputs a name of its own")
        return list(given)

    def _spec(self, meta: Any, where: str) -> TensorSpec:
        if not isinstance(meta, Mapping):
            raise IRError(f"{where}: expected a tensor description, got {type(meta).__name__}")
        name = meta.get("name")
        if not isinstance(name, str) or not name:
            raise IRError(f"{where}: field 'name' is missing or not a string")
        shape = meta.get("shape")
        if not isinstance(shape, (list, tuple)):
            raise IRError(f"{where}: tensor '{name}': field 'shape' is missing or not a list")
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, int):
                raise IRError(f"{where}: tensor '{name}': dimension {size!r} is not an integer; shapes must be static")
            if size < 0:
                raise IRError(f"{where}: tensor '{name}': shape {list(shape)} has a negative dimension")
        dtype = meta.get("dtype")
        if not isinstance(dtype, str) or dtype not in KNOWN_DTYPES:
            names = ", ".join(sorted(KNOWN_DTYPES))
            raise IRError(f"{where}: tensor '{name}': unknown dtype {dtype!r}; known are {names}")
        storage = meta.get("storage") or ""
        if storage and (not isinstance(storage, str) or storage not in KNOWN_DTYPES):
            raise IRError(f"{where}: tensor '{name}': unknown storage dtype {storage!r}")
        bounds = meta.get("bounds")
        if bounds is not None and not (isinstance(bounds, (list, tuple)) and [type(x) for x in bounds] == [int, int]):
            raise IRError(f"{where}: tensor '{name}': bounds {bounds!r:.80} are not a pair of integers")
        if bounds is not None and not INT64_MIN <= bounds[0] <= bounds[1] <= INT64_MAX:
            raise IRError(f"{where}: tensor '{name}': bounds {bounds!r:.80} are not a range of 64-bit integers")
        return TensorSpec(name, tuple(shape), dtype, storage, bounds=None if bounds is None else (bounds[0], bounds[1]))

    def _read_input(self, meta: Any) -> str:
        spec = self._spec(meta, "graph input")
        if spec.name in self.tensors:
            raise IRError(f"graph input '{spec.name}': the name is used twice")
        self.tensors[spec.name] = spec
        self.produced[spec.name, 0] = spec.name
        return spec.name

    def _read_weights(self) -> None:
        mapping = self.data.get("weight_name_mapping") or {}
        if not isinstance(mapping, Mapping):
            raise IRError("IR field 'weight_name_mapping' is not an object")
        listed = self.data.get("weights") or []
        if not isinstance(listed, (list, tuple)):
            raise IRError("IR field 'weights' is not a list")
        values = self._read_constants()
        by_key: dict[str, TensorSpec] = {}
        for meta in listed:
            spec = self._spec(meta, "weight")
            by_key[spec.name] = spec
        mapped = list(mapping.values())
        names = {**{key: key for key in by_key if key not in mapped}, **mapping}
        for name, key in names.items():
            if not isinstance(key, str) or key not in by_key:
                raise IRError(f"weight_name_mapping: '{name}' maps to '{key}', which is not in 'weights'")
            spec = replace(by_key[key], name=name)
            if name in self.tensors:
                raise IRError(f"weight '{name}': a graph input has the same name")
            self.tensors[name] = spec
            if key in values:
                value = values[key]
                if value.size != spec.numel:
                    raise IRError(f"constant '{key}': {value.size} values for shape {list(spec.shape)}")
                self.constants[name] = value.reshape(spec.shape)
            else:
                self.weights[name] = key

    def _read_constants(self) -> dict[str, np.ndarray]:
        raw = self.data.get("constants") or {}
        if not isinstance(raw, Mapping):
            raise IRError("IR field 'constants' is not an object")
        values = {}
        for name, item in raw.items():
            try:
                values[name] = np.asarray(item["data"]).astype(numpy_dtype(item["dtype"]))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise IRError(f"constant '{name}': cannot read its data ({error})") from error
        return values

    def _check_node(self, index: int, raw: Any) -> Mapping[str, Any]:
        if not isinstance(raw, Mapping):
            raise IRError(f"node {index}: expected an object, got {type(raw).__name__}")
        name = raw.get("name")
        if not isinstance(name, str) or not name:
            raise IRError(f"node {index}: field 'name' is missing or not a string")
        if not isinstance(raw.get("op_type"), str) or not raw["op_type"]:
            raise IRError(f"node '{name}': field 'op_type' is missing or not a string")
        for key in ("inputs", "outputs"):
            if not isinstance(raw.get(key), (list, tuple)):
                raise IRError(f"node '{name}': field '{key}' is missing or not a list")
        if not isinstance(raw.get("attrs") or {}, Mapping):
            raise IRError(f"node '{name}': field 'attrs' is not an object")
        return raw

    def _read_outputs(self, raw: Mapping[str, Any]) -> tuple[str, ...]:
        names = []
        for index, meta in enumerate(raw["outputs"]):
            spec = self._spec(meta, f"node '{raw['name']}' output {index}")
            unique = unique_name(spec.name, self.tensors)
            self.tensors[unique] = replace(spec, name=unique)
            self.produced[raw["name"], index] = unique
            names.append(unique)
        return tuple(names)

    def _read_node(self, raw: Mapping[str, Any], outputs: tuple[str, ...]) -> OpNode:
        name = raw["name"]
        inputs = tuple(self._resolve(meta, f"node '{name}' input {i}") for i, meta in enumerate(raw["inputs"]))
        attrs = {key: normalize_attr(value) for key, value in (raw.get("attrs") or {}).items()}
        node = OpNode(name, raw["op_type"], inputs, outputs, attrs)
        if node.base == "getitem":
            _check_choice(node)
        return node

    def _resolve(self, meta: Any, where: str) -> str:
        spec = self._spec(meta, where)
        producer = meta.get("producer_node")
        if producer is not None:
            index = meta.get("producer_output_idx", 0)
            is_reference = isinstance(producer, str) and isinstance(index, int)
            resolved = self.produced.get((producer, index)) if is_reference else None
            if resolved is None:
                raise IRError(f"{where}: reads output {index} of '{producer}', which no node or graph input produces")
        elif spec.name in self.weights or spec.name in self.constants or (spec.name, 0) in self.produced:
            resolved = spec.name
        else:
            by_key = {key: name for name, key in self.weights.items()}
            resolved = by_key.get(spec.name, spec.name)
        if resolved not in self.tensors:
            raise IRError(f"{where}: tensor '{spec.name}' is not a weight, a graph input, or any node's output")
        declared = self.tensors[resolved]
        if declared.shape != spec.shape:
            raise IRError(
                f"{where}: '{spec.name}' has shape {list(spec.shape)}, but its producer declares {list(declared.shape)}"
            )
        return resolved

    def _read_graph_output(self, meta: Any) -> str:
        spec = self._spec(meta, "graph output")
        if meta.get("producer_node") is not None:
            return self._resolve(meta, f"graph output '{spec.name}'")
        if spec.name not in self.tensors:
            raise IRError(f"graph output '{spec.name}' is made by no node")
        return spec.name


def _subgraph(whole: OpNode, nodes: list[OpNode], graph: IRGraph) -> IRGraph:
    """The nodes that compute the op `whole` as a graph of their own, with that op's inputs and outputs."""
    read = dict.fromkeys((*whole.inputs, *(name for node in nodes for name in node.inputs)))
    names = dict.fromkeys((*read, *(name for node in nodes for name in node.outputs)))
    made = {name for node in nodes for name in node.outputs}
    return replace(
        graph,
        name=whole.name,
        nodes=nodes,
        tensors={name: graph.tensors[name] for name in names},
        inputs=[n for n in read if n not in made and n not in graph.weights and n not in graph.constants],
        outputs=list(whole.outputs),
        output_names=list(whole.outputs),
        weights={name: graph.weights[name] for name in read if name in graph.weights},
        constants={name: graph.constants[name] for name in read if name in graph.constants},
    )


def _check_choice(node: OpNode) -> None:
    """Raise an `IRError` unless the node has one output and its attribute `index` is the number of an input."""
    index, count = node.attrs.get("index"), len(node.inputs)
    if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count or len(node.outputs) != 1:
        raise IRError(
            f"node '{node.name}' ({node.op_type}): it has {len(node.outputs)} outputs, {count} inputs and index "
            f"{index!r:.40}; needed are one output and the index of an input"
        )


def normalize_attr(value: Any) -> Any:
    """An attribute as plain data: sequences become lists, mappings dicts, a complex number a dict of its two parts.

    Any other object becomes its text; that, like a string, loses a leading `torch.` (`torch.float32` → `float32`).
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.removeprefix("torch.") if isinstance(value, str) else value
    if isinstance(value, (list, tuple)):
        return [normalize_attr(item) for item in value]
    if isinstance(value, complex):
        return {"real": value.real, "imag": value.imag}
    if isinstance(value, Mapping):
        return {str(key): normalize_attr(item) for key, item in value.items()}
    return str(value).removeprefix("torch.")


def topological_order(nodes: list[OpNode]) -> list[OpNode]:
    """The nodes with producers first, otherwise in the order given.

    Raises:
        IRError: the nodes form a cycle; names some of its nodes.
    """
    producer = {out: node.name for node in nodes for out in node.outputs}
    waiting = {node.name: {producer[x] for x in node.inputs if x in producer} for node in nodes}
    done: set[str] = set()
    ordered: list[OpNode] = []
    pending = nodes
    while pending:
        rest = []
        for node in pending:
            if waiting[node.name] <= done:
                ordered.append(node)
                done.add(node.name)
            else:
                rest.append(node)
        if len(rest) == len(pending):
            names = ", ".join(f"'{node.name}'" for node in rest[:5])
            raise IRError(f"the graph has a cycle through {names}{' …' if len(rest) > 5 else ''}")
        pending = rest
    return ordered
