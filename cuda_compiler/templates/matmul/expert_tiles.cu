// Products of rows with the matrices of the experts that they are routed to, by tensor cores. All rows of an expert are computed by
// the same blocks, `held` at a time, so that its matrix is read once where it has no more. A warp makes 16 columns of the result,
// from all terms or, where `splits` warps of a block share the columns, from some of them.
//
// Where there are fewer rows than experts, a row has blocks of its own, which stop if an earlier row has the same expert. Otherwise an
// expert has, and so has that which stands for none, whose rows are 0.

using Half = X::type;

#include "common/tensor_cores.cuh"
#include "common/stream_pack.cuh"

constexpr int warps = THREADS / WARP;
constexpr int tiles = warps / splits;  // of a block, 16 columns each
constexpr index_t columns = Out::size(1);
constexpr index_t blocks = (columns + 16 * tiles - 1) / (16 * tiles);  // of an expert
constexpr int rows = int(Out::size(0));
constexpr int shared_by = rows / int(X::size(0));
constexpr int listed = smaller(rows, 2048);  // rows that are looked through at a time
constexpr bool by_rows = rows <= int(param::e) && rows == listed;

struct OwnRows {
    int list[listed];
    int count;
};

__device__ __forceinline__ unsigned expert_of(const Experts::type *experts, int row) {
    const unsigned expert = unsigned(experts[Experts::offset(row)]);
    return expert < param::e ? expert : param::e;
}

// Lists those of the rows from `first` on that have this expert, in any order. Returns their number, or 0 if one is before `own`.
__device__ __forceinline__ int list_rows(
    OwnRows &own_rows, const Experts::type *experts, int first, unsigned expert, int own
) {
    __syncthreads();
    if (threadIdx.x == 0) {
        own_rows.count = 0;
    }
    __syncthreads();
    bool has_earlier = false;
    for (int i = threadIdx.x; i < listed; i += THREADS) {
        const int row = first + i;
        if (row < rows && expert_of(experts, row) == expert) {
            own_rows.list[atomicAdd(&own_rows.count, 1)] = row;
            has_earlier |= row < own;
        }
    }
    return __syncthreads_or(has_earlier) ? 0 : own_rows.count;
}

// Adds up the warps' parts of a block's columns and stores those of the first `count` rows of `list`.
__device__ __forceinline__ void store_rows(
    const float (&sums)[warps][held][16], const int *list, int count, unsigned expert, index_t first_column,
    const Bias::type *bias, Out::type *out
) {
    for (int result = threadIdx.x; result < held * 16 * tiles; result += THREADS) {
        const int i = result / (16 * tiles), own = result % (16 * tiles);
        const index_t column = first_column + own;
        if (i >= count || column >= columns) {
            continue;
        }
        float sum = 0.0f;
        if (expert < param::e) {
#pragma unroll
            for (int part = 0; part < splits; part++) {
                sum += sums[own / 16 * splits + part][i][own % 16];
            }
            if constexpr (Bias::present) {
                sum += to_float(bias[index_t(expert) * Bias::stride(0) + column * Bias::stride(1)]);
            }
        }
        out[Out::offset(index_t(list[i]) * columns + column)] = from<Out::type>(sum);
    }
}

#kernel expert_tiles
constexpr int fragments = held / 8;
constexpr int pieces = (int(param::k) + 31) / 32;  // of 32 terms, eight for each of four lanes
constexpr bool is_whole = pieces % (splits * unrolled) == 0 && param::k % 32 == 0;

struct Shared {
    OwnRows rows;
    float sums[warps][held][16];
};

// Some pieces of two rows of the weight and of the rows of x. Lane 4g + p has rows g and g + 8 of the weight and row g of each eight
// rows of x, and of a piece's terms eight from 8p on: in whichever order the tensor cores take them, it is the same for both.
struct Batch {
    Words weights[unrolled][2];
    Words x[unrolled][fragments];

    __device__ __forceinline__ static bool exists(int at) { return is_whole || at < int(param::k); }

    __device__ __forceinline__ void load_weights(const Half *const (&from)[2], int first) {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int at = 32 * (first + i) + 8 * (threadIdx.x % 4);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                weights[i][half] = Words{};
                if (exists(at)) {
                    const auto read = stream_pack<8>(from[half] + at);
                    weights[i][half] = *reinterpret_cast<const Words *>(&read);
                }
            }
        }
    }

    __device__ __forceinline__ void load_x(const Half *const (&from)[fragments], int first) {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int at = 32 * (first + i) + 8 * (threadIdx.x % 4);
#pragma unroll
            for (int fragment = 0; fragment < fragments; fragment++) {
                x[i][fragment] = load_words(from[fragment] + at, from[fragment] != nullptr && exists(at));
            }
        }
    }

    __device__ __forceinline__ void multiply_into(float (&sums)[fragments][4]) const {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const Words &top = weights[i][0], &bottom = weights[i][1];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
#pragma unroll
                for (int fragment = 0; fragment < fragments; fragment++) {
                    const Words &own = x[i][fragment];
                    multiply(
                        sums[fragment], top.at[j], bottom.at[j], top.at[j + 1], bottom.at[j + 1], own.at[j], own.at[j + 1]
                    );
                }
            }
        }
    }
};

KERNEL(expert_tiles) {
    __shared__ Shared shared;
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
    const int job = int(blockIdx.x / blocks);
    const index_t block_column = blockIdx.x % blocks * (16 * tiles);
    const unsigned expert = by_rows ? expert_of(experts, job) : unsigned(job);
    const Half *from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const index_t column = block_column + warp / splits * 16 + g + 8 * half;
        from[half] = weight + index_t(expert < param::e ? expert : 0) * Weight::stride(0)
            + (column < columns ? column : columns - 1) * Weight::stride(1);
    }
    const int begin = warp % splits * unrolled;
    Batch batch;
    if (by_rows) {  // most of these blocks have a row to compute, so they need not know it first
        batch.load_weights(from, begin);
    }
    for (int first = 0; first < rows; first += listed) {
        const int count = list_rows(shared.rows, experts, first, expert, by_rows ? job : 0);
        for (int done = 0; done < count; done += held) {
            const Half *own[fragments];
#pragma unroll
            for (int fragment = 0; fragment < fragments; fragment++) {
                const int i = done + 8 * fragment + g;
                own[fragment] = i < count ? x + index_t(shared.rows.list[i] / shared_by) * X::stride(0) : nullptr;
            }
            float sums[fragments][4] = {};
            if (expert < param::e) {
#pragma unroll 1
                for (int piece = begin; piece < pieces; piece += splits * unrolled) {
                    if (!by_rows || piece > begin || done > 0) {
                        batch.load_weights(from, piece);
                    }
                    batch.load_x(own, piece);
                    batch.multiply_into(sums);
                }
            }
            __syncthreads();
#pragma unroll
            for (int fragment = 0; fragment < fragments; fragment++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    shared.sums[warp][8 * fragment + 2 * p + i % 2][g + i / 2 * 8] = sums[fragment][i];
                }
            }
            __syncthreads();
            store_rows(shared.sums, shared.rows.list + done, count - done, expert, block_column, bias, out);
        }
    }
}

#kernel quantized_expert_tiles
// Codes are multiplied as integers with x in spans: `quantized.cuh` and `resident/quantized_product.cu` say how.

#include "common/quantized.cuh"

constexpr int spans = param::k / span;
constexpr int steps = ((spans + 3) / 4 + splits * unrolled - 1) / (splits * unrolled);  // of a warp
constexpr int staged = 4 * unrolled * splits * steps;  // spans of x, with zeros behind the last
constexpr int group = param::k / param::groups;
constexpr int parts = group < span ? span / group : 1;  // of a span, with a scale each
constexpr int group_spans = group < span ? 1 : group / span;

static_assert(parts == 1 || has_table && Operand::products % parts == 0, "the sum of a span's terms is of no use to its parts");

struct Shared {
    alignas(16) unsigned x[held][staged][span_words];
    SpanScale spans[held][staged];
    OwnRows rows;
    float sums[warps][held][16];
};

__device__ __forceinline__ void stage_row(unsigned (&target)[staged][span_words], SpanScale (&scales)[staged], const Half *row) {
    for (int first = threadIdx.x / WARP * WARP; first < staged * span_packs; first += THREADS) {  // by whole warps
        const int at = first + threadIdx.x % WARP;
        Pack<Half, 8> values = {};
        if (at < spans * span_packs) {
            values = load_pack<8>(row + 8 * at);
        }
        const SpanPack<Half> converted(values);
        if (at < staged * span_packs) {
            converted.store(target[at / span_packs], scales[at / span_packs], at % span_packs);
        }
    }
}

// Codes, scales and offsets of some spans of two rows of the weight. Lane 4g + p has rows g and g + 8, and span p of each four.
struct Batch {
    Words codes[unrolled][2];
    Scales::type scales[unrolled][2][parts];
    OffsetValue shifts[unrolled][2];

    __device__ __forceinline__ void load(
        const unsigned char *data, const Scales::type *all_scales, const Offset::type *offset, const index_t (&own)[2], int first
    ) {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int place = smaller(4 * (first + i) + threadIdx.x % 4, spans - 1);  // behind the last, where x is 0, any will do
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const auto read = stream_pack<16>(data + own[half] * Data::stride(0) + 16 * place);
                codes[i][half] = *reinterpret_cast<const Words *>(&read);
#pragma unroll
                for (int part = 0; part < parts; part++) {
                    scales[i][half][part] = all_scales[own[half] * Scales::stride(0) + place / group_spans * parts + part];
                }
                shifts[i][half] = OffsetValue(0);
                if constexpr (Offset::present) {
                    shifts[i][half] = offset_value(offset[own[half] * Offset::stride(0) + place / group_spans]);
                }
            }
        }
    }

    // totals += products with the first `count` rows of x that are staged.
    __device__ __forceinline__ void multiply_into(float (&totals)[held][2], const Shared &shared, int count, int first) const {
        const int g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int place = 4 * (first + i) + p;
            const Operand operand(codes[i][0], codes[i][1]);
#pragma unroll
            for (int row = 0; row < held; row++) {
                if (row > 0 && row >= count) {
                    break;
                }
                const SpanScale of_x = shared.spans[row][place];
                unsigned plane[lane_words];
                load_plane(plane, shared.x[row][place], g % 2, g / 2 == p);
#pragma unroll
                for (int part = 0; part < parts; part++) {
                    SpanSums sums(of_x);
                    sums.add<parts>(operand, plane, part);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float scale = to_float(scales[i][half][part]);
                        totals[row][half] = sums.scaled(half, of_x, scale, shifts[i][half], totals[row][half]);
                    }
                }
            }
        }
    }
};

KERNEL(quantized_expert_tiles) {
    __shared__ Shared shared;
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
    const int job = int(blockIdx.x / blocks);
    const index_t block_column = blockIdx.x % blocks * (16 * tiles);
    const unsigned expert = by_rows ? expert_of(experts, job) : unsigned(job);
    index_t own[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const index_t column = block_column + warp / splits * 16 + g + 8 * half;
        own[half] = index_t(expert < param::e ? expert : 0) * columns + (column < columns ? column : columns - 1);
    }
    const int begin = warp % splits * unrolled;
    Batch batch;
    if (by_rows) {  // most of these blocks have a row to compute, so they need not know it first
        batch.load(data, scales, offset, own, begin);
    }
    for (int first = 0; first < rows; first += listed) {
        const int count = list_rows(shared.rows, experts, first, expert, by_rows ? job : 0);
        for (int done = 0; done < count; done += held) {
            if (expert < param::e) {
                if (!by_rows || done > 0) {
                    batch.load(data, scales, offset, own, begin);
                }
                for (int i = 0; i < held && done + i < count; i++) {
                    const index_t row = shared.rows.list[done + i] / shared_by;
                    stage_row(shared.x[i], shared.spans[i], x + row * X::stride(0));
                }
            }
            __syncthreads();
            float totals[held][2] = {};
            if (expert < param::e) {
#pragma unroll 1
                for (int step = 0; step < steps; step++) {
                    const int place = begin + step * splits * unrolled;
                    if (step > 0) {
                        batch.load(data, scales, offset, own, place);
                    }
                    batch.multiply_into(totals, shared, count - done, place);
                }
            }
#pragma unroll
            for (int row = 0; row < held; row++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float total = totals[row][half];
                    total += __shfl_xor_sync(0xffffffffu, total, 1);
                    total += __shfl_xor_sync(0xffffffffu, total, 2);
                    if (p == 0) {
                        shared.sums[warp][row][g + 8 * half] = total;
                    }
                }
            }
            __syncthreads();
            store_rows(shared.sums, shared.rows.list + done, count - done, expert, block_column, bias, out);
        }
    }
}
