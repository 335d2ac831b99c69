"""Compiles Metal sources for the emulator and lists their kernels and mutants.

    python -m metal_emulator.listing FILE.metal ... [-DNAME=VALUE ...]

prints each kernel with its arguments, and each mutant: every barrier and bounds guard that can be switched off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from metal_emulator.compiler import CompileError, compile_source
from metal_kernels import resolve_includes


def main(arguments: Sequence[str]) -> int:
    """Compile the files named in `arguments` and list their contents; the exit status is 1 if one does not compile."""
    macros = {"TILE": "16", "VEC_TPG": "256", "VEC_COLUMNS": "4"}
    macros |= dict((word[2:].split("=", 1) + [""])[:2] for word in arguments if word.startswith("-D"))
    failures = 0
    for name in (word for word in arguments if not word.startswith("-D")):
        try:
            library = compile_source(resolve_includes(Path(name)), macros, mutants=True)
        except CompileError as error:
            print(error, file=sys.stderr)
            failures += 1
            continue
        for function in library.functions.values():
            slots = (f"{a.name}: {a.kind} {a.index}" if a.index >= 0 else a.name for a in function.arguments)
            print(f"{name}: kernel {function.name}({', '.join(slots)})")
        for mutant in library.mutants:
            print(f"{mutant.file}:{mutant.line}: mutant {mutant.id} in {mutant.function}: {mutant.kind} {mutant.text}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
