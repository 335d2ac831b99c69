// The running maximum of some values and the sum of exp(value - maximum), in one pass. The maximum starts finite, so
// that -inf contributes 0 and not NaN; a maximum of +inf makes the sum NaN, as do NaN values.
struct ExpSum {
    float largest = -FLOAT_MAX;
    float total = 0.0f;

    __device__ __forceinline__ void add(float value) {
        rescale(fmaxf(largest, value));
        total += expf(value - largest);
    }

    template <int N>
    __device__ __forceinline__ void add(const float (&values)[N]) {
        float greatest = largest;
#pragma unroll
        for (int i = 0; i < N; i++) {
            greatest = fmaxf(greatest, values[i]);
        }
        rescale(greatest);
#pragma unroll
        for (int i = 0; i < N; i++) {
            total += expf(values[i] - largest);
        }
    }

    __device__ __forceinline__ void merge(ExpSum other) {
        rescale(fmaxf(largest, other.largest));
        other.rescale(largest);
        total += other.total;
    }

    __device__ __forceinline__ void rescale(float reference) {
        total *= expf(largest - reference);
        largest = reference;
    }
};

// Turns values into their softmax, or its logarithm, by their sum.
template <bool logarithm>
struct Share {
    float largest;
    float factor;

    __device__ __forceinline__ explicit Share(const ExpSum &sum)
        : largest(sum.largest), factor(logarithm ? logf(sum.total) : 1.0f / sum.total) {}

    __device__ __forceinline__ float of(float value) const {
        const float distance = value - largest;
        return logarithm ? distance - factor : expf(distance) * factor;
    }
};
