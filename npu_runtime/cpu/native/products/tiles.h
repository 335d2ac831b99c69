// Products with packed weights on a matrix unit, whose sums wait for each other.
#pragma once

#include "products/linear_args.h"

namespace npu {

// Blocks of sums on their way from the matrix unit to results, which finish(block, sums, begin, end) makes of some of their
// rows; Block says where the results go. A block is finished while the next one is multiplied, some rows after each of its
// products: a processor that executes instructions out of order then keeps its matrix unit and its vector units busy at the
// same time, but does not see far enough ahead to do so by itself.
template <class Block, class FinishBlock>
class TileSums {
 public:
  // For blocks of that many products of a depth of tiles.
  TileSums(const FinishBlock& finish, int64_t products)
      : finish_(finish), products_(divide_up(products, kTileRows / kRows)) {}
  ~TileSums() { finish_until(kTileRows); }
  // Where the next block's sums go, until it is put.
  float* next() { return sums_[next_]; }
  // Takes part in the work between products.
  NPU_INLINE void after_product() {
    if (--left_) return;
    left_ = products_;
    finish_until(finished_ + kRows);
  }
  void put(const Block& block) {
    finish_until(kTileRows);
    waiting_ = block;
    finished_ = 0;
    left_ = products_;
    next_ ^= 1;
  }

 private:
  static constexpr int64_t kRows = 8;  // that are finished together

  void finish_until(int64_t row) {
    if (finished_ >= kTileRows) return;
    finish_(waiting_, static_cast<const float*>(sums_[next_ ^ 1]), finished_, row);
    finished_ = row;
  }

  const FinishBlock& finish_;
  alignas(64) float sums_[2][kTileRows * kPanel];
  int next_ = 0;
  const int64_t products_;  // after which some rows are finished
  int64_t left_ = products_, finished_ = kTileRows;
  Block waiting_{};
};

// Number of tasks, of that many blocks of sums each, that are claimed together: so many that most blocks are followed by
// another, and no more than every thread gets.
inline int64_t tile_grain(int64_t tasks, int64_t blocks) {
  constexpr int64_t kTogether = 8;
  const int64_t share = divide_up(tasks, num_threads());
  return share * blocks <= kTogether ? share : divide_up(kTogether / 2, blocks);
}

// Many rows, which the matrix unit reads where they are. A task is one panel, which panel_at(p) returns, and a range
// of `task_rows` rows at least; the last block begins early enough to be whole, and leaves out the rows that another has
// finished.
template <class PanelAt>
void run_tiles(const LinearArgs& a, int64_t steps, int64_t task_rows, const PanelAt& panel_at) {
  struct Block {
    int64_t first, left_out, column;
  };
  const bf16* x = reinterpret_cast<const bf16*>(a.x.data);
  const int64_t rows = a.x.size[2], blocks = divide_up(rows, kTileRows), panels = divide_up(a.n, kPanel);
  const int64_t row_tasks = std::clamp<int64_t>(divide_up(8 * num_threads(), panels), divide_up(rows, task_rows), blocks);
  const auto finish_block = [&a, finish = finish_for(a)](const Block& block, const float* sums, int64_t begin, int64_t end) {
    begin = std::max(begin, block.left_out);
    if (begin < end) finish(a, sums + begin * kPanel, block.first + begin, end - begin, block.column);
  };
  parallel_for(row_tasks * panels, tile_grain(row_tasks * panels, blocks / row_tasks), [&](int64_t begin, int64_t end, int) {
    [[maybe_unused]] const TileState state(steps);
    TileSums<Block, decltype(finish_block)> sums(finish_block, divide_up(steps, kTileSteps));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t p = task % panels, row_task = task / panels;
      const bf16* panel = panel_at(p);
      for (int64_t b = blocks * row_task / row_tasks; b < blocks * (row_task + 1) / row_tasks; ++b) {
        const int64_t row = b * kTileRows, first = std::min(row, rows - kTileRows);
        multiply_tiles(x + first * a.x.stride[2], a.x.stride[2], panel, steps, sums.next(),
                       [&]() __attribute__((always_inline)) { sums.after_product(); });
        sums.put({first, row - first, p * kPanel});
      }
    }
  });
}

}  // namespace npu
