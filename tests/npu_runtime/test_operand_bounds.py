"""Native kernels touch nothing beyond the end of their operands; their tests run once more with guarded arrays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize

from npu_runtime.cpu import native
from npu_runtime.cpu.native.build import find_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or find_compiler() is None, reason="needs Linux and a C++ compiler"
    ),
]
SUPPORT = Path(sanitize.__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(SUPPORT), str(sanitize.ROOT)))}
READS = """
import guarded_arrays, numpy as np
guarded_arrays.install()
array = np.ones({count}, np.float32)
np.lib.stride_tricks.as_strided(array, ({count} + 1,)).sum()
"""


@pytest.mark.parametrize("count", (4, 2048))
def test_a_read_beyond_the_end_of_a_guarded_array_ends_the_process(count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS.format(count=count)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")
@pytest.mark.parametrize("path", sanitize.TESTS, ids=lambda path: Path(path).stem)
def test_native_kernels_stay_in_their_operands(path: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "guarded_arrays", "-m", "not slow", path]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=sanitize.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NumPy's arrays: guarded arrays" in done.stdout
