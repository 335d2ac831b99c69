"""The chip `ethos-u65-512` beside Vela, Arm's compiler for it, whose report estimates the cycles of each layer.

    python -m benchmarks.vela --json docs/measurements/vela.json [--model resnet18]

Vela (`pip install ethos-u-vela==5.2.0`) compiles a TFLite file that `benchmarks.tflite` writes; ours is what `simulate`
says of the network in int8. Both are estimates. A layer is a convolution or a linear, with the sums and poolings up to
the next one; ours takes images of floats, so that its rounding of the input is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.tflite import network_of, written
from npu_compiler import compile, read_ir
from npu_compiler.compiler import normalize
from npu_compiler.files import write_atomically
from npu_compiler.fusions.quantization_points import Points
from npu_compiler.graph.model import IRGraph
from npu_compiler.passes.batch_norm import fold_batch_norm
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_model import NPUTarget, load_chip, simulate
from npu_sim.quantizing.networks.uncalibrated import quantized_from_shapes
from npu_sim.vision.models import extract_model_ir, find_model

CHIP = "ethos-u65-512"
MODELS = ("resnet18", "resnet50", "efficientnet-lite0")
_VELA = ["--accelerator-config", CHIP, "--config", "Arm/vela.ini", "--system-config", "Ethos_U65_High_End"]
_MEMORY = ["--memory-mode", "Dedicated_Sram_512KB", "--verbose-performance"]
_LAYERS = ("aten.conv2d", "aten.linear")


@dataclass(frozen=True)
class Layer:
    """The cycles of a layer: Vela's estimate, and ours."""

    model: str
    name: str
    theirs: int
    ours: int


def layers_of(model: str) -> list[Layer]:
    """Return the layers of a vision model, with both estimates."""
    graph = read_ir(extract_model_ir(find_model(model)))
    plain = eliminate_dead_code(fold_batch_norm(normalize(graph)))
    owners = owners_of(plain)
    theirs = Counter[str]()
    for tensor, cycles in vela_cycles(plain):
        theirs[owners[tensor]] += cycles
    chip, ours = load_chip(CHIP), Counter[str]()
    for call in simulate(compile(quantized_from_shapes(graph), NPUTarget(chip)), chip).calls:
        tensor = call.node.partition(".")[0]
        if tensor not in plain.inputs:
            ours[owners[tensor]] += call.cycles
    return [Layer(model, name, theirs[name], ours[name]) for name in dict.fromkeys(owners.values())]


def owners_of(graph: IRGraph) -> dict[str, str]:
    """Return tensor → the convolution or linear layer to which its cycles are attributed.

    It is the layer whose kernel also computes the tensor, else the last layer before.
    """
    owners: dict[str, str] = {}
    producers = graph.producers()
    for node in graph.nodes:
        before = [owners[name] for name in node.inputs if name in owners]
        owner = node.name if node.base in _LAYERS else before[0] if before else ""
        owners.update(dict.fromkeys(node.outputs, owner))
    for layer in Points(graph).layers:
        tensor = layer.result
        while producers[tensor].name != layer.node:  # the sum and the activation that its kernel takes along
            owners[tensor] = layer.node
            inside = [name for name in producers[tensor].inputs if owners.get(name) == layer.node]
            tensor = inside[0]
    return {tensor: owner for tensor, owner in owners.items() if owner}


def vela_cycles(graph: IRGraph) -> list[tuple[str, int]]:
    """Return the name of each operator's output tensor, and the cycles that Vela estimates for the operator."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "network.tflite").write_bytes(written(network_of(graph)))
        command = [sys.executable, "-m", "ethosu.vela", str(folder / "network.tflite"), *_VELA, *_MEMORY]
        subprocess.run([*command, "--output-dir", name], check=True, capture_output=True)
        with (folder / "network_per-layer.csv").open(newline="") as file:
            return [(row["Name"], int(float(row["Op Cycles"]))) for row in csv.DictReader(file)]


def load(path: Path) -> list[Layer]:
    """Load the layers from a file that this benchmark wrote."""
    return [Layer(**row) for row in json.loads(path.read_text("utf-8"))["layers"]]


def save(path: Path, layers: Sequence[Layer]) -> None:
    """Write the layers as JSON, one in each line."""
    rows = ",\n".join(json.dumps(asdict(layer)) for layer in layers)
    head = json.dumps({"estimator": "ethos-u-vela 5.2.0", "made_by": "python -m benchmarks.vela"})
    write_atomically(path, f'{head[:-1]}, "layers": [\n{rows}\n]}}\n'.encode())


def together(layers: Sequence[Layer]) -> list[Layer]:
    """Merge the layers of a cascade, which run as one kernel and whose cycles are counted at the last of them."""
    joined: list[Layer] = []
    waiting: list[Layer] = []
    for layer in layers:
        waiting.append(layer)
        if layer.ours:
            names = dict.fromkeys((waiting[0].name, layer.name))
            theirs, ours = sum(each.theirs for each in waiting), sum(each.ours for each in waiting)
            joined.append(Layer(layer.model, " … ".join(names), theirs, ours))
            waiting = []
    return joined


def table(layers: Sequence[Layer]) -> str:
    """Return a Markdown table with a row for each model.

    A row has totals, totals without the first layer, and the ratios of the other layers.
    """
    titles = ("model", "layers", "Vela, cycles", "ours", "ratio", "without the first")
    lines = [f"| {' | '.join((*titles, 'median ratio of a layer', '10th to 90th percentile', 'farthest'))} |"]
    lines.append(f"|---|{'--:|' * 7}---|")
    for model in dict.fromkeys(layer.model for layer in layers):
        own = together([layer for layer in layers if layer.model == model])
        theirs, ours = sum(layer.theirs for layer in own), sum(layer.ours for layer in own)
        rest = own[1:]
        without = sum(layer.ours for layer in rest) / sum(layer.theirs for layer in rest)
        ratios = [layer.ours / layer.theirs for layer in rest]
        tenths = quantiles(ratios, n=10)
        far = max(rest, key=lambda layer: abs(math.log(layer.ours / layer.theirs)))
        lines.append(
            f"| {model} | {len(own)} | {theirs:,} | {ours:,} | {ours / theirs:.2f} | {without:.2f} "
            f"| {median(ratios):.2f} | {tenths[0]:.2f} to {tenths[-1]:.2f} "
            f"| {far.name}: {far.theirs:,} and {far.ours:,} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="*")
    parser.add_argument("--json", type=Path, help="where the results go")
    given = parser.parse_args(arguments)
    layers = [layer for model in given.model or MODELS for layer in layers_of(model)]
    for layer in layers:
        print(f"{layer.model} {layer.name}: Vela {layer.theirs}, ours {layer.ours}")
    if given.json:
        save(given.json, layers)
    print(table(layers), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
