"""Door to `elementwise.grouping`: which element-wise calls become one kernel."""

from cuda_compiler.elementwise.grouping import Group, find_groups, merge

__all__ = ["Group", "find_groups", "merge"]
