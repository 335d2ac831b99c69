// Rotary embedding, x · cos + rotate_half(x) · sin over the last dimension: a thread takes `pack` pairs of a row.

constexpr int last = X::rank - 1;
constexpr index_t half = X::size(last) / 2;
constexpr index_t quotas = half / pack;  // threads of a row

template <typename V, typename T>
__device__ __forceinline__ void fetch(float (&values)[pack], const T *row, index_t column) {
    if constexpr (pack > 1) {
        load_floats(values, row + column);
    } else {
        values[0] = to_float(row[column * V::stride(last)]);
    }
}

template <typename V, typename T>
__device__ __forceinline__ void put(T *row, index_t column, const float (&values)[pack]) {
    if constexpr (pack > 1) {
        store_floats(row + column, values);
    } else {
        row[column * V::stride(last)] = from<T>(values[0]);
    }
}

// Whose pairs a thread makes: those of a row whose first halves begin at a column.
struct Place {
    index_t row;
    index_t column;
    bool exists;
};

__device__ __forceinline__ Place own_place() {
    const index_t thread = index_t(blockIdx.x) * THREADS + threadIdx.x;
    const index_t row = thread / quotas;
    return {row, thread % quotas * pack, row < X::numel / X::size(last)};
}

struct Pairs {
    float first[pack];
    float second[pack];
};

__device__ __forceinline__ Pairs rotated(
    const X::type *x, const Cos::type *cosines, const Sin::type *sines, const Place &place
) {
    x += leading_offset<X, last>(place.row);
    cosines += leading_offset<Cos, last>(place.row);
    sines += leading_offset<Sin, last>(place.row);
    float a[pack], b[pack], cosine[2][pack], sine[2][pack];
    fetch<X>(a, x, place.column);
    fetch<X>(b, x, place.column + half);
#pragma unroll
    for (int side = 0; side < 2; side++) {
        fetch<Cos>(cosine[side], cosines, place.column + side * half);
        fetch<Sin>(sine[side], sines, place.column + side * half);
    }
    Pairs turned;
#pragma unroll
    for (int i = 0; i < pack; i++) {
        turned.first[i] = a[i] * cosine[0][i] - b[i] * sine[0][i];
        turned.second[i] = b[i] * cosine[1][i] + a[i] * sine[1][i];
    }
    return turned;
}

template <typename V, typename T>
__device__ __forceinline__ void put_pairs(T *row, index_t column, const Pairs &pairs) {
    put<V>(row, column, pairs.first);
    put<V>(row, column + half, pairs.second);
}

#kernel rope_kernel
KERNEL(rope_kernel) {
    const Place place = own_place();
    if (!place.exists) {
        return;
    }
    put_pairs<Out>(out + leading_offset<Out, last>(place.row), place.column, rotated(x, cos, sin, place));
}

#kernel rotary_update
#include "common/move_vector.cuh"

// Rotated keys replace rows of the cache `keys`, and whoever makes a pair of a key brings the value's elements at the
// same places along; all other heads go to `out`.
//
// Where `starts_next`, the kernel behind may start while the one before still runs.
WAITING_KERNEL(rotary_update) {
    if constexpr (starts_next) {
        let_next_kernel_start();
    }
    begin_in_turn();
    const Place place = own_place();
    if (!place.exists) {
        return;
    }
    const index_t token = place.row % X::size(2);
    const index_t head = place.row / X::size(2) % X::size(1) - first_key;
    const index_t image = place.row / X::size(2) / X::size(1);
    if (head >= Keys::size(1)) {
        put_pairs<Out>(out + leading_offset<Out, last>(place.row), place.column, rotated(x, cos, sin, place));
        return;
    }
    const index_t cached = unsigned(index[token * Index::stride(0)]);
    if (!param::checked && cached >= Keys::size(2)) {
        return;
    }
    keys += image * Keys::stride(0) + head * Keys::stride(1) + cached * Keys::stride(2);
    source += image * Source::stride(0) + head * Source::stride(1) + token * Source::stride(2);
    values += image * Values::stride(0) + head * Values::stride(1) + cached * Values::stride(2);
    put_pairs<Keys>(keys, place.column, rotated(x, cos, sin, place));
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const index_t column = place.column + side * half;
        move_vector<pack>(values + column * Values::stride(last), source + column * Source::stride(last));
    }
}
