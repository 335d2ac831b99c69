"""Runs the CUDA kernels' cases under compute-sanitizer: memcheck, racecheck and initcheck.

    python tests/support/cuda_sanitize.py [memcheck racecheck initcheck]

Every kernel that the compiler makes of the cases is run at least once in each dtype, and the resident kernels of small
models; racecheck takes those that use shared memory. Each operand has an allocation of its own, so that a step beyond
it is seen. Ends with 1 if a tool or a comparison complains.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from cuda_cases import CASES  # noqa: E402
from cuda_wirings import WIRED, check_wired  # noqa: E402
from metal_harness import DTYPES, all_cases, call_of, plan_of, run_case  # noqa: E402

from cuda_compiler import CUDACodegenTarget  # noqa: E402
from cuda_runtime import CUDABackend, CUDABuffer  # noqa: E402

TOOLS = {
    "memcheck": ["--report-api-errors", "no"],  # libraries try entry points that a driver may lack
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": ["--check-api-memory-access", "no"],
}
_FOUND = 9

Job = tuple[str, Callable[[CUDABackend], object]]


def chosen(tool: str) -> list[Job]:
    """Return a tool's jobs: the first case of each kernel and of each list of kernels, and resident kernels."""
    first: dict[Any, Job] = {}
    for case in [*all_cases(), *CASES]:
        for dtype in (*DTYPES, "float32"):
            plan = plan_of(call_of(case, dtype), CUDACodegenTarget())
            text = "".join(plan.sources.values())
            if tool != "racecheck" or "__shared__" in text:
                key = (case.kernel, tuple(call.kernel for call in plan.calls), dtype)
                first.setdefault(key, (f"{case.id}-{dtype}", partial(run_case, case, dtype=dtype, seed=1)))
    return [*first.values(), *((kind.__name__, partial(check_wired, kind, seed=1, times=2)) for kind in WIRED)]


class UnwrittenBuffer(CUDABuffer):
    """A buffer that is not poisoned, so that initcheck sees reads of what nobody wrote."""

    def _upload(self, data: np.ndarray) -> None:
        if not (np.ascontiguousarray(data).view(np.uint8) == 0xFF).all():
            super()._upload(data)

    def _clear(self) -> None:
        if self.dtype == "uint8":  # an arena, in which there are counters that begin with zeros
            super()._clear()


class UnwrittenBackend(CUDABackend):
    """The CUDA backend with buffers that are not poisoned."""

    def allocate(self, shape: Any, dtype: str, alloc_shape: Any = None) -> CUDABuffer:
        return UnwrittenBuffer(self._device, shape, alloc_shape, dtype)


def run_part(tool: str, part: int, parts: int) -> int:
    """Run one of `parts` shares of a tool's cases, in a process that the tool watches."""
    import cupy

    cupy.cuda.set_allocator(None)
    backend = UnwrittenBackend() if tool == "initcheck" else CUDABackend()
    failed = 0
    for name, job in chosen(tool)[part::parts]:
        try:
            job(backend)
        except AssertionError as error:
            if tool != "initcheck":  # what was never written has no right value
                print(f"{name}: {error}")
                failed = 1
    return failed


def watch(tool: str, parts: int, part: int) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND), *TOOLS[tool]]
    child = [sys.executable, __file__, tool, "--part", str(part), "--jobs", str(parts)]
    return subprocess.run([*command, *child], capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="tool", help=f"{', '.join(TOOLS)}; all, where none is named")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.tools) - TOOLS.keys():
        parser.error(f"no tool {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    if options.part is not None:
        return run_part(options.tools[0], options.part, options.jobs)
    status = 0
    for tool in options.tools or TOOLS:
        with ThreadPoolExecutor(options.jobs) as pool:
            done = list(pool.map(partial(watch, tool, options.jobs), range(options.jobs)))
        faulty = [each for each in done if each.returncode]
        print(f"{tool}: {len(chosen(tool))} cases, {'clean' if not faulty else 'NOT clean'}", flush=True)
        for each in faulty:
            print(each.stdout[-4000:], each.stderr[-2000:], sep="\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
