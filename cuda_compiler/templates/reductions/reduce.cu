// Reductions over a view's last `reduce_dims` dimensions: a team per output element. The compiler has merged dimensions
// that step evenly, so that most views have one reduced dimension.

#include "common/reduction.cuh"
#include "reductions/extreme.cuh"

constexpr int kept_dims = X::rank - int(param::reduce_dims);
constexpr bool whole = !is_float<X::type>::value;  // integers and booleans
// Elements to an access, where the reduced dimension is the innermost one.
constexpr int pack = param::reduce_dims == 1 ? smaller(X::vector, 16 / int(sizeof(X::type))) : 1;

using Fetched = Select<whole, int, float>::type;

__device__ __forceinline__ Fetched fetched(X::type value) {
    if constexpr (whole) {
        return to_int(value);
    } else {
        return to_float(value);
    }
}

__device__ constexpr index_t reduced_size() {
    index_t size = 1;
    for (int dim = kept_dims; dim < X::rank; dim++) {
        size *= X::size(dim);
    }
    return size;
}

// Where element `index` of the reduced ones lies, from the row's first.
__device__ __forceinline__ index_t reduced_offset(index_t index) {
    index_t offset = 0;
#pragma unroll
    for (int dim = X::rank - 1; dim > kept_dims; dim--) {
        offset += index % X::size(dim) * X::stride(dim);
        index /= X::size(dim);
    }
    return offset + index * X::stride(kept_dims);
}

// Hands this thread's share of the elements to `into.add(value, index)`; `index` counts the elements that are reduced.
template <typename Accumulator>
__device__ __forceinline__ void accumulate(Accumulator &into, const X::type *x, Place place) {
    const X::type *row = x + leading_offset<X, kept_dims>(place.row);
    if constexpr (pack > 1) {
        constexpr index_t packs = reduced_size() / pack;
#pragma unroll 4
        for (index_t i = place.thread(); i < packs; i += Place::threads()) {
            const Pack<X::type, pack> values = load_pack<pack>(row + i * pack);
#pragma unroll
            for (int j = 0; j < pack; j++) {
                into.add(fetched(values.item[j]), i * pack + j);
            }
        }
        for (index_t i = packs * pack + place.thread(); i < reduced_size(); i += Place::threads()) {
            into.add(fetched(row[i]), i);
        }
    } else {
#pragma unroll 4
        for (index_t i = place.thread(); i < reduced_size(); i += Place::threads()) {
            into.add(fetched(row[reduced_offset(i)]), i);
        }
    }
}

// Integers wrap around, as PyTorch's do when they are stored in 32 bits.
using Wrapping = Select<whole, unsigned, float>::type;

struct Total {
    Wrapping value = 0;
    __device__ __forceinline__ void add(Fetched x, index_t) { value += Wrapping(x); }
};

struct FloatTotal {
    float value = 0.0f;
    __device__ __forceinline__ void add(Fetched x, index_t) { value += float(x); }
};

struct Factors {
    Wrapping value = 1;
    __device__ __forceinline__ void add(Fetched x, index_t) { value *= Wrapping(x); }
};

struct Squares {
    float mean;
    float value = 0.0f;
    __device__ __forceinline__ void add(Fetched x, index_t) {
        const float distance = float(x) - mean;
        value = fmaf(distance, distance, value);
    }
};

struct Powers {
    float value = 0.0f;
    __device__ __forceinline__ void add(Fetched x, index_t) {
        const float magnitude = fabsf(float(x));
        value += param::order == 1.0f ? magnitude : param::order == 2.0f ? magnitude * magnitude : powf(magnitude, param::order);
    }
};

struct NonZeros {
    unsigned count = 0;
    __device__ __forceinline__ void add(Fetched x, index_t) { count += x != 0; }
};

// The logarithm of a sum of exponentials keeps its maximum finite at both ends, so that +inf makes the sum +inf.
struct Exponentials {
    ExpSum sum;
    __device__ __forceinline__ void add(Fetched x, index_t) {
        const float value = float(x);
        sum.rescale(fminf(fmaxf(sum.largest, value), FLOAT_MAX));
        sum.total += expf(value - sum.largest);
    }
};

template <bool least>
struct Magnitudes {
    Extreme<least, Fetched> extreme;
    __device__ __forceinline__ void add(Fetched x, index_t i) { extreme.add(Fetched(fabsf(float(x))), unsigned(i)); }
};

template <bool least>
__device__ __forceinline__ Extreme<least, Fetched> extreme_of(const X::type *x, Place place) {
    Extreme<least, Fetched> extreme;
    accumulate(extreme, x, place);
    extreme.reduce(place);
    return extreme;
}

__device__ __forceinline__ float mean_of(const X::type *x, Place place) {
    FloatTotal total;
    accumulate(total, x, place);
    return reduce_sum(total.value, place) / float(reduced_size());
}

__device__ __forceinline__ float variance_of(const X::type *x, Place place) {
    Squares squares;
    squares.mean = mean_of(x, place);
    accumulate(squares, x, place);
    return reduce_sum(squares.value, place) / fmaxf(float(reduced_size()) - param::correction, 0.0f);
}

__device__ __forceinline__ unsigned nonzeros_of(const X::type *x, Place place) {
    NonZeros nonzeros;
    accumulate(nonzeros, x, place);
    return reduce_team<Sum>(nonzeros.count, 0u, place);
}

__device__ __forceinline__ float norm_of(const X::type *x, Place place) {
    if constexpr (param::order > FLOAT_MAX || param::order < -FLOAT_MAX) {
        Magnitudes<(param::order < 0.0f)> magnitudes;
        accumulate(magnitudes, x, place);
        magnitudes.extreme.reduce(place);
        return float(magnitudes.extreme.value());
    } else if constexpr (param::order == 0.0f) {
        return float(nonzeros_of(x, place));
    } else {
        Powers powers;
        accumulate(powers, x, place);
        const float total = reduce_sum(powers.value, place);
        return param::order == 1.0f ? total : param::order == 2.0f ? sqrtf(total) : powf(total, 1.0f / param::order);
    }
}

template <typename T>
__device__ __forceinline__ void put(Out::type *out, Place place, T value) {
    if (place.thread() == 0) {
        out[Out::offset(place.row)] = from<Out::type>(value);
    }
}

#kernel sum_kernel
KERNEL(sum_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    Total total;
    accumulate(total, x, place);
    put(out, place, Fetched(reduce_team<Sum>(total.value, Wrapping(0), place)));
}

#kernel prod_kernel
KERNEL(prod_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    Factors factors;
    accumulate(factors, x, place);
    put(out, place, Fetched(reduce_team<Product>(factors.value, Wrapping(1), place)));
}

#kernel mean_kernel
KERNEL(mean_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, mean_of(x, place));
}

#kernel var_kernel
KERNEL(var_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, variance_of(x, place));
}

#kernel std_kernel
KERNEL(std_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, sqrtf(variance_of(x, place)));
}

#kernel max_kernel
KERNEL(max_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, extreme_of<false>(x, place).value());
}

#kernel min_kernel
KERNEL(min_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, extreme_of<true>(x, place).value());
}

#kernel argmax_kernel
KERNEL(argmax_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, int(extreme_of<false>(x, place).index));
}

#kernel argmin_kernel
KERNEL(argmin_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, int(extreme_of<true>(x, place).index));
}

#kernel any_kernel
KERNEL(any_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, int(nonzeros_of(x, place) != 0));
}

#kernel all_kernel
KERNEL(all_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, int(nonzeros_of(x, place) == reduced_size()));
}

#kernel norm_kernel
KERNEL(norm_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    put(out, place, norm_of(x, place));
}

#kernel logsumexp_kernel
KERNEL(logsumexp_kernel) {
    const Place place;
    if (place.row >= Out::numel) {
        return;
    }
    Exponentials exponentials;
    accumulate(exponentials, x, place);
    exponentials.sum.reduce(place);
    put(out, place, exponentials.sum.largest + logf(exponentials.sum.total));
}
