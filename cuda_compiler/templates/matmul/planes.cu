// out[b, n, s] = act(sum over k of weight[n, k] · x[b, k, s] + bias[n]), for few k and n: a thread has all channels of `pack`
// neighbouring places in registers, so that x is read once and out written once. `ahead`: no call of a run writes weight and bias.

constexpr int inputs = X::size(1);
constexpr int results = Out::size(1);
constexpr int quad = 4;
constexpr int quads = (inputs + quad - 1) / quad;
constexpr index_t packs = Out::size(2) / pack;

WAITING_KERNEL(plane_product) {
    __shared__ __align__(16) float factors[results][quads * quad];
    __shared__ float addends[results];
    if constexpr (!ahead) {
        begin_in_turn();
    }
    for (int i = threadIdx.x; i < results * quads * quad; i += THREADS) {
        const int n = i / (quads * quad);
        const int k = i % (quads * quad);
        factors[n][k] = k < inputs ? to_float(weight[n * Weight::stride(0) + k * Weight::stride(1)]) : 0.0f;
    }
    for (int n = threadIdx.x; n < results; n += THREADS) {
        if constexpr (Bias::present) {
            addends[n] = to_float(bias[n * Bias::stride(0)]);
        } else {
            addends[n] = 0.0f;
        }
    }
    if constexpr (ahead) {
        begin_in_turn();
    }
    __syncthreads();
    const index_t thread = index_t(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= Out::size(0) * packs) {
        return;
    }
    const index_t image = thread / packs;
    const index_t place = thread % packs * pack;
    const X::type *source = x + image * X::stride(0) + place;
    Out::type *target = out + image * Out::stride(0) + place;
    float values[inputs][pack];
#pragma unroll
    for (int k = 0; k < inputs; k++) {
        load_floats(values[k], source + k * X::stride(1));
    }
#pragma unroll
    for (int n = 0; n < results; n++) {
        float sums[pack];
#pragma unroll
        for (int i = 0; i < pack; i++) {
            sums[i] = addends[n];
        }
#pragma unroll
        for (int turn = 0; turn < quads; turn++) {
            const Pack<float, quad> factor = load_pack<quad>(&factors[n][turn * quad]);
#pragma unroll
            for (int j = 0; j < quad && turn * quad + j < inputs; j++) {
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    sums[i] += factor.item[j] * values[turn * quad + j][i];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < pack; i++) {
            sums[i] = activate(sums[i]);
        }
        store_floats(target + n * Out::stride(1), sums);
    }
}
