// out[B, H, M, N] = a[B, H, M, K] · b[B, H, K, N] for two operands that both change from run to run.
#include "pool.h"
#include "products/gemm.h"
#include "scratch.h"

namespace npu {
namespace {

struct MatmulArgs {
  View a, b, out;  // the last stride of a and out is 1
};

template <class W>
void run(const MatmulArgs& args) {
  using X = typename Step<W>::X;
  constexpr int kWidth = Step<W>::kWidth;
  const View &a = args.a, &b = args.b, &out = args.out;
  const int64_t k = a.size[3], n = b.size[3], steps = divide_up(k, kWidth), packed_k = steps * kWidth;
  const int64_t matrices = out.size[0] * out.size[1], panels = divide_up(n, kPanel);
  const RowBlocks blocks(a.size[2]);
  const int64_t matrix_size = blocks.packed_begin(blocks.count, steps) * kWidth;
  const auto block_at = [&](int64_t matrix, int64_t block) {
    return matrix * matrix_size + blocks.packed_begin(block, steps) * kWidth;
  };
  // Matrices that a repeats, by a stride of zero, are packed once.
  const int64_t outer = a.stride[0] ? a.size[0] : 1, inner = a.stride[1] ? a.size[1] : 1;
  X* packed = shared_scratch().get<X>(outer * inner * matrix_size * sizeof(X));
  parallel_for(outer * inner * blocks.count, divide_up(16384, kMaxRows * packed_k), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / blocks.count, block = i % blocks.count, row = blocks.begin(block);
      const W* x = reinterpret_cast<const W*>(a.data) + offset(a, matrix / inner, matrix % inner, row);
      const W* rows[kMaxRows];
      for (int64_t r = 0; r < blocks.size(block); ++r) rows[r] = x + r * a.stride[2];
      pack_rows(rows, blocks.size(block), blocks.size(block), k, packed + block_at(matrix, block));
    }
  });
  // A task packs one panel of b and passes all rows over it.
  const bool small = matrices * n * packed_k <= 8192;
  parallel_for(matrices * panels, small ? matrices * panels : 1, [&](int64_t begin, int64_t end, int) {
    X* panel = thread_scratch().get<X>(packed_k * kPanel * sizeof(X));
    alignas(64) float tile[kMaxRows * kPanel];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / panels, column = i % panels * kPanel, columns = std::min(kPanel, n - column);
      const int64_t m0 = matrix / out.size[1], m1 = matrix % out.size[1];
      const int64_t packed_matrix = (outer > 1 ? m0 : 0) * inner + (inner > 1 ? m1 : 0);
      const W* w = reinterpret_cast<const W*>(b.data) + offset(b, m0, m1, 0) + column * b.stride[3];
      pack_panel(w, b.stride[3], b.stride[2], columns, k, panel);
      for (int64_t block = 0; block < blocks.count; ++block) {
        const int64_t row = blocks.begin(block), rows = blocks.size(block);
        multiply<X>(rows, packed + block_at(packed_matrix, block), panel, steps, {tile}, {});
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < columns; c += kLanes)
            store_any(out.data, out.dtype, offset(out, m0, m1, row + r) + column + c, load(tile + r * kPanel + c),
                      columns - c);
      }
    }
  });
}

void matmul(const MatmulArgs& args) {
  with_type(args.a.dtype, [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(args); });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(matmul, npu::MatmulArgs, npu::matmul)
