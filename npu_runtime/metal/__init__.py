"""The Metal device: calls of Metal through pyobjc, with the shaders of `metal_kernels`."""
