"""Cache folders for tests, apart from the user's cache except for the native kernels, which are copied from it."""

from __future__ import annotations

from pathlib import Path

from npu_compiler.files import write_atomically
from npu_runtime.cpu.native.build import library_path


def put_kernels(cache: Path) -> None:
    """Put the native kernels into a folder, if they can be had: processes that use it need not compile them."""
    kernels = library_path()
    if kernels is None or (cache / kernels.name).exists():
        return
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(cache / kernels.name, kernels.read_bytes())  # other processes may be reading there
