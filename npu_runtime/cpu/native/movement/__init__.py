"""Copies, lookups and updates by index."""
