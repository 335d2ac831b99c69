"""Which device runs a module's programs, and in which dtype."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from npu_runtime.device import Device
from npu_runtime.hardware import Hardware

if TYPE_CHECKING:
    import torch


@cache
def open_backend(name: str | None) -> Hardware:
    """The device of that name, or the best one; all modules of the process share it."""
    return Device(name).backend


def device_name(device: torch.device) -> str:
    """The device that runs programs on the tensors of a torch device."""
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    return "metal" if device.type == "mps" else "cpu"


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """A dtype's name without PyTorch's prefix."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
