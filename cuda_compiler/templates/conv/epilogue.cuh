// Channels side by side of an operand [N, H, W, C] of an epilogue at a pixel of an image; a stride of 0 repeats an element.
template <typename Operand, unsigned columns, int count>
__device__ __forceinline__ void load_at(
    float (&values)[count], const typename Operand::type *operand, unsigned image, unsigned channel, unsigned pixel
) {
    operand += image * Operand::stride(0) + pixel / columns * Operand::stride(1) + pixel % columns * Operand::stride(2) +
        channel * Operand::stride(3);
    if constexpr (Operand::vector >= count) {
        load_floats(values, operand);
    } else {
#pragma unroll
        for (int i = 0; i < count; i++) {
            values[i] = to_float(operand[i * Operand::stride(3)]);
        }
    }
}
