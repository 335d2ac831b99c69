"""`CUDAExecutor`: runs a CUDA program."""

from __future__ import annotations

from cuda_compiler.cuda_program import CUDAProgram
from cuda_compiler.target import CUDA_GPU
from npu_compiler.errors import DeviceError
from npu_compiler.target_config import TargetConfig
from npu_runtime.backend import Backend
from npu_runtime.device import Device
from npu_runtime.executor import Executor


class CUDAExecutor(Executor):
    """The executor that all devices share, for programs of one target.

    Args:
        config: The target that the program must be compiled for.

    Raises:
        DeviceError: it was compiled for another one, or the device does not run it.
    """

    def __init__(self, program: CUDAProgram, device: Device | Backend, config: TargetConfig = CUDA_GPU) -> None:
        if program.target != config.name:
            raise DeviceError(f"the program was compiled for '{program.target}', not for '{config.name}'")
        super().__init__(program, device)


CudaExecutor = CUDAExecutor
