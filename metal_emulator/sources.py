"""Metal source files as text."""

from __future__ import annotations

import re
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
_LINE_DIRECTIVE = re.compile(r'\s*#\s*(?:line\s+)?(\d+)(?:\s+"([^"]*)")?')


def lines_marked_not_a_guard(source: str) -> frozenset[tuple[str, int]]:
    """The (file, line) of every line with the comment `// not a guard`, whose comparisons are no bounds guards."""
    lines, file, line = set(), "program_source", 0
    for text in source.splitlines():
        directive = _LINE_DIRECTIVE.match(text)
        if directive:
            line, file = int(directive.group(1)) - 1, directive.group(2) or file
            continue
        line += 1
        if "not a guard" in text:
            lines.add((file, line))
    return frozenset(lines)
