// Partial sums of a tile in shared memory, for the blocks of a cluster.
#include "common/cluster.cuh"

// A thread's sums to their places in rows of SUM_STAGE.
__device__ __forceinline__ void keep_sums(Sum *partial, const Sum (&sums)[M_FRAGMENTS][N_FRAGMENTS][4]) {
    const int lane = threadIdx.x % WARP;
    const int own_row = threadIdx.x / WARP % warps_m * warp_m + lane / 4;
    const int own_column = threadIdx.x / WARP / warps_m * warp_n + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int at = (own_row + 16 * m + i / 2 * 8) * SUM_STAGE + own_column + 8 * n;
                store_pack<2>(partial + at, Pack<Sum, 2>{{sums[m][n][i], sums[m][n][i + 1]}});
            }
        }
    }
    if constexpr (SHARERS > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
}

// Adds the sums of a block of this cluster, which lie where `own` is in this block's shared memory.
template <int count>
__device__ __forceinline__ void add_partial(Sum (&values)[count], const Sum *own, unsigned sharer) {
#if __CUDA_ARCH__ >= 900
    const unsigned address = address_in(sharer, own);
    constexpr int width = smaller(count, 4);
#pragma unroll
    for (int i = 0; i < count; i += width) {
        unsigned part[width];
        if constexpr (width == 4) {
            asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3]) : "r"(address + 4 * i)
                         : "memory");
        } else {
#pragma unroll
            for (int j = 0; j < width; j++) {
                asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(part[j]) : "r"(address + 4 * (i + j)) : "memory");
            }
        }
#pragma unroll
        for (int j = 0; j < width; j++) {
            values[i + j] += __builtin_bit_cast(Sum, part[j]);
        }
    }
#endif
}

// The sums of a whole cluster, whose blocks have kept theirs.
template <int count>
__device__ __forceinline__ void whole_sums(Sum (&values)[count], const Sum *own) {
    if constexpr (SHARERS > 1) {
#pragma unroll
        for (int j = 0; j < count; j++) {
            values[j] = Sum(0);
        }
#pragma unroll
        for (unsigned other = 0; other < SHARERS; other++) {
            add_partial(values, own, other);
        }
    } else {
#pragma unroll
        for (int j = 0; j < count; j++) {
            values[j] = own[j];
        }
    }
}

// None may end, and take its partial sums along, while others read them.
__device__ __forceinline__ void part_from_cluster() {
    if constexpr (SHARERS > 1) {
        cluster_barrier();
    }
}
