"""The folder for files that are made once a machine: compiled kernels, programs, measured choices."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$NPU_SIM_CACHE, else ~/.cache/npu-simulation; it may not exist yet."""
    return Path(os.environ.get("NPU_SIM_CACHE") or Path.home() / ".cache" / "npu-simulation")
