// Sums of some consecutive rows each, every one times its weight, and what is added to them; a thread per pack of a sum.

constexpr index_t width = Out::size(1);
constexpr int choices = int(Weights::size(1));

#kernel weighted_sum
KERNEL(weighted_sum) {
    const index_t number = index_t(blockIdx.x) * THREADS + threadIdx.x;
    const index_t row = number / (width / pack), column = number % (width / pack) * pack;
    if (row >= Out::size(0)) {
        return;
    }
    float sums[pack] = {};
#pragma unroll
    for (int choice = 0; choice < choices; choice++) {
        const float weight = to_float(weights[row * Weights::stride(0) + choice * Weights::stride(1)]);
        float values[pack];
        load_floats(values, x + (row * choices + choice) * X::stride(0) + column);
#pragma unroll
        for (int i = 0; i < pack; i++) {
            sums[i] = fmaf(weight, values[i], sums[i]);
        }
    }
    if constexpr (Residual::present) {
        float values[pack];
        load_floats(values, residual + row * width + column);
#pragma unroll
        for (int i = 0; i < pack; i++) {
            sums[i] += values[i];
        }
    }
    store_floats(out + row * width + column, sums);
}
