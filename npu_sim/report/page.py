"""The HTML page of a report: one file that contains scripts, styles and data, and makes no network requests.

A content security policy allows the page's own scripts and styles by their hashes, and nothing else, so no requests.
The data is compressed JSON in base64, and the scripts show its names as text, so a name cannot become markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_compiler.files import write_atomically

LICENCES = ("vendor/d3.LICENSE.txt", "vendor/dagre.LICENSE.txt")
LIBRARIES = ("vendor/d3.min.js", "vendor/dagre.min.js")
SCRIPTS = (
    "format.js",
    "tables.js",
    "overview.js",
    "layout.js",
    "drawing.js",
    "graph.js",
    "memory.js",
    "roofline.js",
    "kernels.js",
    "timeline.js",
    "engines.js",
    "layers.js",
    "traffic.js",
    "sweep.js",
    "padding.js",
    "numerics.js",
    "compare.js",
    "app.js",
)
STYLE = "style.css"

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report is drawn by the scripts inside it, which this browser does not run.</noscript>
<main id="report" aria-busy="true"></main>
<script type="application/octet-stream" id="data">{data}</script>
{scripts}
<script type="text/plain" id="licences">{licences}</script>
</body>
</html>
"""


def write_page(path: Path, title: str, data: Mapping[str, Any]) -> int:
    """Write a report and return the file's size in bytes.

    Args:
        data: JSON data, in the form that `assets/app.js` documents.

    Raises:
        InputError: the file cannot be written.
    """
    page = render_page(title, data).encode(errors="replace")  # a title may hold what is no Unicode
    try:
        write_atomically(path, page)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error
    return len(page)


def render_page(title: str, data: Mapping[str, Any]) -> str:
    """Return the HTML text of a page with this title and data."""
    scripts = [_asset(name) for name in LIBRARIES]
    scripts.append('"use strict";\n' + "\n".join(map(_asset, SCRIPTS)))
    style = _asset(STYLE)
    allowed = " ".join(map(_source, scripts))
    policy = f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; img-src data:; base-uri 'none'"
    return _PAGE.format(
        policy=policy,
        title=escape(title),
        style=style,
        data=pack(data),
        licences="\n".join(map(_asset, LICENCES)),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def pack(data: Mapping[str, Any]) -> str:
    """Return data as JSON, compressed by gzip and encoded in base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpack(packed: str) -> Any:
    """Return the data that `pack` encoded."""
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def _asset(name: str) -> str:
    """Return the text of a script or style file, without references to source maps, which a browser would request."""
    text = files("npu_sim.report").joinpath("assets", name).read_text("utf-8")
    return "\n".join(line for line in text.splitlines() if not line.startswith("//# sourceMappingURL="))


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
