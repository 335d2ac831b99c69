"""Simulated chips against times that were measured on silicon."""
