// 8 × 8 matrices spread over a SIMD group, two elements of a row to a lane.
#pragma once

#include "simd.h"

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "SIMD-group matrices are 8 x 8");
    vec<T, 2> elements;

    simdgroup_matrix() = default;
    METAL_INLINE explicit simdgroup_matrix(T diagonal) {
        for (uint i = 0; i < 2; ++i) elements[i] = row() == column() + i ? diagonal : T(0);
    }
    static METAL_INLINE uint row() { return metal_runtime::current().lane / 4; }
    static METAL_INLINE uint column() { return metal_runtime::current().lane % 4 * 2; }
    METAL_INLINE vec<T, 2> &thread_elements() { return elements; }
    METAL_INLINE const vec<T, 2> &thread_elements() const { return elements; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R> METAL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> result;
    result.elements = vec<T, 2>(value);
    return result;
}

template <class P>
METAL_INLINE P simdgroup_element(P start, ulong elements_per_row, ulong2 origin, bool transpose, uint row,
                                 uint column) {
    const ulong across = transpose ? row : column;
    const ulong down = transpose ? column : row;
    return start + ((origin.y + down) * elements_per_row + origin.x + across);
}

METAL_INLINE void check_full_simdgroup(uint site) {
    metal_runtime::Thread &self = metal_runtime::current();
    if (self.simdgroup->count != metal_runtime::SIMD_WIDTH) {
        metal_scheduler->fault(&self, "SIMD-group matrix at line %u in a SIMD group of %u threads", site,
                               self.simdgroup->count);
    }
}

template <class T, class P>
METAL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &matrix, P start, ulong elements_per_row = 8,
                                 ulong2 origin = ulong2(0ul), bool transpose = false, uint site = __builtin_LINE()) {
    check_full_simdgroup(site);
    const auto pointer = start + 0;
    for (uint i = 0; i < 2; ++i) {
        matrix.elements[i] =
            *simdgroup_element(pointer, elements_per_row, origin, transpose, matrix.row(), matrix.column() + i);
    }
}

template <class T, class P>
METAL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &matrix, P start, ulong elements_per_row = 8,
                                  ulong2 origin = ulong2(0ul), bool transpose = false, uint site = __builtin_LINE()) {
    check_full_simdgroup(site);
    const auto pointer = start + 0;
    for (uint i = 0; i < 2; ++i) {
        metal_runtime::write(simdgroup_element(pointer, elements_per_row, origin, transpose, matrix.row(),
                                               matrix.column() + i)) = matrix.elements[i];
    }
}

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                          const simdgroup_matrix<B, 8, 8> &b, const simdgroup_matrix<C, 8, 8> &c,
                                          uint site = __builtin_LINE()) {
    struct Operands {
        float a[2], b[2], c[2];
    };
    struct Result {
        float values[2];
    };
    check_full_simdgroup(site);
    const Operands operands{
        {a.elements[0], a.elements[1]}, {b.elements[0], b.elements[1]}, {c.elements[0], c.elements[1]}};
    const Result result = metal_runtime::collective<Result>(operands, site, [](Operands *lanes, Result *results, uint) {
        float left[8][8], right[8][8], sum[8][8];
        for (uint lane = 0; lane < 32; ++lane) {
            for (uint i = 0; i < 2; ++i) {
                left[lane / 4][lane % 4 * 2 + i] = lanes[lane].a[i];
                right[lane / 4][lane % 4 * 2 + i] = lanes[lane].b[i];
                sum[lane / 4][lane % 4 * 2 + i] = lanes[lane].c[i];
            }
        }
        for (uint row = 0; row < 8; ++row) {
            for (uint k = 0; k < 8; ++k) {
                for (uint column = 0; column < 8; ++column) sum[row][column] += left[row][k] * right[k][column];
            }
        }
        for (uint lane = 0; lane < 32; ++lane) {
            for (uint i = 0; i < 2; ++i) results[lane].values[i] = sum[lane / 4][lane % 4 * 2 + i];
        }
    });
    for (uint i = 0; i < 2; ++i) d.elements[i] = D(result.values[i]);
}

template <class D, class A, class B>
METAL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                     const simdgroup_matrix<B, 8, 8> &b, uint site = __builtin_LINE()) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), site);
}

}  // namespace metal
