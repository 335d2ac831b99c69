"""The comparison of predicted with measured times: where its figures are from, and what the document shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.simulated import Row, accounted, measured, rows_of_file, spearman, table
from benchmarks.simulated_programs import cases, cpu_cases

DOCS = Path(__file__).parents[2] / "docs"


def test_every_program_has_a_documented_time() -> None:
    rows = {(row.chip, row.title, row.dtype): row.measured_ms for row in rows_of_file(DOCS / "simulated.json")}
    for case in (*cases(), *cpu_cases()):
        milliseconds, source = measured(case)
        assert milliseconds > 0 and (DOCS / source).exists()
        assert rows.get((case.chip, case.title, case.dtype), milliseconds) == milliseconds


def test_a_time_is_taken_from_the_right_cell_of_the_page() -> None:
    found = {(case.title, case.chip): measured(case)[0] for case in cases() if case.key[0] == "models"}
    assert found["ConvNeXt-T batch 1", "h200"] < found["ConvNeXt-T batch 32", "h200"]
    text = (DOCS / "figures.md").read_text("utf-8")
    assert f"| ConvNeXt-T, 32 | **{found['ConvNeXt-T batch 1', 'h200']:.3f}** |" in text


def test_the_document_shows_the_table_of_the_results() -> None:
    assert table(rows_of_file(DOCS / "simulated.json")) in (DOCS / "npu_model.md").read_text("utf-8")


def test_measured_kernels_are_taken_apart_by_kind() -> None:
    prefill = next(case for case in cases() if case.key[0] == "prefill" and case.chip == "h200")
    assert accounted(prefill).keys() == {"matmul", "attention", "norm"}


def test_ranks_agree_whatever_the_scale() -> None:
    assert spearman([1, 2, 3], [10, 200, 3000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)


def test_a_row_says_by_how_much_it_is_off() -> None:
    row = Row("cpu", "net", "float32", 0.9, 1.2, 0.5, "cpu.json")
    assert row.error == pytest.approx(-0.25)
    assert "| cpu | net | float32 | 0.9 | 1.2 | -25% | 0.5 | cpu.json |" in table([row])


def test_the_file_of_results_has_the_rank_correlation_over_kinds() -> None:
    data = json.loads((DOCS / "simulated.json").read_text("utf-8"))
    assert data["kinds"] >= 15 and data["rank_correlation"] >= 0.9
