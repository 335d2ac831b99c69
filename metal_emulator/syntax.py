"""Checks the syntax of Metal sources with clang++ and distinct address spaces, as Xcode would.

    python -m metal_emulator.syntax [FILE.metal ...]

checks all of `metal_kernels` by default, for each compute type. In this check, pointers of different address spaces do
not mix, and only functions that Metal has are declared.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import metal_kernels
from metal_emulator.sources import RUNTIME
from metal_kernels import resolve_includes

VARIANTS: tuple[Mapping[str, str], ...] = ({}, {"USE_BFLOAT": "1"}, {"USE_FLOAT": "1"})
MACROS = {
    "TILE": "16",
    "VEC_TPG": "256",
    "VEC_COLUMNS": "4",
    "ELEMENTWISE_OPS": "",
    "__METAL_VERSION__": "310",
    "__HAVE_BFLOAT__": "1",
}
FLAGS = (
    "-std=c++14",
    "-fsyntax-only",
    "-target",
    "aarch64-linux-gnu",
    "-nostdinc",
    "-fno-builtin",
    "-ferror-limit=0",
    "-Wall",
    "-Wno-unknown-attributes",
    "-Wno-unused-function",
    "-Wno-undefined-inline",
    "-Wno-undefined-internal",
    "-Wno-duplicate-decl-specifier",
    "-Wno-unused-const-variable",
    "-Wno-unused-variable",
    "-Wno-undefined-var-template",
    "-Wno-uninitialized",
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<[^>\n]*>", re.MULTILINE)
_DIMENSIONS = r"(?:\s*\[[^\];]*\])*"
# clang has no automatic variables in an address space.
_THREADGROUP_VARIABLE = re.compile(
    rf"(?<=[;{{}}\n\\])(\s*)threadgroup(\s+[\w:]+(?:<[^<>;]*>)?\s+\w+{_DIMENSIONS}(?:\s*,\s*\w+{_DIMENSIONS})*\s*;)"
)
_FUNCTION_CONSTANT = re.compile(r"(\[\[\s*function_constant\s*\([^()]*\)\s*\]\])\s*;")
_HOST_NAME = re.compile(r"(\btemplate\s*)\[\[\s*host_name\s*\([^()]*\)\s*\]\]")
_VECTOR = r"(?:vec<[^<>]*>|(?:u?(?:char|short|int|long)|b?float|half|compute|other)[234](?:_t)?)"
_VECTOR_CAST = re.compile(rf"(?<![\w:])((?:metal::)?{_VECTOR})\(")
_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)([hH]?)(?![\w.])")
_DIAGNOSTIC = re.compile(r"^[^\s].*?: (?:fatal )?(?:error|warning): ", re.MULTILINE)


def check(source: str, macros: Mapping[str, str]) -> str:
    """Clang's messages about a source whose own #include lines have been resolved; empty if there are none.

    Raises:
        FileNotFoundError: There is no clang++.
    """
    compiler = shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no clang++")
    defines = [f"-D{name}={value}" for name, value in {**MACROS, **macros}.items()]
    command = [compiler, *FLAGS, *defines, f"-I{RUNTIME}", "-x", "c++", "-"]
    result = subprocess.run(command, input=_for_clang(source), capture_output=True, text=True, check=False)
    return "".join(message for message in _diagnostics(result.stderr) if not _copies_a_struct(message)).strip()


def _for_clang(source: str) -> str:
    source = _INCLUDE.sub("", source)
    source = _THREADGROUP_VARIABLE.sub(r"\1static threadgroup\2", source)
    source = _FUNCTION_CONSTANT.sub(r"\1 = {};", source)
    source = _HOST_NAME.sub(r"\1", source)
    source = _VECTOR_CAST.sub(r"metal_construct<\1>(", source)
    source = _LITERAL.sub(lambda match: f"half({match[1]}f)" if match[2] else f"{match[1]}f", source)
    return f'#include "syntax_stdlib.h"\n#line 1 "program_source"\n{source}\n'


def _diagnostics(text: str) -> list[str]:
    """Errors and warnings in clang's output, each with its notes."""
    bounds = [*(match.start() for match in _DIAGNOSTIC.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def _copies_a_struct(message: str) -> bool:
    """Whether a message is about a struct copy across address spaces, which Metal's compiler allows."""
    return (
        "no matching constructor for initialization of" in message
        and "(the implicit copy constructor) not viable: cannot bind reference in address space" in message
    )


def main(arguments: Sequence[str]) -> int:
    """Check files, by default all kernels, and print clang's messages; the exit status is 1 if there are any."""
    if shutil.which("clang++") is None:
        print("skipped: no clang++")
        return 0
    paths = [Path(name) for name in arguments]
    paths = paths or sorted(Path(metal_kernels.__file__).parent.glob("*.metal"))
    failures = 0
    for path in paths:
        source = resolve_includes(path)
        for variant in VARIANTS:
            messages = check(source, variant)
            if messages:
                print(f"{path} with {', '.join(variant) or 'no macro'}:\n{messages}", file=sys.stderr)
                failures += 1
                break
    print(f"{len(paths)} Metal sources, {failures} with errors")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
