"""The fusions, one family per file: pattern, rewrite and `Fusion` together. `fusion_patterns` lists them in order."""
