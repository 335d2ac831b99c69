"""The CPU device: the backend, what each kernel means in torch, and the native kernels that make it fast."""
