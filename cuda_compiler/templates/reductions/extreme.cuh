// The greatest or the least of some values, and the first place that has it. After reduction.cuh.

#include "common/ordered.cuh"

template <bool first, typename A, typename B>
struct Select { using type = A; };
template <typename A, typename B>
struct Select<false, A, B> { using type = B; };

// The greatest key, or with `least` the least, and the first index that has it; T is float or int. The keys' complements
// are in reverse order, so that only the greatest is ever sought.
template <bool least, typename T>
struct Extreme {
    int best = int(0x80000000);
    unsigned index = 0xffffffffu;

    // Places are handed in in ascending order.
    __device__ __forceinline__ void add(T value, unsigned place) {
        const int key = key_of<least>(value);
        add_rank(least ? ~key : key, place);
    }

    __device__ __forceinline__ void add_rank(int rank, unsigned place) {
        if (rank > best || index == 0xffffffffu) {
            best = rank;
            index = place;
        }
    }

    __device__ __forceinline__ void reduce(Place place) {
        const int greatest = reduce_team<Max>(best, int(0x80000000), place);
        index = reduce_team<Min>(best == greatest ? index : 0xffffffffu, 0xffffffffu, place);
        best = greatest;
    }

    __device__ __forceinline__ T value() const {
        const int key = least ? ~best : best;
        if constexpr (is_float<T>::value) {
            return __int_as_float(key < 0 ? -key | int(0x80000000) : key);
        } else {
            return key;
        }
    }
};
