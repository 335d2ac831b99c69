// Reductions over a view's last dimensions. The rule has ordered and merged the dimensions, and says how threads walk them:
// - `along`: the innermost dimension is a reduced one. A thread reads `pack` of its elements at a time, for one result.
// - else the innermost one is kept. A thread reads `pack` elements of neighbouring results at a time, and makes all of these.
// A block has `columns` threads for results, and for each of them `walkers` that share its elements; both are powers of two.
// `by_walkers`: neighbouring threads share a result; else they have neighbouring results.
// Where results are few, `chunks` blocks take `share` items each; the one of them that is done last combines what they found. Which
// one that is makes no difference to the result.

#include "reductions/states.cuh"

constexpr bool whole = !is_float<X::type>::value;  // integers and booleans
constexpr int results = along ? 1 : pack;          // of a thread
constexpr int run = along ? pack : 1;              // elements of a result to an access
constexpr int last = X::rank - 1;

__device__ constexpr index_t size_of(int first, int end) {
    index_t size = 1;
    for (int dim = first; dim < end; dim++) {
        size *= X::size(dim);
    }
    return size;
}

constexpr index_t count = size_of(kept_dims, X::rank);             // elements of a result
constexpr index_t items = count / run;                             // accesses of a result, without the last `count % run` elements
constexpr index_t columns_of_all = size_of(0, kept_dims) / results;

// Where a thread's results, or their elements, begin.
template <typename V>
__device__ __forceinline__ index_t column_offset(index_t column) {
    if constexpr (results == 1) {
        return leading_offset<V, kept_dims>(column);
    } else {
        constexpr index_t across = X::size(kept_dims - 1) / results;
        return leading_offset<V, kept_dims - 1>(column / across) + column % across * results * V::stride(kept_dims - 1);
    }
}

// Where an item lies, from the first one of its result.
__device__ __forceinline__ index_t item_offset(index_t item) {
    index_t offset = 0;
#pragma unroll
    for (int dim = last; dim > kept_dims; dim--) {
        const index_t size = dim == last ? X::size(dim) / run : X::size(dim);
        offset += item % size * X::stride(dim) * (dim == last ? run : 1);
        item /= size;
    }
    return offset + item * X::stride(kept_dims) * (kept_dims == last ? run : 1);
}

// The reduction, as its states need to know it.
struct Of {
    static constexpr bool integers = whole;
    static constexpr index_t count = ::count;
    static constexpr float correction = param::correction;
    static constexpr float order = param::order;
};
using Fetched = Element<Of>;

__device__ __forceinline__ Fetched fetched(X::type value) {
    if constexpr (whole) {
        return to_int(value);
    } else {
        return to_float(value);
    }
}

#kernel sum_kernel
#define REDUCTION sum_kernel
using State = Total<Of>;

#kernel prod_kernel
#define REDUCTION prod_kernel
using State = Factors<Of>;

#kernel mean_kernel
#define REDUCTION mean_kernel
using State = Mean<Of>;

#kernel var_kernel
#define REDUCTION var_kernel
using State = Variance<Of>;

#kernel std_kernel
#define REDUCTION std_kernel
using State = Deviation<Of>;

#kernel max_kernel
#define REDUCTION max_kernel
using State = Greatest<Of>;

#kernel min_kernel
#define REDUCTION min_kernel
using State = Least<Of>;

#kernel argmax_kernel
#define REDUCTION argmax_kernel
using State = Position<false, Of>;

#kernel argmin_kernel
#define REDUCTION argmin_kernel
using State = Position<true, Of>;

#kernel any_kernel
#define REDUCTION any_kernel
using State = Any<Of>;

#kernel all_kernel
#define REDUCTION all_kernel
using State = All<Of>;

#kernel norm_kernel
#define REDUCTION norm_kernel
using State = Norm<Of>;

#kernel logsumexp_kernel
#define REDUCTION logsumexp_kernel
using State = Exponentials<Of>;

#kernel sum_kernel prod_kernel mean_kernel var_kernel std_kernel max_kernel min_kernel argmax_kernel argmin_kernel any_kernel all_kernel norm_kernel logsumexp_kernel
constexpr int words = words_of<State>;
constexpr int step = by_walkers ? 1 : columns;                 // from a walker's lane to the next one's
constexpr int near = step < WARP ? smaller(walkers, WARP / step) : 1;  // walkers of a result in one warp
constexpr int slots = columns * results;                       // results of a block
static_assert(words <= most_words, "");

// Hands what all walkers know of each result of the block to `take(slot, state)`, in one thread each.
template <typename Take>
__device__ __forceinline__ void combine(State (&own)[results], int column, int walker, const Take &take) {
    __shared__ unsigned parts[walkers / near][slots][words];
#pragma unroll
    for (int distance = step; distance < step * near; distance *= 2) {
#pragma unroll
        for (int j = 0; j < results; j++) {
            own[j].merge(of_lane(own[j], distance));
        }
    }
    __syncthreads();  // an earlier combination may still be read
    if (walker % near == 0) {
#pragma unroll
        for (int j = 0; j < results; j++) {
            write_state(parts[walker / near][column * results + j], own[j]);
        }
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
        State state = read_state<State>(parts[0][slot]);
#pragma unroll
        for (int i = 1; i < walkers / near; i++) {
            state.merge(read_state<State>(parts[i][slot]));
        }
        take(slot, state);
    }
}

// Adds what `together` accesses have found of a result to its state.
template <int together>
__device__ __forceinline__ void add_found(State &own, const Pack<X::type, pack> (&values)[together], int j, index_t item) {
    Fetched found[together][run];
#pragma unroll
    for (int i = 0; i < together * run; i++) {
        found[i / run][i % run] = fetched(values[i / run].item[along ? i % run : j]);
    }
    add_some(own, found, along ? item * run : item, walkers);
}

// Adds `together` accesses from `item` on, `walkers` apart, to what a thread knows.
template <int together>
__device__ __forceinline__ void accumulate_some(State (&own)[results], const X::type *x, index_t item) {
    Pack<X::type, pack> values[together];
#pragma unroll
    for (int i = 0; i < together; i++) {
        values[i] = load_pack<pack>(x + item_offset(item + i * walkers));
    }
#pragma unroll
    for (int j = 0; j < results; j++) {
        add_found<together>(own[j], values, j, item);
    }
}

__device__ __forceinline__ void accumulate(State (&own)[results], const X::type *x, index_t first, index_t end, int walker) {
    index_t item = first + walker;
    for (; item + 3 * walkers < end; item += 4 * walkers) {
        accumulate_some<4>(own, x, item);
    }
    for (; item < end; item += walkers) {
        accumulate_some<1>(own, x, item);
    }
    if constexpr (count % run != 0) {
        if (end == items) {
            for (index_t i = items * run + walker; i < count; i += walkers) {
                own[0].add(fetched(x[i * X::stride(last)]), i);
            }
        }
    }
}

KERNEL(REDUCTION) {
    const int column = int(threadIdx.x) / (by_walkers ? walkers : 1) % columns;
    const int walker = int(threadIdx.x) / (by_walkers ? 1 : columns) % walkers;
    const index_t block = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
    const index_t number = block * columns + column;
    State own[results];
    if (number < columns_of_all) {
        const index_t end = (chunk + 1) * share;
        accumulate(own, x + column_offset<X>(number), chunk * share, end < items ? end : items, walker);
    }
    if constexpr (walkers == 1) {
        if (number >= columns_of_all) {
            return;
        }
        Out::type *place = out + column_offset<Out>(number);
        if constexpr (results > 1 && Out::vector >= results) {
            Pack<Out::type, results> values;
#pragma unroll
            for (int j = 0; j < results; j++) {
                values.item[j] = from<Out::type>(own[j].result());
            }
            store_pack(place, values);
        } else {
#pragma unroll
            for (int j = 0; j < results; j++) {
                place[results > 1 ? j * Out::stride(kept_dims - 1) : 0] = from<Out::type>(own[j].result());
            }
        }
    } else {
        const auto put = [&](int slot, const State &state) {
            const index_t its = block * columns + slot / results;
            if (its < columns_of_all) {
                const index_t within = results > 1 ? slot % results * Out::stride(kept_dims - 1) : 0;
                out[column_offset<Out>(its) + within] = from<Out::type>(state.result());
            }
        };
        if constexpr (chunks == 1) {
            combine(own, column, walker, put);
        } else {
            unsigned *found = (unsigned *)partial + block * chunks * slots * words;
            combine(own, column, walker, [&](int slot, const State &state) {
                write_state(found + (chunk * slots + slot) * words, state);
                __threadfence();
            });
            __shared__ bool is_last;
            __syncthreads();
            if (threadIdx.x == 0) {
                is_last = atomicInc((unsigned *)done + block, chunks - 1) == chunks - 1;
                __threadfence();
            }
            __syncthreads();
            if (!is_last) {
                return;
            }
#pragma unroll
            for (int j = 0; j < results; j++) {
                own[j] = State();
                for (int i = walker; i < chunks; i += walkers) {
                    unsigned seen[words];
#pragma unroll
                    for (int word = 0; word < words; word++) {
                        seen[word] = __ldcg(found + (i * slots + column * results + j) * words + word);
                    }
                    own[j].merge(read_state<State>(seen));
                }
            }
            combine(own, column, walker, put);
        }
    }
}
