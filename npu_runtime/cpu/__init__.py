"""The CPU device: the backend, a reference implementation of each kernel, and the native kernels that make it fast."""
