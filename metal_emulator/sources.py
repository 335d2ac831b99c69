"""Metal source files as text."""

from __future__ import annotations

import re
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_LINE_DIRECTIVE = re.compile(r'\s*#\s*(?:line\s+)?(\d+)(?:\s+"([^"]*)")?')


def resolve_includes(path: Path) -> str:
    """A file's text with each `#include "name"` replaced, the first time, by the file of that name beside it."""
    return _resolve(path, set())


def _resolve(path: Path, included: set[Path]) -> str:
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _INCLUDE.match(line)
        if not match:
            lines.append(line)
            continue
        inner = path.parent / match.group(1)
        if inner not in included:
            included.add(inner)
            lines.append(_resolve(inner, included))
        lines.append(f'#line {number + 1} "{path.name}"')
    return "\n".join(lines)


def lines_marked_not_a_guard(source: str) -> frozenset[tuple[str, int]]:
    """(file, line) of the source's lines that say `// not a guard`."""
    found, file, line = set(), "program_source", 0
    for text in source.splitlines():
        directive = _LINE_DIRECTIVE.match(text)
        if directive:
            line, file = int(directive.group(1)) - 1, directive.group(2) or file
            continue
        line += 1
        if "not a guard" in text:
            found.add((file, line))
    return frozenset(found)
