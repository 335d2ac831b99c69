"""Access to PyTorch, which may be absent: programs run without it, but tracing models and the CPU fallback need it.

Its import takes a second and more, so it is imported where one of its functions is called, and not to find out whether
it is there.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from npu_compiler.errors import InputError
from npu_compiler.installing import install_command

_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def find_torch() -> ModuleType | None:
    """The imported module `torch`; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


@functools.cache
def torch_version() -> str | None:
    """The version of the package torch, which is not imported for it; None where it is not installed."""
    try:
        return version("torch") if find_spec("torch") is not None else None
    except PackageNotFoundError:  # a folder on PYTHONPATH
        torch = find_torch()
        return None if torch is None else str(torch.__version__)
    except (ImportError, ValueError):
        return None


def torch_threads() -> int:
    """Threads of PyTorch's kernels: 0 without PyTorch; until it is imported, the number that it should begin with."""
    if torch_version() is None:
        return 0
    if "torch" in sys.modules:
        torch = find_torch()
        return 0 if torch is None else int(torch.get_num_threads())
    wanted = (os.environ.get(f"{library}_NUM_THREADS", "") for library in ("OMP", "MKL"))
    return next((int(count) for count in wanted if count.isdecimal() and int(count)), 0) or _physical_cores(_CPUINFO)


def _physical_cores(path: Path) -> int:
    """The cores that this process may run on, those with two threads counted once where the system tells."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable, cores = os.sched_getaffinity(0), set()
    try:
        for part in path.read_text().split("\n\n"):
            pairs = (line.partition(":") for line in part.splitlines())
            fields = {name.strip(): value.strip() for name, _, value in pairs}
            if int(fields.get("processor", -1)) in usable:
                cores.add((fields["physical id"], fields["core id"]))
    except (OSError, KeyError, ValueError):
        return len(usable)
    return len(cores) or len(usable)


def require_torch(purpose: str) -> None:
    """Check that torch is installed.

    Args:
        purpose: Activity that needs torch, as the message's first words: "tracing a model".

    Raises:
        InputError: it is not.
    """
    if find_torch() is None:
        raise InputError(f"{purpose} needs PyTorch: {install_command('torch')}")
