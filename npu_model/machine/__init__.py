"""The simulated machine: executes tile programs, and computes their results and their timing."""
