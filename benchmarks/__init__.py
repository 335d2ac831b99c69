"""Benchmarks against PyTorch. All contenders are timed in one run, in turns; none of these modules is a test."""
