"""The page of the NPU says what its examples of cascades and of several cores take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_model import Chip, load_chip, simulate
from npu_model.analysis.simulation import lowered
from npu_model.chip.description import Cores, Network
from npu_sim.vision.models import extract_model_ir, find_model

PAGE = Path(__file__).parents[2] / "docs" / "npu_model.md"
EDGE = load_chip("edge")


def compiled(ir: Any) -> CompiledProgram:
    return compile_ir(ir, options=CompileOptions(compute_dtype="float16"))


def images(batch: int, size: int, layers: int, pools: bool) -> CompiledProgram:
    """Convolutions of 16 channels with ReLU, and perhaps a pooling."""
    g = IRBuilder("images")
    y = g.input("x", batch, 16, size, size)
    for layer in range(layers):
        y = g("aten.conv2d.default", y, g.weight(f"w{layer}", 16, 16, 3, 3), None, [1, 1], [1, 1])
        y = g("aten.relu.default", y)
    g.output(g("aten.max_pool2d.default", y, [2, 2], [2, 2]) if pools else y)
    return compiled(g.ir())


def rows() -> CompiledProgram:
    """Four linear layers for 256 rows."""
    g = IRBuilder("rows")
    y = g.input("x", 256, 128)
    for layer in range(4):
        y = g("aten.relu.default", g("aten.linear.default", y, g.weight(f"w{layer}", 128, 128)))
    g.output(y)
    return compiled(g.ir())


def chip(kib: int = 1024, bandwidth: float = 12.8, cores: int = 1, split: str = "auto", **network: Any) -> Chip:
    """The chip `edge` with other memory and several cores; `network` changes the connection of the page's chip file."""
    own = {"bandwidth_gb_s": 64.0, "latency_ns": 5.0, "topology": "ring", **network}
    return dataclasses.replace(
        EDGE,
        sram=dataclasses.replace(EDGE.sram, size=kib << 10),
        dram=dataclasses.replace(EDGE.dram, bandwidth_gb_s=bandwidth),
        cores=None if cores == 1 else Cores(count=cores, network=Network(**own), split=split),
    )


def thousands(cycles: int) -> str:
    return f"{round(cycles, -3):,}"


def millions(cycles: int) -> str:
    return f"{1e-6 * cycles:.2f}"


def stripes() -> Iterator[str]:
    program = images(1, 96, 3, pools=False)
    for own in (chip(64, 3.2, 2), chip(64, 3.2, 2, "rows"), chip(64, 3.2)):
        yield thousands(simulate(program, own).cycles)


def pieces() -> Iterator[str]:
    program = images(8, 24, 4, pools=True)
    yield thousands(simulate(program, chip(cores=2, split="layers", bandwidth_gb_s=16.0)).cycles)


def multicast() -> Iterator[str]:
    for own in (True, False):
        run = simulate(rows(), chip(96, 2.0, 4, "rows", bandwidth_gb_s=16.0, multicast=own))
        yield thousands(run.cycles)
        yield f"{run.dram_bytes // 1000} KB"


def resnet() -> Iterator[str]:
    program = compiled(extract_model_ir(find_model("resnet18")))
    for count in (1, 2, 4):
        yield millions(simulate(program, chip(cores=count)).cycles)


def cascades() -> Iterator[str]:
    program = compiled(extract_model_ir(find_model("efficientnet-lite0")))
    run = simulate(program, EDGE)
    yield millions(run.cycles)
    yield f"{1e-6 * run.dram_bytes:.1f} MB"
    chains = sum(" in a cascade of " in section.comment for section in lowered(program, EDGE).sections)
    yield f"{chains} cascades"


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (resnet, cascades)]


@pytest.mark.parametrize("example", [stripes, pieces, multicast, *SLOW])
def test_the_page_says_what_an_example_takes(example: Any) -> None:
    text, figures = PAGE.read_text("utf-8"), list(example())
    assert [figure for figure in figures if figure not in text] == [], f"{PAGE.name} and its Korean page: {figures}"
