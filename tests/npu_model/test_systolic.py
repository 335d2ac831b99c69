"""The formulas of a systolic array, against SCALE-Sim 3 and against a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale_sim import SRAM_KIB, Layer, formulas, load, save, simulate, table
from npu_compiler.errors import InputError
from npu_model.systolic import Dataflow, Product, array_cycles, mapping, sram_accesses
from npu_model.systolic_dram import Buffers, Convolution, dram_traffic

DOCS = Path(__file__).parents[2] / "docs"
COMPARED = load(DOCS / "scale-sim.json")  # python -m benchmarks.scale_sim --json docs/scale-sim.json
BOTH = [
    Layer("test", "product", 1, product=Product(50, 40, 70)),
    Layer("test", "3×3", 1, convolution=Convolution(16, 17, 17, 40, (3, 3))),
]


def test_cycles_and_accesses_of_every_layer_are_those_of_scale_sim() -> None:
    for one in COMPARED:
        product = one.layer.as_product
        cycles = array_cycles(product, one.array, one.array, one.dataflow).cycles
        assert cycles == pytest.approx(one.theirs.cycles, rel=0.02), (one.layer, one.array, one.dataflow)
        found = sram_accesses(product, one.array, one.array, one.dataflow)
        assert (found.input_reads, found.weight_reads, found.output_writes) == one.theirs.sram


def test_the_traffic_of_every_layer_is_that_of_scale_sim() -> None:
    for one in COMPARED:
        assert sum(one.ours.dram) == pytest.approx(sum(one.theirs.dram), rel=0.1), (one.layer, one.array, one.dataflow)


@pytest.mark.parametrize("dataflow", Dataflow)
def test_the_formulas_still_say_what_is_recorded(dataflow: Dataflow) -> None:
    chosen = [one for one in COMPARED if one.dataflow is dataflow and one.layer.as_product.m <= 200]
    assert any(one.layer.convolution for one in chosen) and any(one.layer.product for one in chosen)
    for one in chosen:
        assert formulas(one.layer, one.array, one.dataflow, SRAM_KIB[one.array]) == one.ours


def test_the_document_shows_the_table_of_the_results() -> None:
    assert table(COMPARED) in (DOCS / "npu_model.md").read_text("utf-8")


@pytest.mark.parametrize("dataflow", Dataflow)
@pytest.mark.parametrize("layer", BOTH, ids=["product", "convolution"])
def test_live_scale_sim_agrees(layer: Layer, dataflow: Dataflow) -> None:
    pytest.importorskip("scalesim", reason="SCALE-Sim is not installed: pip install --no-deps scalesim==3.0.0 tqdm")
    theirs, ours = simulate(layer, 16, dataflow, 2), formulas(layer, 16, dataflow, 2)
    assert ours.cycles == theirs.cycles and ours.sram == theirs.sram
    assert sum(ours.dram) == pytest.approx(sum(theirs.dram), rel=0.1)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    save(tmp_path / "some.json", COMPARED[:3])
    assert load(tmp_path / "some.json") == COMPARED[:3]


def test_a_fold_loads_streams_and_drains() -> None:
    product = Product(m=10, n=4, k=4)
    assert array_cycles(product, 4, 4, Dataflow.WEIGHT).cycles == 4 + 10 + 4 + 4 - 2
    assert array_cycles(product, 4, 4, Dataflow.INPUT).cycles == 3 * (4 + 4 + 4 + 4 - 2)
    assert array_cycles(product, 4, 4, Dataflow.OUTPUT).cycles == 3 * (4 + 4 + 4 - 2)
    twice = array_cycles(Product(10, 4, 4, batch=2), 4, 4, Dataflow.WEIGHT)
    assert twice.cycles == 40 and twice.utilization == 320 / (40 * 16)


def test_partial_sums_come_back_once_less_than_they_leave() -> None:
    found = sram_accesses(Product(10, 4, 12), 4, 4, Dataflow.WEIGHT)
    assert (found.input_reads, found.weight_reads, found.output_writes, found.partial_reads) == (120, 48, 120, 80)
    assert sram_accesses(Product(10, 4, 12), 4, 4, Dataflow.OUTPUT).partial_reads == 0


@pytest.mark.parametrize("dataflow", Dataflow)
def test_large_buffers_move_each_element_once(dataflow: Dataflow) -> None:
    convolution = Convolution(8, 10, 12, 16, (3, 3), (1, 2), batch=2)
    found = dram_traffic(convolution, 8, 8, dataflow, Buffers(1 << 20, 1 << 20))
    assert found.input_reads == 2 * 8 * 10 * 11 and found.weight_reads == 8 * 9 * 16
    assert found.output_writes == 2 * 16 * 8 * 5 * (1 if dataflow is Dataflow.OUTPUT else 9)


def test_an_array_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match="an array needs at least one row and one column, not 0×8"):
        mapping(Product(1, 1, 1), 0, 8, Dataflow.WEIGHT)
