// Products of staged steps by warpgroups, while the copies of later steps go on. Expects `multiply_shared`, which begins
// those of 32 bytes of each row.

// Products that are on their way read the two stages before the one that is copied to.
constexpr int AHEAD = stages - 2;
static_assert(warp_m == 16 && warps_m % 4 == 0 && warp_n == 8 * N_FRAGMENTS && AHEAD > 0, "");

// The first products replace what there is.
__device__ __forceinline__ void clear(Sum (&)[M_FRAGMENTS][N_FRAGMENTS][4]) {}

// Before the barrier ahead of a step: what this thread copied can be read by products, and those of the step before the
// last one are done.
__device__ __forceinline__ void settle() {
    show_to_products();
    wait_for_products<1>();
}

// Starts the products of one staged step; warp number w of a warpgroup has rows 16w to 16w + 15 of its 64.
__device__ __forceinline__ void multiply_stage(
    Sum (&sums)[M_FRAGMENTS][N_FRAGMENTS][4], const unsigned char *patches, const unsigned char *factors, bool adds
) {
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    const unsigned char *left = patches + warpgroup % (warps_m / 4) * warpgroup_rows * ROW_BYTES;
    const unsigned char *right = factors + warpgroup / (warps_m / 4) * warp_n * ROW_BYTES;
    const unsigned long long a = matrix_at(shared_address(left), 0);
    const unsigned long long b = matrix_at(shared_address(right), 0);
    pin(sums[0]);
    begin_products();
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        multiply_shared(sums[0], further(a, 32 * part), further(b, 32 * part), adds || part > 0);
    }
    end_of_products();
}

__device__ __forceinline__ void finish_products(Sum (&sums)[M_FRAGMENTS][N_FRAGMENTS][4]) {
    wait_for_products<0>();
    pin(sums[0]);
}
