"""The table of the page on partitioning, BERT on a chip that lacks ops, is what its command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pages.chip_design import with_tables
from benchmarks.pages.missing_ops import PAGES, ROWS, TABLE, bert, chip_with, rows, simulated, table_row


def test_a_layer_loses_more_by_a_gelu_than_the_host_takes_for_it() -> None:
    ir = bert(layers=1)
    whole, gelu, host = (simulated(ir, chip_with(ops)) for ops in (ROWS[0], ROWS[2], ROWS[4]))
    assert (len(whole[0].results), len(gelu[0].results), len(host[0].results)) == (1, 2, 0)
    assert set(gelu[1]) == {"gelu"} and gelu[1]["gelu"] == pytest.approx(gelu[0].seconds - whole[0].seconds, rel=0.05)
    assert gelu[1]["gelu"] > 2 * gelu[0].host > 0
    assert host[0].seconds == host[0].host > 10 * whole[0].seconds
    row = table_row(ROWS[3], gelu[0], {"gelu": 0.00605})
    assert row.startswith('| `without = ["gelu", "softmax"]` | ') and row.endswith(" | 2 | gelu 6.05 |")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_have_a_row_for_each_chip(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.count("\n| `") - with_tables(text, {TABLE: ()}).count("\n| `") == len(ROWS)


@pytest.mark.slow
def test_the_table_is_what_the_command_writes() -> None:
    written = {TABLE: rows()}
    for page in PAGES:
        text = page.read_text("utf-8")
        assert with_tables(text, written) == text, "python -m benchmarks.pages.missing_ops writes it anew"
