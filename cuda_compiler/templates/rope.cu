// Rotary embedding, x · cos + rotate_half(x) · sin over the last dimension: a thread takes `pack` pairs of a row.

constexpr int last = X::rank - 1;
constexpr index_t half = param::rotary_dim / 2;
constexpr index_t quotas = half / pack;  // threads of a row

template <typename V, typename T>
__device__ __forceinline__ void fetch(float (&values)[pack], const T *row, index_t column) {
    if constexpr (pack > 1) {
        load_floats(values, row + column);
    } else {
        values[0] = to_float(row[column * V::stride(last)]);
    }
}

__device__ __forceinline__ void put(Out::type *row, index_t column, const float (&values)[pack]) {
    if constexpr (pack > 1) {
        store_floats(row + column, values);
    } else {
        row[column * Out::stride(last)] = from<Out::type>(values[0]);
    }
}

#kernel rope_kernel
KERNEL(rope_kernel) {
    const index_t thread = index_t(blockIdx.x) * THREADS + threadIdx.x;
    const index_t row = thread / quotas;
    if (row >= X::numel / (2 * half)) {
        return;
    }
    const index_t first = thread % quotas * pack;
    const index_t second = first + half;
    const Cos::type *cosines = cos + leading_offset<Cos, last>(row);
    const Sin::type *sines = sin + leading_offset<Sin, last>(row);
    x += leading_offset<X, last>(row);
    out += leading_offset<Out, last>(row);
    float a[pack], b[pack], turned[pack], cosine[pack], sine[pack];
    fetch<X>(a, x, first);
    fetch<X>(b, x, second);
    fetch<Cos>(cosine, cosines, first);
    fetch<Sin>(sine, sines, first);
#pragma unroll
    for (int i = 0; i < pack; i++) {
        turned[i] = a[i] * cosine[i] - b[i] * sine[i];
    }
    put(out, first, turned);
    fetch<Cos>(cosine, cosines, second);
    fetch<Sin>(sine, sines, second);
#pragma unroll
    for (int i = 0; i < pack; i++) {
        turned[i] = b[i] * cosine[i] + a[i] * sine[i];
    }
    put(out, second, turned);
}
