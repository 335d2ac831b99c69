"""Divides a graph among several devices, as Megatron-LM does (arxiv.org/abs/1909.08053), so that all run one program.

The graph decides what is divided. Starting with the columns of a product's weight, the division spreads from op to op
by the rules on their rows (`Op.shard`): through views, rotations, KV caches and attention, where it becomes one by
heads, up to products whose input is divided by columns. Each rank (device) computes a summand of such a product, and an
all-reduce adds them. The tensors that one start divides are a region.
If the division reaches a result of the graph, such as logits, the parts are gathered. If an op needs a tensor of the
region whole, nothing in the region is divided.

    Given:   h = linear(x, gate);  y = linear(silu(h), down)                     gate: [96, 64], down: [64, 96]
    Result:  h = linear(x, gate.shard);  s = linear(silu(h), down.shard);  y = npu.all_reduce(s) {ranks=2}
             gate.shard: [48, 64] = shard(gate, axis=0, parts=2, ranks=2), down.shard: [64, 48]

Inputs that the graph updates, such as KV caches, and the outputs that they become are divided like other tensors; all
other inputs and outputs are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from npu_compiler.errors import InputError
from npu_compiler.graph.mesh import Mesh, Split, divides, part_shape, pieces
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.weight_recipe import WeightTransformRecipe, on_first_rank, rank_start, shard_recipe
from npu_compiler.ops.registry import Shards, find_op
from npu_compiler.ops.sharding import with_part_shapes
from npu_compiler.passes.integer_ranges import index_bounds

ALL_REDUCE, ALL_GATHER = "npu.all_reduce", "npu.all_gather"


@dataclass
class ShardingPlan:
    """The division of a graph's tensors among ranks.

    Attributes:
        splits: Tensor → how it is divided, except weights.
        nodes: Node → how its tensors are divided, weights included.
        gathered: Tensors that are computed in parts and then gathered.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    nodes: dict[str, Shards] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)


def shard(graph: IRGraph, mesh: Mesh) -> IRGraph:
    """The graph that every rank runs; with one rank, the graph unchanged.

    Raises:
        InputError: a tensor that should be divided does not divide evenly; the message names it.
    """
    if mesh.ranks == 1:
        return graph
    bounds = {name: limits for name, limits in index_bounds(graph).items() if name in graph.inputs}
    bounded = graph.with_nodes(graph.nodes, {x: replace(graph.tensors[x], bounds=y) for x, y in bounds.items()})
    return _divide_tables(_apply(bounded, find_sharding(graph, mesh), mesh), mesh)


def find_sharding(graph: IRGraph, mesh: Mesh) -> ShardingPlan:
    """Find which tensors of a graph are divided, and how.

    Each product with a weight starts a region: the tensors whose division follows from that of its columns. A region is
    left whole if one of its ops cannot work on parts. Raises InputError if a tensor does not divide evenly.
    """
    plan = ShardingPlan()
    for node in graph.nodes:
        if node.name in plan.nodes or not _starts_region(node, graph):
            continue
        region = _Region(graph, mesh).grown_from(node)
        if region is not None:
            plan.splits |= region.splits
            plan.nodes |= region.nodes
            plan.gathered |= region.gathered
    return plan


def _starts_region(node: OpNode, graph: IRGraph) -> bool:
    """Whether the node is a product with a weight of the checkpoint, whose columns can be divided."""
    op = find_op(node.op_type)
    rule = None if op is None or op.shard is None else op.quantized
    return rule is not None and not rule.is_table and node.inputs[rule.input] in graph.weights


class _Region(ShardingPlan):
    """The tensors whose division follows from that of one product's columns."""

    def __init__(self, graph: IRGraph, mesh: Mesh) -> None:
        super().__init__()
        self._graph, self._mesh = graph, mesh
        self._producers, self._consumers = graph.producers(), graph.consumers()
        self._queue: list[str] = []

    def grown_from(self, start: OpNode) -> ShardingPlan | None:
        """The region of a product whose columns are divided; None if an op in it needs a tensor whole."""
        out = start.outputs[0]
        self._add(out, ((len(self._graph.tensors[out].shape) - 1, self._mesh.ranks),))
        while self._queue:
            name = self._queue.pop(0)
            if not self._spreads_from(name):
                return None
        if not all(self._is_consistent(node) for node in self._graph.nodes if node.name in self.nodes):
            return None
        is_padded = bool(self.gathered) and not any(shards.is_sum for shards in self.nodes.values())
        if not is_padded:
            self._check_divides()
        return self

    def _add(self, name: str, split: Split) -> bool:
        if name not in self.splits:
            self.splits[name] = split
            self._queue.append(name)
        return self.splits[name] == split

    def _spreads_from(self, name: str) -> bool:
        if name in self._graph.constants or (name in self._graph.inputs and not self._is_updated(name)):
            return False
        producer = self._producers.get(name)
        if producer is not None and not self._visit(producer, name):
            return False
        if name in self._graph.outputs and not self._updates_input(name):
            self.gathered.add(name)
            return self.splits[name] == ((len(self._graph.tensors[name].shape) - 1, self._mesh.ranks),)
        return all(self._visit(node, name) for node in self._consumers.get(name, []))

    def _is_updated(self, name: str) -> bool:
        outputs = set(self._graph.outputs)
        return any(node.inputs[0] == name and node.outputs[0] in outputs for node in self._consumers.get(name, []))

    def _updates_input(self, name: str) -> bool:
        node = self._producers.get(name)
        return node is not None and node.inputs[0] in self._graph.inputs and node.inputs[0] in self.splits

    def _visit(self, node: OpNode, name: str) -> bool:
        if node.name in self.nodes:
            return True  # whether it agrees is seen at the end
        op = find_op(node.op_type)
        shards = None if op is None or op.shard is None else op.shard(node, self._graph, name, self.splits[name])
        if shards is None or (shards.is_sum and pieces(self.splits[name]) != self._mesh.ranks):
            return False
        self.nodes[node.name] = shards
        return all(self._add(x, split) for x, split in shards.splits.items() if x not in self._graph.weights)

    def _is_consistent(self, node: OpNode) -> bool:
        """Whether the node's tensors are divided as its op needs them, and all others are whole."""
        wanted = self.nodes[node.name].splits
        read = {name for name in node.inputs if name not in self._graph.weights}
        inputs = all(wanted.get(name) == (None if name in self.gathered else self.splits.get(name)) for name in read)
        return inputs and all(wanted.get(name) == self.splits.get(name) for name in node.outputs)

    def _check_divides(self) -> None:
        graph = self._graph
        for node in graph.nodes:
            for name, split in self.nodes[node.name].splits.items() if node.name in self.nodes else ():
                spec = graph.tensors[name]
                if divides(spec.shape, split):
                    if name in graph.weights and spec.quantized is not None:
                        self._check_quantized(spec, split)
                    continue
                dim, parts = next((d, p) for d, p in split if spec.shape[d] % p)
                raise InputError(
                    f"the model cannot be divided among {self._mesh.ranks} devices: dimension {dim} of '{name}' "
                    f"{list(spec.shape)} does not divide into {parts} equal parts"
                )

    def _check_quantized(self, spec: TensorSpec, split: Split) -> None:
        assert spec.quantized is not None
        if problem := spec.quantized.problem(part_shape(spec.shape, split)):
            raise InputError(
                f"the model cannot be divided among {self._mesh.ranks} devices: a part of '{spec.name}' cannot be "
                f"stored as {spec.quantized}: {problem}"
            )


def _apply(graph: IRGraph, plan: ShardingPlan, mesh: Mesh) -> IRGraph:
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    for name, split in plan.splits.items():
        if name not in plan.gathered:
            tensors[name] = replace(tensors[name], shape=part_shape(tensors[name].shape, split))
    divided = _Weights(tensors, weights, mesh)
    nodes: list[OpNode] = []
    for node in graph.nodes:
        shards = plan.nodes.get(node.name)
        if shards is None:
            nodes.append(node)
            continue
        node = node.rename_inputs(
            {name: divided.part(name, split) for name, split in shards.splits.items() if name in graph.weights}
        )
        node = node.rename_inputs({name: divided.on_first_rank(name) for name in shards.once})
        (out, *_) = node.outputs
        if shards.is_sum or out in plan.gathered:
            part = unique_name(f"{out}.part", tensors)
            split = plan.splits.get(out, ())
            tensors[part] = replace(tensors[out], name=part, shape=part_shape(tensors[out].shape, split))
            node = replace(node, outputs=(part, *node.outputs[1:]))
            nodes.append(with_part_shapes(node, graph.with_nodes([], tensors)))
            op = ALL_REDUCE if shards.is_sum else ALL_GATHER
            nodes.append(OpNode(f"{node.name}.{op.split('.')[1]}", op, (part,), (out,), {"ranks": mesh.ranks}))
        else:
            nodes.append(with_part_shapes(node, graph.with_nodes([], tensors)))
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


@dataclass
class _Weights:
    """The weights that are divided among ranks; all nodes that read the same part share a weight."""

    tensors: dict[str, TensorSpec]
    weights: dict[str, WeightTransformRecipe]
    mesh: Mesh
    names: dict[tuple[str, Split], str] = field(default_factory=dict)

    def part(self, name: str, split: Split) -> str:
        ((axis, parts),) = split
        recipe = shard_recipe(self.weights[name], axis, parts, self.mesh.ranks)
        return self._add(name, split, part_shape(self.tensors[name].shape, split), recipe)

    def on_first_rank(self, name: str) -> str:
        return self._add(name, (), self.tensors[name].shape, on_first_rank(self.weights[name]))

    def first_row(self, rows: int) -> str:
        """The name of a weight [1] with the number of the first row of a rank's part of a table, `rows` rows each."""
        key = "", ((0, rows),)
        if key not in self.names:
            name = self.names[key] = unique_name("first_row", self.tensors)
            self.tensors[name], self.weights[name] = TensorSpec(name, (1,), "int64"), rank_start(rows)
        return self.names[key]

    def _add(self, name: str, split: Split, shape: tuple[int, ...], recipe: WeightTransformRecipe) -> str:
        if (name, split) not in self.names:
            part = self.names[name, split] = unique_name(f"{name}.shard", self.tensors)
            self.tensors[part] = replace(self.tensors[name], name=part, shape=shape)
            self.weights[part] = recipe
        return self.names[name, split]


def _divide_tables(graph: IRGraph, mesh: Mesh) -> IRGraph:
    """Divide embedding tables by rows: each rank looks up its rows, with 0 for others, and an all-reduce adds them.

    Tables that are also a product's divided weight are always divided, others only if they are large.
    """
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    divided = _Weights(tensors, weights, mesh)
    shared = {key for recipe in graph.weights.values() if recipe.op == "shard" for key in recipe.keys()}
    nodes: list[OpNode] = []
    for node in graph.nodes:
        op, table = find_op(node.op_type), (*node.inputs, "")[0]
        rule = None if op is None else op.shard_table
        recipe = graph.weights.get(table)
        is_worth_it = recipe is not None and (
            graph.tensors[table].numel >= mesh.least_table or not shared.isdisjoint(recipe.keys())
        )
        if rule is None or recipe is None or recipe.op != "key" or not is_worth_it:
            nodes.append(node)
            continue
        part = divided.part(table, ((0, mesh.ranks),))
        rows = tensors[part].shape[0]
        first = divided.first_row(rows)
        step = node.rename_inputs({table: part})
        steps, specs = rule(step, graph.with_nodes([], tensors), first, rows, tensors)
        out = node.outputs[0]
        summand = unique_name(f"{out}.part", {**tensors, **specs})
        specs[summand] = replace(tensors[out], name=summand)
        steps[-1] = replace(steps[-1], outputs=(summand,))
        tensors |= specs
        reduced = OpNode(f"{node.name}.all_reduce", ALL_REDUCE, (summand,), (out,), {"ranks": mesh.ranks})
        nodes += [*steps, reduced]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)
