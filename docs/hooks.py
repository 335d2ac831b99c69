"""Additions to the site's pages: Mermaid, which draws the diagrams, from an installed package."""

from __future__ import annotations

from importlib.metadata import distribution

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(pages: Files, *, config: MkDocsConfig) -> Files:
    """Add `assets/mermaid.js`, which the theme would otherwise have the browser fetch from another host."""
    script = distribution("mmdc").locate_file("mmdc/assets/mermaid.js")
    pages.append(File.generated(config, "assets/mermaid.js", abs_src_path=str(script)))
    return pages
