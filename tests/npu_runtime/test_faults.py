"""Writing to a failing disk leaves the old content or the new, never half, one clear sentence and no leftovers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runtime.cpu.native.build import find_compiler

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
OPERATIONS = [
    "save",
    "save where nothing is",
    "module",
    "facts",
    "facts over damaged ones",
    "program",
    "program over a damaged one",
    "tuning table",
    "native build",
]
# What is compiled does not matter here, only how it is kept.
STAND_IN = """\
#!/bin/sh
[ "$1" = --version ] && { echo stand-in 1.0; exit; }
while [ "$1" != -o ]; do shift; done
echo code > "$2"
"""

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD and /proc are Linux's"),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]


def examine(folder: Path) -> dict[str, Any]:
    """Operation → how many calls it makes, and what does not hold when one of them fails."""
    library, compiler = folder / "faulty_io.so", folder / "compiler"
    flags = ["-x", "c", "-shared", "-fPIC", "-Wall", "-Werror", str(SUPPORT / "faulty_io.c"), "-ldl"]
    subprocess.run([str(find_compiler()), *flags, "-o", str(library)], check=True)
    compiler.write_text(STAND_IN)
    compiler.chmod(0o755)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "NPU_SIM_NATIVE": "1",
        "NPU_SIM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{SUPPORT}",
    }
    command = [sys.executable, str(SUPPORT / "faulty_io.py"), str(folder), str(compiler)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.slow
def test_a_failing_call_leaves_the_old_or_the_new_and_says_so(tmp_path: Path) -> None:
    examined = examine(tmp_path)
    assert examined.keys() == set(OPERATIONS)
    for operation, found in examined.items():
        assert found["wrong"] == [], operation
        assert found["calls"] >= 7, f"{operation}: open, lock, write, fsync, rename and two times close, at least"
