// Values as integers in the same order, so that one exact comparison serves all types. Both zeros are equal; NaN comes
// above everything, or below everything where the least is sought (a NaN among the values is the result).
template <bool least>
__device__ __forceinline__ int key_of(float value) {
    const int bits = __float_as_int(value);
    const int magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return least ? -0x7fffffff : 0x7fffffff;
    }
    return bits < 0 ? -magnitude : magnitude;
}

template <bool least>
__device__ __forceinline__ int key_of(int value) {
    return value;
}
