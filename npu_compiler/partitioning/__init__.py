"""Prices of a graph's nodes on a device and on its host, and the division between the two that takes the least time."""
