"""Stand-ins for pyobjc's modules Metal, MetalPerformanceShaders and Foundation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metal_emulator import mps
from metal_emulator.device import MTLDevice
from metal_emulator.emulator import Emulator
from metal_emulator.enums import METAL, MPS
from metal_emulator.library import MTLCompileOptions, MTLFunctionConstantValues
from metal_emulator.objc import NSURL, MTLSize, NSRange, unknown
from metal_emulator.pipeline import MTLBinaryArchiveDescriptor, MTLComputePipelineDescriptor

SEED_VARIABLE = "METAL_EMULATOR_SEED"


class Framework:
    """A framework's classes, functions and constants as attributes; any other name raises `UnknownSelectorError`."""

    def __init__(self, name: str, members: Mapping[str, object]) -> None:
        self.__name__ = name
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unknown(self.__name__, name, sorted(self.__dict__))


@dataclass(frozen=True)
class MetalAPI:
    """Stand-ins for the modules Metal, MetalPerformanceShaders and Foundation, and the emulator behind them."""

    Metal: Any
    MPS: Any
    Foundation: Any
    emulator: Emulator


def api(
    *,
    checks: bool = True,
    seed: int | None = None,
    memory: int | None = None,
    poison: bool = True,
    deferred: bool = False,
    mutants: bool = False,
) -> MetalAPI:
    """Create an emulated Mac.

    Without `checks`, kernels run fast and unchecked. `seed` shuffles the order of threads; None means the environment's
    METAL_EMULATOR_SEED, else 0. `memory` is the recommended working set in bytes; None means three quarters of the
    machine's memory. With `poison`, new buffers hold 0xFF bytes, since Metal promises no zeros. `deferred` keeps
    command buffers from running before a caller waits for them. With `mutants`, kernels are compiled such that any of
    their barriers and bounds guards can be switched off (`Emulator.mutant`).
    """
    emulator = Emulator(
        checks=checks,
        poison=poison,
        seed=int(os.environ.get(SEED_VARIABLE, "0")) if seed is None else seed,
        deferred=deferred,
        mutants=[] if mutants else None,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4 if memory is None else memory,
    )
    device = MTLDevice(emulator)
    metal: dict[str, object] = {
        **METAL,
        "MTLBinaryArchiveDescriptor": MTLBinaryArchiveDescriptor,
        "MTLCompileOptions": MTLCompileOptions,
        "MTLComputePipelineDescriptor": MTLComputePipelineDescriptor,
        "MTLCreateSystemDefaultDevice": lambda: device,
        "MTLFunctionConstantValues": MTLFunctionConstantValues,
        "MTLSize": MTLSize,
        "MTLSizeMake": MTLSize,
    }
    shaders: dict[str, object] = {
        **MPS,
        "MPSMatrix": mps.MPSMatrix,
        "MPSMatrixDescriptor": mps.MPSMatrixDescriptor,
        "MPSMatrixMultiplication": mps.MPSMatrixMultiplication,
        "MPSSupportsMTLDevice": mps.MPSSupportsMTLDevice,
    }
    foundation: dict[str, object] = {"NSMakeRange": NSRange, "NSRange": NSRange, "NSURL": NSURL}
    return MetalAPI(
        Metal=Framework("Metal", metal),
        MPS=Framework("MetalPerformanceShaders", shaders),
        Foundation=Framework("Foundation", foundation),
        emulator=emulator,
    )
