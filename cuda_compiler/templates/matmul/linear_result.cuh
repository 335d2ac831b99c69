// What follows a product: act(sum + bias) + residual, or with a gate act(gate) · up; or a function of both, where the activation is
// one of two operands.

struct Addends {
    float bias = 0.0f;
    float up_bias = 0.0f;
    float residual = 0.0f;

    __device__ __forceinline__ Addends() {}

    __device__ __forceinline__ Addends(
        const Bias::type *biases, const Residual::type *residuals, index_t row, index_t column
    ) {
        if constexpr (Bias::present) {
            bias = to_float(biases[column * Bias::stride(0)]);
            if (gated) {
                up_bias = to_float(biases[(column + param::n) * Bias::stride(0)]);
            }
        }
        if constexpr (Residual::present) {
            residual = to_float(residuals[row * Residual::stride(0) + column * Residual::stride(1)]);
        }
    }

    template <typename Sum>
    __device__ __forceinline__ Out::type result(Sum sum, Sum up) const {
        if constexpr (activation_operands == 2) {
            return from<Out::type>(activate(sum + bias, up + up_bias) + residual);
        } else {
            float value = activate(sum + bias);
            if (gated) {
                value *= up + up_bias;
            }
            return from<Out::type>(value + residual);
        }
    }
};

__device__ __forceinline__ void finish(
    float sum, float up, const Addends &addends, Out::type *out, index_t row, index_t column
) {
    out[row * Out::stride(0) + column * Out::stride(1)] = addends.result(sum, up);
}
