// Elements put to, or joined with, the places of a row that indices name. A thread per place looks through the row's
// indices, so that no two write one place and a sum has one order. An index out of range names none.

constexpr int last = Out::rank - 1;

// Integers wrap around, as PyTorch's do when they are stored in 32 bits.
template <bool floats>
struct Joined {
    using type = float;
    __device__ static float stored(float value) { return value; }
};
template <>
struct Joined<false> {
    using type = unsigned;
    __device__ static int stored(unsigned value) { return int(value); }
};
constexpr bool floats = is_float<Base::type>::value || is_float<Source::type>::value;
using Total = Joined<floats>::type;

template <typename T>
__device__ __forceinline__ Total fetched(T value) {
    if constexpr (floats) {
        return to_float(value);
    } else {
        return Total(to_int(value));
    }
}

// NaN counts as the largest and the smallest.
__device__ __forceinline__ Total joined(Total total, Total value) {
    using Kind = param::ReduceKind;
    if constexpr (param::reduce == Kind::last_) {
        return value;
    } else if constexpr (param::reduce == Kind::prod_) {
        return total * value;
    } else if constexpr (param::reduce == Kind::amax_) {
        return Joined<floats>::stored(value) > Joined<floats>::stored(total) || value != value ? value : total;
    } else if constexpr (param::reduce == Kind::amin_) {
        return Joined<floats>::stored(value) < Joined<floats>::stored(total) || value != value ? value : total;
    } else {
        return total + value;
    }
}

KERNEL(scatter_kernel) {
    const index_t element = blockIdx.x * index_t(THREADS) + threadIdx.x;
    if (element >= Out::numel) {
        return;
    }
    constexpr index_t size = Out::size(last), many = Index::size(last);
    const index_t place = element % size;
    const index_t first = element / size * many;
    Total total = fetched(base[Base::offset(element)]);
    unsigned count = param::include_self ? 1 : 0;
    for (index_t k = 0; k < many; k++) {
        if (unsigned(index[Index::offset(first + k)]) == place) {
            const Total value = fetched(source[Source::offset(first + k)]);
            total = count == 0 ? value : joined(total, value);
            count++;
        }
    }
    if (param::reduce == param::ReduceKind::mean_ && count > 1) {
        total = floats ? total / Total(count) : total;
    }
    out[Out::offset(element)] = from<Out::type>(Joined<floats>::stored(total));
}
