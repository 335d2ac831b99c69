// For kernels whose launch may overlap the end of the kernel before them (programmatic dependent launch). Where a launch
// may not, these do nothing.

// What comes before it runs while the kernel before may still be running, so it reads constants only and writes nothing.
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
