"""Comparison of simulated chips with times that were measured on real chips."""
