"""The tables of the tutorial on designing a chip are what its commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pages.chip_design import PAGES, tables, with_tables


def test_a_table_is_written_anew_and_all_else_stays() -> None:
    page = "a\n<!-- table: x -->\n\n| h |\n|---|\n| old |\n| rows |\n\nb\n| other |\n"
    assert with_tables(page, {"x": ["| new |"]}) == "a\n<!-- table: x -->\n\n| h |\n|---|\n| new |\n\nb\n| other |\n"


def test_every_table_of_a_page_has_rows() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        heads = with_tables(text, dict.fromkeys(("edge", "resnet50", "smollm2", "twice"), ()))
        assert text.count("\n| ") - heads.count("\n| ") == 2 + 12 + 8 + 2, page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: Path(page).name)
def test_tables_are_what_the_commands_print(page: Path) -> None:
    text = page.read_text("utf-8")
    assert with_tables(text, tables(text)) == text, "python -m benchmarks.pages.chip_design writes them anew"
