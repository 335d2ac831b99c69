"""Runs the native kernels' tests under GCC's sanitizers: ThreadSanitizer, AddressSanitizer with UBSan.

    python tests/support/sanitize.py [thread address]

The kernels are compiled for it (NPU_SIM_SANITIZE), Python and PyTorch are as they are: what these do among themselves
is not watched, and each access of a kernel is. Ends with 1 if a test fails or a sanitizer reports anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from npu_runtime.cpu.native.build import find_compiler

ROOT = Path(__file__).parents[2]
# In this order: ThreadSanitizer cannot fork, as one of the first tests does, once many threads have come and gone.
KERNEL_TESTS = ("test_native*.py", "test_rounded_rows.py", "test_paged_attention.py", "test_integer_kernels.py")
TESTS = [str(path) for name in KERNEL_TESTS for path in sorted((ROOT / "tests" / "npu_runtime").glob(name))]
# A kernel that gets no memory shall say so itself, under any allocator.
_COMMON = "allocator_may_return_null=1"
OPTIONS = {
    # Forked children run kernels too, on threads of their own.
    "thread": {"TSAN_OPTIONS": f"{_COMMON}:ignore_noninstrumented_modules=1:die_after_fork=0:second_deadlock_stack=1"},
    # What Python and PyTorch leave allocated, or free by other means than they allocate, is theirs.
    "address": {
        "ASAN_OPTIONS": f"{_COMMON}:detect_leaks=0:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
}
THREADS = "4"  # also where there are fewer cores, so that they meet in more ways
LIBRARIES = {"thread": ("libtsan.so",), "address": ("libasan.so", "libubsan.so")}


def preloaded(compiler: str, name: str) -> str:
    """The libraries that a sanitized one needs to be in the process from its start.

    libstdc++ is among them since a sanitizer looks up what throws exceptions when it starts.
    """
    files = []
    for library in (*LIBRARIES[name], "libstdc++.so.6"):
        asked = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
        path = Path(asked.stdout.strip())
        if not path.is_absolute():
            raise SystemExit(f"{compiler} has no {library}; $CXX can name a GCC that has it")
        files.append(str(path.resolve()))
    return " ".join(files)


def passes(compiler: str, name: str) -> bool:
    """Whether the tests pass under that sanitizer, and it reports nothing."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NPU_SIM_SANITIZE": name, "NPU_SIM_NATIVE": "1", "PYTHONPATH": str(ROOT)}
        environment["NPU_SIM_THREADS"] = THREADS
        built = subprocess.run(
            [
                sys.executable,
                "-c",
                "from npu_runtime.cpu.native.build import *; assert library_path(), failure_reason()",
            ],
            env=environment,
            check=False,
        )
        if built.returncode:
            return False
        environment |= {variable: f"{text}:log_path={folder}/report" for variable, text in OPTIONS[name].items()}
        environment |= {"LD_PRELOAD": preloaded(compiler, name), "PYTHONMALLOC": "malloc"}
        # UBSan writes to stderr, whatever the options say, and ends the process.
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        reports = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    print("\n".join(reports))
    print(f"{name}: {'tests fail' if done.returncode else 'tests pass'}, {len(reports)} processes with reports")
    return not done.returncode and not reports


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler")
    results = [passes(compiler, name) for name in sys.argv[1:] or OPTIONS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
