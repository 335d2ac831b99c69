// Phase of a resident kernel that multiplies a few rows of x (up to eight) with a weight [N, K], whose rows arrive through the
// ring: out = act(x · weightᵀ + bias) + residual, or with a gate act(gate) · up. With `base`, base + RMSNorm(x) takes the place of x,
// and is stored as `whole`. With `normed`, x is RMS-normalized. With
// `from_mailbox`, x is read from the mailbox, and with `to_mailbox` the result goes to the next one as well as to memory. A
// block writes the results of `batch` units together. While it goes through a weight that `is_long`, more slots may be in
// flight. What it means: `add_normed`, `rms_norm` and `product` in `resident/twins.py`.
//
// A unit of up to eight weight rows, twice, is one operand of the tensor cores' products, x the other. The columns are divided
// among the warps, 64 at a time. The order of a product's terms does not matter: a lane takes 16 consecutive bytes.
//
// Invariants, besides those of `ring.cuh` (I1 to I5), `prefetch.cuh` (I6, I7) and `grid.cuh` (I8 to I17)
// I18. Batch b leaves its sums in buffer b mod 2. The computing warps of the block wait for each other between writing and
//      reading them. So after the wait of batch b + 1 no warp reads the sums of batch b, and batch b + 2 may overwrite them.
// I19. A phase with `from_mailbox` reads only x from the mailbox, what no step of the kernel writes before it (gains and bias), and
//      a residual or base that is older than the step before. One with `rated_by_mailbox` reads ratings from there, and its x is
//      older. What it writes, the step before does not use (`connect_mailboxes`).

#include "matmul/linear_result.cuh"
#include "resident/product_input.cuh"

constexpr int last_packs = packs % chunk_packs;
constexpr int chunks = packs / chunk_packs;  // whole ones
constexpr int chunk_turns = (chunk_packs / line + warps - 1) / warps;  // lines of a chunk that a warp takes
constexpr int fours = (rows + 3) / 4;  // groups of four rows of x
constexpr int sum_rows = UNIT_ROWS;
// One row of x is received by the warps that multiply its columns, into registers, so no warp waits for another one's part. The
// scale of its norm is a factor of the sums then; what it scales is in bfloat16, whose range is that of float32.
// A warp's lines of a chunk are among those that it receives itself where chunks end with a turn of all warps.
constexpr bool whole_turns = chunks + (last_packs != 0) == 1 || chunk_packs % (line * warps) == 0;
constexpr bool own_columns = rows == 1 && !direct && !Base::present && whole_turns
    && (packs + line * warps - 1) / (line * warps) <= MOST_OWN_TURNS && (!normed || IsBrain<Element>::value);
constexpr bool staged = !direct && !own_columns;
constexpr bool scales_sums = own_columns && normed;
constexpr int x_row = staged ? (packs + line - 1) / line * line * pack : pack;

struct Scratch {
    alignas(16) Element x[staged ? rows : 1][x_row];
    float sums[2][warps][batch][sum_rows][rows];  // I18
    Squares squares;
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES - PREFETCH_QUEUE_BYTES, "the scratch memory is the largest phase's");

// Zeros after rows of x that do not end in whole lines, because the last line is read whole.
__device__ __forceinline__ void pad(Scratch &scratch) {
    constexpr int over = x_row / pack - packs;
    for (int i = this_thread(); i < rows * over; i += THREADS) {
        store_pack<pack>(&scratch.x[i % rows][depth + i / rows * pack], Pack<Element, pack>{});
    }
}

__device__ __forceinline__ void stage_x(Grid &grid, Scratch &scratch, const Input &input) {
    if constexpr (staged) {
        pad(scratch);
        Pack<Element, pack> values[held] = {};
        const Receiver own;
        receive_x<false>(grid, own, scratch.squares, input, values);
#pragma unroll
        for (int i = 0; i < held; i++) {
            if (own.takes(i)) {
                store_pack<pack>(&scratch.x[own.row][own.pack(i) * pack], values[i]);
            }
        }
        sync_block();
    } else if constexpr (direct) {
        back_off();
    }
}

// What a thread takes: its warp's lines, row `group` of a unit, part `part` of a piece.
struct Lane {
    int warp;
    int group;
    int part;

    __device__ __forceinline__ Lane() {
        // With one or two rows there are registers for the addresses of all steps.
        const int thread = rows > 2 ? this_thread() : threadIdx.x;
        warp = thread / WARP;
        group = thread % WARP / 4;
        part = thread % 4;
    }

    // Where the first or the second piece of a line begins, in packs.
    __device__ __forceinline__ int piece(int turn, int which) const {
        return (turn * warps + warp) * line + (which ? 4 + part : part);
    }
};

// The part of x that a warp multiplies with the lines of one chunk: lanes of groups 0 to 3 have the first piece of four rows of
// x, the other lanes the second piece.
template <int packs>
struct Columns {
    static constexpr int lines = (packs + line - 1) / line;
    static constexpr int turns = (lines + warps - 1) / warps;
    Lane lane;
    Words of[turns][fours] = {};  // not left open, or they would keep their registers from step to step

    __device__ __forceinline__ Columns(const Lane &lane) : lane(lane) {}

    __device__ __forceinline__ Columns(const Lane &lane, const Scratch &scratch, int first_pack) : lane(lane) {
        each([&](Words &words, int row, int at, bool wanted) {
            words = load_words(scratch.x[staged ? row : 0] + (first_pack + at) * pack, wanted);
        });
    }

    // `visit(words, row, pack, wanted)` is told which part of x words are.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) {
#pragma unroll
        for (int four = 0; four < fours; four++) {
            const int row = 4 * four + lane.group % 4;
#pragma unroll
            for (int turn = 0; turn < turns; turn++) {
                visit(of[turn][four], row < rows ? row : rows - 1, lane.piece(turn, lane.group / 4), takes(turn));
            }
        }
    }

    __device__ __forceinline__ bool takes(int turn) const {
        return turn < lines / warps || turn * warps + lane.warp < lines;
    }
};

// Where x comes from, if it is not in shared memory.
struct Source {
    const Grid &grid;
    const Element *x;
};

// The same where x is read directly, not from shared memory: begun ahead of its use.
template <int packs>
struct ArrivingColumns : Columns<packs> {
    using Columns<packs>::Columns;
    using Columns<packs>::lane;

    __device__ __forceinline__ void begin(const Source &from, int first_pack) {
        Columns<packs>::each([&](Words &words, int row, int at, bool wanted) {
            wanted = wanted && at < packs;
            if constexpr (from_mailbox) {
                // As messages are stored: 0 for what is missing, and for what is not wanted the zeros' complement.
#pragma unroll
                for (unsigned &word : words.at) {
                    word = wanted ? 0 : 0xffffffffu;
                }
                from.grid.request(words.at, row * depth + (first_pack + at) * pack, wanted);
            } else {
                words = load_words(from.x + row * X::stride(0) + (wanted ? first_pack + at : 0) * pack, wanted);
            }
        });
    }

    __device__ __forceinline__ bool is_incomplete() {
        bool missing = false;
        Columns<packs>::each([&](Words &words, int, int, bool) { missing |= Grid::is_missing(words.at); });
        return missing;
    }

    // The same columns of all rows are written at about the same time, so it is enough to poll for one row.
    __device__ __forceinline__ void wait_for_first_row(const Source &from, int first_pack) const {
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
            const int at = lane.piece(turn, lane.group / 4);
            const bool wanted = Columns<packs>::takes(turn) && at < packs;
            unsigned found[4] = {};
            do {
                from.grid.request(found, (first_pack + at) * pack, wanted);
            } while (wanted && Grid::is_missing(found));
        }
    }

    __device__ __forceinline__ void finish(const Source &from, int first_pack) {
        if constexpr (from_mailbox) {
            while (is_incomplete()) {
                if constexpr (rows > 1) {
                    wait_for_first_row(from, first_pack);
                }
                Columns<packs>::each([&](Words &words, int row, int at, bool) {
                    from.grid.request(words.at, row * depth + (first_pack + at) * pack, Grid::is_missing(words.at));
                });
            }
            Columns<packs>::each([](Words &words, int, int, bool) {
#pragma unroll
                for (unsigned &word : words.at) {
                    word = ~word;
                }
            });
        }
    }
};

// The gains of a lane's columns, and what an RMSNorm does to these, but for its scale.
template <int packs>
struct Gains {
    Pack<Gain::type, pack> of[Columns<packs>::turns] = {};

    __device__ __forceinline__ Gains(const Columns<packs> &columns, const Gain::type *gain) {
        if constexpr (Gain::present) {
#pragma unroll
            for (int turn = 0; turn < Columns<packs>::turns; turn++) {
                const int at = columns.lane.piece(turn, columns.lane.group / 4);
                if (columns.takes(turn) && at < packs) {
                    of[turn] = load_pack<pack>(gain + at * pack);
                }
            }
        }
    }

    // Multiplies the columns with their gains; returns the sum of their squares before that.
    __device__ __forceinline__ float apply(Columns<packs> &columns) const {
        float total = 0.0f;
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
            Pack<Element, pack> values;
            reinterpret_cast<Words &>(values) = columns.of[turn][0];
            float read[pack], factors[pack];
            to_floats(read, values);
            to_floats(factors, of[turn]);
#pragma unroll
            for (int i = 0; i < pack; i++) {
                total = fmaf(read[i], read[i], total);
                if constexpr (Gain::present) {
                    read[i] *= factors[i] + gain_offset;
                }
            }
            store_floats(values.item, read);
            columns.of[turn][0] = reinterpret_cast<const Words &>(values);
        }
        return total;
    }
};

// What a lane keeps of x while the block goes through its units: all of its columns where a row is one chunk, or where it
// receives them itself.
constexpr bool keeps_all = own_columns || (staged && chunks + (last_packs != 0) == 1);

template <int kept>
struct KeptColumns : ArrivingColumns<kept> {
    const Source from;

    __device__ __forceinline__ KeptColumns(const Grid &grid, Scratch &scratch, const Input &input)
        : ArrivingColumns<kept>(Lane()), from{grid, input.x} {
        if constexpr (own_columns) {
            const Gains<kept> gains(*this, input.gain);
            back_off();
            this->begin(from, 0);
            this->finish(from, 0);
            if constexpr (normed) {
                float total = gains.apply(*this);
                total += __shfl_xor_sync(0xffffffffu, total, 1);
                total += __shfl_xor_sync(0xffffffffu, total, 2);
                total += __shfl_xor_sync(0xffffffffu, total, 16);  // of the other piece
                if (this_thread() % WARP == 0) {
                    scratch.squares.of[this_thread() / WARP] = total;
                }
            }
        } else if constexpr (staged) {
            static_cast<Columns<kept> &>(*this) = Columns<kept>(Lane(), scratch, 0);
        }
    }

    // Those of one chunk.
    template <int chunk_packs>
    __device__ __forceinline__ Columns<chunk_packs> of_chunk(int first_turn) const {
        Columns<chunk_packs> part(this->lane);
#pragma unroll
        for (int turn = 0; turn < Columns<chunk_packs>::turns; turn++) {
#pragma unroll
            for (int four = 0; four < fours; four++) {
                part.of[turn][four] = this->of[first_turn + turn][four];
            }
        }
        return part;
    }
};

using HeldColumns = KeptColumns<keeps_all ? packs : line>;

// The norm's scale, where it is a factor of the sums: after a barrier behind `HeldColumns`.
__device__ __forceinline__ float scale_of_sums(const Scratch &scratch) {
    return scales_sums ? scale_of_norm(scratch.squares.of) : 1.0f;
}

// A warp's partial sums of a unit. Rows 0 to 7 of a fragment are the unit's rows with one piece of their lines, rows 8 to 15
// the same rows with the other piece. Each is multiplied with both pieces of four rows of x, of which one is the right one.
struct Sums {
    float of[fours][2][4] = {};  // two of each, so that a product does not wait for the previous one

    __device__ __forceinline__ Sums(int) {}  // all units are alike

    // Adds the products of a slot's rows with their part of x.
    template <int packs>
    __device__ __forceinline__ void add(const char *slot, const Columns<packs> &columns) {
        const Lane &lane = columns.lane;
        slot += (lane.group < unit_rows ? lane.group : unit_rows - 1) * chunk_packs * 16;
        Words weights[Columns<packs>::turns][2];
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // Odd rows begin with the second piece, so that lanes that read at the same time use different banks.
                const int at = lane.piece(turn, i ^ lane.group % 2);
                const bool inside = packs % line == 0 || at < packs;
                weights[turn][i] = load_words(
                    reinterpret_cast<const Half *>(slot + at * 16), inside && columns.takes(turn)
                );
            }
        }
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
            const unsigned(&top)[4] = weights[turn][0].at;
            const unsigned(&bottom)[4] = weights[turn][1].at;
#pragma unroll
            for (int four = 0; four < fours; four++) {
                const unsigned(&x)[4] = columns.of[turn][four].at;
                multiply(of[four][0], top[0], bottom[0], top[1], bottom[1], x[0], x[1]);
                multiply(of[four][1], top[2], bottom[2], top[3], bottom[3], x[2], x[3]);
            }
        }
    }

    __device__ __forceinline__ void store(float (&target)[sum_rows][rows]) const {
        const Lane lane;
        const bool second = lane.part >= 2;  // parts 2 and 3 of the columns are multiplied with the second piece
        const bool bottom = (lane.group % 2 != 0) != second;
#pragma unroll
        for (int four = 0; four < fours; four++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float(&even)[4] = of[four][0];
                const float(&odd)[4] = of[four][1];
                float sum = bottom ? even[2 + i] + odd[2 + i] : even[i] + odd[i];
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                const int row = 4 * four + 2 * lane.part + i;
                if (!second && row < rows) {
                    target[lane.group][row] = sum;
                }
            }
        }
    }
};

// Calls `visit` with the part of x for each chunk of a row.
template <typename Visit>
__device__ __forceinline__ void for_chunks(const Scratch &scratch, const HeldColumns &held_columns, Visit visit) {
    constexpr int rest = last_packs == 0 ? line : last_packs;
    if constexpr (keeps_all && chunks + (last_packs != 0) == 1) {
        visit(held_columns);
    } else if constexpr (keeps_all) {
#pragma unroll
        for (int chunk = 0; chunk < chunks; chunk++) {
            visit(held_columns.template of_chunk<chunk_packs>(chunk * chunk_turns));
        }
        if constexpr (last_packs != 0) {
            visit(held_columns.template of_chunk<rest>(chunks * chunk_turns));
        }
    } else if constexpr (direct) {
        ArrivingColumns<chunk_packs> next(held_columns.lane);
        ArrivingColumns<rest> last(held_columns.lane);
        if constexpr (chunks > 0) {
            next.begin(held_columns.from, 0);
        } else {
            last.begin(held_columns.from, 0);
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            ArrivingColumns<chunk_packs> columns = next;
            if (chunk + 1 < chunks) {
                next.begin(held_columns.from, (chunk + 1) * chunk_packs);
            } else if constexpr (last_packs != 0) {
                last.begin(held_columns.from, packs - last_packs);
            }
            columns.finish(held_columns.from, chunk * chunk_packs);
            visit(columns);
        }
        if constexpr (last_packs != 0) {
            last.finish(held_columns.from, packs - last_packs);
            visit(last);
        }
    } else {
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            visit(Columns<chunk_packs>(held_columns.lane, scratch, chunk * chunk_packs));
        }
        if constexpr (last_packs != 0) {
            visit(Columns<rest>(held_columns.lane, scratch, packs - last_packs));
        }
    }
}

constexpr bool long_columns = direct || (own_columns && chunks > 1);  // much code, so pairs of units and single units share it

#include "resident/product_phase.cuh"
