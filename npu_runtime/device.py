"""`Device`: the best device of this machine, or a named one."""

from __future__ import annotations

import importlib.util
import inspect
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points

from npu_compiler.errors import DeviceError
from npu_runtime.backend import Backend
from npu_runtime.hardware import offer_best_hardware

PLUGINS = "npu_simulation.devices"


def _cpu() -> Backend:
    from npu_runtime.cpu.backend import CPUBackend

    return CPUBackend()


def _metal() -> Backend:
    from npu_runtime.metal.backend import MetalBackend

    return MetalBackend()


def _plugin(name: str) -> Callable[..., Backend] | None:
    """The factory of a device that an installed package offers (entry point group `npu_simulation.devices`).

    None if no package has it.
    """
    entries = entry_points(group=PLUGINS, name=name)
    return next(iter(entries)).load() if entries else None


_FACTORIES: dict[str, Callable[..., Backend]] = {"cpu": _cpu, "metal": _metal}


def register_device(name: str, factory: Callable[..., Backend]) -> None:
    """Make a device available to `Device(name)` and to `npu-sim --device name`.

    Args:
        factory: Called without arguments; if it has a parameter, also with a number, for `name:number`. If that is
            annotated `str`, always with the text after the colon.
    """
    _FACTORIES[name] = factory


def available_devices() -> list[str]:
    """Names of the devices known here, whether or not they can be used on this machine."""
    return sorted(_FACTORIES.keys() | entry_points(group=PLUGINS).names)


def best_device() -> str:
    """The name of the device that `Device()` opens: Metal on a Mac where it is installed, else the CPU."""
    on_mac = platform.system() == "Darwin" and importlib.util.find_spec("Metal") is not None
    return "metal" if on_mac else "cpu"


def find_device(name: str) -> Callable[[], Backend]:
    """A function that opens the device of that name; nothing of the device is imported before it is called.

    Raises:
        DeviceError: there is no such device, or the part of the name after its colon does not suit it.
    """
    kind, colon, detail = name.partition(":")
    factory = _FACTORIES.get(kind) or _plugin(kind)
    if factory is None:
        raise DeviceError(f"unknown device '{name}'; choose one of {', '.join(available_devices())}")
    parameter = next(iter(inspect.signature(factory).parameters.values()), None)
    if parameter is not None and parameter.annotation in (str, "str"):
        if not detail:
            raise DeviceError(f"'{name}' is not a whole device name: write {kind}:{parameter.name.upper()}")
        return partial(factory, detail)
    return _numbered(factory, name, detail) if colon else factory


def _numbered(factory: Callable[..., Backend], name: str, number: str) -> Callable[[], Backend]:
    if not (number.isascii() and number.isdigit()):
        raise DeviceError(
            f"'{name}' is not a device name: write a device number after the colon, such as {name.partition(':')[0]}:0"
        )
    if not inspect.signature(factory).parameters:
        raise DeviceError(
            f"'{name}' is not a device name: there is only one '{name.partition(':')[0]}' device, without a number"
        )
    return partial(factory, int(number))


def neighbour(name: str, distance: int) -> str:
    """The name of the device `distance` numbers after another: `gpu:3` for `gpu:1` and 2.

    A device without numbers keeps its name.
    """
    kind, _, detail = name.partition(":")
    factory = _FACTORIES.get(kind) or _plugin(kind)
    parameter = None if factory is None else next(iter(inspect.signature(factory).parameters.values()), None)
    if parameter is None or parameter.annotation in (str, "str"):
        return name
    return f"{kind}:{int(detail or 0) + distance}"


class Device:
    """A device by name, or the best one here: Metal on a Mac where it is installed, else the CPU.

    Args:
        name: Name of the device. Where a machine has several of a kind, a number follows a colon: `:1` is the second.
            A simulated chip is named there too: `npu:edge`.

    Raises:
        DeviceError: no such device, or it is not usable on this machine.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = best_device() if name is None else name
        self.backend: Backend = find_device(self.name)()

    def __repr__(self) -> str:
        return f"Device({self.name!r}: {self.backend.device})"


offer_best_hardware(lambda: Device().backend)
