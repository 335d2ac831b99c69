// The greatest or least element of a few long rows: a block to each chunk of a row, and the block of a row that is done last
// finds the best of its chunks. Which block that is makes no difference to the result.

#include "common/reduction.cuh"
#include "reductions/extreme.cuh"

using Fetched = Select<is_float<X::type>::value, float, int>::type;

constexpr int chunks = int(Best::size(1));

__device__ __forceinline__ Fetched fetched(X::type value) {
    if constexpr (is_float<X::type>::value) {
        return to_float(value);
    } else {
        return to_int(value);
    }
}

__device__ __forceinline__ Extreme<least, Fetched> extreme_of_chunk(const X::type *row, Place place) {
    const index_t first = index_t(blockIdx.x) * chunk;
    const index_t last = first + chunk < X::size(1) ? first + chunk : X::size(1);
    Extreme<least, Fetched> extreme;
#pragma unroll 4
    for (index_t i = first + place.thread() * pack; i + pack <= last; i += Place::threads() * pack) {
        const Pack<X::type, pack> values = load_pack<pack>(row + i);
#pragma unroll
        for (int j = 0; j < pack; j++) {
            extreme.add(fetched(values.item[j]), unsigned(i + j));
        }
    }
    for (index_t i = last - last % pack + place.thread(); i < last; i += Place::threads()) {
        extreme.add(fetched(row[i]), unsigned(i));
    }
    extreme.reduce(place);
    return extreme;
}

#kernel extreme_of_long_rows
KERNEL(extreme_of_long_rows) {
    const Place place;
    const index_t row = blockIdx.y;
    const Extreme<least, Fetched> found = extreme_of_chunk(x + row * X::stride(0), place);
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        best[row * chunks + blockIdx.x] = found.best;
        index[row * chunks + blockIdx.x] = int(found.index);
        __threadfence();
        is_last = atomicInc(reinterpret_cast<unsigned *>(done) + row, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    Extreme<least, Fetched> extreme;
    for (int i = place.thread(); i < chunks; i += Place::threads()) {
        extreme.add_rank(__ldcg(best + row * chunks + i), unsigned(__ldcg(index + row * chunks + i)));
    }
    extreme.reduce(place);
    if (threadIdx.x == 0) {
        if constexpr (wants_index) {
            out[Out::offset(row)] = from<Out::type>(int(extreme.index));
        } else {
            out[Out::offset(row)] = from<Out::type>(extreme.value());
        }
    }
}
