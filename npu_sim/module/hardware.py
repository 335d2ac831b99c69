"""Choice of the device that runs a module's programs, and of their compute dtype."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from npu_runtime.device import Device
from npu_runtime.hardware import Hardware

if TYPE_CHECKING:
    import torch


def open_backend(device: Device | str | None) -> Hardware:
    """Return the backend of a device, given as an object or by name; None means the best device of this machine.

    A named device is opened once and shared by all modules of the process.
    """
    return device.backend if isinstance(device, Device) else _named(device)


@cache
def _named(name: str | None) -> Hardware:
    return Device(name).backend


def device_name(device: torch.device) -> str:
    """Return the name of the device that runs programs on the tensors of a torch device."""
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    return "metal" if device.type == "mps" else "cpu"


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """Return a dtype's name without the prefix `torch.`; None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
