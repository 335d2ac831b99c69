// The ring in shared memory through which a product by warpgroups gets its operands, and how x is copied to it. Expects `Stage`, with
// x of a step, `beyond`, the rows behind the ring that are read in vain, and `linear_wgmma_layout.cuh`.

struct Memory {
    Stage ring[stages];
    Half spare[beyond + 1][slab_width];
    float squares[held_rows];  // of the block's terms
    Barrier filled[stages];
    Barrier free[stages];
};

static_assert(sizeof(float) * int(param::m) * sums_stride <= sizeof(Memory::ring), "");
static_assert(sizeof(Memory) <= (shared + 1023) / 1024 * 1024, "");  // with what aligns its end

using Turn = RingTurn<stages>;

// What one of two warps' threads copies of `rows` rows: always the same piece, of every eighth row of each slab.
template <int rows>
struct Copier {
    static constexpr int count = rows / 8;

    int row;  // the first one
    int piece;
    unsigned offsets[count];  // of the first step's pieces

    // `source(row)` is the offset of a row.
    template <typename Source>
    __device__ __forceinline__ Copier(int thread, const Source &source) : row(thread / pieces), piece(thread % pieces) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            offsets[i] = unsigned(source(row + 8 * i)) + piece * 8;
        }
    }

    __device__ __forceinline__ bool has_terms(int step, int slab) const {
        return param::k % step_terms == 0 || step * step_terms + slab * slab_width + piece * 8 < int(param::k);
    }

    __device__ __forceinline__ Half *place(Half (&matrix)[rows][slab_width], int i) const {
        return &matrix[row + 8 * i][(piece ^ row) * 8];
    }

    __device__ __forceinline__ void copy(Half (&target)[slabs][rows][slab_width], const Half *source, int step) const {
        const Half *from = source + step * step_terms;
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int slab = 0; slab < slabs; slab++) {
                const bool inside = has_terms(step, slab);
                copy_words(place(target[slab], i), inside ? from + offsets[i] + slab * slab_width : source, inside);
            }
        }
    }

    // Hands over all steps, each as soon as what `copy(stage, step)` copies is there.
    template <typename Copy>
    __device__ __forceinline__ static void copy_all(Memory &memory, int steps, const Copy &copy) {
        Turn turn;
        for (int step = 0; step < steps; step++) {
            memory.free[turn.stage].wait(turn.parity ^ 1);
            copy(memory.ring[turn.stage], step);
            memory.filled[turn.stage].arrive_after_copies();  // W1
            turn.advance();
        }
    }

    // Hands over all steps of x times the gains. Finds the rows' sums of squares, too.
    __device__ __forceinline__ void copy_normed(
        Memory &memory, const Half *x, const Half *gain, int first_step, int steps
    ) const {
        float squares[count] = {};
        const auto load_gains = [&](Words (&gains)[slabs], int step) {
#pragma unroll
            for (int slab = 0; slab < slabs; slab++) {
                const bool inside = step < steps && has_terms(first_step + step, slab);
                const int term = (first_step + step) * step_terms + slab * slab_width + piece * 8;
                gains[slab] = load_words(gain + (inside ? term : 0), inside);
            }
        };
        Words gains[slabs];
        load_gains(gains, 0);
        Turn copied;
        Turn ready;
        for (int step = 0; step < steps + behind; step++) {
            if (step < steps) {
                memory.free[copied.stage].wait(copied.parity ^ 1);
                copy(memory.ring[copied.stage].x, x, first_step + step);
                copied.advance();
            }
            end_of_copies();
            if (step >= behind) {
                wait_for_copies<behind>();
                multiply_by_gains(memory.ring[ready.stage], gains, squares);
                load_gains(gains, step - behind + 1);
                show_to_products();
                memory.filled[ready.stage].arrive();  // W1
                ready.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int lanes = 1; lanes < pieces; lanes *= 2) {
                squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], lanes);
            }
            if (piece == 0) {
                memory.squares[row + 8 * i] = squares[i];
            }
        }
    }

    __device__ __forceinline__ void multiply_by_gains(
        Stage &stage, const Words (&gains)[slabs], float (&squares)[count]
    ) const {
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int slab = 0; slab < slabs; slab++) {
                Words &own = *reinterpret_cast<Words *>(place(stage.x[slab], i));
                Words values = own;
                squares[i] += sum_of_squares(values);
                multiply_all(values, gains[slab]);
                own = values;
            }
        }
    }
};

// Copies all of the block's steps.
__device__ __forceinline__ void copy_x(
    Memory &memory, const X::type *x, const Gain::type *gain, int thread, int first_step, int steps
) {
    const Copier<held_rows> copier(thread, [&](int row) {
        return smaller(row, int(param::m) - 1) * X::stride(0);
    });
    if constexpr (normed) {
        copier.copy_normed(memory, x, reinterpret_cast<const Half *>(gain), first_step, steps);
    } else {
        copier.copy_all(memory, steps, [&](Stage &stage, int step) {
            copier.copy(stage.x, x, first_step + step);
        });
    }
}
