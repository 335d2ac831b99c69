// The epilogue of integer sums: act(sum · scale + bias + residual), where scale is x's times the channel's.
#include "conv/codes.cuh"

constexpr float NO_BIAS = -0.0f;  // which changes no sum

__device__ __forceinline__ float scaled(float sum, float scale, float bias) {
    return __fadd_rn(__fmul_rn(sum, scale), bias);
}

// What an element of the residual stands for, whose scale counts where it is in bytes.
__device__ __forceinline__ float residual_value(Residual::type value, float scale) {
    if constexpr (IsByte<Residual::type>::value) {
        return __fmul_rn(float(to_int(value) - param::residual_zero_point), scale);
    } else {
        return to_float(value);
    }
}

// Whether the lower limit of codes does what the activation would.
constexpr bool LIMITED =
    CODED && param::activation == param::ActivationKind::relu_ && param::low >= param::out_zero_point;

__device__ __forceinline__ float activated(float y) { return LIMITED ? y : activate(y); }

__device__ __forceinline__ Out::type finished(float y, float inverse) { return stored(activated(y), inverse); }

__device__ __forceinline__ Pack<Out::type, 2> finished(float first, float second, float inverse) {
    return stored(activated(first), activated(second), inverse);
}
