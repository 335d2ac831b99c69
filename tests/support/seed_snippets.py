"""The Python code of the documents that specify the public API, word for word, in the order of the documents."""

from __future__ import annotations

EXTRACT = r"""
from torch_ir import extract_ir
ir = extract_ir(model, example_input, model_name="my_model")
"""

COMPILE = r"""
import npu_compiler
program = npu_compiler.compile("model_ir.json")
program.save("model.npubin")
"""

EXECUTE = r"""
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights

device = Device()
program = CompiledProgram.load("model.npubin")
executor = Executor(program, device)
weights = load_weights("model.safetensors", program, device)

input_buf = NPUBuffer.from_numpy(input_data, device, spec=program.input_specs[0])
outputs = executor.run(inputs={"input": input_buf}, weights=weights)
result = outputs["output"].to_numpy(spec=program.output_specs[0])
"""

EXECUTE_DAG = r"""
from npu_compiler import partition, is_op_supported
from npu_runtime import DAGExecutor, MetalBackend

plan = partition(ir_dict, is_op_supported)
backend = MetalBackend()
dag = DAGExecutor(plan, backend)
dag.load_weights(weights_dict)
result = dag.execute(inputs={"x": input_array})
"""

CODEGEN_TARGET = r"""
class CodegenTarget(ABC):
    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]: ...
    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]: ...
    def fused_kernel(self, kernel_type: str) -> tuple[str, str]: ...
    def shader_source(self, filename: str) -> str: ...
"""

BUFFER_AND_BACKEND = r"""
class DeviceBuffer(ABC):
    shape, alloc_shape, dtype, size_bytes, native_handle
    def to_numpy(self, spec=None) -> np.ndarray: ...

class Backend(ABC):
    def allocate_buffer(self, data, alloc_shape, spec) -> DeviceBuffer: ...
    def allocate_zeros(self, shape, dtype, alloc_shape) -> DeviceBuffer: ...
    def execute(self, program, inputs, weights) -> dict[str, DeviceBuffer]: ...
    def create_executor(self, program) -> Any: ...
    def synchronize(self): ...
"""

DISPATCH_STRATEGY = r"""
class DispatchStrategy(ABC):
    def compute_dispatch(self, call: KernelCall, pipeline) \
        -> tuple[tuple[int,int,int], tuple[int,int,int]] | None: ...
"""

TARGET_CONFIG = r"""
# target_config.py
CUDA_GPU = TargetConfig(
    name="cuda_gpu",
    channel_alignment_bytes=128,
    channel_tile=64,
    matmul_tile=32,
    max_threadgroup_1d=1024,
    max_threadgroup_2d=32,
    max_threadgroup_3d_xy=16,
    max_threadgroup_3d_z=8,
    max_dispatches_per_batch=65535,
)
"""

CUDA_TARGET = r"""
class CudaCodegenTarget(CodegenTarget):
    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        return (kernel_name, "elementwise.cu")

    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        name = "matmul_vec" if is_vec else "matmul_tiled"
        return (name, "matmul.cu")

    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        return (kernel_type, f"{kernel_type}.cu")

    def shader_source(self, filename: str) -> str:
        return filename
"""

CUDA_BUFFER = r'''
class CudaBuffer(DeviceBuffer):
    """DeviceBuffer backed by a CUDA device pointer (via cupy or pycuda)."""
    # native_handle -> cupy.ndarray or device pointer
    # to_numpy() -> cupy.asnumpy()
'''

CUDA_EXECUTOR = r'''
class CudaExecutor:
    """Executes CompiledProgram on CUDA GPU."""
    # CUDA stream-based command batching
    # Metal command buffer  -> CUDA stream
    # Metal compute encoder -> CUDA kernel launch
    # Metal MPS matmul      -> cuBLAS GEMM
'''

CUDA_BACKEND = r"""
class CudaBackend(Backend):
    def create_executor(self, program) -> CudaExecutor:
        return CudaExecutor(program, self._device, config=CUDA_GPU)
"""

WIRING = r"""
# Compile with target
program = npu_compiler.compile("model_ir.json", target=CudaCodegenTarget())

# Execute with backend
backend = CudaBackend()
executor = backend.create_executor(program)
outputs = executor.run(inputs, weights)
"""


ALL = (
    EXTRACT,
    COMPILE,
    EXECUTE,
    EXECUTE_DAG,
    CODEGEN_TARGET,
    BUFFER_AND_BACKEND,
    DISPATCH_STRATEGY,
    TARGET_CONFIG,
    CUDA_TARGET,
    CUDA_BUFFER,
    CUDA_EXECUTOR,
    CUDA_BACKEND,
    WIRING,
)
