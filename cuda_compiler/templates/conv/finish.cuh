// The epilogue of convolutions over channels-last images.

// `PACK` channels side by side are what one 16-byte access of 16-bit elements moves.
constexpr int PACK = 8;

template <int count, typename T>
__device__ __forceinline__ void add(float (&values)[count], const T *data) {
    float addends[count];
    load_floats(addends, data);
#pragma unroll
    for (int i = 0; i < count; i++) {
        values[i] += addends[i];
    }
}

// act(values + bias + residual) in float, rounded once, of channels side by side, which are moved in one access. Where the
// residual comes last, act(values + bias) + residual.
#where epilogue
// Here neither is there: the epilogue has both among its steps.
#end
template <int count>
__device__ __forceinline__ void finish(
    float (&values)[count], const Bias::type *bias, const Residual::type *residual, Out::type *out, unsigned image,
    unsigned channel, unsigned pixel
#where epilogue
    , const Epilogue &epilogue
#end
) {
    if constexpr (Bias::present) {
        add(values, bias + channel * Bias::stride(0));
    }
#where residual_last
#elsewhere
    if constexpr (Residual::present) {
        add(values, residual + place<Residual>(image, channel, pixel));
    }
#end
#pragma unroll
    for (int i = 0; i < count; i++) {
        values[i] = activate(values[i]);
    }
#where residual_last
    add(values, residual + place<Residual>(image, channel, pixel));
#end
#where epilogue
    epilogue.apply(values, image, channel, pixel);
#end
    store_floats(out + place<Out>(image, channel, pixel), values);
}
#where epilogue

#define finish(...) finish(__VA_ARGS__, EPILOGUE)
#end
