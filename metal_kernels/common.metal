// What every kernel file shares: the compute type, operand types, strided addressing, activations and reductions.

#include <metal_stdlib>
using namespace metal;

// `other_t` is the 16-bit dtype that the compute type is not: scales of quantized weights may be stored in it.
#if defined(USE_FLOAT)
typedef float compute_t;
typedef half other_t;
#elif defined(USE_BFLOAT)
typedef bfloat compute_t;
typedef half other_t;
#else
typedef half compute_t;
typedef bfloat other_t;
#endif
typedef vec<compute_t, 4> compute4_t;
typedef vec<other_t, 4> other4_t;

// How an operand is stored. Every operand `x` has a function constant `x_type` that says which, so that a pipeline
// holds one load and one store and no branch.
#define TYPE_COMPUTE 0
#define TYPE_FLOAT 1
#define TYPE_INT 2
#define TYPE_BOOL 3
#define TYPE_BYTE 4
#define TYPE_OTHER 5

#define MAX_RANK 8
#define SIMD_WIDTH 32

// An operand's geometry, in elements; the buffer is bound at its first element. Dimensions beyond the rank have size 1
// and stride 0.
struct Strided {
    uint rank;
    uint shape[MAX_RANK];
    uint strides[MAX_RANK];
};

// Where element `index`, counted row-major over the first `dims` dimensions, starts.
inline uint offset_of(constant Strided &view, uint index, uint dims) {
    uint offset = 0;
    for (uint dim = dims; dim-- > 0;) {
        const uint size = view.shape[dim];
        const uint rest = index / size;
        offset += (index - rest * size) * view.strides[dim];
        index = rest;
    }
    return offset;
}

inline uint offset_of(constant Strided &view, uint index) {
    return offset_of(view, index, view.rank);
}

inline bool is_float(uint type) {
    return type == TYPE_COMPUTE || type == TYPE_FLOAT || type == TYPE_OTHER;
}

inline float load(device const void *data, uint type, uint index) {
    switch (type) {
        case TYPE_COMPUTE: return float(((device const compute_t *)data)[index]);
        case TYPE_OTHER: return float(((device const other_t *)data)[index]);
        case TYPE_FLOAT: return ((device const float *)data)[index];
        case TYPE_INT: return float(((device const int *)data)[index]);
        default: return float(((device const uchar *)data)[index]);
    }
}

inline int load_int(device const void *data, uint type, uint index) {
    switch (type) {
        case TYPE_COMPUTE: return int(float(((device const compute_t *)data)[index]));
        case TYPE_OTHER: return int(float(((device const other_t *)data)[index]));
        case TYPE_FLOAT: return int(((device const float *)data)[index]);
        case TYPE_INT: return ((device const int *)data)[index];
        default: return int(((device const uchar *)data)[index]);
    }
}

inline void store(device void *data, uint type, uint index, float value) {
    switch (type) {
        case TYPE_COMPUTE: ((device compute_t *)data)[index] = compute_t(value); break;
        case TYPE_OTHER: ((device other_t *)data)[index] = other_t(value); break;
        case TYPE_FLOAT: ((device float *)data)[index] = value; break;
        case TYPE_INT: ((device int *)data)[index] = int(value); break;
        default: ((device uchar *)data)[index] = uchar(value != 0); break;
    }
}

inline void store_int(device void *data, uint type, uint index, int value) {
    switch (type) {
        case TYPE_COMPUTE: ((device compute_t *)data)[index] = compute_t(float(value)); break;
        case TYPE_OTHER: ((device other_t *)data)[index] = other_t(float(value)); break;
        case TYPE_FLOAT: ((device float *)data)[index] = float(value); break;
        case TYPE_INT: ((device int *)data)[index] = value; break;
        default: ((device uchar *)data)[index] = uchar(value != 0); break;
    }
}

// Four elements at once, from an index that is a multiple of 4; `store4` is for the float types only.
inline float4 load4(device const void *data, uint type, uint index) {
    switch (type) {
        case TYPE_COMPUTE: return float4(*(device const compute4_t *)((device const compute_t *)data + index));
        case TYPE_OTHER: return float4(*(device const other4_t *)((device const other_t *)data + index));
        case TYPE_FLOAT: return *(device const float4 *)((device const float *)data + index);
        case TYPE_INT: return float4(*(device const int4 *)((device const int *)data + index));
        default: return float4(*(device const uchar4 *)((device const uchar *)data + index));
    }
}

inline void store4(device void *data, uint type, uint index, float4 value) {
    if (type == TYPE_COMPUTE) {
        *(device compute4_t *)((device compute_t *)data + index) = compute4_t(value);
    } else if (type == TYPE_OTHER) {
        *(device other4_t *)((device other_t *)data + index) = other4_t(value);
    } else {
        *(device float4 *)((device float *)data + index) = value;
    }
}

// How many elements a view has.
inline uint numel(constant Strided &view) {
    uint count = 1;
    for (uint dim = 0; dim < view.rank; dim++) {
        count *= view.shape[dim];
    }
    return count;
}

// Copies an element from one place and type to another; integers do not pass through floats.
inline void move_element(
    device void *target, uint target_type, uint to, device const void *source, uint kind, uint from
) {
    if (is_float(kind)) {
        store(target, target_type, to, load(source, kind, from));
    } else {
        store_int(target, target_type, to, load_int(source, kind, from));
    }
}

// What stands where an index was out of range, which a GPU cannot report: NaN, or 0 in integers.
inline void store_missing(device void *out, uint type, uint index) {
    if (is_float(type)) {
        store(out, type, index, NAN);
    } else {
        store_int(out, type, index, 0);
    }
}

// What Metal's library lacks of C's; each within 2 units in the last place.

inline float erf(float x) {
    const float t = fabs(x);
    if (t > 0.92f) {
        // log(1 - erf(t)); from 4 on erf rounds to 1.
        const float s = min(t, 4.0f);
        float p = fma(1.9822070775e-4f, s, -3.0654998275e-3f);
        p = fma(p, s, 2.2315248061e-2f);
        p = fma(p, s, -1.0411374558e-1f);
        p = fma(p, s, -6.3697601312e-1f);
        p = fma(p, s, -1.1277972809f);
        p = fma(p, s, -1.6643907080e-4f);
        return copysign(1.0f - exp(p), x);
    }
    const float s = x * x;
    float p = fma(-6.0218060e-4f, s, 4.9996014e-3f);
    p = fma(p, s, -2.67712835e-2f);
    p = fma(p, s, 1.128195491e-1f);
    p = fma(p, s, -3.761250818e-1f);
    p = fma(p, s, 1.28379152e-1f);
    return fma(p, x, x);
}

inline float expm1(float x) {
    if (!(x < 20.0f)) {
        return exp(x);
    }
    if (x < -20.0f) {
        return -1.0f;
    }
    // x = n ln 2 + r, ln 2 in two parts: exp(x) - 1 = 2^n (exp(r) - 1) + (2^n - 1).
    const float n = rint(x * 1.44269504f);
    const float r = fma(n, 1.90465421e-9f, fma(n, -0.693147182f, x));
    float p = fma(1.3882519e-3f, r, 8.3665191e-3f);
    p = fma(p, r, 4.16671998e-2f);
    p = fma(p, r, 1.666654363e-1f);
    p = fma(p, r, 4.999999815e-1f);
    p = fma(p * r, r, r);
    const float scale = as_type<float>((int(n) + 127) << 23);
    return fma(p, scale, scale - 1.0f);
}

inline float log1p(float x) {
    const float sum = 1.0f + x;
    const float result = log(sum);
    // Adds what `sum` lost of x; log1p(±0) = ±0, log1p(-1) = -inf and log1p(inf) = inf have nothing to add.
    return sum == 1.0f ? x : isinf(result) ? result : result + (x - (sum - 1.0f)) / sum;
}

// The activations of the products and convolutions, in the order in which their declarations name them.
enum Activation : uint { NONE, RELU, RELU6, GELU, GELU_TANH, SILU, HARDSWISH, HARDSIGMOID, SIGMOID };

// NaN stays NaN, as in PyTorch; max and clamp would drop it.
inline float relu(float x) {
    return select(x, 0.0f, x < 0.0f);
}

inline float relu6(float x) {
    return select(relu(x), 6.0f, x > 6.0f);
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}

inline float activate(float x, uint activation) {
    switch (activation) {
        case RELU: return relu(x);
        case RELU6: return relu6(x);
        case GELU: return 0.5f * x * (1.0f + erf(x * 0.707106781f));
        case GELU_TANH: return 0.5f * x * (1.0f + precise::tanh(0.797884561f * x * fma(0.044715f * x, x, 1.0f)));
        case SILU: return x * sigmoid(x);
        case HARDSWISH: return x * relu6(x + 3.0f) / 6.0f;
        case HARDSIGMOID: return relu6(x + 3.0f) / 6.0f;
        case SIGMOID: return sigmoid(x);
        default: return x;
    }
}

#define FRAGMENT 8  // edge of a simdgroup_matrix

// A block of ROWS × COLUMNS fragments of a product, which one SIMD group accumulates in registers: all loops over them
// are unrolled, since what is indexed by a variable would go to memory.
template <uint ROWS, uint COLUMNS>
struct ProductBlock {
    simdgroup_float8x8 sums[ROWS][COLUMNS];

    void clear() {
#pragma unroll
        for (uint row = 0; row < ROWS; row++) {
#pragma unroll
            for (uint column = 0; column < COLUMNS; column++) {
                sums[row][column] = make_filled_simdgroup_matrix<float, FRAGMENT, FRAGMENT>(0.0f);
            }
        }
    }

    // sums += left · right, both staged row-major in threadgroup memory: left[rows, depth], and right[depth, columns],
    // or right[columns, depth] where `transposed`. Strides are elements from one row to the next.
    template <bool transposed>
    void accumulate(
        threadgroup const float *left, uint left_stride, threadgroup const float *right, uint right_stride, uint depth
    ) {
        for (uint k = 0; k < depth; k += FRAGMENT) {
            simdgroup_float8x8 a[ROWS];
            simdgroup_float8x8 b[COLUMNS];
#pragma unroll
            for (uint row = 0; row < ROWS; row++) {
                simdgroup_load(a[row], left + row * FRAGMENT * left_stride + k, left_stride);
            }
#pragma unroll
            for (uint column = 0; column < COLUMNS; column++) {
                if (transposed) {
                    simdgroup_load(
                        b[column], right + column * FRAGMENT * right_stride + k, right_stride, ulong2(0), true
                    );
                } else {
                    simdgroup_load(b[column], right + k * right_stride + column * FRAGMENT, right_stride);
                }
            }
#pragma unroll
            for (uint row = 0; row < ROWS; row++) {
#pragma unroll
                for (uint column = 0; column < COLUMNS; column++) {
                    simdgroup_multiply_accumulate(sums[row][column], a[row], b[column], sums[row][column]);
                }
            }
        }
    }

    // Row-major, without gaps.
    void store(threadgroup float *block) {
#pragma unroll
        for (uint row = 0; row < ROWS; row++) {
#pragma unroll
            for (uint column = 0; column < COLUMNS; column++) {
                const uint stride = COLUMNS * FRAGMENT;
                simdgroup_store(sums[row][column], block + row * FRAGMENT * stride + column * FRAGMENT, stride);
            }
        }
    }
};

// The most SIMD groups that a threadgroup may have.
#define MAX_SIMDGROUPS 32

// Where a thread stands in its threadgroup, which is made of whole SIMD groups.
struct Place {
    uint lane;
    uint group;
    uint groups;

    uint thread_index() const { return group * SIMD_WIDTH + lane; }
    uint thread_count() const { return groups * SIMD_WIDTH; }
};
