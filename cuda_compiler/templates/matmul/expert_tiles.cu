// Products of rows with the matrices of the experts that they are routed to, by tensor cores. All rows of an expert are computed by
// the same blocks, `held` at a time, so that its matrix is read once where it has no more. A warp multiplies a tile of 16 rows of the
// matrix, by all terms or, where `splits` warps of a block share the tile, by some of them. A tile makes 16 columns of the result or,
// where the first half of a matrix gates the second, 8: it has eight rows of each half.
//
// E1. The next kernel may start when the weights have been read. Where it was let start at once, a step took longer: presumably its
//     blocks, which take the places that are free, were two on multiprocessors that were done first and none on others.
//
// Where there are fewer rows than experts, a row has blocks of its own, which stop if an earlier row has the same expert. Otherwise an
// expert has, and so has that which stands for none, whose rows are 0.

using Half = X::type;

#include "common/tensor_cores.cuh"
#include "common/stream_pack.cuh"

constexpr int warps = THREADS / WARP;
#where activation
constexpr bool gated = true;
#elsewhere
constexpr bool gated = false;
__device__ __forceinline__ float activate(float value) { return value; }
#end
constexpr int halves = gated ? 2 : 1;
constexpr int tile_columns = 16 / halves;
constexpr int tiles = warps / splits;  // of a block
constexpr index_t columns = Out::size(1);
constexpr index_t block_columns = tile_columns * tiles;
constexpr index_t blocks = (columns + block_columns - 1) / block_columns;  // of an expert
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

// The row of a matrix that is row `place` of one half of the tile that makes the columns from `first` on. Behind the last column any
// will do.
__device__ __forceinline__ index_t matrix_row(index_t first, int place, int half) {
    const index_t column = first + place + (gated ? 0 : 8 * half);
    return (column < columns ? column : columns - 1) + (gated ? half * columns : 0);
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
    for (int result = threadIdx.x; result < held * int(block_columns); result += THREADS) {
        const int i = result / int(block_columns), own = result % int(block_columns);
        const index_t column = first_column + own;
        if (i >= count || column >= columns) {
            continue;
        }
        float values[halves] = {};
        if (expert < param::e) {
#pragma unroll
            for (int half = 0; half < halves; half++) {
#pragma unroll
                for (int part = 0; part < splits; part++) {
                    values[half] += sums[own / tile_columns * splits + part][i][8 * half + own % tile_columns];
                }
                if constexpr (Bias::present) {
                    const index_t place = (half * columns + column) * Bias::stride(1);
                    values[half] += to_float(bias[index_t(expert) * Bias::stride(0) + place]);
                }
            }
        }
        const float value = gated ? activate(values[0]) * values[halves - 1] : values[0];
        out[Out::offset(index_t(list[i]) * columns + column)] = from<Out::type>(value);
    }
}

#kernel expert_tiles
#include "matmul/expert_batch.cuh"

struct Shared {
    OwnRows rows;
    float sums[warps][held][16];
};

WAITING_KERNEL(expert_tiles) {
    wait_for_inputs();
    __shared__ Shared shared;
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
    const int job = int(blockIdx.x / blocks);
    const index_t block_column = blockIdx.x % blocks * block_columns;
    const unsigned expert = by_rows ? expert_of(experts, job) : unsigned(job);
    const Half *from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        from[half] = weight + index_t(expert < param::e ? expert : 0) * Weight::stride(0)
            + matrix_row(block_column + warp / splits * tile_columns, g, half) * Weight::stride(1);
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
            let_next_kernel_start();  // E1
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

WAITING_KERNEL(quantized_expert_tiles) {
    wait_for_inputs();
    __shared__ Shared shared;
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
    const int job = int(blockIdx.x / blocks);
    const index_t block_column = blockIdx.x % blocks * block_columns;
    const unsigned expert = by_rows ? expert_of(experts, job) : unsigned(job);
    index_t own[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        own[half] = index_t(expert < param::e ? expert : 0) * (halves * columns)
            + matrix_row(block_column + warp / splits * tile_columns, g, half);
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
            let_next_kernel_start();  // E1
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
