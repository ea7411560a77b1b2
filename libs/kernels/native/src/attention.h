// Causal attention over the paged pool, without a copy of any sequence's KV.
//
// Keys are cut into spans of whole blocks, about 256 tokens, at fixed places. A row computes each span that it sees on
// its own: scores (a sum over the dimensions in order), their maximum, the exponentials, and the sum over the keys in order
// of weight * value; then it merges its spans in order (Milakov and Gimelshein, 2018). A key that a row does not see has the
// weight 0, which changes no bit. So a row's result depends on nothing but its query and the keys.
//
// Two ways to the same numbers: attention_direct.h reads the pool as it is, for few rows of a sequence (decode), where each
// span is a task of its own. attention_panel.h turns a span to float once and multiplies many rows with it (prefill).
// attention_tasks.h says which rows go which way.
#pragma once

#include "linear.h"
#include "pool.h"

namespace baton {

constexpr int SPAN = 256;       // tokens, about: whole blocks
constexpr int DIRECT_ROWS = 8;  // up to so many rows of a sequence go `Direct`
constexpr int PANEL_ROWS = 32;  // rows of a sequence in one task

struct Batch {  // shared with ctypes
  int32_t num_rows, num_sequences;
  const int32_t* first_rows;     // [sequences + 1] of each sequence, in the batch
  const int32_t* starts;         // [sequences] position of its first row
  const int32_t* tables;         // block tables, one after the other
  const int32_t* table_offsets;  // [sequences] where in `tables`
  int32_t window;                // a row sees itself and window - 1 tokens before it; 0: all
  int32_t is_drawn;              // 0: no row's result is wanted, only its KV

  int rows_of(int sequence) const { return first_rows[sequence + 1] - first_rows[sequence]; }
  int lowest_key(int position) const { return window > 0 && position >= window ? position - window + 1 : 0; }
};

inline int span_tokens(int block_size) { return block_size * (SPAN / block_size > 1 ? SPAN / block_size : 1); }
inline int padded(int n) { return (n + TILE - 1) / TILE * TILE; }

// What a row and head knows after some spans. `mixed` is the sum of weight * value.
struct Partial {
  float* maximum;
  float* total;
  float* mixed;  // [padded dim]
};

// Turns the scores of keys [low, high) of a span into weights, in place; the others get 0, up to `end`.
inline void weigh(float* scores, int low, int high, int end, float& maximum, float& total) {
  simd::F most = simd::set1(simd::LOWEST);
  const int first = low / TILE * TILE;
  for (int j = first; j < high; j += TILE)
    most = simd::max(most, simd::keep(simd::load(scores + j), low - j, high - j, simd::LOWEST));
  maximum = simd::largest(most);
  const simd::F shift = simd::set1(maximum);
  simd::F sum = simd::zero();
  for (int j = 0; j < first; j += TILE) simd::store(scores + j, simd::zero());
  int j = first;
  for (; j < high; j += TILE) {
    const simd::F weight = simd::keep(simd::exp(simd::sub(simd::load(scores + j), shift)), low - j, high - j, 0.0f);
    simd::store(scores + j, weight);
    sum = simd::add(sum, weight);
  }
  for (; j < end; j += TILE) simd::store(scores + j, simd::zero());
  total = simd::sum(sum);
}

inline void merge(Partial into, Partial span, int dim, bool is_first) {
  if (is_first) {
    *into.maximum = *span.maximum, *into.total = *span.total;
    std::memcpy(into.mixed, span.mixed, padded(dim) * sizeof(float));
    return;
  }
  const float most = *into.maximum > *span.maximum ? *into.maximum : *span.maximum;
  const simd::F kept = simd::exp(simd::set1(*into.maximum - most)), added = simd::exp(simd::set1(*span.maximum - most));
  *into.maximum = most;
  *into.total = lane(simd::fma(simd::set1(*into.total), kept, simd::mul(simd::set1(*span.total), added)), 0);
  for (int d = 0; d < dim; d += TILE)
    simd::store(into.mixed + d,
                simd::fma(simd::load(into.mixed + d), kept, simd::mul(simd::load(span.mixed + d), added)));
}

inline void finish(Partial row, int dim, float* out) {
  const simd::F total = simd::set1(*row.total);
  for (int d = 0; d < dim; d += TILE)
    simd::store(out + d, simd::div(simd::load(row.mixed + d), total), dim - d < TILE ? dim - d : TILE);
}

// Scratch memory of one thread.
class AttentionScratch {
 public:
  void prepare(int dim, int span, int group_heads) {
    const int rows = PANEL_ROWS * group_heads, direct = DIRECT_ROWS * group_heads;
    const int stride = padded(span + TILE);
    keys = keys_.take(static_cast<size_t>(dim) * stride);
    values = values_.take(static_cast<size_t>(stride) * padded(dim));
    queries = queries_.take(static_cast<size_t>(rows) * dim);
    scores = scores_.take(static_cast<size_t>(rows > direct ? rows : direct) * stride);
    mixed = mixed_.take(static_cast<size_t>(rows) * padded(dim));
    running = running_.take(static_cast<size_t>(rows) * padded(dim));
    sums = sums_.take(4 * static_cast<size_t>(rows));
  }
  float *keys, *values, *queries, *scores, *mixed, *running, *sums;

 private:
  Buffer<float> keys_, values_, queries_, scores_, mixed_, running_, sums_;
};

}  // namespace baton
