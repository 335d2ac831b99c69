// Products of staged steps by warps. Expects `multiply`, which adds those of one fragment.

#include "common/matrices.cuh"

// Adds the products of one staged step to a warp's fragments of the tile; lane 4g + p holds columns 2p and 2p + 1 of rows
// g and g + 8 of each.
__device__ __forceinline__ void multiply_stage(
    Sum (&sums)[M_FRAGMENTS][N_FRAGMENTS][4], const unsigned char *patches, const unsigned char *factors, bool
) {
    const int lane = threadIdx.x % WARP;
    const int first_m = threadIdx.x / WARP % warps_m * warp_m;
    const int first_n = threadIdx.x / WARP / warps_m * warp_n;
#if __CUDA_ARCH__ >= 800
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        unsigned a[M_FRAGMENTS][4];
        unsigned b[N_FRAGMENTS / 2][4];
#pragma unroll
        for (int m = 0; m < M_FRAGMENTS; m++) {
            const int row = first_m + 16 * m + lane % 16;
            load_matrices<false>(a[m], shared_address(patches + staged(row, 32 * part + lane / 16 * 16)));
        }
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS / 2; n++) {
            const int row = first_n + 16 * n + lane % 8 + lane / 16 * 8;
            load_matrices<false>(b[n], shared_address(factors + staged(row, 32 * part + lane / 8 % 2 * 16)));
        }
#pragma unroll
        for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
            for (int n = 0; n < N_FRAGMENTS; n++) {
                const unsigned(&rows)[4] = a[m];
                multiply(
                    sums[m][n], rows[0], rows[1], rows[2], rows[3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]
                );
            }
        }
    }
#else
    constexpr int terms = ROW_BYTES / sizeof(Weight::type);
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = first_m + 16 * m + lane / 4 + i / 2 * 8;
                const int column = first_n + 8 * n + lane % 4 * 2 + i % 2;
// Not all of the terms: a compiler needs seconds for that.
#pragma unroll 8
                for (int k = 0; k < terms; k++) {
                    const int byte = k * int(sizeof(Weight::type));
                    const X::type left = *reinterpret_cast<const X::type *>(patches + staged(row, byte));
                    const Weight::type right = *reinterpret_cast<const Weight::type *>(factors + staged(column, byte));
                    add_product(sums[m][n][i], left, right);
                }
            }
        }
    }
#endif
}

constexpr int AHEAD = stages - 1;

__device__ __forceinline__ void clear(Sum (&sums)[M_FRAGMENTS][N_FRAGMENTS][4]) {
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS * N_FRAGMENTS * 4; i++) {
        sums[i / (4 * N_FRAGMENTS)][i / 4 % N_FRAGMENTS][i % 4] = Sum(0);
    }
}

__device__ __forceinline__ void settle() {}
__device__ __forceinline__ void finish_products(Sum (&)[M_FRAGMENTS][N_FRAGMENTS][4]) {}
