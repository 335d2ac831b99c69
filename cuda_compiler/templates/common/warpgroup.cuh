// Products of 16-bit values by a warpgroup. Expects their type as `Half`.
#include "common/warpgroup_steps.cuh"

// Products of `width` columns: sums[64 × width] (+)= left[64 × 16] · right, in fragments as of 16 × 8 for each warp. The right
// side is [width × 16] in the first, and [16 × width] in the second, whose left side is in registers, as in the third, whose
// right side is [width × 16] again.
#define HALF_PRODUCT(...) \
    SHARED_PRODUCT(float, IsBrain<Half>::value, "k16.f32.bf16.bf16", "k16.f32.f16.f16", ", 1, 1, 0, 0", __VA_ARGS__)
#define MULTIPLY_HELD(type, width, names, a, b, across, ...)                                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" width "k16.f32." type "." type " {" names "}, {" a "}, " b    \
                 ", 1, 1, 1, " across ";"                                                                          \
                 : __VA_ARGS__ : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

#define HELD_PRODUCT_OF(name, across, groups, width, names, a, b, ...)                                             \
    __device__ __forceinline__ void name(                                                                          \
        float (&sums)[groups][4], const unsigned (&left)[4], unsigned long long right                              \
    ) {                                                                                                            \
        if constexpr (IsBrain<Half>::value) {                                                                      \
            MULTIPLY_HELD("bf16", width, names, a, b, across, __VA_ARGS__);                                        \
        } else {                                                                                                   \
            MULTIPLY_HELD("f16", width, names, a, b, across, __VA_ARGS__);                                         \
        }                                                                                                          \
    }
#define HELD_PRODUCT(...) HELD_PRODUCT_OF(multiply_held, "1", __VA_ARGS__)
#define HELD_ROWS_PRODUCT(...) HELD_PRODUCT_OF(multiply_rows_held, "0", __VA_ARGS__)

WIDE_8(HALF_PRODUCT, "+f")
WIDE_16(HALF_PRODUCT, "+f")
WIDE_32(HALF_PRODUCT, "+f")
WIDE_64(HALF_PRODUCT, "+f")
WIDE_96(HALF_PRODUCT, "+f")
WIDE_128(HALF_PRODUCT, "+f")
WIDE_160(HALF_PRODUCT, "+f")

HELD_PRODUCT(5, "40", NAMES_20, "%20, %21, %22, %23", "%24", SIXTEEN("+f", sums, 0), FOUR("+f", sums, 4))
HELD_PRODUCT(8, "64", NAMES_32, "%32, %33, %34, %35", "%36", SIXTEEN("+f", sums, 0), SIXTEEN("+f", sums, 4))
HELD_PRODUCT(
    10, "80", NAMES_40, "%40, %41, %42, %43", "%44", SIXTEEN("+f", sums, 0), SIXTEEN("+f", sums, 4), EIGHT("+f", sums, 8)
)
HELD_PRODUCT(16, "128", NAMES_64, "%64, %65, %66, %67", "%68", SIXTY_FOUR("+f", sums, 0))

HELD_ROWS_PRODUCT(1, "8", NAMES_4, "%4, %5, %6, %7", "%8", FOUR("+f", sums, 0))
HELD_ROWS_PRODUCT(2, "16", NAMES_8, "%8, %9, %10, %11", "%12", EIGHT("+f", sums, 0))
HELD_ROWS_PRODUCT(4, "32", NAMES_16, "%16, %17, %18, %19", "%20", SIXTEEN("+f", sums, 0))
HELD_ROWS_PRODUCT(8, "64", NAMES_32, "%32, %33, %34, %35", "%36", SIXTEEN("+f", sums, 0), SIXTEEN("+f", sums, 4))
HELD_ROWS_PRODUCT(
    12, "96", NAMES_48, "%48, %49, %50, %51", "%52", SIXTEEN("+f", sums, 0), SIXTEEN("+f", sums, 4), SIXTEEN("+f", sums, 8)
)
HELD_ROWS_PRODUCT(16, "128", NAMES_64, "%64, %65, %66, %67", "%68", SIXTY_FOUR("+f", sums, 0))
