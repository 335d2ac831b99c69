// How the splits of attention in a resident kernel put together what they found. Expects the number of `problems`, and
// `number_of(problem)` and `result_place(number, row)`, where the result of a problem's row begins.

// The tagged sums: a split's maximum and total for a row, [row of a problem, split, 2], and after all of these its weighted sums
// of values, [row of a problem, split, dimension].
constexpr int all_partials = problems * rows * splits;

__device__ __forceinline__ unsigned long long *stats_of(int *partials, int part) {
    return reinterpret_cast<unsigned long long *>(partials) + 2 * part;
}

__device__ __forceinline__ unsigned long long *sums_of(int *partials, int part, int dim) {
    return reinterpret_cast<unsigned long long *>(partials) + 2 * all_partials + part * value_width + dim;
}

struct SendPartials {
    const Grid &grid;
    int *partials;
    int split;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float largest, float total, const float (&found)[4]
    ) const {
        const int part = (number_of(problem) * rows + row) * splits + split;
        if (total != 0.0f) {
            grid.send_tagged(sums_of(partials, part, dim), found[0], found[1]);
            grid.send_tagged(sums_of(partials, part, dim + 2), found[2], found[3]);
        }
        if (dim == 0) {
            grid.send_tagged(stats_of(partials, part), largest, total);
        }
    }
};

// The greatest number among neighbouring lanes of a warp, `lanes` of them, for all of these.
template <int lanes>
__device__ __forceinline__ float greatest_of(float value) {
#if __CUDA_ARCH__ >= 800
    if constexpr (lanes == WARP) {
        // One instruction for integers, whose order is that of the floats once those below 0 are turned around.
        const auto turned = [](int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
        return __int_as_float(turned(__reduce_max_sync(0xffffffffu, turned(__float_as_int(value)))));
    }
#endif
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
}

// The number of a lane's quarter among `lanes` neighbouring ones.
template <int lanes>
__device__ __forceinline__ int own_quarter(int lane) {
    return (lane & lanes / 2 ? 2 : 0) + (lane & lanes / 4 ? 1 : 0);
}

// One of four sums over `lanes` neighbouring lanes, that of the lane's quarter: an exchange halves what a lane keeps.
template <int lanes>
__device__ __forceinline__ float sum_of_own_quarter(int lane, const float (&values)[4]) {
    const bool upper = lane & lanes / 2;
    const bool odd = lane & lanes / 4;
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? values[i] : values[2 + i], lanes / 2);
        pair[i] = (upper ? values[2 + i] : values[i]) + other;
    }
    float sum = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], lanes / 4);
#pragma unroll
    for (int step = lanes / 8; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    return sum;
}

// This block's share of the results, four dimensions at a time: neighbouring lanes read the splits' tagged sums for them (I16)
// and combine these with each other.
#where has_sinks
__device__ __forceinline__ void combine_partials(
    const Grid &grid, int *partials, const Sinks::type *sinks, Out::type *out
) {
#elsewhere
__device__ __forceinline__ void combine_partials(const Grid &grid, int *partials, Out::type *out) {
#end
    constexpr int lanes = larger(4, lanes_for(splits));
    constexpr int own = (splits + lanes - 1) / lanes;
    constexpr int pieces = value_width / 4;
    constexpr int results = all_partials / splits * pieces;
    const int lane = threadIdx.x % lanes;
    for (int first = 0; first < results; first += THREADS / lanes * gridDim.x) {
        const int number = first + threadIdx.x / lanes * gridDim.x + blockIdx.x;
        const int row = number / pieces;
        const int dim = number % pieces * 4;
        const int own_dim = dim + own_quarter<lanes>(lane);
        const index_t place = result_place(row / rows, row % rows);
        float largest[own], total[own], sums[own][4];
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (int i = 0; i < own; i++) {
                const int split = i * lanes + lane;
                largest[i] = -FLOAT_MAX;
                total[i] = 0.0f;
                if (number >= results || split >= splits) {
                    continue;
                }
                const int part = row * splits + split;
                const bool known = grid.receive_tagged(stats_of(partials, part), largest[i], total[i]);
                const bool low = grid.receive_tagged(sums_of(partials, part, dim), sums[i][0], sums[i][1]);
                const bool high = grid.receive_tagged(sums_of(partials, part, dim + 2), sums[i][2], sums[i][3]);
                // A split without keys sends no sums.
                complete &= known && (total[i] == 0.0f || (low && high));
            }
        } while (!complete);
        float greatest = largest[0];
#pragma unroll
        for (int i = 1; i < own; i++) {
            greatest = fmaxf(greatest, largest[i]);
        }
        greatest = greatest_of<lanes>(greatest);
        float whole = 0.0f;
        float result[4] = {};
#pragma unroll
        for (int i = 0; i < own; i++) {
            const float weight = total[i] == 0.0f ? 0.0f : State::exponential(largest[i] - greatest);
            whole = fmaf(weight, total[i], whole);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                result[j] = total[i] == 0.0f ? result[j] : fmaf(weight, sums[i][j], result[j]);
            }
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            whole += __shfl_xor_sync(0xffffffffu, whole, step);
        }
        const float sum = sum_of_own_quarter<lanes>(lane, result);
        if (lane % (lanes / 4) != 0 || number >= results) {
            continue;
        }
#where has_sinks
        whole += sink_weight(sinks, head_of(row / rows, row % rows), greatest);
#end
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const Out::type value = from<Out::type>(whole == 0.0f ? 0.0f : __fdividef(sum, whole));
        if constexpr (to_mailbox) {
            grid.send(place + own_dim, value);
        }
        out[place + own_dim * Out::stride(Out::rank - 1)] = value;
    }
}
