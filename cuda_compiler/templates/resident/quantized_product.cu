// Phase of a resident kernel that multiplies a few rows of x (up to eight) with a weight [N, K] in few bits, whose rows arrive
// through the ring, their scales and offsets beside them. All else is as in `product.cu`, whose invariants hold here too. What
// it means: `product` in `resident/twins.py`, of the dequantized weight; what becomes of x, `span_integers` there.
//
// Integers are multiplied as such, so that nothing but 4-bit codes is taken apart, and these by three instructions for eight.
// x becomes integers of 15 bits and a power of two per *span*, the elements of 16 bytes of codes. An element of at least 1/64
// of its span's largest keeps all 8 bits of a bfloat16; for the others the error is up to 1/16384 of the largest. The integers are
// 256 · high + low, two planes of bytes. Sums over a span are exact; they are scaled, and added up in float32. Codes of
// float8 become 16-bit floats in registers and are multiplied with x as it is.
//
// A tile of 16 weight rows is one operand of the tensor cores' products. The other is a span of x for each of the four lanes of
// a group: its planes are columns of their own, zero for the other lanes' terms. So a lane's sums are those of its own span,
// which may have its own scale, for a row and for the eighth one after it. The columns are divided among the warps, a line of
// 128 bytes at a time, or of 64 where the busiest warp has less to do so. With experts side by side, a row consists of one row of each
// chosen expert, a chunk each.

#include "matmul/linear_result.cuh"
#include "resident/product_input.cuh"
#include "common/quantized.cuh"

constexpr int row_bytes = depth / codes_per_byte;
constexpr int pieces = line_bytes / 64;  // of four spans, one for each lane of a group
constexpr int line_spans = line_bytes / 16;
constexpr int chunks = (row_bytes + chunk_bytes - 1) / chunk_bytes;
constexpr int chunk_lines = (smaller(chunk_bytes, row_bytes) + line_bytes - 1) / line_bytes;
constexpr int chunk_turns = (chunk_lines + warps - 1) / warps;  // lines of a chunk that a warp takes
// Each expert's row of x begins with a line of the first warp.
constexpr int lines = side_by_side ? chunks * chunk_turns * warps : (row_bytes + line_bytes - 1) / line_bytes;
constexpr int turns = (lines + warps - 1) / warps;
static_assert(
    chunks == 1 || side_by_side || chunk_bytes % (line_bytes * warps) == 0, "all warps take as many lines of a chunk"
);
constexpr int run_rows = interleaved ? unit_rows : own_rows;  // of the weight, with which a unit begins
constexpr int tiles = (unit_rows + 15) / 16;
constexpr int sum_rows = unit_rows;
constexpr int groups = param::groups;
constexpr int group = depth / groups;
constexpr int chunk_groups = groups == 1 || chunks == 1 ? groups : chunk_bytes * codes_per_byte / group;

struct Scratch {
    alignas(16) unsigned x[rows][lines * line_spans][span_words];
    SpanScale spans[rows][lines * line_spans];
    float sums[2][warps][batch][sum_rows][rows];  // I18
    Squares squares;
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES - PREFETCH_QUEUE_BYTES, "the scratch memory is the largest phase's");

// One row of x is received by the warps that multiply its columns, so no warp waits for another one's part. The scale of its norm is
// a factor of the sums then; what it scales is in bfloat16, whose range is that of float32.
constexpr bool own_columns = rows == 1 && (!normed || IsBrain<Element>::value);
constexpr bool scales_sums = own_columns && normed;
constexpr int line_packs = line_spans * span_packs;
constexpr int chunk_places = chunk_turns * warps * line_packs;
constexpr int chunk_packs = packs / chunks;
static_assert(!side_by_side || own_columns, "rows of experts are received by the warps that multiply them");

// The packs of the lines that a warp takes, a lane's.
struct OwnReceiver {
    static constexpr int row = 0;
    static constexpr int held = (turns * line_packs + WARP - 1) / WARP;

    // Where a pack is kept.
    __device__ __forceinline__ int place(int i) const {
        const int thread = this_thread();
        const int number = i * WARP + thread % WARP;
        return (number / line_packs * warps + thread / WARP) * line_packs + number % line_packs;
    }
    __device__ __forceinline__ int pack(int i) const {
        const int own = place(i);
        if constexpr (side_by_side) {
            const int chunk = own / chunk_places;
            const int inside = own - chunk * chunk_places;
            return inside < chunk_packs ? chunk * chunk_packs + inside : packs;
        }
        return own;
    }
    __device__ __forceinline__ bool takes(int i) const { return pack(i) < packs; }
    __device__ __forceinline__ bool is_in_lines(int i) const { return place(i) < lines * line_packs; }
};

__device__ __forceinline__ float scale_of_sums(const Scratch &scratch) {
    return scales_sums ? scale_of_norm(scratch.squares.of) : 1.0f;
}

__device__ __forceinline__ void stage_x(Grid &grid, Scratch &scratch, const Input &input) {
    if constexpr (own_columns) {
        const OwnReceiver own;
        Pack<Element, pack> values[OwnReceiver::held] = {};
        receive_x<scales_sums>(grid, own, scratch.squares, input, values);
#pragma unroll
        for (int i = 0; i < OwnReceiver::held; i++) {
            const int at = own.place(i);
            const SpanPack<Element> made(values[i]);
            if (own.is_in_lines(i)) {  // the last line is read whole
                made.store(scratch.x[0][at / span_packs], scratch.spans[0][at / span_packs], at % span_packs);
            }
        }
        __syncwarp();
        return;
    }
    // The last line is read whole.
    constexpr int spans = depth / span;
    const int thread = this_thread();
    for (int i = thread; i < rows * (lines * line_spans - spans); i += THREADS) {
        const int place = spans + i / rows;
        scratch.spans[i % rows][place] = SpanScale{};
#pragma unroll
        for (int word = 0; word < span_words; word++) {
            scratch.x[i % rows][place][word] = 0;
        }
    }
    Pack<Element, pack> values[held] = {};
    const Receiver own;
    receive_x<false>(grid, own, scratch.squares, input, values);
#pragma unroll
    for (int i = 0; i < held; i++) {
        const int at = own.pack(i);
        const int place = at / span_packs;
        const SpanPack<Element> made(values[i]);
        if (own.takes(i)) {
            made.store(scratch.x[own.row][place], scratch.spans[own.row][place], at % span_packs);
        }
    }
    sync_block();
}

// What a thread takes: its warp's lines, rows `row` and `row` + 8 of a tile, part `part` of four spans.
struct Lane {
    int warp;
    int row;
    int part;

    __device__ __forceinline__ Lane() {
        const unsigned thread = this_thread();
        warp = thread / WARP;
        row = thread % WARP / 4;
        part = thread % 4;
    }

    // Whether there is a line for a turn of a chunk that begins with turn `first` of the row. Experts' rows end with their chunks.
    __device__ __forceinline__ bool takes(int first, int turn) const {
        constexpr int end = side_by_side ? chunk_lines : lines;
        const int own = side_by_side ? turn : first + turn;
        return own < end / warps || own * warps + warp < end;
    }
};

// A lane's operand: a plane of a span, or nothing where the span is another lane's; and the scale of its own span.
struct Columns {
    unsigned at[lane_words] = {};  // not left open, or they would keep their registers from step to step
    SpanScale own = {};

    Columns() = default;

    __device__ __forceinline__ Columns(const Scratch &scratch, const Lane &lane, int row, int turn, int piece) {
        const int place = (turn * warps + lane.warp) * line_spans + piece * 4 + lane.part;
        const int column = lane.row;
        own = scratch.spans[row][place];
        load_plane(at, scratch.x[row][place], column % 2, column / 2 == lane.part);
    }
};

// Where there are registers for a lane's part of x, it stays there instead of being read again for every unit.
constexpr bool x_in_registers = rows == 1 && chunks == 1 && pieces * turns * (lane_words + 2) <= 110;
constexpr int held_turns = x_in_registers ? turns : 1;
constexpr int chunk_columns = rows == 1 ? chunk_turns : 1;

template <int count>
struct SomeTurns {
    Columns of[count][pieces];

    __device__ __forceinline__ SomeTurns(const Scratch &scratch, const Lane &lane, int first) {
#pragma unroll
        for (int turn = 0; turn < count; turn++) {
            if (lane.takes(first, turn)) {
#pragma unroll
                for (int piece = 0; piece < pieces; piece++) {
                    of[turn][piece] = Columns(scratch, lane, 0, first + turn, piece);
                }
            }
        }
    }
};

struct HeldColumns {
    Lane lane;
    SomeTurns<held_turns> turns;

    __device__ __forceinline__ HeldColumns(const Grid &, Scratch &scratch, const Input &) : turns(scratch, lane, 0) {}
};

// The part of x that a warp multiplies with the lines of one chunk.
template <int count>
struct ChunkColumns {
    const Scratch &scratch;
    const Lane &lane;
    const SomeTurns<count> &held;  // of one row of x
    int chunk;

    __device__ __forceinline__ bool takes(int turn) const {
        return chunk * chunk_turns + turn < turns && lane.takes(chunk * chunk_turns, turn);
    }

    __device__ __forceinline__ Columns operator()(int row, int turn, int piece) const {
        if constexpr (rows == 1) {
            return held.of[turn][piece];
        } else {
            return Columns(scratch, lane, row, chunk * chunk_turns + turn, piece);
        }
    }
};

// Where a weight row's part of a side begins, in a slot.
template <int side_row, int side_chunk, int side_place, int side_stride>
struct SideRows {
    __device__ __forceinline__ static int place(int row, int unit, int chunk) {
        const int copy = row / side_rows;
        const int first = copy * side_rows;
        const bool partner = first >= run_rows;
        constexpr bool partner_alike = !gated || param::n * side_row % 16 == 0;
        constexpr bool aligned = side_rows * side_row % 16 == 0 && side_chunk % 16 == 0 && partner_alike;
        unsigned before = unit * run_rows * side_row + chunk * side_chunk;  // is the same for all lanes
        if constexpr (side_rows != run_rows || !partner_alike) {
            before += (first + (partner ? int(param::n) - own_rows : 0)) * side_row;
        }
        const unsigned slack = aligned ? 0 : before % 16;
        const int skipped = side_chunk == 0 && groups > 1 && !side_by_side ? chunk * chunk_groups * (side_row / groups) : 0;
        return side_place + copy * side_stride + slack + (row - first) * side_row + skipped;
    }
};

// A warp's partial sums of a unit: a lane's are those of rows r and r + 8 of each tile.
struct Sums {
    float of[tiles][2][rows] = {};
    int unit;

    __device__ __forceinline__ Sums(int unit) : unit(unit) {}

    // Adds the products of a slot's rows with their part of x.
    template <int count>
    __device__ __forceinline__ void add(const char *slot, const ChunkColumns<count> &columns) {
        using ScaleRows = SideRows<scale_row, scale_chunk, scale_place, scale_stride>;
        using OffsetRows = SideRows<offset_row, offset_chunk, offset_place, offset_stride>;
        const Lane &lane = columns.lane;
        int row[tiles][2];
        const char *scales[tiles][2];
        const char *offsets[tiles][2];
#pragma unroll
        for (int i = 0; i < 2 * tiles; i++) {
            const int wanted = i * 8 + lane.row;
            int &own = row[i / 2][i % 2];
            own = wanted < unit_rows ? wanted : unit_rows - 1;
            scales[i / 2][i % 2] = slot + ScaleRows::place(own, unit, columns.chunk);
            offsets[i / 2][i % 2] = Offset::present ? slot + OffsetRows::place(own, unit, columns.chunk) : nullptr;
        }
#pragma unroll
        for (int turn = 0; turn < chunk_turns; turn++) {
            if (!columns.takes(turn)) {
                continue;
            }
            const int at = (turn * warps + lane.warp) * line_bytes + lane.part * 16;
#pragma unroll
            for (int tile = 0; tile < tiles; tile++) {
                Words read[2][pieces];  // half, piece
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const char *codes = slot + row[tile][half] * chunk_bytes + at;
                    if constexpr (pieces == 1) {
                        read[half][0] = *reinterpret_cast<const Words *>(codes);
                        continue;
                    }
                    // Where rows begin in the same bank, odd ones begin with the second piece, so that lanes that read at the
                    // same time use different banks.
                    const int odd = chunk_bytes % 128 == 0 ? row[tile][half] % 2 : 0;
                    const Words first = *reinterpret_cast<const Words *>(codes + odd * 64);
                    const Words second = *reinterpret_cast<const Words *>(codes + (odd ^ 1) * 64);
#pragma unroll
                    for (int word = 0; word < 4; word++) {
                        read[half][0].at[word] = odd ? second.at[word] : first.at[word];
                        read[half][pieces - 1].at[word] = odd ? first.at[word] : second.at[word];
                    }
                }
#pragma unroll
                for (int piece = 0; piece < pieces; piece++) {
                    const Operand operand(read[0][piece], read[1][piece]);
                    int place = ((turn * warps + lane.warp) * line_spans + piece * 4 + lane.part) * span / group;
                    if constexpr (groups == 1) {
                        place = 0;
                    } else if constexpr (side_by_side) {
                        place = smaller(place, chunk_groups - 1);
                    } else if constexpr (row_bytes % line_bytes != 0) {
                        place = smaller(place, groups - 1 - columns.chunk * chunk_groups);
                    }
                    float scale[2];
                    OffsetValue offset[2] = {};
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        scale[half] = to_float(reinterpret_cast<const Scales::type *>(scales[tile][half])[place]);
                        if constexpr (Offset::present) {
                            offset[half] = offset_value(reinterpret_cast<const Offset::type *>(offsets[tile][half])[place]);
                        }
                    }
#pragma unroll
                    for (int x_row = 0; x_row < rows; x_row++) {
                        const Columns x = columns(x_row, turn, piece);
                        SpanSums sums(x.own);
                        sums.add(operand, x.at);
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float &total = of[tile][half][x_row];
                            total = sums.scaled(half, x.own, scale[half], offset[half], total);
                        }
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void store(float (&target)[sum_rows][rows]) const {
        const int thread = this_thread() % WARP;
        const int group = thread / 4;
#pragma unroll
        for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = tile * 16 + half * 8 + group;
#pragma unroll
                for (int x_row = 0; x_row < rows; x_row++) {
                    float sum = of[tile][half][x_row];
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    if (thread % 4 == 0 && row < unit_rows) {
                        target[row][x_row] = sum;
                    }
                }
            }
        }
    }
};

// Calls `visit` with the part of x for each chunk of a row.
template <typename Visit>
__device__ __forceinline__ void for_chunks(const Scratch &scratch, const HeldColumns &held, Visit visit) {
    if constexpr (x_in_registers) {
        visit(ChunkColumns<held_turns>{scratch, held.lane, held.turns, 0});
    } else {
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            const SomeTurns<chunk_columns> own(scratch, held.lane, chunk * chunk_turns);
            visit(ChunkColumns<chunk_columns>{scratch, held.lane, own, chunk});
        }
    }
}

constexpr bool long_columns = false;

#include "resident/product_phase.cuh"
