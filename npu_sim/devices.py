"""Devices that combine packages which may not know of each other; registered as entry points in pyproject.toml."""

from npu_runtime import Backend, MetalBackend


def metal_emulator() -> Backend:
    """The Metal backend on the emulator, every access checked."""
    import metal_emulator

    return MetalBackend(metal_emulator.api(checks=True))


def metal_emulator_fast() -> Backend:
    """The same without the checks."""
    import metal_emulator

    return MetalBackend(metal_emulator.api(checks=False))
