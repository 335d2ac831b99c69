// Elements picked, and rows replaced, by index tensors. An index that is out of range picks `missing`.

#include "common/move_vector.cuh"

__device__ __forceinline__ index_t thread_number() {
    return blockIdx.x * index_t(THREADS) + threadIdx.x;
}

#kernel embedding_kernel
// A thread per VECTOR columns of an id's row.
KERNEL(embedding_kernel) {
    constexpr index_t columns = param::width / VECTOR;
    const index_t number = thread_number();
    if (number >= Ids::numel * columns) {
        return;
    }
    const index_t column = number % columns * VECTOR;
    const index_t id = number / columns;
    const index_t row = unsigned(ids[Ids::offset(id)]);
    Out::type *to = out + leading_offset<Out, Out::rank - 1>(id) + column * Out::stride(Out::rank - 1);
    if (param::checked || row < param::rows) {
        move_vector<VECTOR>(to, table + row * Table::stride(0) + column);
        return;
    }
    Pack<Out::type, VECTOR> nothing;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        nothing.item[i] = missing<Out::type>();
    }
    store_pack<VECTOR>(to, nothing);
}

#kernel gather_kernel
KERNEL(gather_kernel) {
    const index_t element = thread_number();
    if (element >= Out::numel) {
        return;
    }
    const index_t picked = unsigned(index[Index::offset(element)]);
    index_t from_offset = picked * X::stride(param::dim);
    index_t rest = element;
#pragma unroll
    for (int dim = Out::rank - 1; dim >= 0; dim--) {
        if (dim != int(param::dim)) {
            from_offset += rest % Out::size(dim) * X::stride(dim);
        }
        rest /= Out::size(dim);
    }
    const bool found = picked < X::size(param::dim);
    out[Out::offset(element)] = found ? convert<Out::type>(x[from_offset]) : missing<Out::type>();
}

#kernel index_select_kernel
KERNEL(index_select_kernel) {
    const index_t element = thread_number();
    if (element >= Out::numel) {
        return;
    }
    index_t from_offset = 0;
    index_t picked = 0;
    index_t rest = element;
#pragma unroll
    for (int dim = Out::rank - 1; dim >= 0; dim--) {
        index_t position = rest % Out::size(dim);
        if (dim == int(param::dim)) {
            picked = unsigned(index[position * Index::stride(0)]);
            position = picked;
        }
        from_offset += position * X::stride(dim);
        rest /= Out::size(dim);
    }
    const bool found = picked < X::size(param::dim);
    out[Out::offset(element)] = found ? convert<Out::type>(x[from_offset]) : missing<Out::type>();
}

#kernel index_kernel
// What an index adds to the offset of the element that it picks.
struct Picked {
    index_t offset;
    bool found;
};

// Follows the index of dimension `dim`, whose element number `at` applies; negative ones count from the back.
template <typename View>
__device__ __forceinline__ void pick(Picked &picked, int dim, const int *index, index_t at) {
    if constexpr (View::present) {
        const int value = index[View::offset(at)];
        const index_t position = unsigned(value < 0 ? value + int(X::size(dim)) : value);
        picked.found = picked.found && position < X::size(dim);
        picked.offset += position * X::stride(dim);
    }
}

template <typename View>
__device__ __forceinline__ void pick(Picked &, int, const float *, index_t) {}

// out[i…, b…, j…] = x[i…, index0[b…], index1[b…], …, j…], with the i… over dimensions 0 to `first`.
KERNEL(index_kernel) {
    const index_t element = thread_number();
    if (element >= Out::numel) {
        return;
    }
    constexpr int first = param::first;
    constexpr int behind = first + Index0::rank;
    Picked picked = {0, true};
    index_t at = 0;
    index_t run = 1;
    index_t rest = element;
#pragma unroll
    for (int dim = Out::rank - 1; dim >= 0; dim--) {
        const index_t position = rest % Out::size(dim);
        if (dim >= behind) {
            picked.offset += position * X::stride(dim - behind + first + int(param::count));
        } else if (dim >= first) {
            at += position * run;
            run *= Out::size(dim);
        } else {
            picked.offset += position * X::stride(dim);
        }
        rest /= Out::size(dim);
    }
    pick<Index0>(picked, first, index0, at);
    pick<Index1>(picked, first + 1, index1, at);
    pick<Index2>(picked, first + 2, index2, at);
    pick<Index3>(picked, first + 3, index3, at);
    pick<Index4>(picked, first + 4, index4, at);
    pick<Index5>(picked, first + 5, index5, at);
    pick<Index6>(picked, first + 6, index6, at);
    pick<Index7>(picked, first + 7, index7, at);
    out[Out::offset(element)] = picked.found ? convert<Out::type>(x[picked.offset]) : missing<Out::type>();
}

#kernel index_copy_kernel index_copy_pair_kernel
// Moves VECTOR elements of a source, from its element number `element` on, to the row of the target that they replace.
template <typename Source, typename Target, typename Index>
__device__ __forceinline__ void replace_row(
    typename Target::type *target, const typename Source::type *source, const int *index, index_t element
) {
    index_t from_offset = 0;
    index_t to = 0;
    index_t picked = 0;
    index_t rest = element;
#pragma unroll
    for (int dim = Source::rank - 1; dim >= 0; dim--) {
        const index_t position = rest % Source::size(dim);
        index_t row = position;
        if (dim == int(param::dim)) {
            picked = unsigned(index[position * Index::stride(0)]);
            row = picked;
        }
        from_offset += position * Source::stride(dim);
        to += row * Target::stride(dim);
        rest /= Source::size(dim);
    }
    if (param::checked || picked < Target::size(param::dim)) {
        move_vector<VECTOR>(target + to, source + from_offset);
    }
}

#kernel index_copy_kernel
KERNEL(index_copy_kernel) {
    const index_t element = thread_number() * VECTOR;
    if (element < Source::numel) {
        replace_row<Source, Out, Index>(out, source, index, element);
    }
}

#kernel index_copy_pair_kernel
KERNEL(index_copy_pair_kernel) {
    const index_t element = thread_number() * VECTOR;
    if (element < Source0::numel) {
        replace_row<Source0, Out0, Index>(out0, source0, index, element);
        replace_row<Source1, Out1, Index>(out1, source1, index, element);
    }
}
