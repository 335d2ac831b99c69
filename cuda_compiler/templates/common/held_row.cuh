// What a team reduces in several passes. A thread holds `held_packs` packs of `pack` elements in registers between them; the rest
// is read again.

#include "common/reduction.cuh"

// `Values` tells what is reduced: `count` elements, and `get<N>` for N of them from one on. They are held as `Type`, in which all of
// them can be stored.
template <typename Values, typename Type = float>
struct Held {
    static constexpr index_t packs = Values::count / pack;
    Pack<Type, pack> held[held_packs];

    // Calls visit(values, first) for every element of this thread, in packs and one by one. `again` is set where the
    // held values are there already, and `changes` where those that it makes of them are to be held.
    template <bool again, bool changes = false, typename Visit>
    __device__ __forceinline__ void each(const Values &source, Place place, Visit visit) {
#pragma unroll
        for (int turn = 0; turn < held_packs; turn++) {
            const index_t i = turn * Place::threads() + place.thread();
            if (i < packs) {
                float values[pack];
                if constexpr (again) {
                    to_floats(values, held[turn]);
                } else {
                    source.get(values, i * pack);
                }
                if constexpr (!again && !changes) {
                    from_floats(held[turn], values);
                }
                visit(values, i * pack);
                if constexpr (changes) {
                    from_floats(held[turn], values);
                }
            }
        }
        for (index_t i = held_packs * Place::threads() + place.thread(); i < packs; i += Place::threads()) {
            float read[pack];
            source.get(read, i * pack);
            visit(read, i * pack);
        }
        for (index_t i = packs * pack + place.thread(); i < Values::count; i += Place::threads()) {
            float read[1];
            source.get(read, i);
            visit(read, i);
        }
    }
};

struct AddSquares {
    float &sum;
    float mean;
    template <int N>
    __device__ __forceinline__ void operator()(const float (&values)[N], index_t) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum = fmaf(values[i] - mean, values[i] - mean, sum);
        }
    }
};

template <int N, typename T>
__device__ __forceinline__ void get_floats(float (&values)[N], const T *data) {
    if constexpr (N > 1) {
        load_floats(values, data);
    } else {
        values[0] = to_float(*data);
    }
}

template <int N, typename T>
__device__ __forceinline__ void put_floats(T *data, const float (&values)[N]) {
    if constexpr (N > 1) {
        store_floats(data, values);
    } else {
        *data = from<T>(values[0]);
    }
}
