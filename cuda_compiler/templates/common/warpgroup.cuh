// Products of 16-bit values by a warpgroup. Expects their type as `Half`.
#include "common/warpgroup_steps.cuh"

#define FOUR(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

// Products of `width` columns: sums[64 × width] (+)= left[64 × 16] · right, in fragments as of 16 × 8 for each warp. The right
// side is [width × 16] in the first, and [16 × width] in the second, whose left side is in registers.
#define MULTIPLY_SHARED(type, width, names, a, b, adds_at, sums_list)                                              \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" width     \
                 "k16.f32." type "." type " {" names "}, " a ", " b ", adds, 1, 1, 0, 0;}"                         \
                 : sums_list : "l"(left), "l"(right), "r"(int(adds)))
#define MULTIPLY_HELD(type, width, names, a, b, sums_list)                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" width "k16.f32." type "." type " {" names "}, {" a "}, " b    \
                 ", 1, 1, 1, 1;"                                                                                   \
                 : sums_list : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

__device__ __forceinline__ void multiply_shared(
    float (&sums)[8][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_SHARED("bf16", "64", NAMES_32, "%32", "%33", "%34", LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4)));
    } else {
        MULTIPLY_SHARED("f16", "64", NAMES_32, "%32", "%33", "%34", LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4)));
    }
}

__device__ __forceinline__ void multiply_shared(
    float (&sums)[12][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_SHARED("bf16", "96", NAMES_48, "%48", "%49", "%50",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8)));
    } else {
        MULTIPLY_SHARED("f16", "96", NAMES_48, "%48", "%49", "%50",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8)));
    }
}

__device__ __forceinline__ void multiply_shared(
    float (&sums)[16][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_SHARED("bf16", "128", NAMES_64, "%64", "%65", "%66",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)));
    } else {
        MULTIPLY_SHARED("f16", "128", NAMES_64, "%64", "%65", "%66",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)));
    }
}

__device__ __forceinline__ void multiply_shared(
    float (&sums)[20][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_SHARED("bf16", "160", NAMES_80, "%80", "%81", "%82",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12), SIXTEEN(sums, 16)));
    } else {
        MULTIPLY_SHARED("f16", "160", NAMES_80, "%80", "%81", "%82",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12), SIXTEEN(sums, 16)));
    }
}

__device__ __forceinline__ void multiply_held(
    float (&sums)[5][4], const unsigned (&left)[4], unsigned long long right
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_HELD("bf16", "40", NAMES_20, "%20, %21, %22, %23", "%24", LIST(SIXTEEN(sums, 0), FOUR(sums, 4)));
    } else {
        MULTIPLY_HELD("f16", "40", NAMES_20, "%20, %21, %22, %23", "%24", LIST(SIXTEEN(sums, 0), FOUR(sums, 4)));
    }
}

__device__ __forceinline__ void multiply_held(
    float (&sums)[8][4], const unsigned (&left)[4], unsigned long long right
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_HELD("bf16", "64", NAMES_32, "%32, %33, %34, %35", "%36", LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4)));
    } else {
        MULTIPLY_HELD("f16", "64", NAMES_32, "%32, %33, %34, %35", "%36", LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4)));
    }
}

__device__ __forceinline__ void multiply_held(
    float (&sums)[10][4], const unsigned (&left)[4], unsigned long long right
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_HELD("bf16", "80", NAMES_40, "%40, %41, %42, %43", "%44",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), FOUR(sums, 8), FOUR(sums, 9)));
    } else {
        MULTIPLY_HELD("f16", "80", NAMES_40, "%40, %41, %42, %43", "%44",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), FOUR(sums, 8), FOUR(sums, 9)));
    }
}

__device__ __forceinline__ void multiply_held(
    float (&sums)[16][4], const unsigned (&left)[4], unsigned long long right
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_HELD("bf16", "128", NAMES_64, "%64, %65, %66, %67", "%68",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)));
    } else {
        MULTIPLY_HELD("f16", "128", NAMES_64, "%64, %65, %66, %67", "%68",
            LIST(SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)));
    }
}

// Keeps the compiler from using registers earlier or later than here, which it does not know to be on their way.
template <int count>
__device__ __forceinline__ void pin(float (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : FOUR(sums, i) :: "memory");
    }
}
