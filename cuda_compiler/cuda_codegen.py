"""Door to code generation: `pipeline` for a whole plan, `elementwise.kernel_source` for a fused kernel's CUDA C."""

from cuda_compiler.elementwise.kernel_source import generate_elementwise
from cuda_compiler.pipeline import cuda_stages

__all__ = ["generate_elementwise", "cuda_stages"]
