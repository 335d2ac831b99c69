// Products of bytes by a warpgroup. Expects `SIGNED`: whether the left side is; the right side always is.
#include "common/warpgroup_steps.cuh"

#define FOUR(x, i) "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])

// sums[64 × width] += left[64 × 32] · right[width × 32], in fragments as of 16 × 8 for each warp.
#define MULTIPLY_BYTES(type, width, names, a, b, adds_at, sums_list)                                               \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" width     \
                 "k32.s32." type ".s8 {" names "}, " a ", " b ", adds;}"                                           \
                 : sums_list : "l"(left), "l"(right), "r"(int(adds)))

__device__ __forceinline__ void multiply_shared(
    int (&sums)[8][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (SIGNED) {
        MULTIPLY_BYTES("s8", "64", NAMES_32, "%32", "%33", "%34", LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4)));
    } else {
        MULTIPLY_BYTES("u8", "64", NAMES_32, "%32", "%33", "%34", LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4)));
    }
}

__device__ __forceinline__ void multiply_shared(
    int (&sums)[12][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (SIGNED) {
        MULTIPLY_BYTES("s8", "96", NAMES_48, "%48", "%49", "%50",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8)));
    } else {
        MULTIPLY_BYTES("u8", "96", NAMES_48, "%48", "%49", "%50",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8)));
    }
}

__device__ __forceinline__ void multiply_shared(
    int (&sums)[16][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (SIGNED) {
        MULTIPLY_BYTES("s8", "128", NAMES_64, "%64", "%65", "%66",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)));
    } else {
        MULTIPLY_BYTES("u8", "128", NAMES_64, "%64", "%65", "%66",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)));
    }
}

__device__ __forceinline__ void multiply_shared(
    int (&sums)[20][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (SIGNED) {
        MULTIPLY_BYTES("s8", "160", NAMES_80, "%80", "%81", "%82",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12), SIXTEEN(sums, 16)));
    } else {
        MULTIPLY_BYTES("u8", "160", NAMES_80, "%80", "%81", "%82",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12), SIXTEEN(sums, 16)));
    }
}

// Keeps the compiler from using registers earlier or later than here, which it does not know to be on their way.
template <int count>
__device__ __forceinline__ void pin(int (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : FOUR(sums, i) :: "memory");
    }
}
