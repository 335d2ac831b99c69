// A copy that exchanges which dimension lies side by side: x's last one does in x, its last but one in out. A block moves a
// square of them through shared memory, so that both sides are accessed by vectors.

constexpr int EDGE = 64;
constexpr int RANK = X::rank;
constexpr index_t ROWS = X::size(RANK - 2);
constexpr index_t COLUMNS = X::size(RANK - 1);

using Element = Out::type;

WAITING_KERNEL(transpose) {
    __shared__ Element square[EDGE][EDGE + 4 / sizeof(Element)];
    const index_t first_row = blockIdx.y * index_t(EDGE);
    const index_t first_column = blockIdx.x * index_t(EDGE);
    begin_in_turn();
    const X::type *source = x + leading_offset<X, RANK - 2>(blockIdx.z);
#pragma unroll
    for (int i = threadIdx.x; i < EDGE * EDGE / in_pack; i += THREADS) {
        const int row = i / (EDGE / in_pack);
        const int column = i % (EDGE / in_pack) * in_pack;
        if (first_row + row < ROWS && first_column + column < COLUMNS) {
            const auto pack =
                load_pack<in_pack>(source + (first_row + row) * X::stride(RANK - 2) + first_column + column);
#pragma unroll
            for (int j = 0; j < in_pack; j++) {
                square[row][column + j] = pack.item[j];
            }
        }
    }
    __syncthreads();
    Element *target = out + leading_offset<Out, RANK - 2>(blockIdx.z);
#pragma unroll
    for (int i = threadIdx.x; i < EDGE * EDGE / out_pack; i += THREADS) {
        const int row = i % (EDGE / out_pack) * out_pack;
        const int column = i / (EDGE / out_pack);
        if (first_row + row < ROWS && first_column + column < COLUMNS) {
            Pack<Element, out_pack> pack;
#pragma unroll
            for (int j = 0; j < out_pack; j++) {
                pack.item[j] = square[row + j][column];
            }
            store_pack<out_pack>(target + (first_column + column) * Out::stride(RANK - 1) + first_row + row, pack);
        }
    }
}
