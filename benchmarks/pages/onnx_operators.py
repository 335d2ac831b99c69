"""The page of ONNX operators: those with a converter, and the outcomes of the ONNX project's node tests.

`python -m benchmarks.pages.onnx_operators` writes `docs/onnx_operators.md` from the table of converters and from
`docs/onnx.json`, which `python tests/support/onnx_suite.py` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_sim.onnx import operators as _operators  # noqa: F401  # registers the rows
from npu_sim.onnx.control import CONTROL_FLOW
from npu_sim.onnx.files import NEWEST_OPSET, OLDEST_OPSET
from npu_sim.onnx.rows import ROWS

DOCS = Path(__file__).parents[2] / "docs"


def document(facts: Mapping[str, Any]) -> str:
    """Return the page in Markdown.

    Args:
        facts: The content of `docs/onnx.json`.
    """
    inside = facts["inside"]
    total = sum(inside.values())
    listed = ", ".join(f"{count} {kind}" for kind, count in inside.items())
    share = 100 * inside["right"] / total
    lines = [
        "# ONNX operators",
        "",
        "The operators of ONNX that have a converter, and what became of the ONNX project's own tests. Written by",
        "`python -m benchmarks.pages.onnx_operators`.",
        "",
        "## The node tests",
        "",
        f"The {facts['tests']} node tests of `onnx.backend.test` (ONNX {facts['onnx']})",
        "are written to files and run by `npu_sim.compile` on the CPU device. Of these,",
        f"{total} are in scope: {listed}. That is **{share:.1f} % right**;",
        f"{facts['on_device']} of them run wholly on the device, the others partly in PyTorch. Refused means an error",
        f"of one sentence. Inputs that decide a shape are constants in {facts['with_constants']} of those that are",
        "right: programs have static shapes.",
        "",
        "The others are out of scope by their types, domains, opsets and operators; of them",
        f"{facts['outside_right']} are right nevertheless, and the rest are refused in a sentence. None of all tests",
        "is wrong or ends otherwise.",
        "",
        "| out of scope | tests |",
        "|---|---|",
        *(f"| {reason} | {count} |" for reason, count in facts["outside"].items()),
        "",
        "| refused in scope | reason |",
        "|---|---|",
        *(f"| `{name}` | {message.replace('|', chr(92) + '|')} |" for name, message in facts["refused"].items()),
        "",
        "## The operators",
        "",
        f"Opsets {OLDEST_OPSET} to {NEWEST_OPSET} are read. {len(ROWS)} operators have a converter:",
        "",
        ", ".join(f"`{name}`" for name in sorted(ROWS)) + ".",
        "",
        "What has none is replaced by the nodes by which ONNX defines it, where it does. Inputs that decide shapes or",
        "axes must be constants, or computed of shapes and constants. " + ", ".join(f"`{x}`" for x in CONTROL_FLOW),
        "are read where their way is known: the branch of a constant condition, and the rounds of a constant number.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "onnx_operators.md").write_text(document(json.loads((DOCS / "onnx.json").read_text())))
