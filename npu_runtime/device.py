"""`Device`: the best device here, or the one named."""

from __future__ import annotations

import platform
from collections.abc import Callable

from npu_compiler.errors import DeviceError
from npu_runtime.backend import Backend


def _cpu() -> Backend:
    from npu_runtime.cpu_backend import CPUBackend

    return CPUBackend()


_FACTORIES: dict[str, Callable[[], Backend]] = {"cpu": _cpu}


def register_device(name: str, factory: Callable[[], Backend]) -> None:
    """Make a device available to `Device(name)` and to `npu-sim --device name`."""
    _FACTORIES[name] = factory


def available_devices() -> list[str]:
    return sorted(_FACTORIES)


class Device:
    """A device by name, or the best one here: Metal on a Mac where it is installed, else the CPU.

    Raises:
        DeviceError: no such device, or it is not usable on this machine.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            name = "metal" if platform.system() == "Darwin" and "metal" in _FACTORIES else "cpu"
        if name not in _FACTORIES:
            raise DeviceError(f"unknown device '{name}'; here are {', '.join(available_devices())}")
        self.name = name
        self.backend: Backend = _FACTORIES[name]()

    def __repr__(self) -> str:
        return f"Device({self.name!r}: {self.backend.device})"
