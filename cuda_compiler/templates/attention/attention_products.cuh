// Products of 16-bit values by tensor cores, 16 rows at a time, one warp for itself; lane 4g + p holds parts of rows g and
// g + 8.

constexpr int block_rows = 16;

using Half = K::type;

#include "common/tensor_cores.cuh"

// Two values rounded to 16 bits, the first one low.
__device__ __forceinline__ unsigned packed(float first, float second) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    if constexpr (IsBrain<Half>::value) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    }
    return word;
#else
    return unsigned(from<Half>(first).bits) | unsigned(from<Half>(second).bits) << 16;
#endif
}
