// Attention of many query rows (prefill): keys and values are packed as panels, tiles of scores come from the GEMM
// kernel, and the softmax is computed online, so that no [M, S] matrix exists.
//
// For bfloat16 the weights are rounded to bfloat16 before they multiply the values (torch's kernel does the same);
// their total is taken over the rounded weights, so they still sum to one.
#pragma once

#include "attention_rows.h"

namespace npu {

constexpr int64_t kTileKeys = 256;  // keys per tile: 12 rows of scores, and the panels they meet, stay in L1 and L2
constexpr int64_t kTilePanels = kTileKeys / kPanel;
constexpr int64_t kTaskBlocks = 4;  // row blocks that pass over a tile's panels together

// The packed keys and values of one key head, in elements of X.
struct PanelLayout {
  int64_t key_panels, value_panels, key_panel_size, value_panel_size;
  PanelLayout(const AttentionArgs& a, int64_t width)
      : key_panels(divide_up(a.keys(), kPanel)),
        value_panels(divide_up(a.value_width(), kPanel)),
        key_panel_size(round_up(a.width(), width) * kPanel),
        value_panel_size(key_panels * kPanel * kPanel) {}
  int64_t values_at() const { return key_panels * key_panel_size; }
  int64_t size() const { return values_at() + value_panels * value_panel_size; }
};

// Packs keys [32 panel, 32 panel + 32) and their values.
template <class T, class X>
void pack_keys(const AttentionArgs& a, const PanelLayout& layout, int64_t batch, int64_t kv_head, int64_t panel,
               X* packed) {
  constexpr int kWidth = Step<T>::kWidth;
  const int64_t key = panel * kPanel, count = std::min(kPanel, a.keys() - key);
  const T* keys = reinterpret_cast<const T*>(a.k.data) + offset(a.k, batch, kv_head, key);
  pack_panel<X, kWidth>(keys, a.k.stride[2], 1, count, a.width(), packed + panel * layout.key_panel_size);
  const T* values = reinterpret_cast<const T*>(a.v.data) + offset(a.v, batch, kv_head, key);
  for (int64_t p = 0; p < layout.value_panels; ++p) {
    X* out = packed + layout.values_at() + p * layout.value_panel_size + key * kPanel;
    // Weights of keys beyond the last are zero, and so must the values be: zero times leftovers could be NaN.
    if (count < kPanel) std::fill(out, out + kPanel * kPanel, X{});
    pack_panel<X, kWidth>(values + p * kPanel, 1, a.v.stride[2], std::min(kPanel, a.value_width() - p * kPanel), count,
                          out);
  }
}

// The running softmax of one block of up to kMaxRows query rows.
template <class T>
struct RowBlock {
  using X = typename Step<T>::X;
  int64_t first, rows;
  int64_t keys, shared_keys;  // a causal mask hides keys from the first on for all rows, from the second on for some
  QueryRow<T> query[kMaxRows];
  float highest[kMaxRows], total[kMaxRows];
  X* q;         // packed
  float* sums;  // one [rows][32] tile per value panel
};

template <class T>
void begin_block(const AttentionArgs& a, int64_t batch, int64_t kv_head, RowBlock<T>& block, int64_t value_panels) {
  constexpr int kWidth = Step<T>::kWidth;
  block.keys = 0;
  block.shared_keys = a.keys();
  for (int64_t r = 0; r < block.rows; ++r) {
    block.query[r] = query_row<T>(a, batch, kv_head, block.first + r);
    block.keys = std::max(block.keys, block.query[r].keys);
    block.shared_keys = std::min(block.shared_keys, block.query[r].keys);
    block.highest[r] = kNoWeight;
    block.total[r] = 0;
  }
  pack_rows<typename Step<T>::X, kWidth>([&](int64_t r) { return block.query[r].q; }, block.rows, a.width(), block.q);
  std::fill(block.sums, block.sums + value_panels * block.rows * kPanel, 0.0f);
}

// Attends a block to keys [key, key + 256) or what of them exists.
template <class T>
void attend_tile(const AttentionArgs& a, const PanelLayout& layout, const typename Step<T>::X* packed, int64_t key,
                 RowBlock<T>& block, float* scores, typename Step<T>::X* weights) {
  using X = typename Step<T>::X;
  constexpr int kWidth = Step<T>::kWidth;
  const int64_t rows = block.rows, panels = divide_up(std::min(kTileKeys, block.keys - key), kPanel);
  // Row r's scores are scores[r * kTileKeys ...]; first they hold the biases, if there can be any.
  const bool biased = a.mask_kind != MaskKind::none || key + kTileKeys > block.shared_keys;
  bool alive[kTilePanels];
  std::fill(alive, alive + kTilePanels, !biased);
  for (int64_t r = 0; biased && r < rows; ++r)
    for (int64_t j = 0; j < panels * kPanel; j += kLanes) {
      const Vec bias = score_bias(a, block.query[r], key + j, a.mask_floor);
      store(scores + r * kTileKeys + j, bias);
      alive[j / kPanel] = alive[j / kPanel] || attends_any(bias);
    }
  int64_t begin = 0, end = panels;
  while (begin < end && !alive[begin]) ++begin;
  while (begin < end && !alive[end - 1]) --end;
  if (begin == end) return;

  alignas(64) float tile[kMaxRows * kPanel];
  Vec highest[kMaxRows];
  std::fill(highest, highest + rows, splat(kNoWeight));
  for (int64_t p = begin; p < end; ++p) {
    const X* panel = packed + (key / kPanel + p) * layout.key_panel_size;
    multiply<X>(rows, block.q, panel, divide_up(a.width(), kWidth), tile, false);
    for (int64_t r = 0; r < rows; ++r)
      for (int v = 0; v < 2; ++v) {
        float* score = scores + r * kTileKeys + p * kPanel + v * kLanes;
        Vec value = load(tile + r * kPanel + v * kLanes) * a.scale;
        if (biased) value += load(score);
        store(score, value);
        highest[r] = max(value, highest[r]);
      }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float before = block.highest[r], now = std::max(before, max_lanes(highest[r]));
    if (now > before && before > kNoWeight) {
      const float shrink = std::exp(before - now);
      block.total[r] *= shrink;
      for (int64_t p = 0; p < layout.value_panels; ++p)
        for (int v = 0; v < 2; ++v) {
          float* sums = block.sums + (p * rows + r) * kPanel + v * kLanes;
          store(sums, load(sums) * shrink);
        }
    }
    block.highest[r] = now;
    const float shift = now == kNoWeight ? 0.0f : now;  // see attend_rows
    Vec total{};
    for (int64_t j = begin * kPanel; j < end * kPanel; j += kLanes) {
      X* weight = weights + r * kTileKeys + j;
      store(weight, exp(load(scores + r * kTileKeys + j) - shift));
      total += load(weight);
    }
    block.total[r] += sum_lanes(total);
  }
  for (int64_t p = 0; p < layout.value_panels; ++p) {
    const X* values = packed + layout.values_at() + p * layout.value_panel_size + (key + begin * kPanel) * kPanel;
    multiply<X, kTileKeys>(rows, weights + begin * kPanel, values, (end - begin) * kPanel / kWidth,
                           block.sums + p * rows * kPanel, true);
  }
}

template <class T>
void finish_block(const AttentionArgs& a, int64_t batch, int64_t kv_head, const RowBlock<T>& block, float* partial) {
  for (int64_t r = 0; r < block.rows; ++r) {
    partial[0] = block.highest[r];
    partial[1] = block.total[r];
    for (int64_t d = 0; d < a.value_width(); d += kLanes)
      store(partial + kPartialHead + d, load(block.sums + (d / kPanel * block.rows + r) * kPanel + d % kPanel));
    combine_and_store<T>(a, batch, kv_head, block.first + r, partial, 1, 0);
  }
}

template <class T>
void attention_by_tiles(const AttentionArgs& a) {
  using X = typename Step<T>::X;
  const PanelLayout layout(a, Step<T>::kWidth);
  const int64_t heads = a.batch() * a.kv_heads();
  X* packed = shared_scratch().get<X>(heads * layout.size() * sizeof(X));
  parallel_for(heads * layout.key_panels, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / layout.key_panels;
      pack_keys<T>(a, layout, head / a.kv_heads(), head % a.kv_heads(), i % layout.key_panels,
                   packed + head * layout.size());
    }
  });

  const RowBlocks blocks(a.rows());
  const int64_t task_blocks = heads * blocks.count >= 8 * num_threads() * kTaskBlocks ? kTaskBlocks : 1;
  const int64_t tasks = divide_up(blocks.count, task_blocks);
  const int64_t q_size = round_up(a.width(), Step<T>::kWidth) * kMaxRows;
  const int64_t sums_size = layout.value_panels * kPanel * kMaxRows;
  parallel_for(heads * tasks, 1, [&](int64_t begin, int64_t end, int) {
    float* sums = thread_scratch().get<float>(
        (kTaskBlocks * sums_size + kMaxRows * kTileKeys + partial_size(a)) * sizeof(float) +
        (kTaskBlocks * q_size + kMaxRows * kTileKeys) * sizeof(X));
    float* scores = sums + kTaskBlocks * sums_size;
    float* partial = scores + kMaxRows * kTileKeys;
    X* weights = reinterpret_cast<X*>(partial + partial_size(a));
    X* q = weights + kMaxRows * kTileKeys;
    for (int64_t i = begin; i < end; ++i) {
      // Late rows see the most keys under a causal mask: they go first, so that the short ones even out the end.
      const int64_t task = tasks - 1 - i / heads, head = i % heads;
      const int64_t batch = head / a.kv_heads(), kv_head = head % a.kv_heads();
      const int64_t first = task * task_blocks, count = std::min(task_blocks, blocks.count - first);
      RowBlock<T> block[kTaskBlocks];
      int64_t keys = 0;
      for (int64_t b = 0; b < count; ++b) {
        block[b].first = blocks.begin(first + b);
        block[b].rows = blocks.size(first + b);
        block[b].q = q + b * q_size;
        block[b].sums = sums + b * sums_size;
        begin_block(a, batch, kv_head, block[b], layout.value_panels);
        keys = std::max(keys, block[b].keys);
      }
      const X* panels = packed + head * layout.size();
      for (int64_t key = 0; key < keys; key += kTileKeys)
        for (int64_t b = 0; b < count; ++b)
          if (key < block[b].keys) attend_tile(a, layout, panels, key, block[b], scores, weights);
      for (int64_t b = 0; b < count; ++b) finish_block(a, batch, kv_head, block[b], partial);
    }
  });
}

}  // namespace npu
