"""The matrix engine's cycles against SCALE-Sim 3, for every convolution and product of ResNets and a Qwen2.5 layer.

    python -m benchmarks.scale_sim --json docs/scale-sim.json [--model resnet50] [--array 128]
    python -m benchmarks.scale_sim --table docs/scale-sim.json

Ours is what `npu_model.simulate` says of a program that consists of the layer, on a chip with one array of that size
and dataflow, whose folds wait for each other and whose scratchpad holds the layer: the cycles in which the matrix
engine is busy. SCALE-Sim (`pip install --no-deps scalesim==3.0.0 tqdm`) makes the addresses that its array asks for in
each cycle; their number is that of the cycles. Layers of the same shape are simulated once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npu_compiler import CompileOptions, compile
from npu_compiler.files import write_atomically
from npu_compiler.program.products import Product
from npu_model import Chip, Dataflow, NPUTarget, Result, parse_chip, simulate

TOKENS = 128
ARRAYS = (32, 128)
MODELS = ("resnet18", "resnet50", "qwen2.5-1.5b")
SHORT = {Dataflow.WEIGHT: "ws", Dataflow.OUTPUT: "os", Dataflow.INPUT: "is"}


@dataclass(frozen=True)
class Convolution:
    """A convolution without padding; kernel and stride are (height, width)."""

    channels: int
    height: int
    width: int
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)

    @property
    def results(self) -> tuple[int, int]:
        """Height and width of the result."""
        return (
            (self.height - self.kernel[0]) // self.stride[0] + 1,
            (self.width - self.kernel[1]) // self.stride[1] + 1,
        )


@dataclass(frozen=True)
class Layer:
    """The work of a layer; either `product` or `convolution` is set.

    Attributes:
        model: The model's name.
        name: The layer's name.
        count: Number of layers of the model with the same work.
        product: The matrix product. None: the layer is a convolution.
        convolution: The convolution. None: the layer is a product.
    """

    model: str
    name: str
    count: int
    product: Product | None = None
    convolution: Convolution | None = None

    @property
    def as_product(self) -> Product:
        """The matrix product that computes the layer; the rows of a convolution's product are its windows."""
        if self.product is not None:
            return self.product
        conv = self.convolution
        assert conv is not None
        rows, columns = conv.results
        return Product(rows * columns, conv.filters, conv.channels * conv.kernel[0] * conv.kernel[1])


@dataclass(frozen=True)
class Comparison:
    """Cycles of a layer on an array of processing elements.

    Attributes:
        layer: The layer.
        array: Rows and columns of the array.
        dataflow: The operand that stays in the array.
        theirs: Cycles according to SCALE-Sim.
        ours: Cycles according to `npu_model`.
    """

    layer: Layer
    array: int
    dataflow: Dataflow
    theirs: int
    ours: int


def chip_of(rows: int, columns: int, dataflow: Dataflow) -> Chip:
    """Return a chip like SCALE-Sim's: one array that is fed with whole windows, and enough memory.

    Its folds (parts of a product that fit the array) do not overlap.
    """
    return parse_chip(
        f"""
        chip = {{ name = "scale-sim", clock_ghz = 1.0 }}
        matrix = {{ arrays = 1, rows = {rows}, columns = {columns}, dataflow = "{dataflow}", rates = {{ float16 = 1 }},
                    accumulator_bytes = {2**36}, windows = "columns" }}
        output = {{ lanes = 1024 }}
        vector = {{ lanes = 1024, rates = {{ float16 = 1, float32 = 1 }} }}
        sram = {{ size = {2**36}, banks = 1024, ports = 1, bytes_per_cycle = 1024 }}
        dram = {{ bandwidth_gb_s = 1e6, latency_ns = 0 }}
        dma = {{ channels = 4 }}
        """.replace("\n                    ", " "),
        "scale-sim",
    )


def simulated(layer: Layer, rows: int, columns: int, dataflow: Dataflow) -> Result:
    """Compile a layer as a program and simulate it."""
    chip = chip_of(rows, columns, dataflow)
    return simulate(compile(_ir(layer), NPUTarget(chip), CompileOptions(compute_dtype="float16")), chip)


def cycles_of(layer: Layer, rows: int, columns: int, dataflow: Dataflow) -> int:
    """Return the cycles in which the matrix engine is busy with the layer."""
    return simulated(layer, rows, columns, dataflow).busy["matrix"]


def _ir(layer: Layer) -> dict[str, Any]:
    """Return the IR of a layer: a linear layer, a batched product of two inputs, or a convolution."""
    if (conv := layer.convolution) is not None:
        x = _tensor("x", 1, conv.channels, conv.height, conv.width)
        w = _tensor("w", conv.filters, conv.channels, *conv.kernel)
        window = {"stride": [*conv.stride], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
        return _graph([x], [w], "conv2d.default", window, _tensor("y", 1, conv.filters, *conv.results))
    product = layer.as_product
    m, n, k, batch = product.m, product.n, product.k, product.batch
    if batch == 1:
        return _graph([_tensor("x", m, k)], [_tensor("w", n, k)], "linear.default", {}, _tensor("y", m, n))
    both = [_tensor("x", batch, m, k), _tensor("w", batch, k, n)]
    return _graph(both, [], "bmm.default", {}, _tensor("y", batch, m, n))


def _tensor(name: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "shape": [*shape], "dtype": "float32"}


def _graph(
    inputs: list[dict[str, Any]], weights: list[dict[str, Any]], op: str, attrs: dict[str, Any], result: dict[str, Any]
) -> dict[str, Any]:
    made = {"producer_output_idx": 0}
    operands = [*({**each, "producer_node": each["name"], **made} for each in inputs), *weights]
    node = {"name": "layer", "op_type": f"aten.{op}", "inputs": operands, "attrs": attrs, "outputs": [result]}
    return {
        "model_name": "layer",
        "graph_inputs": inputs,
        "graph_outputs": [{**result, "producer_node": "layer", **made}],
        "weights": weights,
        "weight_name_mapping": {each["name"]: each["name"] for each in weights},
        "constants": {},
        "nodes": [node],
    }


def layers_of(model: str) -> list[Layer]:
    """Return the distinct convolutions and products of a ResNet, or of one layer of `qwen2.5-1.5b` in a prefill."""
    works = _resnet(model) if model.startswith("resnet") else _qwen()
    layers: dict[Product | Convolution, tuple[str, int]] = {}
    for name, work in works:
        layers[work] = (layers[work][0], layers[work][1] + 1) if work in layers else (name, 1)
    return [
        Layer(model, name, count, **{"product" if isinstance(work, Product) else "convolution": work})  # type: ignore[arg-type]
        for work, (name, count) in layers.items()
    ]


def _resnet(name: str) -> Iterator[tuple[str, Product | Convolution]]:
    import torch
    from torch import nn

    from npu_sim.vision import resnet

    layers: list[tuple[str, Product | Convolution]] = []

    def record(name: str, module: nn.Module, x: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            layers.append((name, trimmed(module, *x.shape[1:])))
        elif isinstance(module, nn.Linear):
            layers.append((name, Product(x.shape[0], module.out_features, module.in_features)))

    with torch.device("meta"):
        network = getattr(resnet, name)().eval()
        for name, module in network.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: record(name, module, args[0]))
        network(torch.empty(1, 3, 224, 224))
    yield from layers


def trimmed(module: Any, channels: int, height: int, width: int) -> Convolution:
    """Return a `Conv2d` with its padding added to the input, without rows and columns that no window reaches.

    SCALE-Sim would make a partial window of these rows and columns.
    """
    sizes = []
    for size, kernel, stride, padding in zip(
        (height, width), module.kernel_size, module.stride, module.padding, strict=True
    ):
        outputs = (size + 2 * padding - kernel) // stride + 1
        sizes.append((outputs - 1) * stride + kernel)
    return Convolution(channels, sizes[0], sizes[1], module.out_channels, module.kernel_size, module.stride)


def _qwen() -> Iterator[tuple[str, Product]]:
    from benchmarks.configurations import qwen2_1_5b

    config = qwen2_1_5b(1)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head = hidden // heads
    kv = head * (config.num_key_value_heads or heads)
    yield "q_proj", Product(TOKENS, hidden, hidden)
    yield "k_proj", Product(TOKENS, kv, hidden)
    yield "v_proj", Product(TOKENS, kv, hidden)
    yield "attention scores", Product(TOKENS, TOKENS, head, heads)
    yield "attention values", Product(TOKENS, head, TOKENS, heads)
    yield "o_proj", Product(TOKENS, hidden, hidden)
    yield "gate_proj", Product(TOKENS, inner, hidden)
    yield "up_proj", Product(TOKENS, inner, hidden)
    yield "down_proj", Product(TOKENS, hidden, inner)


def scale_sim_cycles(layer: Layer, rows: int, columns: int, dataflow: Dataflow) -> int:
    """Return the cycles of SCALE-Sim's array; for a batch of products, those of one times the batch size."""
    from scalesim.compute.operand_matrix import operand_matrix
    from scalesim.compute.systolic_compute_is import systolic_compute_is
    from scalesim.compute.systolic_compute_os import systolic_compute_os
    from scalesim.compute.systolic_compute_ws import systolic_compute_ws
    from scalesim.layout_utils import layouts
    from scalesim.scale_config import scale_config
    from scalesim.topology_utils import topologies

    product = layer.as_product
    if layer.convolution:
        conv = layer.convolution
        shape = [conv.height, conv.width, *conv.kernel, conv.channels, conv.filters, *conv.stride]
    else:
        shape = [product.m, product.k, 1, product.k, 1, product.n, 1, 1]
    topology = topologies()
    topology.load_layer_params_from_list(layer.name, [layer.name, *shape, 1, 1])
    topology.topo_calc_hyperparams()
    config = scale_config()
    config.update_from_list(["", rows, columns, 1024, 1024, 1024, 0, 0, 0, SHORT[dataflow], "CALC", 0])
    operands = operand_matrix()
    operands.set_params(config, topology, layouts(), 0)
    compute = {"ws": systolic_compute_ws, "os": systolic_compute_os, "is": systolic_compute_is}[SHORT[dataflow]]()
    compute.set_params(
        config,
        ifmap_op_mat=operands.get_ifmap_matrix()[1],
        filter_op_mat=operands.get_filter_matrix()[1],
        ofmap_op_mat=operands.get_ofmap_matrix()[1],
    )
    return len(compute.get_demand_matrices()[2]) * product.batch


def load(path: Path) -> list[Comparison]:
    """Load the comparisons from a file that this benchmark wrote."""
    comparisons = []
    for row in json.loads(path.read_text())["results"]:
        layer = dict(row["layer"])
        if sizes := layer["convolution"]:
            pairs = {name: tuple(sizes[name]) for name in ("kernel", "stride")}
            layer["convolution"] = Convolution(**{**sizes, **pairs})
        else:
            layer["product"] = Product(**layer["product"])
        comparisons.append(
            Comparison(Layer(**layer), row["array"], Dataflow(row["dataflow"]), row["theirs"], row["ours"])
        )
    return comparisons


def save(path: Path, comparisons: list[Comparison]) -> None:
    """Write the comparisons as JSON, one in each line."""
    rows = ",\n".join(json.dumps(asdict(comparison)) for comparison in comparisons)
    head = json.dumps({"simulator": "scalesim 3.0.0", "made_by": "python -m benchmarks.scale_sim"})
    write_atomically(path, f'{head[:-1]}, "results": [\n{rows}\n]}}\n'.encode())


def table(comparisons: list[Comparison]) -> str:
    """Return a Markdown table with a row for each model, array and dataflow.

    A row has the sums over all layers and the largest difference of a single layer.
    """
    lines = [
        "| model | array | dataflow | cycles, SCALE-Sim | cycles, ours | largest difference of a layer |",
        "|---|---|---|--:|--:|---|",
    ]
    groups: dict[tuple[str, int, str], list[Comparison]] = {}
    for one in comparisons:
        groups.setdefault((one.layer.model, one.array, f"{one.dataflow} stationary"), []).append(one)
    for (model, size, dataflow), members in groups.items():
        theirs, ours = (sum(getattr(one, name) * one.layer.count for one in members) for name in ("theirs", "ours"))
        worst = max(members, key=lambda one: abs(one.ours / one.theirs - 1))
        difference = f"{worst.ours / worst.theirs - 1:+.2%} ({worst.layer.name})"
        lines.append(f"| {model} | {size}×{size} | {dataflow} | {theirs:,} | {ours:,} | {difference} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="*")
    parser.add_argument("--array", type=int, choices=ARRAYS, nargs="*")
    parser.add_argument("--json", type=Path, help="where the results go; SCALE-Sim's that are there already are kept")
    parser.add_argument("--table", type=Path, help="print the table of a file of results and simulate nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(load(arguments.table)), end="")
        return 0
    before = load(arguments.json) if arguments.json and arguments.json.exists() else []
    theirs = {(one.layer, one.array, one.dataflow): one.theirs for one in before}
    comparisons = []
    for size in arguments.array or ARRAYS:
        for model in arguments.model or MODELS:
            for layer in layers_of(model):
                for dataflow in Dataflow:
                    known = theirs.get((layer, size, dataflow)) or scale_sim_cycles(layer, size, size, dataflow)
                    ours = cycles_of(layer, size, size, dataflow)
                    print(f"{model} {layer.name} {size} {SHORT[dataflow]}: {known}, ours {ours}", flush=True)
                    comparisons.append(Comparison(layer, size, dataflow, known, ours))
    if arguments.json:
        save(arguments.json, comparisons)
    print(table(comparisons), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
