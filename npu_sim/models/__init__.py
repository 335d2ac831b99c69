"""PyTorch models that the front ends bring along."""
