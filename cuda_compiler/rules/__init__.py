"""Rules: the templates, grids and constants of the CUDA kernels that an op-level kernel becomes; a family per file."""
