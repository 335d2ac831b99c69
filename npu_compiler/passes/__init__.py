"""Rewrites of the graph, a file each: plain functions `IRGraph → IRGraph`."""
