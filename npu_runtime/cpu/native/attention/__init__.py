"""Attention over contiguous and paged caches, and updates of rounded caches."""
