"""The Metal compute shaders, as package data; README.md says how a kernel is bound."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from npu_compiler.version import __version__

__all__ = ["__version__", "resolve_includes", "shader_source"]

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')


@cache
def shader_source(filename: str) -> str:
    """A shader file as Metal compiles it at run time, where there is no folder to include from."""
    return resolve_includes(files(__name__) / filename)


def resolve_includes(path: Traversable | Path) -> str:
    """A file's text with each `#include "name"` replaced, the first time, by the file of that name beside it.

    `#line` directives make the compiler speak of the files' own lines.
    """
    folder = path.parent if isinstance(path, Path) else files(__name__)
    return _resolve(folder, path.name, set())


def _resolve(folder: Traversable, name: str, included: set[str]) -> str:
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), 1):
        match = _INCLUDE.match(line)
        if not match:
            lines.append(line)
            continue
        if match[1] not in included:
            included.add(match[1])
            lines.append(_resolve(folder, match[1], included))
        lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines)
