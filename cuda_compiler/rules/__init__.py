"""What each op-level kernel becomes on an NVIDIA GPU: a rule chooses template, grid and constants, a family a file."""
