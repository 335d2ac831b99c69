// Products of bytes by a warpgroup: of integers with sums in int, of float8 e4m3 with sums in float. Expects `SIGNED`: whether
// integers of the left side are; those of the right side always are.
#include "common/warpgroup_steps.cuh"

// sums[64 × width] (+)= left[64 × 32] · right[width × 32], in fragments as of 16 × 8 for each warp.
#define BYTES_PRODUCT(...) SHARED_PRODUCT(int, SIGNED, "k32.s32.s8.s8", "k32.s32.u8.s8", "", __VA_ARGS__)
#define FLOAT8_PRODUCT(...) SHARED_PRODUCT(float, true, "k32.f32.e4m3.e4m3", "", ", 1, 1", __VA_ARGS__)

WIDE_64(BYTES_PRODUCT, "+r")
WIDE_96(BYTES_PRODUCT, "+r")
WIDE_128(BYTES_PRODUCT, "+r")
WIDE_160(BYTES_PRODUCT, "+r")
WIDE_192(BYTES_PRODUCT, "+r")
WIDE_256(BYTES_PRODUCT, "+r")

WIDE_128(FLOAT8_PRODUCT, "+f")
WIDE_192(FLOAT8_PRODUCT, "+f")
WIDE_256(FLOAT8_PRODUCT, "+f")
