"""The page of the simulated NPU's speed, and the lines that it is made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import npu
from benchmarks.npu import PAGE, Line, page, timed

WHERE = {"cpu": "X1", "cores": 2, "load": 0.0, "python": "3.11", "numpy": "2.4", "date": "2026-01-02"}
AGAIN = "run python -m benchmarks.npu --document docs/measurements/npu.md"
DOCUMENT = Path(__file__).parents[2] / "docs" / "measurements" / "npu.md"


def test_a_line_has_the_first_time_and_the_median_of_later_ones() -> None:
    calls: list[int] = []
    line = timed("calls", 1.0, lambda: calls.append(1), rounds=3)
    assert len(calls) == 4 and line.again is not None and line.first >= 0
    assert timed("once", None, lambda: calls.append(1), rounds=0).again is None and len(calls) == 5


def test_a_page_has_a_row_for_each_line() -> None:
    lines = [Line("a", 1.0, 0.5, 0.25, 0.125), Line("b", None, 12.34), Line("c", 1.0, problem="it does not fit")]
    text = page(lines, WHERE)
    assert (
        "| a | 0.5 | 0.25 | 0.125 | 1 |\n| b | 12.3 |  |  |  |\n| c | not measured: it does not fit | | | 1 |" in text
    )
    assert "X1, 2 cores; Python 3.11, NumPy 2.4, 2026-01-02." in text
    assert "beside 7 other processes" in page(lines, {**WHERE, "load": 7.2})


def test_an_unknown_part_is_refused() -> None:
    import typer

    app = typer.Typer()
    app.command()(npu.main)
    done = CliRunner().invoke(app, ["--only", "resnet,vgg"])
    assert done.exit_code == 2 and "unknown part vgg" in re.sub(r"\s+", " ", done.output.replace("│", ""))


def test_parts_are_measured_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {name: lambda name=name: iter([Line(name, 1.0, 0.5)]) for name in ("one", "two")}
    monkeypatch.setattr(npu, "PARTS", parts)
    npu.main("two,one", tmp_path / "page.md")
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith(("| one", "| two"))]
    assert rows == ["| two | 0.5 |  |  | 1 |", "| one | 0.5 |  |  | 1 |"]


def test_the_recorded_page_is_of_this_form() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    head, tail = PAGE.split("{machine}")[0], PAGE.split("{rows}")[1].format(factor=npu.CHECKED_FACTOR)
    assert text.startswith(head) and text.endswith(tail), (
        "run python -m benchmarks.npu --document docs/measurements/npu.md"
    )
    for what in (
        "time ResNet-50",
        "compute ResNet-18",
        "compute a token of SmolLM2",
        "Qwen2.5-1.5B",
        "sweep",
        "compile",
    ):
        assert what in text, f"docs/measurements/npu.md has no line '{what}': measure all parts"
