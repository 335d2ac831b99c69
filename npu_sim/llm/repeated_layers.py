"""Graphs of models whose layers repeat: a few layers are traced, and the others are copies of them in the graph.

PyTorch takes the better part of a second to trace a layer with symbolic sizes. `trace_few` therefore traces `SAMPLE`
layers only, and `repeat_layers` inserts copies of the last but one:

    before: ids → [layer 0] → [layer 1] → [layer 2] → [layer 3] → logits
    after:  ids → [layer 0] → [layer 1] → [layer 2] → [copy of layer 2] → … → [last layer] → logits

A layer here is a period of the list of nodes: it begins with the first node that reads a weight or cache of the layer.
Whether the layers that are not traced compute the same is not assumed. PyTorch also runs the whole model without data,
which takes little time, and each call of an op there has to be the one that the copies predict.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

SAMPLE = 4  # layers that are traced: the first, two to compare, and the last
_MOST_VALUES = 1000  # of a constant that is compared

_IR: TypeAlias = dict[str, Any]


class NotAlikeError(Exception):
    """The layers of a graph do not repeat, or cannot be compared."""


def trace_few(
    path: str,
    count: int,
    build: Callable[[int], tuple[nn.Module, Sequence[Any]]],
    trace: Callable[[nn.Module, Sequence[Any]], _IR],
) -> _IR | None:
    """The IR of a model of `count` layers, of which `SAMPLE` are traced; None if they are not all alike.

    Args:
        path: Path of the list of layers in the module.
        build: Returns the module with that many layers, and its inputs on the meta device, of which `k` and `v` are
            lists with a tensor for each layer.
        trace: Traces a module to IR; an empty result stands for a module that cannot be traced.
    """
    pattern = _pattern(path)
    try:
        predicted = repeat_layers(recorded(*build(SAMPLE)), count, pattern)
        if canonical(predicted) != canonical(recorded(*build(count))):
            return None
        ir = trace(*build(SAMPLE))
        return repeat_layers(ir, count, pattern) if ir else None
    except NotAlikeError:
        return None


def _pattern(path: str) -> re.Pattern[str]:
    """Matches names of weights and caches that belong to a layer, whose number is the second group."""
    own = rf"{re.escape(path)}\.|[a-z]_{re.escape(path.replace('.', '_'))}_|[kv]_"
    return re.compile(rf"^({own})(\d+)(?=$|[._])")


def recorded(module: nn.Module, inputs: Sequence[Any]) -> _IR:
    """The calls of ops that a module makes on the meta device, in the form of IR.

    Raises NotAlikeError if it uses constants of its own whose values are not known, so that they cannot be compared.
    """
    import torch

    recorder = _recorder()
    for key, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        recorder.name(value, key)
    for own, given in zip(inspect.signature(module.forward).parameters, inputs, strict=False):
        if isinstance(given, list):
            for layer, x in enumerate(given):
                recorder.name(x, f"{own}_{layer}")
        elif given is not None:
            recorder.name(given, own)
    with torch.no_grad(), recorder:
        results = module(*inputs)
    outputs = recorder.described(results)
    return {
        "nodes": recorder.nodes,
        "graph_inputs": [],
        "graph_outputs": outputs,
        "weights": [],
        "weight_name_mapping": {},
    }


def _recorder() -> Any:
    """A context that records the ops which PyTorch calls: `nodes` in the form of IR.

    `name` gives a tensor a name, unless it has one, and `described` returns the names and shapes of those in a value.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.nodes: list[dict[str, Any]] = []
            self._names: dict[int, str] = {}
            self._held: list[torch.Tensor] = []  # so that ids are not used again

        def name(self, tensor: torch.Tensor, name: str) -> None:
            if id(tensor) not in self._names:
                self._held.append(tensor)
                self._names[id(tensor)] = name

        def described(self, value: Any) -> list[dict[str, Any]]:
            tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
            for x in tensors:
                if id(x) not in self._names:  # a constant of the module's own code
                    _require(x.device.type != "meta" and x.numel() <= _MOST_VALUES)
                    self.name(x, f"constant {x.tolist()}")
            return [{"name": self._names[id(x)], "shape": list(x.shape), "dtype": str(x.dtype)} for x in tensors]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            own, given = f"n_{len(self.nodes)}", (args, kwargs or {})
            inputs = self.described(given)
            result = func(*given[0], **given[1])
            for place, x in enumerate(tree_leaves(result)):
                if isinstance(x, torch.Tensor):
                    self.name(x, f"{own}:{place}" if place else own)
            attrs = tree_map(lambda x: "tensor" if isinstance(x, torch.Tensor) else str(x), list(given))
            node = {"name": own, "op_type": str(func), "attrs": attrs, "inputs": inputs}
            self.nodes.append({**node, "outputs": self.described(result)})
            return result

    return Recorder()


def repeat_layers(ir: _IR, count: int, pattern: re.Pattern[str]) -> _IR:
    """The IR of a model with `count` layers, from that of a model with its first `SAMPLE` layers.

    Args:
        pattern: Matches names of weights and inputs that belong to a layer, whose number is the second group.

    Raises:
        NotAlikeError: the nodes of the layers are not alike.
    """
    return _Repetition(ir, count - SAMPLE, pattern).result()


class _Repetition:
    """The work of `repeat_layers`.

    Attributes:
        more: Number of copies of the last layer but one.
        begins: The first node of each layer, by its number among the nodes.
        period: Number of nodes of a layer.
        behind: The first node of the last layer that is not like that of the layer before; the layer has ended there.
    """

    def __init__(self, ir: _IR, more: int, pattern: re.Pattern[str]) -> None:
        self.ir, self.more, self.pattern = ir, more, pattern
        self.nodes: list[dict[str, Any]] = ir["nodes"]
        self.places = {x["name"]: place for place, node in enumerate(self.nodes) for x in node["outputs"]}
        first: dict[int, int] = {}
        for place, node in enumerate(self.nodes):
            for layer in (self.layer(x["name"]) for x in node["inputs"]):
                if layer is not None:
                    first.setdefault(layer, place)
        _require(sorted(first) == list(range(SAMPLE)) and not ir.get("composites") and not ir.get("constants"))
        self.begins = [first[layer] for layer in range(SAMPLE)]
        self.period = self.begins[2] - self.begins[1]
        _require(self.begins[0] < self.begins[1] < self.begins[2] == self.begins[3] - self.period)
        _require(all(self._is_alike(place) for place in range(self.begins[2], self.begins[3])))
        last = range(self.begins[3], min(len(self.nodes), self.begins[3] + self.period))
        self.behind = next((place for place in last if not self._is_alike(place)), last.stop)

    def layer(self, name: str) -> int | None:
        """The layer to which a weight or an input belongs; None for others and for results of nodes."""
        match = None if name in self.places else self.pattern.match(name)
        return None if match is None else int(match[2])

    def _shifted(self, name: str, layers: int) -> str:
        match = self.pattern.match(name)
        return name if match is None else f"{match[1]}{int(match[2]) + layers}{name[match.end() :]}"

    def _is_alike(self, place: int) -> bool:
        """Whether a node is like that of the layer before: all but the layer's own weights and values is equal."""
        node, before = self.nodes[place], self.nodes[place - self.period]
        return _form(node) == _form(before) and all(
            x["name"] == y["name"] or self._moves(x["name"], y["name"])
            for x, y in zip(node["inputs"], before["inputs"], strict=True)
        )

    def _moves(self, name: str, before: str) -> bool:
        """Whether a value is to its layer what another one is to the layer before."""
        place, other = self.places.get(name), self.places.get(before)
        if place is None or other is None:
            return place is other and name == self._shifted(before, 1)
        return place - other == self.period and self._output(name) == self._output(before)

    def _output(self, name: str) -> int:
        """The number of a value among the outputs of its node."""
        return [x["name"] for x in self.nodes[self.places[name]]["outputs"]].index(name)

    def result(self) -> _IR:
        """The IR of all layers."""
        ir, start, end = self.ir, self.begins[2], self.begins[3]
        sources = [(place, 0) for place in range(end)]
        sources += [(place, layers) for layers in range(1, self.more + 1) for place in range(start, end)]
        sources += [(place, self.more) for place in range(end, len(self.nodes))]
        names = self._names(sources)

        def placed(x: dict[str, Any], place: int) -> dict[str, Any]:
            """A node's result as the result of the new node at that place."""
            name = names[place] + x["name"].removeprefix(self.nodes[self.places[x["name"]]]["name"])
            return {**x, "name": name, **({"producer_node": names[place]} if "producer_node" in x else {})}

        def moved(x: dict[str, Any], layers: int) -> dict[str, Any]:
            """The value, weight or input that is to a later layer what another one is to its own."""
            if x["name"] in self.places:
                return placed(x, self.places[x["name"]] + layers * self.period)
            own = {key: self._shifted(x[key], layers) for key in ("name", "producer_node") if x.get(key) is not None}
            return {**x, **own}

        nodes = []
        for number, (place, layers) in enumerate(sources):
            node = self.nodes[place]
            own = [layers if layers and self._is_own(place, position) else 0 for position in range(len(node["inputs"]))]
            inputs = [moved(x, by) for x, by in zip(node["inputs"], own, strict=True)]
            outputs = [placed(x, number) for x in node["outputs"]]
            nodes.append({**node, "name": names[number], "inputs": inputs, "outputs": outputs})
        keys = self._extended([{"name": name, "key": key} for name, key in ir["weight_name_mapping"].items()])
        lists = ("graph_inputs", "graph_outputs", "weights")
        return {
            **ir,
            "nodes": nodes,
            **{name: [moved(x, layers) for x, layers in self._extended(ir[name])] for name in lists},
            "weight_name_mapping": {
                self._shifted(x["name"], layers): self._shifted(x["key"], layers) for x, layers in keys
            },
        }

    def _names(self, sources: Sequence[tuple[int, int]]) -> list[str]:
        """The names of the new nodes. Copies are numbered on from the last node with the same beginning of its name."""
        last: dict[str, int] = {}
        for name in self._names_in_use():
            base, number = _numbered(name)
            last[base] = max(last.get(base, 0), number)
        names = []
        for place, layers in sources:
            name = self.nodes[place]["name"]
            if layers and place < self.begins[3]:
                base, _ = _numbered(name)
                last[base] += 1
                name = f"{base}_{last[base]}"
            names.append(name)
        return names

    def _names_in_use(self) -> Iterator[str]:
        yield from (node["name"] for node in self.nodes)
        yield from self.places
        yield from self.ir["weight_name_mapping"]
        yield from (x["name"] for x in self.ir["graph_inputs"])

    def _is_own(self, place: int, position: int) -> bool:
        """Whether an input of a node from the last layer but one on is another value in another layer."""
        name = self.nodes[place]["inputs"][position]["name"]
        if place < self.behind:
            return bool(name != self.nodes[place - self.period]["inputs"][position]["name"])
        producer = self.places.get(name)
        if producer is None:
            _require(self.layer(name) is None)
            return False
        _require(producer < self.begins[0] or producer >= self.begins[2])
        return producer >= self.begins[2]

    def _extended(self, items: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
        """The items of a list for all layers: for each, an item of the list and the layers by which it moves."""
        layers = [self._layer_of(x) for x in items]
        place = 0
        while place < len(items):
            if layers[place] is None:
                behind = self.places.get(items[place]["name"], 0) >= self.behind
                yield items[place], self.more if behind else 0
                place += 1
                continue
            end = place + 1  # of a run of items of ascending layers
            while end < len(items) and layers[end] is not None and layers[end] >= layers[end - 1]:  # type: ignore[operator]
                end += 1
            each = (end - place) // SAMPLE
            _require(layers[place:end] == [layer for layer in range(SAMPLE) for _ in range(each)])
            groups = [items[first : first + each] for first in range(place, end, each)]
            _require(len({str(list(map(_form_of_value, group))) for group in groups[1:]}) == 1)
            for shifts, group in zip(([0], [0], range(self.more + 1), [self.more]), groups, strict=True):
                yield from ((x, by) for by in shifts for x in group)
            place = end

    def _layer_of(self, x: dict[str, Any]) -> int | None:
        """The layer to which a weight, an input or a result belongs; None for others."""
        place = self.places.get(x["name"])
        if place is None:
            return self.layer(x["name"])
        if not self.begins[0] <= place < self.behind:
            return None
        return sum(place >= begin for begin in self.begins) - 1


def _numbered(name: str) -> tuple[str, int]:
    """The beginning of a name, and the number at its end; 0 if there is none."""
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (name, 0)


def _require(condition: bool) -> None:
    if not condition:
        raise NotAlikeError


def _form_of_value(x: Mapping[str, Any]) -> list[Any]:
    return [x.get(key) for key in ("shape", "dtype", "producer_output_idx")]


def _form(node: Mapping[str, Any]) -> list[Any]:
    """All of a node except names."""
    values = [list(map(_form_of_value, node[key])) for key in ("inputs", "outputs")]
    return [node["op_type"], node["attrs"], *values]


def canonical(ir: _IR) -> list[Any]:
    """The graph with numbers in place of the names of nodes: equal for graphs that differ in these names only."""
    numbers = {
        x["name"]: [number, place] for number, node in enumerate(ir["nodes"]) for place, x in enumerate(node["outputs"])
    }

    places = {node["name"]: number for number, node in enumerate(ir["nodes"])}

    def of(values: Sequence[dict[str, Any]]) -> list[Any]:
        producers = [x.get("producer_node") for x in values]
        named = zip(values, producers, strict=True)
        return [[numbers.get(x["name"], x["name"]), places.get(node, node), _form_of_value(x)] for x, node in named]

    nodes = [[_form(node), of(node["inputs"])] for node in ir["nodes"]]
    return [nodes, *(of(ir[key]) for key in ("graph_inputs", "graph_outputs", "weights")), ir["weight_name_mapping"]]


__all__ = ["SAMPLE", "NotAlikeError", "canonical", "recorded", "repeat_layers", "trace_few"]
