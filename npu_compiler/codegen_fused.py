"""Door to `fusion_patterns`: the fusions, whose fused ops the op table lowers as it does all others."""

from npu_compiler.fusion_patterns import FUSIONS, fuse
from npu_compiler.fusions.engine import Fusion

__all__ = ["FUSIONS", "Fusion", "fuse"]
