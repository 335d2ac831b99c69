// Matrices of 16-bit elements from shared memory to the fragments of tensor cores.

// Four 8 × 8 matrices as fragments; lanes 8i to 8i + 7 say where the rows of matrix i begin in shared memory. Transposed,
// lane 4g + p holds rows 2p and 2p + 1 of column g.
template <bool transposed>
__device__ __forceinline__ void load_matrices(unsigned (&matrices)[4], unsigned address) {
#if __CUDA_ARCH__ >= 750
    if constexpr (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3]) : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3]) : "r"(address)
                     : "memory");
    }
#else
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 8 * i + (transposed ? lane % 4 * 2 : lane / 4);
        const unsigned first = __shfl_sync(0xffffffffu, address, row);
        const unsigned second = __shfl_sync(0xffffffffu, address, transposed ? row + 1 : row);
        const int column = transposed ? lane / 4 : lane % 4 * 2;
        const unsigned short *rows[2] = {
            static_cast<const unsigned short *>(__cvta_shared_to_generic(first)),
            static_cast<const unsigned short *>(__cvta_shared_to_generic(second))
        };
        matrices[i] = unsigned(rows[0][column]) | unsigned(rows[1][column + (transposed ? 0 : 1)]) << 16;
    }
#endif
}
