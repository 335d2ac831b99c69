"""Attention over contiguous and paged KV caches, and updates of quantized caches."""
