"""The site of the documentation: it builds without a warning in both languages, and needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Measurements, tables that a program writes, and what is read from docstrings stay in English.
ENGLISH_ONLY = {"model_types.md", "npu_isa.md", "onnx_operators.md", "operators.md"}
ENGLISH_FOLDERS = {"measurements", "reference"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there_in_both_languages(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix().removesuffix(".md").removesuffix(".ko")
        place = re.sub(r"(^|/)(index|README)$", r"\1", name)
        assert (site / place / "index.html").is_file() and (site / "ko" / place / "index.html").is_file(), name


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|<img[^>]*\ssrc)=["']?((?:https?:)?//[^"'\s>]+)"""
    found = {address for page in pages for address in re.findall(loaded, page.read_text(encoding="utf-8"))}
    assert found == set()
    assert (site / "assets" / "mermaid.js").is_file()
    assert all("assets/mermaid.js" in page.read_text(encoding="utf-8") for page in pages)


def test_pages_are_translated_but_for_those_listed_here() -> None:
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md") if not page.name.endswith(".ko.md")}
    english = {page.as_posix() for page in pages if not (DOCS / page).with_suffix(".ko.md").exists()}
    listed = {page.as_posix() for page in pages if page.parts[0] in ENGLISH_FOLDERS} | ENGLISH_ONLY
    assert english == listed
