"""Cycles of the matrix engine, as `simulate` counts them, against SCALE-Sim 3, the formulas, and a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale_sim import Convolution, Layer, cycles_of, load, save, scale_sim_cycles, table
from npu_compiler.errors import InputError
from npu_compiler.program.products import Product
from npu_model.chip import Dataflow, array_cycles
from npu_model.chip.systolic import mapping, sram_accesses

DOCS = Path(__file__).parents[2] / "docs"
COMPARED = load(DOCS / "scale-sim.json")  # python -m benchmarks.scale_sim --json docs/scale-sim.json
WITHIN = 0.01


@st.composite
def layers(draw: st.DrawFn, most: int = 700) -> Layer:
    """A product, a batch of them, or a convolution."""
    kind = draw(st.sampled_from(("product", "batch", "convolution")))
    if kind != "convolution":
        m, n, k = (draw(st.integers(2, most)) for _ in "mnk")  # the compiler multiplies what is 1 wide by elements
        batch = 1 if kind == "product" else draw(st.integers(2, 6))
        return Layer("random", kind, 1, product=Product(m, n, k, batch))
    kernel = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    height, width = ((n - 1) * step + size for n, step, size in zip((rows, columns), stride, kernel, strict=True))
    channels, filters = draw(st.integers(2, 64)), draw(st.integers(2, most // 4))
    return Layer("random", kind, 1, convolution=Convolution(channels, height, width, filters, kernel, stride))


arrays = st.tuples(st.integers(2, 40), st.integers(2, 40))


@pytest.mark.parametrize("dataflow", drawn(Dataflow, 1 / 3))
@settings(max_examples=25, deadline=None)
@given(layer=layers(), array=arrays)
def test_a_random_layer_keeps_the_arrays_busy_as_long_as_the_formulas_say(
    dataflow: Dataflow, layer: Layer, array: tuple[int, int]
) -> None:
    expected = array_cycles(layer.as_product, *array, dataflow).cycles
    assert cycles_of(layer, *array, dataflow) == pytest.approx(expected, rel=WITHIN)


@pytest.mark.parametrize("dataflow", drawn(Dataflow, 1 / 3))
@settings(max_examples=10, deadline=None)
@given(layer=layers(most=80), array=arrays)
def test_a_random_layer_takes_the_cycles_of_scale_sim(dataflow: Dataflow, layer: Layer, array: tuple[int, int]) -> None:
    pytest.importorskip("scalesim", reason="SCALE-Sim is not installed: pip install --no-deps scalesim==3.0.0 tqdm")
    assert cycles_of(layer, *array, dataflow) == pytest.approx(scale_sim_cycles(layer, *array, dataflow), rel=WITHIN)


def test_every_layer_that_was_compared_agrees() -> None:
    assert len(COMPARED) > 150
    for one in COMPARED:
        assert one.ours == pytest.approx(one.theirs, rel=WITHIN), one


@pytest.mark.parametrize("dataflow", drawn(Dataflow, 1 / 3))
def test_simulations_still_say_what_is_recorded(dataflow: Dataflow) -> None:
    chosen = [one for one in COMPARED if one.dataflow is dataflow and one.layer.as_product.m <= 200]
    assert any(one.layer.convolution for one in chosen) and any(one.layer.product for one in chosen)
    for one in chosen:
        assert cycles_of(one.layer, one.array, one.array, one.dataflow) == one.ours


def test_the_document_shows_the_table_of_the_results() -> None:
    assert table(COMPARED) in (DOCS / "npu_model.md").read_text("utf-8")


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


def test_an_array_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match="an array needs at least one row and one column, not 0×8"):
        mapping(Product(1, 1, 1), 0, 8, Dataflow.WEIGHT)
