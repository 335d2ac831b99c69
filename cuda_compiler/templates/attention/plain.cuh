// Attention of one query in float arithmetic, for any dtypes, widths and strides: each warp follows keys of its own, and a block
// has a slice of the result. Expects `slice`, `width`, `value_width` and `Problem`, with `q_row`, `k_row` and `v_row`.

constexpr int warps = THREADS / WARP;
constexpr int slices = (value_width + slice - 1) / slice;
constexpr int parts = (slice + WARP - 1) / WARP;

// Row `row` attends to the first `reach` keys, but for those whose bias(key), which is added to their score, is -inf;
// store(dim, value) takes the result of the block's slice, by blockIdx.x.
#where has_sinks
// beside(largest) is the weight of the row's sink, where the weight of a key is exp(score - largest).
template <index_t q_stride, index_t k_stride, index_t v_stride, typename Bias, typename Store, typename Beside>
__device__ __forceinline__ void attend_plainly(
    const Problem &problem, int row, int reach, Bias bias_of, Store store, Beside beside
) {
#elsewhere
template <index_t q_stride, index_t k_stride, index_t v_stride, typename Bias, typename Store>
__device__ __forceinline__ void attend_plainly(const Problem &problem, int row, int reach, Bias bias_of, Store store) {
#end
    __shared__ float largest_of[warps];
    __shared__ float total_of[warps];
    __shared__ float sums_of[warps][slice];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int first_dim = blockIdx.x % slices * slice;
    const Q::type *query = problem.q_row(row);
    float largest = -FLOAT_MAX;
    float total = 0.0f;
    float sums[parts] = {};
    for (int key = warp; key < reach; key += warps) {
        const float bias = bias_of(key);
        if (bias == -INFINITY_F) {
            continue;
        }
        const K::type *keys_row = problem.k_row(key);
        const V::type *values_row = problem.v_row(key);
        float product = 0.0f;
        for (int dim = lane; dim < width; dim += WARP) {
            product = fmaf(to_float(query[dim * q_stride]), to_float(keys_row[dim * k_stride]), product);
        }
#where soft_cap
        const float score = param::soft_cap * tanhf(warp_sum(product) * (param::scale / param::soft_cap)) + bias;
#elsewhere
        const float score = warp_sum(product) * param::scale + bias;
#end
        const float before = largest;
        largest = fmaxf(largest, score);
        const float shrink = expf(before - largest);
        const float weight = expf(score - largest);
        total = total * shrink + weight;
#pragma unroll
        for (int part = 0; part < parts; part++) {
            const int dim = first_dim + part * WARP + lane;
            if (dim < value_width) {
                const float value = to_float(values_row[dim * v_stride]);
                sums[part] = sums[part] * shrink + weight * value;
            }
        }
    }
#pragma unroll
    for (int part = 0; part < parts; part++) {
        if (part * WARP + lane < slice) {
            sums_of[warp][part * WARP + lane] = sums[part];
        }
    }
    if (lane == 0) {
        largest_of[warp] = largest;
        total_of[warp] = total;
    }
    __syncthreads();
    largest = -FLOAT_MAX;
    total = 0.0f;
#pragma unroll
    for (int other = 0; other < warps; other++) {
        largest = fmaxf(largest, largest_of[other]);
    }
#pragma unroll
    for (int other = 0; other < warps; other++) {
        total += total_of[other] * expf(largest_of[other] - largest);
    }
#where has_sinks
    total += beside(largest);
#end
    for (int dim = threadIdx.x; dim < slice && first_dim + dim < value_width; dim += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            sum += sums_of[other][dim] * expf(largest_of[other] - largest);
        }
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const float value = total == 0.0f ? 0.0f : sum / total;
        store(first_dim + dim, value);
    }
}
