"""Online: buffers, weights, executors and the CPU device."""

from npu_runtime.backend import Backend, DeviceBuffer, Operand
from npu_runtime.buffer import NPUBuffer
from npu_runtime.cpu_backend import CPUBackend
from npu_runtime.cpu_fallback import execute_cpu_partition
from npu_runtime.dag_executor import DAGExecutor
from npu_runtime.device import Device, available_devices, register_device
from npu_runtime.executor import Executor
from npu_runtime.metal_backend import MetalBackend
from npu_runtime.profiler import Profiler
from npu_runtime.weight_loader import load_weights

__all__ = [
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
