"""`CUDAExecutor`: runs a CUDA program."""

from __future__ import annotations

from cuda_compiler.cuda_program import CUDAProgram
from npu_compiler.target_config import CUDA_GPU, TargetConfig
from npu_runtime.buffer import Opened
from npu_runtime.executor import Executor
from npu_runtime.hardware import Hardware


class CUDAExecutor(Executor):
    """The executor that all devices share, for programs of the CUDA target."""

    def __init__(
        self, program: CUDAProgram, device: Hardware | Opened[Hardware], config: TargetConfig = CUDA_GPU
    ) -> None:
        super().__init__(program, device, config)


CudaExecutor = CUDAExecutor
