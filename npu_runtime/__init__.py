"""Runs compiled programs: devices, buffers, weights and executors."""

from typing import TYPE_CHECKING

from npu_compiler.deferred_import import deferred
from npu_compiler.version import __version__
from npu_runtime.backend import Backend, DeviceBuffer, Operand
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device, available_devices, register_device
from npu_runtime.executor import Executor
from npu_runtime.profiler import Profiler
from npu_runtime.weight_loader import load_weights

if TYPE_CHECKING:
    from npu_runtime.cpu.backend import CPUBackend
    from npu_runtime.cpu_fallback import execute_cpu_partition
    from npu_runtime.dag_executor import DAGExecutor
    from npu_runtime.metal.backend import MetalBackend

# Imported when used: torch and the op table, which they need, take longer than a second start on another device.
__getattr__ = deferred(
    __name__,
    {
        "CPUBackend": "cpu.backend",
        "DAGExecutor": "dag_executor",
        "MetalBackend": "metal.backend",
        "execute_cpu_partition": "cpu_fallback",
    },
)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "__version__",
    "Backend",
    "CPUBackend",
    "DAGExecutor",
    "Device",
    "DeviceBuffer",
    "Executor",
    "MetalBackend",
    "NPUBuffer",
    "Operand",
    "Profiler",
    "available_devices",
    "execute_cpu_partition",
    "load_weights",
    "register_device",
]
