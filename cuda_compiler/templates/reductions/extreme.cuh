// The greatest or the least of some values, and the first place that has it.

#include "common/ordered.cuh"

// The greatest key, or with `least` the least, and the first index that has it; T is float or int. The keys' complements
// are in reverse order, so that only the greatest is ever sought.
template <bool least, typename T>
struct Extreme {
    int best = int(0x80000000);
    unsigned index = 0xffffffffu;

    __device__ __forceinline__ void add(T value, index_t place) {
        const int key = key_of<least>(value);
        take(least ? ~key : key, unsigned(place));
    }

    __device__ __forceinline__ void merge(const Extreme &other) { take(other.best, other.index); }

    // An index of all ones is none, and comes behind every other.
    __device__ __forceinline__ void take(int rank, unsigned place) {
        if (rank > best || (rank == best && place < index)) {
            best = rank;
            index = place;
        }
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
