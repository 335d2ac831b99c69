"""Door to the compiler's memory planner, which places the buffers between kernels for every target alike."""

from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.plan import BufferAllocation

__all__ = ["BufferAllocation", "plan_memory"]
