// Copies to shared memory that do not wait.

struct alignas(16) Words {
    unsigned at[4];
};

// 16 bytes, or 4 or 8 of them, to shared memory, without waiting; zeros where they are outside.
template <int bytes = 16, typename T>
__device__ __forceinline__ void copy_words(T *target, const T *source, bool inside) {
#if __CUDA_ARCH__ >= 800
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(target)), "l"(source), "r"(inside ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(shared_address(target)), "l"(source), "n"(bytes), "r"(inside ? bytes : 0) : "memory");
    }
#else
#pragma unroll
    for (int i = 0; i < bytes / 4; i++) {
        reinterpret_cast<unsigned *>(target)[i] = inside ? reinterpret_cast<const unsigned *>(source)[i] : 0u;
    }
#endif
}

__device__ __forceinline__ void end_of_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all copies but those before the last `running` calls of `end_of_copies`.
template <int running>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(running) : "memory");
#endif
}
