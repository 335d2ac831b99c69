// What the expressions of the element-wise table use beyond C's math library.

// Integer division as in torch, but for a divisor of 0, for which torch raises: there the quotient is 0.

__device__ __forceinline__ int trunc_div(int a, int b) {
    return b == 0 ? 0 : b == -1 ? int(0u - unsigned(a)) : a / b;
}

__device__ __forceinline__ int trunc_mod(int a, int b) {
    return a - trunc_div(a, b) * b;
}

__device__ __forceinline__ int floor_div(int a, int b) {
    const int rest = trunc_mod(a, b);
    return trunc_div(a, b) - int(b != 0 && rest != 0 && (rest < 0) != (b < 0));
}

__device__ __forceinline__ int floor_mod(int a, int b) {
    const int rest = trunc_mod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// fmod is exact where a - b * floor(a / b) is not: for quotients too long for a float, and for an infinite divisor.

__device__ __forceinline__ float floor_mod(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

__device__ __forceinline__ float floor_div(float a, float b) {
    if (b == 0) {
        return a / b;
    }
    const float rest = fmodf(a, b);
    const float quotient = (a - rest) / b - float(rest != 0 && (rest < 0) != (b < 0));
    return rintf(quotient);
}

// Wraps around as torch does; a negative power of anything but 1 and -1 is 0.
__device__ __forceinline__ int int_pow(int base, int exponent) {
    if (exponent < 0) {
        return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
    }
    unsigned result = 1;
    unsigned square = unsigned(base);
    for (unsigned bits = unsigned(exponent); bits != 0; bits >>= 1) {
        result *= bits & 1 ? square : 1;
        square *= square;
    }
    return int(result);
}
