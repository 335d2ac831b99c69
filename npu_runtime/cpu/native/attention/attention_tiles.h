// Attention of many query rows (prefill): keys and values are packed as panels, tiles of scores come from the GEMM
// kernel, and the softmax is computed online, so that no [M, S] matrix exists. Panels of keys that a causal mask or the
// given one hides from all queries are not packed, and a block of queries skips those that it cannot see, those before
// its queries' windows among them.
//
// For bfloat16 the weights are rounded to bfloat16 before they multiply the values (torch's kernel does the same);
// their total is taken over the rounded weights, so they still sum to one.
#pragma once

#include "attention/attention_mask.h"
#include "attention/attention_rows.h"

namespace npu {

inline constexpr int64_t kTaskBlocks = 4;  // row blocks that pass over a tile's panels together

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

// Rows of a panel as X, `pitch` values apart: codes become the numbers that they stand for, in the thread's memory.
template <class X, class K>
auto widened_rows(const K* rows, int64_t count, int64_t width, int64_t* pitch) {
  if constexpr (!kIsCode<K>) {
    return rows;
  } else {
    const int64_t stride = *pitch;
    *pitch = round_up(width, kLanes);
    X* numbers = thread_scratch().get<X>(kPanel * *pitch * sizeof(X));
    for (int64_t c = 0; c < count; ++c)
      for (int64_t d = 0; d < width; d += kLanes)
        store(numbers + c * *pitch + d, load_n(rows + c * stride + d, width - d));
    return static_cast<const X*>(numbers);
  }
}

// Packs one panel of keys and their values.
template <class K, class X>
void pack_keys(const AttentionArgs& a, const PanelLayout& layout, int64_t batch, int64_t kv_head, int64_t panel,
               X* packed) {
  const int64_t key = panel * kPanel, count = std::min(kPanel, a.keys() - key);
  int64_t k_pitch = a.k.stride[2], v_pitch = a.v.stride[2];
  const auto* keys =
      widened_rows<X>(reinterpret_cast<const K*>(a.k.data) + offset(a.k, batch, kv_head, key), count, a.width(), &k_pitch);
  pack_panel(keys, k_pitch, 1, count, a.width(), packed + panel * layout.key_panel_size);
  const auto* values = widened_rows<X>(reinterpret_cast<const K*>(a.v.data) + offset(a.v, batch, kv_head, key), count,
                                       a.value_width(), &v_pitch);
  for (int64_t p = 0; p < layout.value_panels; ++p) {
    X* out = packed + layout.values_at() + p * layout.value_panel_size + key * kPanel;
    // Weights of keys beyond the last are zero, and so must the values be: zero times leftovers could be NaN.
    if (count < kPanel) std::fill(out, out + kPanel * kPanel, X{});
    pack_panel(values + p * kPanel, 1, v_pitch, std::min(kPanel, a.value_width() - p * kPanel), count,
                          out);
  }
}

// The running softmax of one block of up to kMaxRows query rows.
template <class T>
struct RowBlock {
  using X = typename Step<T>::X;
  int64_t batch, kv_head;
  int64_t first, rows;
  int64_t keys, shared_keys;  // a causal mask hides keys from the first on for all rows, from the second on for some
  int64_t begin, shared_begin;  // windows hide keys before the first for all rows, before the second for some
  QueryRow<T> query[kMaxRows];
  const TilePanels* mask[kMaxRows];  // what the mask's row leaves visible, if there is a mask
  float highest[kMaxRows], total[kMaxRows];
  X* q;         // packed
  float* sums;  // one [rows][kPanel] tile per value panel

  // What the rows together see of the tile that begins at `key`, and where scores need a bias.
  TilePanels visible(bool masked, int64_t key) const {
    const auto bits_below = [](int64_t panels) {
      return static_cast<uint8_t>((1 << std::clamp<int64_t>(panels, 0, kTilePanels)) - 1);
    };
    TilePanels result = masked ? TilePanels{} : TilePanels{0xff, 0};
    for (int64_t r = 0; masked && r < rows; ++r) result = result | mask[r][key / kTileKeys];
    result.seen &= bits_below(divide_up(keys - key, kPanel));
    result.seen &= ~bits_below((std::max(begin, key) - key) / kPanel);
    if (shared_keys < key + kTileKeys) result.biased |= ~bits_below((std::max(shared_keys, key) - key) / kPanel);
    result.biased |= bits_below(divide_up(shared_begin - key, kPanel));
    return result;
  }
};

template <class T>
void begin_block(const AttentionArgs& a, const MaskSummary& mask, int64_t batch, int64_t kv_head, RowBlock<T>& block,
                 int64_t value_panels) {
  const T* row[kMaxRows];
  block.batch = batch;
  block.kv_head = kv_head;
  block.keys = 0;
  block.shared_keys = block.begin = a.keys();
  block.shared_begin = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t index = block.first + r, head = kv_head * (a.heads() / a.kv_heads()) + index / a.queries();
    block.query[r] = query_row<T>(a, batch, kv_head, index);
    row[r] = block.query[r].q;
    if (mask.planes) block.mask[r] = mask.row(batch, head, index % a.queries());
    block.keys = std::max(block.keys, block.query[r].keys);
    block.shared_keys = std::min(block.shared_keys, block.query[r].keys);
    block.begin = std::min(block.begin, block.query[r].first);
    block.shared_begin = std::max(block.shared_begin, block.query[r].first);
    block.highest[r] = kNoWeight;
    block.total[r] = 0;
  }
  pack_rows(row, block.rows, block.rows, a.width(), block.q);
  std::fill(block.sums, block.sums + value_panels * block.rows * kPanel, 0.0f);
}

// Attends a block to what it sees of one tile of keys, [key, key + kTileKeys).
template <class T, class K>
void attend_tile(const AttentionArgs& a, const PanelLayout& layout, const typename Step<T>::X* packed, int64_t key,
                 RowBlock<T>& block, float* scores, typename Step<T>::X* weights) {
  using X = typename Step<T>::X;
  constexpr int kWidth = Step<T>::kWidth;
  const TilePanels visible = block.visible(a.mask_kind != MaskKind::none, key);
  if (visible.seen == 0) return;
  // The panels that are seen, side by side: row r's scores of the c-th are scores[r * kTileKeys + c * kPanel ...].
  int64_t panels[kTilePanels], count = 0;
  for (int64_t p = 0; p < kTilePanels; ++p)
    if (visible.seen >> p & 1) panels[count++] = key / kPanel + p;

  const int64_t rows = block.rows;
  alignas(64) float tile[kMaxRows * kPanel];
  Vec highest[kMaxRows];
  std::fill(highest, highest + rows, splat(kNoWeight));
  for (int64_t c = 0; c < count; ++c) {
    const int64_t first = panels[c] * kPanel;
    const bool biased = visible.biased >> (panels[c] % kTilePanels) & 1;
    multiply<X>(rows, block.q, packed + panels[c] * layout.key_panel_size, divide_up(a.width(), kWidth), {tile}, {});
    Vec factor[2];
    for (int v = 0; v < 2; ++v)
      factor[v] = a.scale * scales_of<K>(a, a.k_scales, block.batch, block.kv_head, first + v * kLanes);
    for (int64_t r = 0; r < rows; ++r)
      for (int v = 0; v < 2; ++v) {
        Vec score = capped(a, load(tile + r * kPanel + v * kLanes) * factor[v]);
        if (biased) score += score_bias(a, block.query[r], first + v * kLanes, a.mask_floor);
        store(scores + r * kTileKeys + c * kPanel + v * kLanes, score);
        highest[r] = max(score, highest[r]);
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
    for (int64_t j = 0; j < count * kPanel; j += kLanes) {
      X* weight = weights + r * kTileKeys + j;
      store(weight, exp(load(scores + r * kTileKeys + j) - shift));
      total += load(weight);
      if constexpr (kIsCode<K>) {
        const int64_t at = panels[j / kPanel] * kPanel + j % kPanel;
        store(weight, load(weight) * scales_of<K>(a, a.v_scales, block.batch, block.kv_head, at));
      }
    }
    block.total[r] += sum_lanes(total);
  }
  // Weights meet the values of neighbouring panels in one go.
  for (int64_t c = 0, next; c < count; c = next) {
    for (next = c + 1; next < count && panels[next] == panels[next - 1] + 1;) ++next;
    for (int64_t p = 0; p < layout.value_panels; ++p) {
      const X* values = packed + layout.values_at() + p * layout.value_panel_size + panels[c] * kPanel * kPanel;
      multiply_unpacked<X>(rows, weights + c * kPanel, kTileKeys, values, (next - c) * kPanel / kWidth,
                           {block.sums + p * rows * kPanel}, onto({block.sums + p * rows * kPanel}));
    }
  }
}

template <class T, class K>
void finish_block(const AttentionArgs& a, int64_t batch, int64_t kv_head, const RowBlock<T>& block, float* partial) {
  for (int64_t r = 0; r < block.rows; ++r) {
    partial[0] = block.highest[r];
    partial[1] = block.total[r];
    for (int64_t d = 0; d < a.value_width(); d += kLanes)
      store(partial + kPartialHead + d, load(block.sums + (d / kPanel * block.rows + r) * kPanel + d % kPanel));
    combine_and_store<T, K>(a, batch, kv_head, block.first + r, partial, 1, 0);
  }
}

template <class T, class K>
void attention_by_tiles(const AttentionArgs& a) {
  using X = typename Step<T>::X;
  const PanelLayout layout(a, Step<T>::kWidth);
  const int64_t heads = a.batch() * a.kv_heads();
  MaskSummary mask(a);
  char* memory = shared_scratch().get<char>(mask.bytes() + heads * layout.size() * sizeof(X));
  mask.fill<T>(a, memory);
  X* packed = reinterpret_cast<X*>(memory + mask.bytes());
  const int64_t group = a.heads() / a.kv_heads();
  const int64_t panels = divide_up(a.causal ? std::min(a.keys(), a.first_query + a.queries()) : a.keys(), kPanel);
  parallel_for(heads * panels, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / panels, panel = i % panels, batch = head / a.kv_heads(), kv_head = head % a.kv_heads();
      if (mask.seen(batch, kv_head * group, group, panel / kTilePanels) >> (panel % kTilePanels) & 1)
        pack_keys<K>(a, layout, batch, kv_head, panel, packed + head * layout.size());
    }
  });

  const RowBlocks blocks(a.rows());
  const int64_t task_blocks = heads * blocks.count >= 8 * num_threads() * kTaskBlocks ? kTaskBlocks : 1;
  const int64_t tasks = divide_up(blocks.count, task_blocks);
  const int64_t q_size = round_up(a.width(), Step<T>::kWidth) * kMaxRows + kLanes * Step<T>::kWidth;
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
      int64_t keys = 0, begin = a.keys();
      for (int64_t b = 0; b < count; ++b) {
        block[b].first = blocks.begin(first + b);
        block[b].rows = blocks.size(first + b);
        block[b].q = q + b * q_size;
        block[b].sums = sums + b * sums_size;
        begin_block(a, mask, batch, kv_head, block[b], layout.value_panels);
        keys = std::max(keys, block[b].keys);
        begin = std::min(begin, block[b].begin);
      }
      const X* head_packed = packed + head * layout.size();
      for (int64_t key = begin / kTileKeys * kTileKeys; key < keys; key += kTileKeys)
        for (int64_t b = 0; b < count; ++b)
          if (key < block[b].keys && block[b].begin < key + kTileKeys)
            attend_tile<T, K>(a, layout, head_packed, key, block[b], scores, weights);
      for (int64_t b = 0; b < count; ++b) finish_block<T, K>(a, batch, kv_head, block[b], partial);
    }
  });
}

}  // namespace npu
