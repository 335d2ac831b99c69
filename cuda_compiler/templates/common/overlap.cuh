// The launch of a kernel overlaps the end of the kernel before it (programmatic dependent launch). Where GPUs cannot do
// that, these do nothing.

// What comes before it runs while the kernel before may still be running, so it reads nothing that that kernel writes, and writes
// nothing itself. All kernels before that one have ended, since a kernel lets the next one start only behind its own wait: some of its
// blocks may end without waiting, but never all. The exception is `rotary_update`; `passes/rotary_updates.py` looks at what the
// kernel before that one writes.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may take the places that are free from now on, up to their own wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void begin_in_turn() {
    wait_for_inputs();
    let_next_kernel_start();
}
