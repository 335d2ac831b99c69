// Sums over the last `reduce_dims` dimensions of a view whose last kept dimension lies side by side, and no reduced one does. A
// block makes `columns` packs of `pack` results that lie side by side; its threads share the elements of each.

#kernel sum_of_columns
#define REDUCED sum_of_columns
__device__ __forceinline__ float term(float value) { return value; }
__device__ __forceinline__ float result(float sum) { return sum; }

#kernel mean_of_columns
#define REDUCED mean_of_columns
__device__ __forceinline__ float term(float value) { return value; }
__device__ __forceinline__ float result(float sum) { return sum / float(count); }

#kernel norm_of_columns
#define REDUCED norm_of_columns
__device__ __forceinline__ float term(float value) { return value * value; }
__device__ __forceinline__ float result(float sum) { return sqrtf(sum); }

#kernel sum_of_columns mean_of_columns norm_of_columns
constexpr int outer_dims = X::rank - int(param::reduce_dims) - 1;
constexpr int WIDTH = int(X::size(outer_dims));
constexpr int SLAB = columns * pack;  // results of a block
constexpr int SLABS = (WIDTH + SLAB - 1) / SLAB;
constexpr int WALKERS = THREADS / columns;

// Where element `index` of the reduced ones lies, from the first one of its column.
__device__ __forceinline__ index_t reduced_offset(index_t index) {
    index_t offset = 0;
#pragma unroll
    for (int dim = X::rank - 1; dim > outer_dims + 1; dim--) {
        offset += index % X::size(dim) * X::stride(dim);
        index /= X::size(dim);
    }
    return offset + index * X::stride(outer_dims + 1);
}

KERNEL(REDUCED) {
    __shared__ float parts[WALKERS][SLAB];
    const index_t outer = blockIdx.x / SLABS;
    const int first = int(blockIdx.x % SLABS) * SLAB;
    const int own = int(threadIdx.x) % columns * pack;
    float sums[pack] = {};
    if (first + own < WIDTH) {
        const X::type *column = x + leading_offset<X, outer_dims>(outer) + first + own;
#pragma unroll 4
        for (int i = int(threadIdx.x) / columns; i < count; i += WALKERS) {
            float values[pack];
            load_floats(values, column + reduced_offset(i));
#pragma unroll
            for (int j = 0; j < pack; j++) {
                sums[j] += term(values[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < pack; j++) {
        parts[threadIdx.x / columns][own + j] = sums[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SLAB && first + i < WIDTH; i += THREADS) {
        float sum = 0.0f;
#pragma unroll 8
        for (int walker = 0; walker < WALKERS; walker++) {
            sum += parts[walker][i];
        }
        const index_t place = leading_offset<Out, outer_dims>(outer) + (first + i) * Out::stride(outer_dims);
        out[place] = from<Out::type>(result(sum));
    }
}
