"""Rewrites of a plan of op-level calls: plain functions over `ExecutionPlan`."""
