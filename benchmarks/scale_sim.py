"""Our systolic array formulas against SCALE-Sim 3, on every convolution and product of ResNet-50 and a Qwen2.5 layer.

    python -m benchmarks.scale_sim --json docs/scale-sim.json [--model resnet50] [--array 128]
    python -m benchmarks.scale_sim --table docs/scale-sim.json

SCALE-Sim (`pip install --no-deps scalesim==3.0.0 tqdm`) makes the addresses that its array asks for in each cycle,
and its double-buffered SRAMs of stated sizes count what comes from DRAM. Their lookup is replaced by a table
with the same answers, and they keep no trace: a hundredth of the time for the same counts, which `--check` shows
against the unmodified buffers. Elements are one byte, as in SCALE-Sim. Layers of the same shape are simulated once.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from npu_compiler.files import write_atomically
from npu_model.systolic import Dataflow, Product, array_cycles, sram_accesses
from npu_model.systolic_dram import Buffers, Convolution, dram_traffic

TOKENS = 128
SRAM_KIB = {32: 128, 128: 1024}  # array → size of the SRAM for inputs, and of that for weights
_CHUNK = 64  # cycles
_MOST_ADDRESSES = 1 << 24
SHORT = {Dataflow.WEIGHT: "ws", Dataflow.OUTPUT: "os", Dataflow.INPUT: "is"}


@dataclass(frozen=True)
class Layer:
    """A layer's work and how many layers of its model have it; exactly one of the two is set."""

    model: str
    name: str
    count: int
    product: Product | None = None
    convolution: Convolution | None = None

    @property
    def work(self) -> Product | Convolution:
        work = self.product or self.convolution
        assert work is not None
        return work

    @property
    def as_product(self) -> Product:
        return self.work if isinstance(self.work, Product) else self.work.product


@dataclass(frozen=True)
class Counts:
    """Cycles without stalls; elements read and written by the array; elements read from and written to DRAM."""

    cycles: int
    sram: tuple[int, int, int]
    dram: tuple[int, int, int]


@dataclass(frozen=True)
class Comparison:
    """A layer on an array: what SCALE-Sim counts, and what the formulas said when it ran."""

    layer: Layer
    array: int
    dataflow: Dataflow
    theirs: Counts
    ours: Counts


def formulas(layer: Layer, size: int, dataflow: Dataflow, sram_kib: int) -> Counts:
    """Return the counts that our formulas predict for a layer on an array of `size` × `size`."""
    sram = sram_accesses(layer.as_product, size, size, dataflow)
    dram = dram_traffic(layer.work, size, size, dataflow, Buffers(sram_kib * 1024, sram_kib * 1024))
    return Counts(
        array_cycles(layer.as_product, size, size, dataflow).cycles,
        (sram.input_reads, sram.weight_reads, sram.output_writes),
        (dram.input_reads, dram.weight_reads, dram.output_writes),
    )


def layers_of(model: str) -> list[Layer]:
    """The distinct convolutions and products of `resnet50`, or of one layer of `qwen2.5-1.5b` in a prefill."""
    works = _resnet50() if model == "resnet50" else _qwen()
    layers: dict[Product | Convolution, tuple[str, int]] = {}
    for name, work in works:
        layers[work] = (layers[work][0], layers[work][1] + 1) if work in layers else (name, 1)
    return [
        Layer(model, name, count, **{"product" if isinstance(work, Product) else "convolution": work})  # type: ignore[arg-type]
        for work, (name, count) in layers.items()
    ]


def _resnet50() -> Iterator[tuple[str, Product | Convolution]]:
    import torch
    from torch import nn

    from npu_sim.vision.resnet import resnet50

    layers: list[tuple[str, Product | Convolution]] = []

    def record(name: str, module: nn.Module, x: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            layers.append((name, trimmed(module, *x.shape[1:])))
        elif isinstance(module, nn.Linear):
            layers.append((name, Product(x.shape[0], module.out_features, module.in_features)))

    with torch.device("meta"):
        network = resnet50().eval()
        for name, module in network.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: record(name, module, args[0]))
        network(torch.empty(1, 3, 224, 224))
    yield from layers


def trimmed(module: Any, channels: int, height: int, width: int) -> Convolution:
    """A `Conv2d` as the formulas take it: padding included, and rows and columns that no window reaches left out.

    SCALE-Sim would make a partial window of what is left out.
    """
    sizes = []
    for size, kernel, stride, padding in zip(
        (height, width), module.kernel_size, module.stride, module.padding, strict=True
    ):
        outputs = (size + 2 * padding - kernel) // stride + 1
        sizes.append((outputs - 1) * stride + kernel)
    return Convolution(channels, sizes[0], sizes[1], module.out_channels, module.kernel_size, module.stride)


def _qwen() -> Iterator[tuple[str, Product]]:
    from benchmarks.qwen import qwen

    config = qwen(1)
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


def simulate(layer: Layer, size: int, dataflow: Dataflow, sram_kib: int, unmodified: bool = False) -> Counts:
    """Return SCALE-Sim's counts for a layer; for a batch of products, one product's counts times the batch."""
    from scalesim.compute.operand_matrix import operand_matrix
    from scalesim.compute.systolic_compute_is import systolic_compute_is
    from scalesim.compute.systolic_compute_os import systolic_compute_os
    from scalesim.compute.systolic_compute_ws import systolic_compute_ws
    from scalesim.layout_utils import layouts
    from scalesim.memory.read_port import read_port
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
    config.update_from_list(["", size, size, *[sram_kib] * 3, 0, 0, 0, SHORT[dataflow], "CALC", 0])
    operands = operand_matrix()
    operands.set_params(config, topology, layouts(), 0)
    compute = {"ws": systolic_compute_ws, "os": systolic_compute_os, "is": systolic_compute_is}[SHORT[dataflow]]()
    compute.set_params(
        config,
        ifmap_op_mat=operands.get_ifmap_matrix()[1],
        filter_op_mat=operands.get_filter_matrix()[1],
        ofmap_op_mat=operands.get_ofmap_matrix()[1],
    )
    inputs, weights, outputs = compute.get_demand_matrices()
    reads = []
    for demand in (inputs, weights):
        buffer = _original_buffer()() if unmodified else _read_buffer()()
        buffer.set_params(read_port(), sram_kib * 1024, 1, 0.5, 1, 10)
        cycles = np.arange(len(demand)).reshape(-1, 1)
        for start in range(0, len(demand), 1 << 14):
            buffer.service_reads(demand[start : start + (1 << 14)], cycles[start : start + (1 << 14)])
        buffer.complete_all_prefetches()
        reads.append(int(buffer.get_num_accesses()))
    writes = int((outputs != -1).sum())  # its SRAM for outputs passes everything on
    sram = (int(compute.get_ifmap_requests()), int(compute.get_filter_requests()), writes)
    batch = product.batch
    return Counts(
        len(outputs) * batch,
        (sram[0] * batch, sram[1] * batch, sram[2] * batch),
        (reads[0] * batch, reads[1] * batch, writes * batch),
    )


def _original_buffer() -> Any:
    from scalesim.memory.read_buffer_estimate_bw import ReadBufferEstimateBw

    return ReadBufferEstimateBw


@cache
def _read_buffer() -> Any:
    class ReadBuffer(_original_buffer()):  # type: ignore[misc]
        """SCALE-Sim's SRAM with a table for its lookups, and without its trace.

        Of a chunk of requests, those that hit change nothing and are left out, unless the window may fill within it.
        """

        def set_params(self, *arguments: Any) -> None:
            super().set_params(*arguments)
            self.asked = 0
            self.set_of = array("i", [-1]) * _MOST_ADDRESSES  # address → the set that it was last put into

        def service_reads(self, requests: Any, cycles: Any) -> None:
            sets = np.frombuffer(self.set_of, np.int32)
            for start in range(0, len(requests), _CHUNK):
                addresses = requests[start : start + _CHUNK].ravel()
                addresses = addresses[addresses >= 0].astype(np.int64)
                missed = addresses[sets[addresses] < self.read_buffer_set_start_id]
                room = (self.read_buffer_set_end_id + 1 - self.current_set_id) * self.num_items_per_set
                for address in (missed if len(missed) < room - self.elems_current_set else addresses).tolist():
                    self.asked += 1  # stands for the cycle, which no count depends on
                    self.manage_prefetches(self.asked, address)

        def manage_prefetches(self, cycle: int, address: int) -> None:
            if self.set_of[address] >= self.read_buffer_set_start_id:
                return
            self.set_of[address] = self.current_set_id
            super().manage_prefetches(cycle, address)

        def check_hit(self, address: int) -> bool:
            return False  # a hit does not come here

        def prefetch(self) -> None:
            first, last = self.prefetch_buffer_set_start_id, self.prefetch_buffer_set_end_id
            if not self.active_buffer_prefetch_done:
                first, last = 0, self.num_sets_active_buffer - 1
            self.num_access += sum(len(found) for found in self.list_of_sets[first : last + 1])
            self.trace_valid = True

    return ReadBuffer


def load(path: Path) -> list[Comparison]:
    """The comparisons of a file that this benchmark wrote."""
    comparisons = []
    for row in json.loads(path.read_text())["results"]:
        layer = dict(row["layer"])
        if layer["convolution"]:
            sizes = layer["convolution"]
            layer["convolution"] = Convolution(
                **{**sizes, "kernel": tuple(sizes["kernel"]), "stride": tuple(sizes["stride"])}
            )
        else:
            layer["product"] = Product(**layer["product"])
        theirs, ours = (
            Counts(counts["cycles"], tuple(counts["sram"]), tuple(counts["dram"]))
            for counts in (row["theirs"], row["ours"])
        )
        comparisons.append(Comparison(Layer(**layer), row["array"], Dataflow(row["dataflow"]), theirs, ours))
    return comparisons


def save(path: Path, comparisons: list[Comparison]) -> None:
    """Write the comparisons as JSON, a line each."""
    rows = ",\n".join(json.dumps(asdict(comparison)) for comparison in comparisons)
    head = json.dumps(
        {"simulator": "scalesim 3.0.0", "sram_kib": SRAM_KIB, "made_by": "python -m benchmarks.scale_sim"}
    )
    write_atomically(path, f'{head[:-1]}, "results": [\n{rows}\n]}}\n'.encode())


def table(comparisons: list[Comparison]) -> str:
    """A Markdown table, a row per model, array and dataflow: sums over all layers and the largest difference of one."""
    lines = [
        "| model | array | dataflow | cycles, SCALE-Sim | cycles, ours | largest difference of a layer |"
        " DRAM elements, SCALE-Sim | DRAM elements, ours | largest difference of a layer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, int, str], list[Comparison]] = {}
    for comparison in comparisons:
        key = (comparison.layer.model, comparison.array, f"{comparison.dataflow} stationary")
        groups.setdefault(key, []).append(comparison)
    for (model, size, dataflow), members in groups.items():
        cells = []
        cycles = [(one.theirs.cycles, one.ours.cycles, one.layer) for one in members]
        traffic = [(sum(one.theirs.dram), sum(one.ours.dram), one.layer) for one in members]
        for pairs in (cycles, traffic):
            theirs = sum(pair[0] * pair[2].count for pair in pairs)
            ours = sum(pair[1] * pair[2].count for pair in pairs)
            worst = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
            cells += [f"{theirs:,}", f"{ours:,}", f"{worst[1] / worst[0] - 1:+.2%} ({worst[2].name})"]
        lines.append(f"| {model} | {size}×{size} | {dataflow} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet50", "qwen2.5-1.5b"], nargs="*")
    parser.add_argument("--array", type=int, choices=list(SRAM_KIB), nargs="*")
    parser.add_argument("--json", type=Path, help="where the results go; those that are there already are kept")
    parser.add_argument("--table", type=Path, help="print the table of a file of results and simulate nothing")
    parser.add_argument("--check", action="store_true", help="simulate small products with the unmodified SRAMs too")
    arguments = parser.parse_args()
    console = Console(width=200)
    if arguments.table:
        print(table(load(arguments.table)), end="")
        return 0
    if arguments.check:
        return check(console)
    comparisons = load(arguments.json) if arguments.json and arguments.json.exists() else []
    done = {(one.layer, one.array, one.dataflow) for one in comparisons}
    for size in arguments.array or sorted(SRAM_KIB, reverse=True):
        for model in arguments.model or ("resnet50", "qwen2.5-1.5b"):
            for layer in layers_of(model):
                for dataflow in Dataflow:
                    if (layer, size, dataflow) in done:
                        continue
                    one = Comparison(
                        layer,
                        size,
                        dataflow,
                        simulate(layer, size, dataflow, SRAM_KIB[size]),
                        formulas(layer, size, dataflow, SRAM_KIB[size]),
                    )
                    ours, theirs = one.ours, one.theirs
                    console.print(
                        f"{model} {layer.name} {size} {SHORT[dataflow]}: cycles {theirs.cycles} ours {ours.cycles},"
                        f" DRAM {theirs.dram} ours {ours.dram}"
                    )
                    comparisons.append(one)
                    if arguments.json:
                        save(arguments.json, comparisons)
    print(table(comparisons), end="")
    return 0


def check(console: Console) -> int:
    """Whether the replaced lookup changes a count: small layers, with SRAMs that they overflow."""
    works: list[dict[str, Any]] = [
        {"product": Product(50, 40, 70)},
        {"convolution": Convolution(16, 17, 17, 40, (3, 3))},
        {"convolution": Convolution(3, 23, 23, 20, (5, 5), (2, 2))},
    ]
    status = 0
    for work in works:
        for dataflow in Dataflow:
            layer = Layer("check", "layer", 1, **work)
            fast, slow = (simulate(layer, 16, dataflow, 2, unmodified) for unmodified in (False, True))
            console.print(f"{work} {SHORT[dataflow]}: {'the same' if fast == slow else f'{fast} and {slow}'}")
            status |= fast != slow
    return status


if __name__ == "__main__":
    sys.exit(main())
