// What a thread knows of some elements of a reduction: `add` takes one more and its number, `merge` what another thread knows, and
// `result` is the reduction. Integers wrap around, as PyTorch's do when they are stored in 32 bits. `Of` tells of the reduction:
// `integers`, whether elements are integers or booleans; `count`, their number; `correction` of a variance; `order` of a norm.

#include "common/exp_sum.cuh"
#include "reductions/extreme.cuh"

template <typename Of>
using Element = typename Either<Of::integers, int, float>::type;

template <typename Of>
using Wrapping = typename Either<Of::integers, unsigned, float>::type;

template <typename Of>
struct Total {
    Wrapping<Of> value = 0;
    __device__ __forceinline__ void add(Element<Of> x, index_t) { value += Wrapping<Of>(x); }
    __device__ __forceinline__ void merge(const Total &other) { value += other.value; }
    __device__ __forceinline__ Element<Of> result() const { return Element<Of>(value); }
};

template <typename Of>
struct Mean {
    float value = 0.0f;
    __device__ __forceinline__ void add(Element<Of> x, index_t) { value += float(x); }
    __device__ __forceinline__ void merge(const Mean &other) { value += other.value; }
    __device__ __forceinline__ float result() const { return value / float(Of::count); }
};

template <typename Of>
struct Factors {
    Wrapping<Of> value = 1;
    __device__ __forceinline__ void add(Element<Of> x, index_t) { value *= Wrapping<Of>(x); }
    __device__ __forceinline__ void merge(const Factors &other) { value *= other.value; }
    __device__ __forceinline__ Element<Of> result() const { return Element<Of>(value); }
};

// The mean so far, and the sum of the squares of the distances from it.
template <typename Of>
struct Variance {
    float number = 0.0f;
    float mean = 0.0f;
    float squares = 0.0f;
    __device__ __forceinline__ void add(Element<Of> x, index_t) {
        const Element<Of> one[1][1] = {{x}};
        add_all(one);
    }
    // Takes some elements with one division.
    template <typename T, int turns, int run>
    __device__ __forceinline__ void add_all(const T (&x)[turns][run]) {
        constexpr int few = turns * run;
        Variance of_few;
#pragma unroll
        for (int i = 0; i < few; i++) {
            of_few.mean += float(x[i / run][i % run]) * (1.0f / few);
        }
#pragma unroll
        for (int i = 0; i < few; i++) {
            const float distance = float(x[i / run][i % run]) - of_few.mean;
            of_few.squares = fmaf(distance, distance, of_few.squares);
        }
        of_few.number = float(few);
        merge(of_few);
    }
    // One fast division, since ten of these in a row are most of what a short row costs.
    __device__ __forceinline__ void merge(const Variance &other) {
        const float both = number + other.number, distance = other.mean - mean;
        const float share = __fdividef(other.number, fmaxf(both, 1.0f));
        mean = fmaf(distance, share, mean);
        squares += fmaf(distance * distance, number * share, other.squares);
        number = both;
    }
    __device__ __forceinline__ float result() const { return squares / fmaxf(float(Of::count) - Of::correction, 0.0f); }
};

template <typename Of>
struct Deviation : Variance<Of> {
    __device__ __forceinline__ void merge(const Deviation &other) { Variance<Of>::merge(other); }
    __device__ __forceinline__ float result() const { return sqrtf(Variance<Of>::result()); }
};

template <bool least, typename Of>
struct Best : Extreme<least, Element<Of>> {
    __device__ __forceinline__ Element<Of> result() const { return this->value(); }
};

template <bool least, typename Of>
struct Position : Extreme<least, Element<Of>> {
    __device__ __forceinline__ int result() const { return int(this->index); }
};

template <typename Of>
struct NonZeros {
    unsigned value = 0;
    __device__ __forceinline__ void add(Element<Of> x, index_t) { value += x != 0; }
    __device__ __forceinline__ void merge(const NonZeros &other) { value += other.value; }
    __device__ __forceinline__ float result() const { return float(value); }
};

template <typename Of>
struct Any : NonZeros<Of> {
    __device__ __forceinline__ int result() const { return this->value != 0; }
};

template <typename Of>
struct All : NonZeros<Of> {
    __device__ __forceinline__ int result() const { return this->value == Of::count; }
};

template <bool least, typename Of>
struct Magnitude : Extreme<least, Element<Of>> {
    __device__ __forceinline__ void add(Element<Of> x, index_t i) {
        Extreme<least, Element<Of>>::add(Element<Of>(fabsf(float(x))), i);
    }
    __device__ __forceinline__ float result() const { return float(this->value()); }
};

template <typename Of>
struct Powers {
    float value = 0.0f;
    __device__ __forceinline__ void add(Element<Of> x, index_t) {
        const float magnitude = fabsf(float(x));
        value += Of::order == 1.0f ? magnitude : Of::order == 2.0f ? magnitude * magnitude : powf(magnitude, Of::order);
    }
    __device__ __forceinline__ void merge(const Powers &other) { value += other.value; }
    __device__ __forceinline__ float result() const {
        return Of::order == 1.0f ? value : Of::order == 2.0f ? sqrtf(value) : powf(value, 1.0f / Of::order);
    }
};

// The sum of exp(x - largest). The largest stays finite at both ends, so that -inf contributes 0 and +inf makes the sum +inf.
template <typename Of>
struct Exponentials : ExpSum {
    __device__ __forceinline__ void add(Element<Of> x, index_t) {
        const float value = float(x);
        rescale(fminf(fmaxf(largest, value), FLOAT_MAX));
        total += expf(value - largest);
    }
    __device__ __forceinline__ float result() const { return largest + logf(total); }
};

template <typename Of>
using Greatest = Best<false, Of>;

template <typename Of>
using Least = Best<true, Of>;

template <typename Of>
using Norm = typename Either<
    (Of::order > FLOAT_MAX || Of::order < -FLOAT_MAX), Magnitude<(Of::order < 0.0f), Of>,
    typename Either<Of::order == 0.0f, NonZeros<Of>, Powers<Of>>::type>::type;

// Adds `turns` runs of neighbours to what is known: the first is number `first` of all elements, and from a run to the next one
// are `step` times as many as it has. A variance takes all of them with one division.
template <typename State, typename T, int turns, int run>
__device__ __forceinline__ void add_some(State &known, const T (&x)[turns][run], index_t first, index_t step) {
#pragma unroll
    for (int i = 0; i < turns * run; i++) {
        known.add(x[i / run][i % run], first + i / run * step * run + i % run);
    }
}

template <typename Of, typename T, int turns, int run>
__device__ __forceinline__ void add_some(Variance<Of> &known, const T (&x)[turns][run], index_t, index_t) {
    known.add_all(x);
}

template <typename Of, typename T, int turns, int run>
__device__ __forceinline__ void add_some(Deviation<Of> &known, const T (&x)[turns][run], index_t, index_t) {
    known.add_all(x);
}

template <typename State>
constexpr int words_of = sizeof(State) / 4;

template <typename State>
__device__ __forceinline__ State read_state(const unsigned *from_place) {
    State state;
#pragma unroll
    for (int i = 0; i < words_of<State>; i++) {
        reinterpret_cast<unsigned *>(&state)[i] = from_place[i];
    }
    return state;
}

template <typename State>
__device__ __forceinline__ void write_state(unsigned *to, const State &state) {
#pragma unroll
    for (int i = 0; i < words_of<State>; i++) {
        to[i] = reinterpret_cast<const unsigned *>(&state)[i];
    }
}

template <typename State>
__device__ __forceinline__ State of_lane(const State &state, int distance, unsigned lanes = 0xffffffffu) {
    State other;
#pragma unroll
    for (int i = 0; i < words_of<State>; i++) {
        const unsigned word = reinterpret_cast<const unsigned *>(&state)[i];
        reinterpret_cast<unsigned *>(&other)[i] = __shfl_xor_sync(lanes, word, distance);
    }
    return other;
}
