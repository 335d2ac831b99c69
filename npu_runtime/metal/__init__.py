"""The Metal device: pyobjc calls on the shaders of `metal_kernels`."""
