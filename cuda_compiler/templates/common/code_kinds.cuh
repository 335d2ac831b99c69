// Kinds of codes of a weight, and the numbers that 4-bit codes choose from a table: those of `CODE_FORMATS`. Expects `param::codes`.

constexpr bool is_int4 = param::codes == param::CodesKind::int4_;
constexpr bool is_int8 = param::codes == param::CodesKind::int8_;
constexpr bool is_float4 = param::codes == param::CodesKind::float4_e2m1_;
constexpr bool has_table = is_float4 || param::codes == param::CodesKind::iq4_nl_;
constexpr bool in_nibbles = is_int4 || has_table;
static_assert(in_nibbles || is_int8 || param::codes == param::CodesKind::float8_e4m3_);

// The int8 numbers that the four codes of float4 in the low half of a word choose, one in each byte, but 0 for negative ones: the highest
// bit of a selector repeats the sign of the byte, which is 0 for all magnitudes.
__device__ __forceinline__ unsigned positive_bytes(unsigned codes) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(0x03020100u), "r"(0x0c080604u), "r"(codes));
    return result;
}

// The int8 numbers that the four codes in the low half of a word choose, one in each byte.
__device__ __forceinline__ unsigned table_bytes(unsigned codes) {
    // Of codes 0 to 7 and of codes 8 to 15, first bytes last.
    constexpr unsigned low[2] = {is_float4 ? 0x03020100u : 0xbfad9881u, is_float4 ? 0x0c080604u : 0xf6eaddcfu};
    constexpr unsigned high[2] = {is_float4 ? 0xfdfeff00u : 0x26190d01u, is_float4 ? 0xf4f8fafcu : 0x71594535u};
    unsigned number, difference, sign;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(number) : "r"(low[0]), "r"(low[1]), "r"(codes & 0x7777u));
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(difference) : "r"(low[0] ^ high[0]), "r"(low[1] ^ high[1]), "r"(codes & 0x7777u));
    // The highest bit of a selector repeats the sign of the byte: 0xff for codes from 8 on, else 0x80, which becomes 0.
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(sign) : "r"(0x80808080u), "r"(codes));
    return number ^ (difference & (sign << 1 | 1u) & sign);
}
