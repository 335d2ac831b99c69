// Kernels that make a tensor out of nothing, or out of another's elements in another order; a thread per element, or per
// `pack` neighbours of the last dimension.

__device__ __forceinline__ index_t thread_number() {
    return blockIdx.x * index_t(THREADS) + threadIdx.x;
}

// A value that is given as a float and as an int.
template <typename T>
__device__ __forceinline__ T either(float value, int) { return from<T>(value); }
template <>
__device__ __forceinline__ int either<int>(float, int value) { return value; }

#kernel fill_kernel
KERNEL(fill_kernel) {
    const index_t element = thread_number();
    if (element < Out::numel) {
        out[Out::offset(element)] = either<Out::type>(param::value, param::int_value);
    }
}

#kernel arange_kernel
KERNEL(arange_kernel) {
    const index_t element = thread_number();
    if (element < Out::numel) {
        out[Out::offset(element)] = either<Out::type>(
            fmaf(float(element), param::step, param::start), param::int_start + int(element) * param::int_step
        );
    }
}

#kernel pad_kernel
constexpr int PADDED_DIMS = 6;

// Which element of a dimension of `size` a padded one shows; outside of it only in constant mode.
__device__ __forceinline__ int padded_source(int position, int size) {
    if constexpr (param::mode == param::ModeKind::reflect_) {
        return size - 1 - abs(size - 1 - abs(position));
    } else if constexpr (param::mode == param::ModeKind::replicate_) {
        return min(max(position, 0), size - 1);
    } else if constexpr (param::mode == param::ModeKind::circular_) {
        return position < 0 ? position + size : position < size ? position : position - size;
    } else {
        return position;
    }
}

// pads(0) and pads(1) are what comes before and after the last dimension, pads(2) and pads(3) the one before it, …
KERNEL(pad_kernel) {
    const index_t element = thread_number() * pack;
    if (element >= Out::numel) {
        return;
    }
    index_t from_offset = 0;
    index_t rest = element;
    bool inside = true;
#pragma unroll
    for (int dim = Out::rank - 1; dim >= 0; dim--) {
        const int level = Out::rank - 1 - dim;
        const int before = level < PADDED_DIMS ? param::pads(2 * level) : 0;
        const int position = padded_source(int(rest % Out::size(dim)) - before, int(X::size(dim)));
        inside = inside && unsigned(position) < X::size(dim);
        from_offset += index_t(position) * X::stride(dim);
        rest /= Out::size(dim);
    }
    Pack<Out::type, pack> values;
    if (inside) {
        const Pack<X::type, pack> shown = load_pack<pack>(x + from_offset);
#pragma unroll
        for (int i = 0; i < pack; i++) {
            values.item[i] = convert<Out::type>(shown.item[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < pack; i++) {
            values.item[i] = either<Out::type>(param::value, param::int_value);
        }
    }
    store_pack(out + Out::offset(element), values);
}

#kernel triangle_kernel
KERNEL(triangle_kernel) {
    const index_t element = thread_number();
    if (element >= Out::numel) {
        return;
    }
    const index_t line = element / Out::size(Out::rank - 1);
    const int above = int(element % Out::size(Out::rank - 1)) - int(line % Out::size(Out::rank - 2));
    const bool kept = param::upper ? above >= param::diagonal : above <= param::diagonal;
    out[Out::offset(element)] = kept ? convert<Out::type>(x[X::offset(element)]) : from<Out::type>(0);
}

#kernel flip_kernel
KERNEL(flip_kernel) {
    const index_t element = thread_number();
    if (element >= Out::numel) {
        return;
    }
    index_t from_offset = 0;
    index_t rest = element;
#pragma unroll
    for (int dim = X::rank - 1; dim >= 0; dim--) {
        const index_t position = rest % X::size(dim);
        from_offset += (param::dims(dim) != 0 ? X::size(dim) - 1 - position : position) * X::stride(dim);
        rest /= X::size(dim);
    }
    out[Out::offset(element)] = convert<Out::type>(x[from_offset]);
}
