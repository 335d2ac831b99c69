// Products of 16-bit values by a warpgroup. Expects their type as `Half`.
#include "common/warpgroup_steps.cuh"

#define FOUR(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

// Products of `width` columns: sums[64 × width] (+)= left[64 × 16] · right, in fragments as of 16 × 8 for each warp. The right
// side is [width × 16] in the first, and [16 × width] in the second, whose left side is in registers.
#define MULTIPLY_SHARED(type, width, names, a, b, adds_at, ...)                                                    \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" width     \
                 "k16.f32." type "." type " {" names "}, " a ", " b ", adds, 1, 1, 0, 0;}"                         \
                 : __VA_ARGS__ : "l"(left), "l"(right), "r"(int(adds)))
#define MULTIPLY_HELD(type, width, names, a, b, ...)                                                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" width "k16.f32." type "." type " {" names "}, {" a "}, " b    \
                 ", 1, 1, 1, 1;"                                                                                   \
                 : __VA_ARGS__ : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

#define SHARED_PRODUCT(groups, width, names, a, b, adds_at, ...)                                                   \
    __device__ __forceinline__ void multiply_shared(                                                               \
        float (&sums)[groups][4], unsigned long long left, unsigned long long right, bool adds                     \
    ) {                                                                                                            \
        if constexpr (IsBrain<Half>::value) {                                                                      \
            MULTIPLY_SHARED("bf16", width, names, a, b, adds_at, __VA_ARGS__);                                     \
        } else {                                                                                                   \
            MULTIPLY_SHARED("f16", width, names, a, b, adds_at, __VA_ARGS__);                                      \
        }                                                                                                          \
    }

#define HELD_PRODUCT(groups, width, names, a, b, ...)                                                              \
    __device__ __forceinline__ void multiply_held(                                                                 \
        float (&sums)[groups][4], const unsigned (&left)[4], unsigned long long right                              \
    ) {                                                                                                            \
        if constexpr (IsBrain<Half>::value) {                                                                      \
            MULTIPLY_HELD("bf16", width, names, a, b, __VA_ARGS__);                                                \
        } else {                                                                                                   \
            MULTIPLY_HELD("f16", width, names, a, b, __VA_ARGS__);                                                 \
        }                                                                                                          \
    }

SHARED_PRODUCT(1, "8", NAMES_4, "%4", "%5", "%6", FOUR(sums, 0))
SHARED_PRODUCT(2, "16", NAMES_8, "%8", "%9", "%10", EIGHT(sums, 0))
SHARED_PRODUCT(4, "32", NAMES_16, "%16", "%17", "%18", SIXTEEN(sums, 0))
SHARED_PRODUCT(8, "64", NAMES_32, "%32", "%33", "%34", SIXTEEN(sums, 0), SIXTEEN(sums, 4))
SHARED_PRODUCT(12, "96", NAMES_48, "%48", "%49", "%50", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8))
SHARED_PRODUCT(
    16, "128", NAMES_64, "%64", "%65", "%66", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)
)
SHARED_PRODUCT(
    20, "160", NAMES_80, "%80", "%81", "%82", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12),
    SIXTEEN(sums, 16)
)

HELD_PRODUCT(5, "40", NAMES_20, "%20, %21, %22, %23", "%24", SIXTEEN(sums, 0), FOUR(sums, 4))
HELD_PRODUCT(8, "64", NAMES_32, "%32, %33, %34, %35", "%36", SIXTEEN(sums, 0), SIXTEEN(sums, 4))
HELD_PRODUCT(
    10, "80", NAMES_40, "%40, %41, %42, %43", "%44", SIXTEEN(sums, 0), SIXTEEN(sums, 4), EIGHT(sums, 8)
)
HELD_PRODUCT(
    16, "128", NAMES_64, "%64, %65, %66, %67", "%68", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8),
    SIXTEEN(sums, 12)
)

// Keeps the compiler from using registers earlier or later than here, which it does not know to be on their way.
template <int count>
__device__ __forceinline__ void pin(float (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : FOUR(sums, i) :: "memory");
    }
}
