"""Door to `passes`: the rewrites that simplify a graph."""

from npu_compiler.fusions.conv import fold_padding
from npu_compiler.graph.weight_recipe import WeightTransformRecipe
from npu_compiler.passes.batch_norm import fold_batch_norm, lower_batch_norm
from npu_compiler.passes.common_subexpressions import eliminate_common_subexpressions
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_compiler.passes.functionalize import functionalize
from npu_compiler.passes.noops import eliminate_noops

__all__ = [
    "WeightTransformRecipe",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "eliminate_noops",
    "fold_batch_norm",
    "fold_padding",
    "functionalize",
    "lower_batch_norm",
]
