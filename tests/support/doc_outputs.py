"""Pages whose code blocks print what stands below them.

    PYTHONPATH=. python tests/support/doc_outputs.py docs/npu_isa.md

writes what they print now.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def with_outputs(page: str) -> str:
    """The page with what each Python block prints in the text block behind it; blocks share their names."""
    names: dict[str, Any] = {}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block[1], names)
        return f"```python\n{block[1]}```\n\n```text\n{printed.getvalue().rstrip()}\n```\n"

    return _BLOCK.sub(run, page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")
