"""Additions to the site: the charts of the measurements, and Mermaid, which draws the diagrams.

A page has a chart where its source says `<!-- chart: cpu -->`, a comment that a repository's host does not show. The
charts are drawn from the JSON files of docs/measurements/ while the site is built.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

DOCS = Path(__file__).parent
DATA = DOCS / "measurements"
sys.path.append(str(DOCS.parent))  # the benchmarks, which are not installed, draw the charts


def _draw_cpu(path: Path) -> None:
    from benchmarks.cpu.page import draw
    from benchmarks.figures import load_run

    draw([load_run(file) for file in sorted(DATA.glob("cpu-*.json"))], path)


def _draw_cuda(path: Path) -> None:
    from benchmarks.cuda.page import draw
    from benchmarks.figures import load_run

    draw(load_run(DATA / "cuda.json"), path)


def _draw_quality(path: Path) -> None:
    from benchmarks.quality.page import draw, load_quality

    draw(load_quality(DATA / "quality.json"), path)


# Name of a chart → its text for those who do not see it, and the function that draws it.
CHARTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cpu": ("CPU: time by device and library", _draw_cpu),
    "cuda": ("CUDA: time against torch.compile and the floor", _draw_cuda),
    "quality": ("Quality against bits per weight", _draw_quality),
}


@functools.cache
def _drawn_charts() -> tempfile.TemporaryDirectory[str]:
    """Draw the charts, once per process; the folder goes with the process."""
    folder = tempfile.TemporaryDirectory()
    for name, (_, draw) in CHARTS.items():
        draw(Path(folder.name) / f"{name}.svg")
    return folder


def on_files(pages: Files, *, config: MkDocsConfig) -> Files:
    """Add the charts and `assets/mermaid.js`, which the theme would otherwise fetch from another host."""
    script = distribution("mmdc").locate_file("mmdc/assets/mermaid.js")
    pages.append(File.generated(config, "assets/mermaid.js", abs_src_path=str(script)))
    for name in CHARTS:
        drawn = Path(_drawn_charts().name) / f"{name}.svg"
        pages.append(File.generated(config, f"assets/charts/{name}.svg", abs_src_path=str(drawn)))
    return pages


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the comments that stand for charts by images."""
    for name, (text, _) in CHARTS.items():
        address = get_relative_url(f"assets/charts/{name}.svg", page.url)
        markdown = markdown.replace(f"<!-- chart: {name} -->", f'<img src="{address}" alt="{text}">')
    return markdown
