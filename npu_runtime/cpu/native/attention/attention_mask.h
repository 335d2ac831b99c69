// Which parts of the keys a mask leaves visible, found in one pass over it: prefill neither reads nor packs the others.
#pragma once

#include "attention/attention.h"
#include "pool.h"

namespace npu {

inline constexpr int64_t kTilePanels = 8;  // a block's scores of a tile, and the panels that they meet, stay in L2
inline constexpr int64_t kTileKeys = kTilePanels * kPanel;

// One bit for each panel of a tile. Of several rows together, both are the union.
struct TilePanels {
  uint8_t seen = 0;    // some key is attended
  uint8_t biased = 0;  // the mask adds something to the score of some key, or hides it

  TilePanels operator|(TilePanels other) const {
    return {static_cast<uint8_t>(seen | other.seen), static_cast<uint8_t>(biased | other.biased)};
  }
};

// Whether all of a tile's bytes are zero.
inline bool all_zero(const char* bytes) {
  IVec seen{};
  for (int64_t i = 0; i < kTileKeys; i += sizeof(IVec)) seen |= load_bits<IVec>(bytes + i);
  return !any(seen);
}

// The panels of the tile that begins at `key`, of which `row` may see some.
template <class T>
TilePanels scan_tile(const AttentionArgs& a, const QueryRow<T>& row, int64_t key) {
  TilePanels result{0, 0xff};
  const bool whole = a.mask_kind == MaskKind::boolean && a.mask.stride[3] != 0 && key + kTileKeys <= row.keys;
  if (whole && all_zero(row.mask + key)) return result;
  for (int64_t p = 0; p < kTilePanels && key + p * kPanel < row.keys; ++p) {
    const Vec low = score_bias(a, row, key + p * kPanel, a.mask_floor);
    const Vec high = score_bias(a, row, key + p * kPanel + kLanes, a.mask_floor);
    if (differs_any(low, kNoWeight) || differs_any(high, kNoWeight)) result.seen |= 1 << p;
    if (!differs_any(low, 0.0f) && !differs_any(high, 0.0f)) result.biased &= ~(1 << p);
  }
  return result;
}

// The tiles of every distinct row of the mask; rows that the mask repeats by a stride of zero are looked at once.
struct MaskSummary {
  int64_t tiles, planes, plane_rows;
  int64_t batch_stride, head_stride, row_stride;  // in rows of the summary
  TilePanels* data = nullptr;                     // the planes' rows, then the union of each plane's rows

  explicit MaskSummary(const AttentionArgs& a) : tiles(divide_up(a.keys(), kTileKeys)) {
    const auto distinct = [&](int d) { return a.mask.stride[d] == 0 ? 1 : a.mask.size[d]; };
    const auto stride = [&](int d, int64_t rows) { return a.mask.stride[d] == 0 ? 0 : rows; };
    plane_rows = distinct(2);
    planes = a.mask_kind == MaskKind::none ? 0 : distinct(0) * distinct(1);
    row_stride = stride(2, 1);
    head_stride = stride(1, plane_rows);
    batch_stride = stride(0, plane_rows * distinct(1));
  }
  int64_t bytes() const { return round_up(planes * (plane_rows + 1) * tiles * sizeof(TilePanels), 64); }

  // The summary of one row of the mask: one entry per tile.
  const TilePanels* row(int64_t batch, int64_t head, int64_t query) const {
    return data + (batch * batch_stride + head * head_stride + query * row_stride) * tiles;
  }

  // What any query of the heads [head, head + heads) attends of a tile.
  uint8_t seen(int64_t batch, int64_t head, int64_t heads, int64_t tile) const {
    if (planes == 0) return 0xff;
    uint8_t seen = 0;
    for (int64_t h = head; h < (head_stride ? head + heads : head + 1); ++h) {
      const int64_t plane = (batch * batch_stride + h * head_stride) / plane_rows;
      seen |= data[(planes * plane_rows + plane) * tiles + tile].seen;
    }
    return seen;
  }

  template <class T>
  void fill(const AttentionArgs& a, void* memory) {
    data = static_cast<TilePanels*>(memory);
    if (planes == 0) return;
    const int64_t heads = a.mask.stride[1] == 0 ? 1 : a.mask.size[1], rows = planes * plane_rows;
    // Some microseconds of work per thread, or this one does it all.
    const int64_t grain = std::max<int64_t>(1, (16 << 10) / a.keys());
    parallel_for(rows, rows <= 2 * grain ? rows : grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t plane = i / plane_rows;
        const int64_t at = offset(a.mask, plane / heads, plane % heads, i % plane_rows);
        QueryRow<T> row{};
        row.mask = a.mask.data + at * mask_item_size(a);
        row.keys = a.keys();
        for (int64_t t = 0; t < tiles; ++t) data[i * tiles + t] = scan_tile(a, row, t * kTileKeys);
      }
    });
    for (int64_t plane = 0; plane < planes; ++plane) {
      TilePanels* all = data + (rows + plane) * tiles;
      std::fill(all, all + tiles, TilePanels{});
      for (int64_t r = 0; r < plane_rows; ++r)
        for (int64_t t = 0; t < tiles; ++t) all[t] = all[t] | data[(plane * plane_rows + r) * tiles + t];
    }
  }
};

}  // namespace npu
