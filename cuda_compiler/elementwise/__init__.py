"""Element-wise calls: which of them become one kernel, and that kernel's source."""
