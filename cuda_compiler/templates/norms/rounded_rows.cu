// Rows rounded to bytes with a scale of their own, for products: as codes and scales, or as the floats that these stand for.
//
// What is rounded is x, or what the calls ahead would have made of it and stored as `Stored`: the result of a product of codes, which
// x is before its scales; its sum with a residual, which is stored too; an element-wise `made(x, other)`; a RMSNorm.

#include "common/held_row.cuh"
#include "common/row_rounding.cuh"

#kernel rounded_rows
template <int N>
__device__ __forceinline__ void round_to_stored(float (&values)[N]) {
    Pack<Stored, N> stored;
    from_floats(stored, values);
    to_floats(values, stored);
}

// values *= the scales of a product's row and of its columns from `first` on.
template <int N>
__device__ __forceinline__ void scale_product(float (&values)[N], float of_row, const float *of_columns) {
    float scales[N];
    get_floats(scales, of_columns);
#pragma unroll
    for (int i = 0; i < N; i++) {
        values[i] *= scales[i] * of_row;
    }
}

struct Row {
    static constexpr index_t count = X::size(1);
    const X::type *x;
    const Other::type *other;
    const Residual::type *residual;
    const Columns::type *columns;
    const Beside::type *beside;
    float scale;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t first) const {
        get_floats(values, x + first);
        if constexpr (Columns::present) {
            scale_product(values, scale, columns + first);
        }
        if constexpr (Residual::present) {
            float added[N];
            get_floats(added, residual + first);
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] += added[i];
            }
        }
        if constexpr (Columns::present && !is_made) {
            round_to_stored(values);
        }
        if constexpr (is_made) {
            float others[N] = {};
            if constexpr (Other::present) {
                get_floats(others, other + first);
                if constexpr (Beside::present) {
                    scale_product(others, scale, beside + first);
                }
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] = made(values[i], others[i]);
            }
            round_to_stored(values);
        }
    }
};

struct StoreTotal {
    const Total::type *total;

    template <int N>
    __device__ __forceinline__ void operator()(const float (&values)[N], index_t first) const {
        if constexpr (Total::present) {
            put_floats(const_cast<Total::type *>(total) + first, values);
        }
    }
};

struct Normalize {
    const Weight::type *weight;
    float scale;

    template <int N>
    __device__ __forceinline__ void operator()(float (&values)[N], index_t first) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] *= scale;
        }
        if constexpr (Weight::present) {
            float gains[N];
            get_floats(gains, weight + first);
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] *= gains[i] + weight_offset;
            }
        }
        round_to_stored(values);
    }
};

// The larger of a and |b|; NaN if either is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
    return result;
#else
    return max_nan(a, fabsf(b));
#endif
}

struct FindLargest {
    float &largest;

    template <int N>
    __device__ __forceinline__ void operator()(const float (&values)[N], index_t) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            largest = larger_magnitude(largest, values[i]);
        }
    }
};

struct PutRounded {
    Out::type *out;
    RowRounding rounding;

    template <int N>
    __device__ __forceinline__ void operator()(const float (&values)[N], index_t first) const {
        put(out + first, values);
    }

    template <int N>
    __device__ __forceinline__ void put(unsigned char *target, const float (&values)[N]) const {
        Pack<unsigned char, N> codes;
        rounding.codes(codes, values);
        store_pack<N>(target, codes);
    }

    template <int N, typename T>
    __device__ __forceinline__ void put(T *target, const float (&values)[N]) const {
        float rounded[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            rounded[i] = rounding.number(values[i]) * rounding.scale;
        }
        put_floats(target, rounded);
    }
};

__device__ __forceinline__ void put_scale(float *scales, index_t row, float scale) { scales[row] = scale; }
__device__ __forceinline__ void put_scale(const float *, index_t, float) {}  // there are none

// Of long rows, threads hold what takes few registers, so that more rows are under way; of others, what takes no conversion.
using Kept = Either<(held_packs > 3), Stored, float>::type;

// A norm changes what threads hold, so they must hold all of the row.
static_assert(!is_normed || X::size(1) % pack == 0 && X::size(1) / pack <= index_t(held_packs) * Place::threads(), "");

KERNEL(rounded_rows) {
    const Place place;
    if (place.row >= X::size(0)) {
        return;
    }
    float of_row = 1.0f;
    if constexpr (Rows::present) {
        of_row = rows[place.row];
    }
    const Row row{
        x + place.row * X::stride(0), other + place.row * Other::stride(0), residual + place.row * Residual::stride(0),
        columns, beside, of_row};
    Held<Row, Kept> held;
    if constexpr (is_normed) {
        float squares = 0.0f;
        held.template each<false>(row, place, AddSquares{squares, 0.0f});
        held.template each<true>(row, place, StoreTotal{total + place.row * Total::stride(0)});
        const float scale = rsqrtf(reduce_sum(squares, place) / float(Row::count) + eps);
        held.template each<true, true>(row, place, Normalize{weight, scale});
    }
    float largest = 0.0f;
    held.template each<is_normed>(row, place, FindLargest{largest});
    const unsigned bits = __float_as_uint(largest) & 0x7fffffffu;  // as integers, those of NaN are the greatest
    const RowRounding rounding(reduce_team<Max>(bits, 0u, place));
    held.template each<true>(row, place, PutRounded{out + place.row * Out::stride(0), rounding});
    if (place.thread() == 0) {
        put_scale(scales, place.row, rounding.scale);
    }
}
