"""Number of threads that the native kernels may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """Number of threads: $NPU_SIM_THREADS, else the cores that this process may use, limited by its cgroup's CPU time.

    Raises:
        ValueError: NPU_SIM_THREADS is not a positive number.
    """
    wanted = os.environ.get("NPU_SIM_THREADS")
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ValueError(f"NPU_SIM_THREADS must be a positive number of threads, not {wanted!r}")
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores(_CGROUP)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cgroup_cores(folder: Path) -> float | None:
    """The CPU time that the cgroup file system mounted at `folder` allows, in cores.

    None if it sets no limit, or there are no such files.
    """
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cores if cores > 0 else None
