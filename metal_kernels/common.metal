// What every kernel file shares: the compute type, operand types, strided addressing, activations and reductions.

#include <metal_stdlib>
using namespace metal;

#if defined(USE_FLOAT)
typedef float compute_t;
#elif defined(USE_BFLOAT)
typedef bfloat compute_t;
#else
typedef half compute_t;
#endif
typedef vec<compute_t, 4> compute4_t;

// How an operand is stored. Every operand `x` has a function constant `x_type` that says which, so that a pipeline holds
// one load and one store and no branch.
#define TYPE_COMPUTE 0
#define TYPE_FLOAT 1
#define TYPE_INT 2
#define TYPE_BOOL 3

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

inline float load(device const void *data, uint type, uint index) {
    switch (type) {
        case TYPE_COMPUTE: return float(((device const compute_t *)data)[index]);
        case TYPE_FLOAT: return ((device const float *)data)[index];
        case TYPE_INT: return float(((device const int *)data)[index]);
        default: return float(((device const uchar *)data)[index]);
    }
}

inline int load_int(device const void *data, uint type, uint index) {
    switch (type) {
        case TYPE_COMPUTE: return int(float(((device const compute_t *)data)[index]));
        case TYPE_FLOAT: return int(((device const float *)data)[index]);
        case TYPE_INT: return ((device const int *)data)[index];
        default: return int(((device const uchar *)data)[index]);
    }
}

inline void store(device void *data, uint type, uint index, float value) {
    switch (type) {
        case TYPE_COMPUTE: ((device compute_t *)data)[index] = compute_t(value); break;
        case TYPE_FLOAT: ((device float *)data)[index] = value; break;
        case TYPE_INT: ((device int *)data)[index] = int(value); break;
        default: ((device uchar *)data)[index] = uchar(value != 0); break;
    }
}

inline void store_int(device void *data, uint type, uint index, int value) {
    switch (type) {
        case TYPE_COMPUTE: ((device compute_t *)data)[index] = compute_t(float(value)); break;
        case TYPE_FLOAT: ((device float *)data)[index] = float(value); break;
        case TYPE_INT: ((device int *)data)[index] = value; break;
        default: ((device uchar *)data)[index] = uchar(value != 0); break;
    }
}

// Four floats at once, from an index that is a multiple of 4; for the float types only.
inline float4 load4(device const void *data, uint type, uint index) {
    if (type == TYPE_COMPUTE) {
        return float4(*(device const compute4_t *)((device const compute_t *)data + index));
    }
    return *(device const float4 *)((device const float *)data + index);
}

inline void store4(device void *data, uint type, uint index, float4 value) {
    if (type == TYPE_COMPUTE) {
        *(device compute4_t *)((device compute_t *)data + index) = compute4_t(value);
    } else {
        *(device float4 *)((device float *)data + index) = value;
    }
}
