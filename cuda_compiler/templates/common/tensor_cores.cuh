// Products of 16-bit values by tensor cores. Expects their type as `Half`.
#include "common/copies.cuh"

template <typename T>
struct IsBrain { static constexpr bool value = false; };
template <>
struct IsBrain<bf16> { static constexpr bool value = true; };

// 8 elements; zeros where they are outside.
__device__ __forceinline__ Words load_words(const Half *data, bool inside) {
    return inside ? *reinterpret_cast<const Words *>(data) : Words{};
}

__device__ __forceinline__ Half low_half(unsigned word) { return Half{(unsigned short)(word & 0xffffu)}; }
__device__ __forceinline__ Half high_half(unsigned word) { return Half{(unsigned short)(word >> 16)}; }

// a · b + c of two pairs of 16-bit floats, each rounded once; 0 on GPUs that cannot.
__device__ __forceinline__ unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
    unsigned result = 0;
#if __CUDA_ARCH__ >= 800
    if constexpr (IsBrain<Half>::value) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    }
#endif
    return result;
}

// x *= gains, eight elements, each rounded once.
__device__ __forceinline__ void multiply_all(Words &x, const Words &gains) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x.at[i] = multiply_add_pairs(x.at[i], gains.at[i], 0x80008000u);  // -0, which keeps zeros' signs
    }
}

// Of eight bfloat16 values.
__device__ __forceinline__ float sum_of_squares(const Words &x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float low = __uint_as_float(x.at[i] << 16);
        const float high = __uint_as_float(x.at[i] & 0xffff0000u);
        sum = fmaf(low, low, fmaf(high, high, sum));
    }
    return sum;
}

// sums[16 × 8] += a[16 × 16] · b[16 × 8], in the fragments of mma.m16n8k16.
__device__ __forceinline__ void multiply(
    float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1
) {
#if __CUDA_ARCH__ >= 800
    if constexpr (IsBrain<Half>::value) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#else
    // GPUs before Ampere: the same sums from the same fragments, which the lanes hand to each other.
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int part = 0; part < 4; part++) {
        const int row_lane = (lane & ~3) | part;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned top = __shfl_sync(0xffffffffu, half ? a2 : a0, row_lane);
            const unsigned bottom = __shfl_sync(0xffffffffu, half ? a3 : a1, row_lane);
#pragma unroll
            for (int column = 0; column < 2; column++) {
                const int column_lane = (lane % 4 * 2 + column) * 4 + part;
                const unsigned right = __shfl_sync(0xffffffffu, half ? b1 : b0, column_lane);
                const float low = to_float(low_half(right));
                const float high = to_float(high_half(right));
                sums[column] = fmaf(to_float(low_half(top)), low, sums[column]);
                sums[column] = fmaf(to_float(high_half(top)), high, sums[column]);
                sums[2 + column] = fmaf(to_float(low_half(bottom)), low, sums[2 + column]);
                sums[2 + column] = fmaf(to_float(high_half(bottom)), high, sums[2 + column]);
            }
        }
    }
#endif
}
