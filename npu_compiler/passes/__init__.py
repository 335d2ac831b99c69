"""Rewrites of the graph, one per file: plain functions `IRGraph → IRGraph`."""
