"""Other tools' estimates: the TFLite file that Vela reads, how layers are matched, and what they taught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ir_builder import IRBuilder

from benchmarks.tflite import Network, network_of
from benchmarks.vela import Layer, load, owners_of, table, together, vela_cycles
from npu_compiler import InputError, compile, read_ir
from npu_compiler.graph.model import IRGraph
from npu_model import NPUTarget, load_chip, simulate
from npu_model.lowering import convolutions
from npu_sim.quantizing.networks.uncalibrated import quantized_from_shapes

RECORDED = Path(__file__).parents[2] / "docs" / "measurements" / "vela.json"
CONV, DEPTHWISE, ADD, MAX, AVERAGE, RESHAPE, FULL = 3, 4, 0, 17, 1, 22, 9


def small() -> IRGraph:
    """A residual block of a convolution and a depthwise one, pooled and classified."""
    g = IRBuilder("small")
    x = g.input("x", 1, 8, 16, 16)
    a = g("aten.conv2d.default", x, g.weight("a", 8, 8, 3, 3), g.weight("b", 8), [1, 1], [1, 1])
    r = g("aten.relu.default", a)
    d = g("aten.conv2d.default", r, g.weight("d", 8, 1, 3, 3), g.weight("e", 8), [1, 1], [1, 1], [1, 1], 8)
    s = g("aten.relu.default", g("aten.add.Tensor", d, x))
    m = g("aten.max_pool2d.default", s, [2, 2], [2, 2])
    p = g("aten.flatten.using_ints", g("aten.adaptive_avg_pool2d.default", m, [1, 1]), 1)
    return read_ir(g.output(g("aten.linear.default", p, g.weight("f", 4, 8), g.weight("h", 4))).ir())


def shape_of(network: Network, number: int) -> tuple[int, ...]:
    return network.tensors[number][1]


def test_a_network_becomes_operators_of_images_in_rows() -> None:
    network = network_of(small())
    assert [each.op for each in network.operators] == [CONV, DEPTHWISE, ADD, MAX, AVERAGE, RESHAPE, FULL]
    first, depthwise, added, *_ = network.operators
    assert shape_of(network, network.inputs[0]) == (1, 16, 16, 8)
    assert shape_of(network, first.inputs[1]) == (8, 3, 3, 8) and shape_of(network, depthwise.inputs[1]) == (1, 3, 3, 8)
    assert [each.options["FusedActivationFunction"] for each in (first, depthwise, added)] == [1, 0, 1]
    assert first.options["Padding"] == 0 and added.inputs == (depthwise.output, network.inputs[0])
    assert shape_of(network, network.outputs[0]) == (1, 4)


def test_an_op_without_a_form_is_refused() -> None:
    g = IRBuilder()
    graph = read_ir(g.output(g("aten.sin.default", g.input("x", 1, 8, 4, 4))).ir())
    with pytest.raises(InputError, match=r"node 'sin' \(aten.sin.default\) has no form in such a TFLite file"):
        network_of(graph)


def test_sums_and_poolings_count_to_the_layer_before() -> None:
    owners = owners_of(small())
    assert owners["conv2d"] == owners["relu"] == "conv2d"
    assert {owners[name] for name in ("conv2d_1", "add", "relu_1", "max_pool2d", "flatten")} == {"conv2d_1"}
    assert owners["linear"] == "linear"


def test_layers_of_a_cascade_count_as_one() -> None:
    layers = [Layer("m", "a", 10, 0), Layer("m", "b", 20, 40), Layer("m", "c", 5, 5)]
    assert together(layers) == [Layer("m", "a … b", 30, 40), Layer("m", "c", 5, 5)]


def test_the_recorded_layers_are_near_ours() -> None:
    layers = load(RECORDED)
    lines = table(layers).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| resnet18", "| resnet50", "| efficientnet-lite0"]
    for model in {layer.model for layer in layers}:
        for layer in together([each for each in layers if each.model == model])[1:]:
            assert 0.2 < layer.ours / layer.theirs < 3, layer


def test_vela_reads_the_file() -> None:
    pytest.importorskip("ethosu.vela", reason="Vela is not installed: pip install ethos-u-vela==5.2.0")
    cycles = vela_cycles(small())
    assert {"conv2d", "conv2d_1", "linear"} <= {name for name, _ in cycles}
    assert sum(number for _, number in cycles) > 0


def depthwise(channels: int, size: int, kernel: int) -> dict[str, Any]:
    g = IRBuilder()
    x, w = g.input("x", 1, channels, size, size), g.weight("w", channels, 1, kernel, kernel)
    padding = [kernel // 2] * 2
    return g.output(g("aten.conv2d.default", x, w, None, [1, 1], padding, [1, 1], channels)).ir()


def none(*_: object) -> Iterator[Any]:
    return iter(())


@pytest.mark.parametrize("channels, size, kernel", [(480, 14, 5), (240, 28, 3), (96, 56, 3)])
@pytest.mark.parametrize("chip", ["ethos-u65-512", "edge"])
def test_a_depthwise_convolution_is_on_the_engine_that_takes_less_time(
    channels: int, size: int, kernel: int, chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tilings on lanes fit, which must not keep the search from those on the arrays."""
    own, graph = load_chip(chip), quantized_from_shapes(read_ir(depthwise(channels, size, kernel)))

    def cycles() -> int:
        calls = simulate(compile(graph, NPUTarget(own)), own).calls
        return sum(call.cycles for call in calls if "conv" in call.kernel)

    both = cycles()
    for left_out in ("_on_lanes", "_on_arrays"):
        with monkeypatch.context() as patch:
            patch.setattr(convolutions, left_out, none)
            assert both <= 1.1 * cycles()
