"""Choice of the device that runs a module's programs, and of its compute dtype."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from npu_runtime.device import Device
from npu_runtime.hardware import Hardware

if TYPE_CHECKING:
    import torch


def open_backend(device: Device | str | None) -> Hardware:
    """The device, or the one of that name, or the best one; all modules of the process share one that is named."""
    return device.backend if isinstance(device, Device) else _named(device)


@cache
def _named(name: str | None) -> Hardware:
    return Device(name).backend


def device_name(device: torch.device) -> str:
    """The device that runs programs on the tensors of a torch device."""
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    return "metal" if device.type == "mps" else "cpu"


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """A dtype's name without PyTorch's prefix; None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
