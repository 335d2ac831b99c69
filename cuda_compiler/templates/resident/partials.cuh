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

// This block's share of the results, four dimensions at a time: neighbouring lanes read the splits' tagged sums for them (I16)
// and combine these with each other.
__device__ __forceinline__ void combine_partials(const Grid &grid, int *partials, Out::type *out) {
    constexpr int lanes = lanes_for(splits);
    constexpr int own = (splits + lanes - 1) / lanes;
    constexpr int pieces = value_width / 4;
    constexpr int results = all_partials / splits * pieces;
    const int lane = threadIdx.x % lanes;
    for (int first = 0; first < results; first += THREADS / lanes * gridDim.x) {
        const int number = first + threadIdx.x / lanes * gridDim.x + blockIdx.x;
        const int row = number / pieces;
        const int dim = number % pieces * 4;
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
        float greatest = -FLOAT_MAX;
#pragma unroll
        for (int i = 0; i < own; i++) {
            greatest = fmaxf(greatest, largest[i]);
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
        }
        float whole = 0.0f;
        float result[4] = {};
#pragma unroll
        for (int i = 0; i < own; i++) {
            const float weight = total[i] == 0.0f ? 0.0f : expf(largest[i] - greatest);
            whole = fmaf(weight, total[i], whole);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                result[j] = total[i] == 0.0f ? result[j] : fmaf(weight, sums[i][j], result[j]);
            }
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            whole += __shfl_xor_sync(0xffffffffu, whole, step);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                result[j] += __shfl_xor_sync(0xffffffffu, result[j], step);
            }
        }
        if (lane != 0 || number >= results) {
            continue;
        }
        const index_t place = result_place(row / rows, row % rows);
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const float share = whole == 0.0f ? 0.0f : 1.0f / whole;
        Out::type values[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            values[j] = from<Out::type>(result[j] * share);
        }
        if constexpr (to_mailbox) {
            grid.send(place + dim, values);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out[place + (dim + j) * Out::stride(Out::rank - 1)] = values[j];
        }
    }
}
