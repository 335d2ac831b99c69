"""Door to `fusion_patterns`: the fusions. Their fused ops are lowered by the op table, like all other ops."""

from npu_compiler.fusion_patterns import FUSIONS, fuse
from npu_compiler.fusions.engine import Fusion

__all__ = ["FUSIONS", "Fusion", "fuse"]
