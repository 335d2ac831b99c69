"""The page of the instruction set shows what its code prints."""

from __future__ import annotations

from pathlib import Path

from doc_outputs import with_outputs

PAGE = Path(__file__).parents[2] / "docs" / "npu_isa.md"


def test_the_page_shows_what_its_code_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_outputs(text) == text, "write it anew: PYTHONPATH=. python tests/support/doc_outputs.py docs/npu_isa.md"
    assert text.count("```text\n") == 2 and "fill 0" in text and "conv " in text
