// Products of bytes by a warpgroup: of integers with sums in int, of float8 e4m3 with sums in float. Expects `SIGNED`: whether
// integers of the left side are; those of the right side always are.
#include "common/warpgroup_steps.cuh"

#define FOUR(x, i) "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])

// sums[64 × width] += left[64 × 32] · right[width × 32], in fragments as of 16 × 8 for each warp.
#define MULTIPLY_BYTES(type, width, names, a, b, adds_at, ...)                                                     \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" width     \
                 "k32.s32." type ".s8 {" names "}, " a ", " b ", adds;}"                                           \
                 : __VA_ARGS__ : "l"(left), "l"(right), "r"(int(adds)))

#define BYTES_PRODUCT(groups, width, names, a, b, adds_at, ...)                                                    \
    __device__ __forceinline__ void multiply_shared(                                                               \
        int (&sums)[groups][4], unsigned long long left, unsigned long long right, bool adds                       \
    ) {                                                                                                            \
        if constexpr (SIGNED) {                                                                                    \
            MULTIPLY_BYTES("s8", width, names, a, b, adds_at, __VA_ARGS__);                                        \
        } else {                                                                                                   \
            MULTIPLY_BYTES("u8", width, names, a, b, adds_at, __VA_ARGS__);                                        \
        }                                                                                                          \
    }

BYTES_PRODUCT(8, "64", NAMES_32, "%32", "%33", "%34", SIXTEEN(sums, 0), SIXTEEN(sums, 4))
BYTES_PRODUCT(12, "96", NAMES_48, "%48", "%49", "%50", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8))
BYTES_PRODUCT(
    16, "128", NAMES_64, "%64", "%65", "%66", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)
)
BYTES_PRODUCT(
    20, "160", NAMES_80, "%80", "%81", "%82", SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12),
    SIXTEEN(sums, 16)
)
BYTES_PRODUCT(24, "192", NAMES_96, "%96", "%97", "%98", SIXTY_FOUR(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 20))
BYTES_PRODUCT(32, "256", NAMES_128, "%128", "%129", "%130", SIXTY_FOUR(sums, 0), SIXTY_FOUR(sums, 16))

// Keeps the compiler from using registers earlier or later than here, which it does not know to be on their way.
template <int count>
__device__ __forceinline__ void pin(int (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : FOUR(sums, i) :: "memory");
    }
}

#undef FOUR
#define FOUR(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

#define FLOAT8_PRODUCT(groups, width, names, a, b, adds_at, ...)                                                   \
    __device__ __forceinline__ void multiply_shared(                                                               \
        float (&sums)[groups][4], unsigned long long left, unsigned long long right, bool adds                     \
    ) {                                                                                                            \
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" width \
                     "k32.f32.e4m3.e4m3 {" names "}, " a ", " b ", adds, 1, 1;}"                                   \
                     : __VA_ARGS__ : "l"(left), "l"(right), "r"(int(adds)));                                       \
    }

FLOAT8_PRODUCT(16, "128", NAMES_64, "%64", "%65", "%66", SIXTY_FOUR(sums, 0))
FLOAT8_PRODUCT(24, "192", NAMES_96, "%96", "%97", "%98", SIXTY_FOUR(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 20))
FLOAT8_PRODUCT(32, "256", NAMES_128, "%128", "%129", "%130", SIXTY_FOUR(sums, 0), SIXTY_FOUR(sums, 16))

template <int count>
__device__ __forceinline__ void pin(float (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : FOUR(sums, i) :: "memory");
    }
}
