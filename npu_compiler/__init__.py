"""The compiler: `torch_ir` IR in, `.npubin` program out. Imports no torch and no device library."""

from typing import TYPE_CHECKING

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.deferred_import import deferred
from npu_compiler.errors import (
    ConstraintError,
    DeviceError,
    InputError,
    IRError,
    NPUError,
    NumericalWarning,
    PrecisionWarning,
    ProgramFormatError,
    UntrustedProgramError,
    WeightError,
)
from npu_compiler.graph.model import IRGraph, TensorSpec
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat, quantize
from npu_compiler.graph.reader import read_ir
from npu_compiler.options import CompileOptions
from npu_compiler.program.target import CodegenTarget, MetalCodegenTarget, OpLevelTarget
from npu_compiler.target_config import METAL_GPU, OP_LEVEL, TargetConfig
from npu_compiler.version import __version__

if TYPE_CHECKING:
    from npu_compiler.compiler import compile, trace_compilation, trace_stages
    from npu_compiler.graph.printer import print_graph
    from npu_compiler.op_support import get_supported_ops, is_op_supported
    from npu_compiler.partitioner import Partition, PartitionPlan, TransferOp, partition

# What compiles is imported when it is used: a program that was compiled before runs without.
__getattr__ = deferred(
    __name__,
    {
        "Partition": "partitioner",
        "PartitionPlan": "partitioner",
        "TransferOp": "partitioner",
        "compile": "compiler",
        "get_supported_ops": "op_support",
        "is_op_supported": "op_support",
        "partition": "partitioner",
        "print_graph": "graph.printer",
        "trace_compilation": "compiler",
        "trace_stages": "compiler",
    },
)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "METAL_GPU",
    "OP_LEVEL",
    "CodegenTarget",
    "CompileOptions",
    "CompiledProgram",
    "ConstraintError",
    "DeviceError",
    "IRError",
    "IRGraph",
    "InputError",
    "MetalCodegenTarget",
    "NPUError",
    "NumericalWarning",
    "PrecisionWarning",
    "OpLevelTarget",
    "Partition",
    "PartitionPlan",
    "ProgramFormatError",
    "QuantizedArray",
    "QuantizedFormat",
    "TargetConfig",
    "TensorSpec",
    "TransferOp",
    "UntrustedProgramError",
    "WeightError",
    "__version__",
    "compile",
    "get_supported_ops",
    "is_op_supported",
    "partition",
    "print_graph",
    "quantize",
    "read_ir",
    "trace_compilation",
    "trace_stages",
]
