// What blocks of a cluster need to work together. Clusters are of compute capability 9.0 and up.

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address, for instructions on a cluster's memory, of what lies in another block where `own` lies in this one.
__device__ __forceinline__ unsigned address_in(unsigned block, const void *own) {
    unsigned address = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
#endif
    return address;
}

__device__ __forceinline__ float read_from(unsigned block, const float *own) {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in(block, own)) : "memory");
#endif
    return value;
}

// Four floats side by side; `own` is a multiple of 16 bytes.
__device__ __forceinline__ void read_four_from(float (&values)[4], unsigned block, const float *own) {
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(address_in(block, own)) : "memory");
#endif
}

__device__ __forceinline__ void write_to(unsigned block, const float *own, float value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address_in(block, own)), "f"(value) : "memory");
#endif
}
