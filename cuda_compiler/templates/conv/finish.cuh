// The epilogue of convolutions over channels-last images.

// `PACK` channels side by side are what one 16-byte access of 16-bit elements moves.
constexpr int PACK = 8;

template <int count, typename T>
__device__ __forceinline__ void add(float (&values)[PACK], int first, const T *data) {
    float addends[count];
    load_floats(addends, data);
#pragma unroll
    for (int i = 0; i < count; i++) {
        values[first + i] += addends[i];
    }
}

// act(values + bias + residual) in float, rounded once; `aligned` says that all of them move in whole packs.
__device__ __forceinline__ void finish(
    float (&values)[PACK], const Bias::type *bias, const Residual::type *residual, Out::type *out, unsigned image,
    unsigned channel, unsigned pixel
) {
    constexpr int width = aligned ? PACK : 1;
#pragma unroll
    for (int first = 0; first < PACK; first += width) {
        if (!aligned && channel + first >= Out::size(1)) {
            break;
        }
        if constexpr (Bias::present) {
            add<width>(values, first, bias + (channel + first) * Bias::stride(0));
        }
        if constexpr (Residual::present) {
            add<width>(values, first, residual + place<Residual>(image, channel + first, pixel));
        }
        float results[width];
#pragma unroll
        for (int i = 0; i < width; i++) {
            results[i] = activate(values[first + i]);
        }
        store_floats(out + place<Out>(image, channel + first, pixel), results);
    }
}
