"""Benchmarks of serving many requests at once: throughput, speculative decoding, and clients that misbehave."""
