// Attention of the tokens of many sequences, whose keys and values lie in blocks of one pool.
//
// Tokens that follow each other in a sequence are a group, which passes over its keys together. Groups of a few tokens
// (decoding) read keys and values where they lie, all at once: a task is a group, one key head or all, a chunk of rows
// and a range of keys. A larger group (a piece of a prompt) has its keys and values gathered, and is then attention like
// any other. Keys before the windows of a group's tokens are neither read nor gathered: their blocks may be another
// sequence's by now.
#pragma once

#include "attention/attention_rows.h"
#include "attention/attention_tiles.h"

namespace npu {

// Up to this many queries per head reading keys where they lie beats packing them first.
inline constexpr int64_t kFewQueries = 4;

inline constexpr int64_t kSplitKeys = 128;  // of each of the ranges among which threads divide long contexts, at least

struct PagedArgs {
  View q, k, v, out;        // [1, N, H, D], [1, rows, KV, D], [1, rows, KV, Dv], [1, N, H, Dv]; pools are contiguous
  const int32_t* tables;    // [S, T], rows table_stride apart
  const int32_t* sequences;  // [N]
  const int32_t* positions;  // [N]
  int64_t sequence_count, table_size, table_stride, block_size;
  int64_t window;  // number of last keys that a token sees; 0: all
  float scale, soft_cap;  // as in AttentionArgs
  View sinks;

  int64_t tokens() const { return q.size[1]; }
  int64_t blocks() const { return k.size[1] / block_size; }
};

struct TokenGroup {
  int64_t first, count;  // tokens
  int64_t sequence, position;
  int64_t chunks, splits, range;  // of rows, of keys; keys of a split
  int64_t first_task, first_partial;

  int64_t keys() const { return position + count; }
  // The first key that some token sees.
  int64_t first_key(const PagedArgs& a) const { return a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0; }
  // Where the keys to read begin, with others of the same vector.
  int64_t begin(const PagedArgs& a) const { return first_key(a) / kLanes * kLanes; }
};

// [N, H, D] as [1, H, count, D], from token `first` on.
inline View tokens_of(const View& x, int64_t first, int64_t count) {
  return {x.data + first * x.stride[1] * item_size(x.dtype), x.dtype, {1, x.size[2], count, x.size[3]},
          {0, x.stride[2], x.stride[1], x.stride[3]}};
}

// The pool [rows, KV, D] as [1, KV, keys, D]; with a table, or for rows that are gathered.
inline View rows_of(const View& pool, char* data, int64_t keys) {
  return {data, pool.dtype, {1, pool.size[2], keys, pool.size[3]}, {0, pool.size[3], pool.size[2] * pool.size[3], 1}};
}

inline AttentionArgs attention_of(const PagedArgs& a, const TokenGroup& group) {
  AttentionArgs args{};
  args.q = tokens_of(a.q, group.first, group.count);
  args.out = tokens_of(a.out, group.first, group.count);
  args.k = rows_of(a.k, a.k.data, group.keys());
  args.v = rows_of(a.v, a.v.data, group.keys());
  args.mask_kind = MaskKind::none;
  args.causal = 1;
  args.scale = a.scale;
  args.format = RowFormat::none;
  args.first_query = group.position;
  args.window = a.window;
  args.soft_cap = a.soft_cap;
  args.sinks = a.sinks;
  args.table = a.tables + group.sequence * a.table_stride;
  args.block_size = a.block_size;
  args.blocks = a.blocks();
  return args;
}

inline int64_t find_groups(const PagedArgs& a, TokenGroup* groups) {
  int64_t count = 0;
  for (int64_t n = 0; n < a.tokens(); ++n) {
    const int64_t sequence = std::clamp<int64_t>(a.sequences[n], 0, a.sequence_count - 1);
    const int64_t position = std::clamp<int64_t>(a.positions[n], 0, a.table_size * a.block_size - 1);
    if (count > 0 && groups[count - 1].sequence == sequence && groups[count - 1].keys() == position) {
      ++groups[count - 1].count;
    } else {
      groups[count] = {};
      groups[count].first = n;
      groups[count].count = 1;
      groups[count].sequence = sequence;
      groups[count++].position = position;
    }
  }
  return count;
}

// Copies the keys and values that a group sees out of the pool, so that they follow each other from key 0 on.
inline void gather(const PagedArgs& a, const TokenGroup& group, AttentionArgs& args) {
  const int64_t begin = group.first_key(a), first_page = begin / a.block_size;
  const int64_t keys = group.keys() - begin, pages = divide_up(group.keys(), a.block_size) - first_page;
  const int64_t k_row = a.k.size[2] * a.k.size[3] * item_size(a.k.dtype);
  const int64_t v_row = a.v.size[2] * a.v.size[3] * item_size(a.v.dtype);
  char* k = result_scratch().get<char>(keys * (k_row + v_row));
  char* v = k + keys * k_row;
  parallel_for(pages, std::max<int64_t>(1, (64 << 10) / (a.block_size * (k_row + v_row))),
               [&](int64_t begin_page, int64_t end_page, int) {
                 for (int64_t page = first_page + begin_page; page < first_page + end_page; ++page) {
                   const int64_t key = std::max(page * a.block_size, begin), inside = key - page * a.block_size;
                   const int64_t count = std::min((page + 1) * a.block_size, group.keys()) - key;
                   const int64_t block = std::clamp<int64_t>(args.table[page], 0, args.blocks - 1);
                   const int64_t row = block * a.block_size + inside;
                   std::memcpy(k + (key - begin) * k_row, a.k.data + row * k_row, count * k_row);
                   std::memcpy(v + (key - begin) * v_row, a.v.data + row * v_row, count * v_row);
                 }
               });
  args.first_query -= begin;
  args.k = rows_of(a.k, k, keys);
  args.v = rows_of(a.v, v, keys);
  args.table = nullptr;
}

// The groups that read keys where they lie.
template <class T>
void attend_pages(const PagedArgs& a, TokenGroup* groups, int64_t count) {
  const int64_t heads = a.k.size[2], shared = a.q.size[2] / heads;
  int64_t chunks = 0, elements = 0;
  for (TokenGroup* g = groups; g < groups + count; ++g) {
    chunks += g->chunks = divide_up(shared * g->count, kRowChunk);
    elements += heads * (g->keys() - g->begin(a)) * (a.q.size[3] + a.out.size[3]);
  }
  const int64_t wanted_splits = divide_up(4 * num_threads(), chunks);
  int64_t ranges = 0;
  for (TokenGroup* g = groups; g < groups + count; ++g) {
    const int64_t keys = g->keys() - g->begin(a);
    g->splits = std::clamp<int64_t>(keys / kSplitKeys, 1, wanted_splits);
    g->range = round_up(divide_up(keys, g->splits), kKeyBlock);
    g->splits = divide_up(keys, g->range);  // rounding up may leave no keys to the last ones
    ranges += g->chunks * g->splits;
  }
  // The rows of all heads lie beside each other: a task that takes them all reads the pool in order.
  const int64_t parts = ranges < num_threads() ? heads : 1, part_heads = heads / parts;
  const int64_t size = kPartialHead + round_up(a.out.size[3], kLanes);
  int64_t tasks = 0, partials = 0;
  for (TokenGroup* g = groups; g < groups + count; ++g) {
    g->first_task = tasks;
    g->first_partial = partials;
    tasks += parts * g->chunks * g->splits;
    partials += g->splits * heads * shared * g->count * size;
  }
  float* memory = shared_scratch().get<float>(partials * sizeof(float));
  // The partial of a row of a key head and of the first split; those of the others are `partial_stride` apart.
  const auto partial_stride = [&](const TokenGroup& g) { return heads * shared * g.count * size; };
  const auto partial = [&](const TokenGroup& g, int64_t head, int64_t row) {
    return memory + g.first_partial + (head * shared * g.count + row) * size;
  };
  parallel_for(tasks, elements < 16384 ? tasks : 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const TokenGroup& g = *std::prev(std::partition_point(
          groups, groups + count, [&](const TokenGroup& other) { return other.first_task <= task; }));
      const AttentionArgs args = attention_of(a, g);
      const int64_t local = task - g.first_task, split = local % g.splits, chunk = local / g.splits % g.chunks;
      const int64_t first_head = local / (g.splits * g.chunks) * part_heads;
      const int64_t row = chunk * kRowChunk, rows = std::min(kRowChunk, args.rows() - row);
      const int64_t first_key = g.begin(a) + split * g.range, last_key = std::min(g.keys(), first_key + g.range);
      for (int64_t key = first_key; key < last_key; key += kKeyBlock)
        for (int64_t head = first_head; head < first_head + part_heads; ++head)
          attend_rows<T, T>(args, 0, head, row, rows, key, std::min(last_key, key + kKeyBlock), 0,
                            partial(g, head, row) + split * partial_stride(g), key > first_key, last_key);
      if (g.splits > 1) continue;
      for (int64_t head = first_head; head < first_head + part_heads; ++head)
        for (int64_t r = row; r < row + rows; ++r) combine_and_store<T, T>(args, 0, head, r, partial(g, head, r), 1, 0);
    }
  });
  for (const TokenGroup* g = groups; g < groups + count; ++g) {
    if (g->splits == 1) continue;
    const AttentionArgs args = attention_of(a, *g);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t row = 0; row < args.rows(); ++row)
        combine_and_store<T, T>(args, 0, head, row, partial(*g, head, row), g->splits, partial_stride(*g));
  }
}

template <class T>
void paged_attention(const PagedArgs& a) {
  TokenGroup* groups = operand_scratch().get<TokenGroup>(a.tokens() * sizeof(TokenGroup));
  TokenGroup* end = groups + find_groups(a, groups);
  const bool in_place = a.block_size % kLanes == 0;
  TokenGroup* large = std::stable_partition(
      groups, end, [&](const TokenGroup& group) { return in_place && group.count <= kFewQueries; });
  if (large > groups) attend_pages<T>(a, groups, large - groups);
  for (; large < end; ++large) {
    AttentionArgs args = attention_of(a, *large);
    gather(a, *large, args);
    if (args.queries() <= kFewQueries) attention_by_rows<T, T>(args);
    else attention_by_tiles<T, T>(args);
  }
}

}  // namespace npu
