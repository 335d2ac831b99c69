// All steps of a recurrent layer in one launch. A block keeps some of one direction's hidden elements ("units") through all
// steps, for some rows of the batch ("its rows"), with their weights. The products of the input, of all steps, are there before.
//
// Invariants
// R1. All blocks run at the same time (a cooperative launch), so a block may poll for what another one writes.
// R2. A hidden state is the message of its step: `recurrent_begin` fills the output with bits that no result has (all ones: a
//     NaN with a sign, and results that are NaN have none), and a reader polls each value's own place. Every place is written
//     once, so nothing has to be ordered.
// R3. Partial sums alternate between two buffers, with one barrier of the block a step: a thread that writes those of step s + 2
//     has passed the barrier of step s + 1, which every thread reaches only when it has read those of step s.

constexpr int steps = Out::size(0);
constexpr int all_rows = Out::size(1);
constexpr int hidden = Hn::size(2);
constexpr int lines = GATES * UNITS;  // of the weight, in a block: those of a gate together
constexpr int padded_lines = (lines + 15) / 16 * 16 + 4;  // lanes of a fragment write to different banks
constexpr int padded_rows = (ROWS + 7) / 8 * 8;
constexpr int items = (ROWS * UNITS + THREADS - 1) / THREADS;  // elements of the hidden state per thread

enum Cell { LSTM, GRU, TANH, RELU };

using Bits = Either<sizeof(Out::type) == 2, unsigned short, unsigned>::type;

// A block's part of the work.
struct Part {
    bool backward;
    int first_row;
    int first_unit;

    __device__ __forceinline__ Part() {
        const int others = blockIdx.x / BLOCKS;
        backward = others / ROW_GROUPS == 1;
        first_row = others % ROW_GROUPS * ROWS;
        first_unit = blockIdx.x % BLOCKS * UNITS;
    }

    __device__ __forceinline__ int position(int step) const { return backward ? steps - 1 - step : step; }
    __device__ __forceinline__ bool has_row(int row) const { return row < ROWS && first_row + row < all_rows; }
    __device__ __forceinline__ bool has_unit(int unit) const { return first_unit + unit < hidden; }

    // The row of the weight that is the block's line `line`; negative where it has none.
    __device__ __forceinline__ int weight_row(int line) const {
        return line < lines && has_unit(line % UNITS) ? line / UNITS * hidden + first_unit + line % UNITS : -1;
    }

    __device__ __forceinline__ index_t result(int step, int row, int unit) const {
        return position(step) * Out::stride(0) + (first_row + row) * Out::stride(1)
            + ((backward ? hidden : 0) + unit) * Out::stride(2);
    }

    template <typename V>
    __device__ __forceinline__ index_t state(int row, int unit) const {
        return (backward ? V::stride(0) : 0) + (first_row + row) * V::stride(1) + unit * V::stride(2);
    }

    __device__ __forceinline__ index_t input(int step, int row, int gate, int unit) const {
        return (backward ? Given::stride(0) : 0) + position(step) * Given::stride(1) + (first_row + row) * Given::stride(2)
            + gate * hidden + first_unit + unit;
    }
};

// R2
__device__ __forceinline__ void store_bits(void *place, unsigned short bits) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(place), "h"(bits) : "memory");
}
__device__ __forceinline__ void store_bits(void *place, unsigned bits) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(bits) : "memory");
}
__device__ __forceinline__ void load_bits(const void *place, unsigned short &bits) {
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(bits) : "l"(place) : "memory");
}
__device__ __forceinline__ void load_bits(const void *place, unsigned &bits) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(place) : "memory");
}

__device__ __forceinline__ void send(Out::type *place, Out::type value) {
    store_bits(place, reinterpret_cast<const Bits &>(value));
}

__device__ __forceinline__ Out::type receive(const Out::type *place) {
    Bits bits;
    do {
        load_bits(place, bits);
    } while (bits == Bits(~Bits(0)));
    return reinterpret_cast<const Out::type &>(bits);
}

__device__ __forceinline__ float squashed(float x) {
    if constexpr (sizeof(Out::type) == 2) {
        return 2.0f * near_sigmoid(2.0f * x) - 1.0f;
    } else {
        return tanhf(x);
    }
}

__device__ __forceinline__ float opened(float x) {
    if constexpr (sizeof(Out::type) == 2) {
        return near_sigmoid(x);
    } else {
        return 1.0f / (1.0f + expf(-x));
    }
}

// In dynamic shared memory: the partial sums of two steps, the biases of the block's lines (the input's first), and the rest.
struct Shared {
    float *sums[2];
    float *biases;
    unsigned char *rest;

    __device__ __forceinline__ Shared(unsigned char *memory) {
        constexpr int size = PIECES * padded_rows * padded_lines;
        sums[0] = reinterpret_cast<float *>(memory);
        sums[1] = sums[0] + size;
        biases = sums[1] + size;
        rest = memory + (2 * size + (2 * lines + 3) / 4 * 4) * sizeof(float);
    }
};

template <typename T>
__device__ __forceinline__ float bias_of(const T *bias, int row) {
    return bias == nullptr || row < 0 ? 0.0f : to_float(bias[row]);
}

// A thread's elements of the hidden state, and what they keep from step to step: an LSTM's cell state, a GRU's hidden state.
struct Elements {
    float kept[items];
    float given[items][GATES];

    __device__ __forceinline__ static int unit(int item) { return (threadIdx.x + item * THREADS) % UNITS; }
    __device__ __forceinline__ static int row(int item) { return (threadIdx.x + item * THREADS) / UNITS; }
    __device__ __forceinline__ static bool is_there(int item, const Part &part) {
        return part.has_row(row(item)) && part.has_unit(unit(item));
    }

    __device__ __forceinline__ void begin(const Part &part, const H0::type *h0, const C0::type *c0) {
#pragma unroll
        for (int item = 0; item < items; item++) {
            kept[item] = 0.0f;
            if (is_there(item, part)) {
                const int at = part.first_unit + unit(item);
                kept[item] = CELL == LSTM ? to_float(c0[part.state<C0>(row(item), at)])
                                          : to_float(convert<Out::type>(h0[part.state<H0>(row(item), at)]));
            }
        }
    }

    // Begins to read the input's products of a step.
    __device__ __forceinline__ void request(const float *inputs, const Part &part, int step) {
#pragma unroll
        for (int item = 0; item < items; item++) {
#pragma unroll
            for (int gate = 0; gate < GATES; gate++) {
                const bool there = is_there(item, part);
                given[item][gate] = there ? inputs[part.input(step, row(item), gate, unit(item))] : 0.0f;
            }
        }
    }

    // Writes the hidden states of a step, from the partial sums of its products.
    template <typename C>
    __device__ __forceinline__ void finish(
        const Part &part, const Shared &shared, int step, Out::type *out, Hn::type *hn, C *cn
    ) {
#pragma unroll
        for (int item = 0; item < items; item++) {
            if (is_there(item, part)) {
                const Out::type h = from<Out::type>(advance(item, shared.sums[step % 2], shared.biases));
                const int at = part.first_unit + unit(item);
                send(out + part.result(step, row(item), at), h);
                if constexpr (CELL == GRU) {
                    kept[item] = to_float(h);
                }
                if (step == steps - 1) {
                    hn[part.state<Hn>(row(item), at)] = convert<Hn::type>(h);
                    if constexpr (CELL == LSTM) {
                        cn[part.state<Cn>(row(item), at)] = from<C>(kept[item]);
                    }
                }
            }
        }
    }

    // The next hidden state of an element.
    __device__ __forceinline__ float advance(int item, const float *sums, const float *biases) {
        float input[GATES];
        float recalled[GATES];
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
            const int line = gate * UNITS + unit(item);
            input[gate] = given[item][gate] + biases[line];
            recalled[gate] = biases[lines + line];
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                recalled[gate] += sums[(piece * padded_rows + row(item)) * padded_lines + line];
            }
        }
        if constexpr (CELL == LSTM) {  // gates i, f, g, o
            kept[item] = opened(input[1] + recalled[1]) * kept[item]
                + opened(input[0] + recalled[0]) * squashed(input[2] + recalled[2]);
            return opened(input[3] + recalled[3]) * squashed(kept[item]);
        } else if constexpr (CELL == GRU) {  // gates r, z, n
            const float keep = opened(input[1] + recalled[1]);
            const float fresh = squashed(input[2] + opened(input[0] + recalled[0]) * recalled[2]);
            return (1.0f - keep) * fresh + keep * kept[item];
        } else {
            const float total = input[0] + recalled[0];
            return CELL == TANH ? squashed(total) : max_nan(total, 0.0f);
        }
    }
};

// The operands that the two kernels of the steps share.
#define BEGIN_STEPS(part, shared, elements) \
    for (int i = threadIdx.x; i < 2 * lines; i += THREADS) { \
        const int row = part.weight_row(i % lines); \
        const float forward = i < lines ? bias_of(bias, row) : bias_of(hidden_bias, row); \
        const float backward = i < lines ? bias_of(back_bias, row) : bias_of(back_hidden_bias, row); \
        shared.biases[i] = part.backward ? backward : forward; \
    } \
    elements.begin(part, h0, c0); \
    __syncthreads()
