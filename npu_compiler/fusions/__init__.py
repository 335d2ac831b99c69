"""The fusions, a family a file: pattern, rewrite and `Fusion` together. `fusion_patterns` lists them in order."""
