// What all element-wise kernels share. An op is a row of the compiler's table, passed in the macro ELEMENTWISE_OPS:
//
//     ELEMENTWISE(add_kernel, const float alpha = params.attrs[0];, (a + alpha * b), (a + int(alpha) * b))
//     ELEMENTWISE_FLOAT(silu_kernel, , (a / (1 + exp(-a))))
//
// The results are C expressions over floats and over ints. A file says ELEMENTWISE_DENSE or ELEMENTWISE_BROADCAST, and
// so makes those rows kernels of that form.

#include "common.metal"

constant uint a_type [[function_constant(0)]];
constant uint b_type [[function_constant(1)]];
constant uint c_type [[function_constant(2)]];
constant uint out_type [[function_constant(3)]];
constant bool has_a [[function_constant(4)]];
constant bool has_b [[function_constant(5)]];
constant bool has_c [[function_constant(6)]];
constant bool vectorized [[function_constant(7)]];
constant bool integer [[function_constant(8)]];

struct ElementwiseParams {
    float scalars[3];
    int int_scalars[3];
    float attrs[3];
};

// Integer division as in torch, but for a divisor of 0, for which torch raises: there the quotient is 0.

inline int trunc_div(int a, int b) {
    return b == 0 ? 0 : b == -1 ? -a : a / b;
}

inline int trunc_mod(int a, int b) {
    return a - trunc_div(a, b) * b;
}

inline int floor_div(int a, int b) {
    const int rest = trunc_mod(a, b);
    return trunc_div(a, b) - int(b != 0 && rest != 0 && (rest < 0) != (b < 0));
}

inline int floor_mod(int a, int b) {
    const int rest = trunc_mod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// fmod is exact where a - b * floor(a / b) is not: for quotients too long for a float, and for an infinite divisor.

inline float floor_mod(float a, float b) {
    const float rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

inline float floor_div(float a, float b) {
    if (b == 0) {
        return a / b;
    }
    const float rest = fmod(a, b);
    const float quotient = (a - rest) / b - float(rest != 0 && (rest < 0) != (b < 0));
    return rint(quotient);
}

// Wraps around as torch does; a negative power of anything but 1 and -1 is 0.
inline int int_pow(int base, int exponent) {
    if (exponent < 0) {  // not a guard of memory
        return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
    }
    uint result = 1;
    uint square = uint(base);
    for (uint bits = uint(exponent); bits != 0; bits >>= 1) {
        result *= bits & 1 ? square : 1;
        square *= square;
    }
    return int(result);
}

// A thread's share of the operands: up to four elements.
template <typename T>
struct Lanes {
    T a[4];
    T b[4];
    T c[4];
};

// What an absent operand is: a scalar of the call.
inline float scalar(constant ElementwiseParams &params, uint operand, float) {
    return params.scalars[operand];
}

inline int scalar(constant ElementwiseParams &params, uint operand, int) {
    return params.int_scalars[operand];
}

#define ELEMENTWISE_OPERANDS                                                  \
    device const void *a [[buffer(0), function_constant(has_a)]],             \
    device const void *b [[buffer(1), function_constant(has_b)]],             \
    device const void *c [[buffer(2), function_constant(has_c)]],             \
    device void *out [[buffer(3)]],                                           \
    constant ElementwiseParams &params [[buffer(4)]],                         \
    constant Strided *views [[buffer(5)]]

// A row's result as a function, over floats or over ints.
#define ELEMENTWISE_RESULT(name, type, attributes, result)                                                \
    inline type name##_result(type a, type b, type c, constant ElementwiseParams &params) {               \
        attributes                                                                                        \
        return result;                                                                                    \
    }

#define ELEMENTWISE(name, attributes, result, int_result)                     \
    ELEMENTWISE_RESULT(name, float, attributes, result)                       \
    ELEMENTWISE_RESULT(name, int, attributes, int_result)                     \
    ELEMENTWISE_KERNEL(name, if (integer) { ELEMENTWISE_RUN(name, int) } else { ELEMENTWISE_RUN(name, float) })

#define ELEMENTWISE_FLOAT(name, attributes, result)                           \
    ELEMENTWISE_RESULT(name, float, attributes, result)                       \
    ELEMENTWISE_KERNEL(name, ELEMENTWISE_RUN(name, float))

#if defined(ELEMENTWISE_DENSE)

// Row-major operands, as one dimension; four elements a thread.

// Elements `first` to `end` of a row-major operand; `whole` if they are four, aligned for a vector access.

inline void read_lanes(thread float *lanes, device const void *data, uint type, uint first, uint end, bool whole) {
    if (whole && is_float(type)) {
        const float4 four = load4(data, type, first);
        lanes[0] = four.x;
        lanes[1] = four.y;
        lanes[2] = four.z;
        lanes[3] = four.w;
        return;
    }
    for (uint index = first; index < end; index++) {
        lanes[index - first] = load(data, type, index);
    }
}

inline void read_lanes(thread int *lanes, device const void *data, uint type, uint first, uint end, bool whole) {
    for (uint index = first; index < end; index++) {
        lanes[index - first] = load_int(data, type, index);
    }
}

inline void write_lanes(device void *out, thread const float *lanes, uint first, uint end, bool whole) {
    if (whole && is_float(out_type)) {
        store4(out, out_type, first, float4(lanes[0], lanes[1], lanes[2], lanes[3]));
        return;
    }
    for (uint index = first; index < end; index++) {
        store(out, out_type, index, lanes[index - first]);
    }
}

inline void write_lanes(device void *out, thread const int *lanes, uint first, uint end, bool whole) {
    for (uint index = first; index < end; index++) {
        store_int(out, out_type, index, lanes[index - first]);
    }
}

template <typename T>
inline void spread(thread T *lanes, T value) {
    for (uint lane = 0; lane < 4; lane++) {
        lanes[lane] = value;
    }
}

template <typename T>
inline void read_operands(
    thread Lanes<T> &lanes, device const void *a, device const void *b, device const void *c,
    constant ElementwiseParams &params, uint first, uint end, bool whole
) {
    spread(lanes.a, scalar(params, 0, T()));
    spread(lanes.b, scalar(params, 1, T()));
    spread(lanes.c, scalar(params, 2, T()));
    if (has_a) {
        read_lanes(lanes.a, a, a_type, first, end, whole);
    }
    if (has_b) {
        read_lanes(lanes.b, b, b_type, first, end, whole);
    }
    if (has_c) {
        read_lanes(lanes.c, c, c_type, first, end, whole);
    }
}

#define ELEMENTWISE_KERNEL(name, run)                                                                     \
    kernel void name(ELEMENTWISE_OPERANDS, uint position [[thread_position_in_grid]]) {                   \
        const uint first = 4 * position;                                                                  \
        const uint end = min(first + 4, views[3].shape[0]);                                               \
        const bool whole = vectorized && end == first + 4;                                                \
        run                                                                                               \
    }

#define ELEMENTWISE_RUN(name, type)                                                                       \
    Lanes<type> x;                                                                                        \
    read_operands(x, a, b, c, params, first, end, whole);                                                 \
    for (uint lane = 0; lane < 4; lane++) {                                                               \
        x.a[lane] = name##_result(x.a[lane], x.b[lane], x.c[lane], params);                               \
    }                                                                                                     \
    write_lanes(out, x.a, first, end, whole);

#elif defined(ELEMENTWISE_BROADCAST)

// Strided operands of rank 2 or more; a thread per element.

inline void load_at(thread float &value, device const void *data, uint type, uint offset) {
    value = load(data, type, offset);
}

inline void load_at(thread int &value, device const void *data, uint type, uint offset) {
    value = load_int(data, type, offset);
}

inline void store_at(device void *out, uint offset, float value) {
    store(out, out_type, offset, value);
}

inline void store_at(device void *out, uint offset, int value) {
    store_int(out, out_type, offset, value);
}

// Where the element at (column, row, index of the outer dimensions) lies.
inline uint offset_at(constant Strided &view, uint3 position) {
    const uint inner = view.rank - 2;
    return position.x * view.strides[inner + 1] + position.y * view.strides[inner] + offset_of(view, position.z, inner);
}

// The operands' values for the element at `position`, where the grid has one.
template <typename T>
inline bool read_operands(
    thread Lanes<T> &lanes, device const void *a, device const void *b, device const void *c,
    constant ElementwiseParams &params, constant Strided *views, uint3 position
) {
    const uint rank = views[3].rank;
    if (position.x >= views[3].shape[rank - 1] || position.y >= views[3].shape[rank - 2]) {
        return false;
    }
    lanes.a[0] = scalar(params, 0, T());
    lanes.b[0] = scalar(params, 1, T());
    lanes.c[0] = scalar(params, 2, T());
    if (has_a) {
        load_at(lanes.a[0], a, a_type, offset_at(views[0], position));
    }
    if (has_b) {
        load_at(lanes.b[0], b, b_type, offset_at(views[1], position));
    }
    if (has_c) {
        load_at(lanes.c[0], c, c_type, offset_at(views[2], position));
    }
    return true;
}

#define ELEMENTWISE_KERNEL(name, run)                                                                     \
    kernel void name(ELEMENTWISE_OPERANDS, uint3 position [[thread_position_in_grid]]) {                  \
        run                                                                                               \
    }

#define ELEMENTWISE_RUN(name, type)                                                                       \
    Lanes<type> x;                                                                                        \
    if (read_operands(x, a, b, c, params, views, position)) {                                             \
        store_at(out, offset_at(views[3], position), name##_result(x.a[0], x.b[0], x.c[0], params));      \
    }

#endif
