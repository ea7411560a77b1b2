// Attention for few rows of a sequence, straight from the pool: one span of keys at a time.
#pragma once

#include "attention.h"

namespace baton {

// Scores of `COUNT` queries with `VECTORS` runs of up to 16 keys, each a block's or a piece of one.
template <class Element, int COUNT, int VECTORS>
inline void score_runs(const float* const* queries, const typename Element::Type* const* keys, int block_size, int dim,
                       int count, float* const* scores) {
  simd::F sums[COUNT][VECTORS];
  for (auto& row : sums)
    for (auto& sum : row) sum = simd::zero();
  for (int d = 0; d < dim; ++d) {
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      const auto* at = keys[v] + static_cast<size_t>(d) * block_size;
      const simd::F key = count == TILE ? Element::load(at) : Element::load(at, count);
      UNROLL for (int r = 0; r < COUNT; ++r) sums[r][v] = simd::fma(simd::set1(queries[r][d]), key, sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < COUNT; ++r)
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      if (count == TILE)
        simd::store(scores[r] + v * TILE, sums[r][v]);
      else
        simd::store(scores[r] + v * TILE, sums[r][v], count);
    }
}

// mixed[r] = sum over keys [low, high) of weight * value, for `VECTORS` pieces of 16 dimensions.
template <class Element, int COUNT, int VECTORS>
inline void mix_values(const float* const* weights, const typename Element::Type* const* values, int block_size, int dim,
                       int piece, int low, int high, float* const* mixed) {
  simd::F sums[COUNT][VECTORS];
  for (auto& row : sums)
    for (auto& sum : row) sum = simd::zero();
  const int last = dim - (piece + VECTORS - 1) * TILE;  // dimensions of the last piece
  for (int j = low, block = low / block_size; j < high; ++block) {
    const int end = (block + 1) * block_size < high ? (block + 1) * block_size : high;
    const auto* value = values[block] + static_cast<size_t>(j - block * block_size) * dim + piece * TILE;
    for (; j < end; ++j, value += dim) {
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        const bool whole = v + 1 < VECTORS || last >= TILE;
        const simd::F x = whole ? Element::load(value + v * TILE) : Element::load(value + v * TILE, last);
        UNROLL for (int r = 0; r < COUNT; ++r) sums[r][v] = simd::fma(simd::set1(weights[r][j]), x, sums[r][v]);
      }
    }
  }
  UNROLL for (int r = 0; r < COUNT; ++r)
    UNROLL for (int v = 0; v < VECTORS; ++v) simd::store(mixed[r] + (piece + v) * TILE, sums[r][v]);
}

// One span of one key head, for `COUNT` queries whose keys end at `highs` (and begin at `lows`) within the span.
template <class Element>
struct Span {
  const typename Element::Type* keys[SPAN];  // of each block
  const typename Element::Type* values[SPAN];
  int block_size, dim, num_tokens;

  Span(const Pool& pool, int layer, int head, const int32_t* table, int first_block, int tokens)
      : block_size(pool.block_size), dim(pool.head_dim), num_tokens(tokens) {
    for (int b = 0; b * block_size < tokens; ++b) {
      keys[b] = reinterpret_cast<const typename Element::Type*>(pool.part(table[first_block + b], layer, 0, head));
      values[b] = reinterpret_cast<const typename Element::Type*>(pool.part(table[first_block + b], layer, 1, head));
    }
  }

  template <int COUNT>
  void attend(const float* const* queries, const int* lows, const int* highs, float* scores, Partial* out) const {
    const int stride = padded(num_tokens + TILE);
    float* rows[COUNT];
    float* mixed[COUNT];
    int low = lows[0], high = 0;
    UNROLL for (int r = 0; r < COUNT; ++r) {
      rows[r] = scores + r * stride, mixed[r] = out[r].mixed;
      low = lows[r] < low ? lows[r] : low;
      high = highs[r] > high ? highs[r] : high;
    }
    score<COUNT>(queries, rows, low, high);
    UNROLL for (int r = 0; r < COUNT; ++r)
      weigh(rows[r], lows[r], highs[r], padded(high), *out[r].maximum, *out[r].total);
    mix<COUNT>(rows, low, high, mixed);
  }

 private:
  template <int COUNT>
  void score(const float* const* queries, float* const* rows, int low, int high) const {
    constexpr int PAIR = 2;
    for (int b = low / block_size; b * block_size < high;) {
      if (block_size == TILE && (b + 1) * block_size < high) {  // two blocks at once: more sums under way
        float* to[COUNT];
        UNROLL for (int r = 0; r < COUNT; ++r) to[r] = rows[r] + b * TILE;
        score_runs<Element, COUNT, PAIR>(queries, keys + b, block_size, dim, TILE, to);
        b += PAIR;
        continue;
      }
      for (int j = 0; j < block_size && b * block_size + j < high; j += TILE) {
        const typename Element::Type* run = keys[b] + j;
        float* to[COUNT];
        UNROLL for (int r = 0; r < COUNT; ++r) to[r] = rows[r] + b * block_size + j;
        score_runs<Element, COUNT, 1>(queries, &run, block_size, dim, block_size - j < TILE ? block_size - j : TILE, to);
      }
      ++b;
    }
  }

  template <int COUNT>
  void mix(const float* const* rows, int low, int high, float* const* mixed) const {
    const int pieces = (dim + TILE - 1) / TILE;
    int piece = 0;
    for (; piece + 4 <= pieces; piece += 4)
      mix_values<Element, COUNT, 4>(rows, values, block_size, dim, piece, low, high, mixed);
    for (; piece < pieces; ++piece)
      mix_values<Element, COUNT, 1>(rows, values, block_size, dim, piece, low, high, mixed);
  }
};

// Queries that wait to be attended together.
struct DirectQueries {
  static constexpr int MOST = 4;
  int count = 0;
  const float* queries[MOST];
  int lows[MOST], highs[MOST];
  Partial out[MOST];

  void add(const float* query, int low, int high, Partial to) {
    queries[count] = query, lows[count] = low, highs[count] = high, out[count] = to;
    ++count;
  }

  template <class Element>
  void attend(const Span<Element>& span, float* scores) {
    if (count == 4) span.template attend<4>(queries, lows, highs, scores, out);
    if (count == 3) span.template attend<3>(queries, lows, highs, scores, out);
    if (count == 2) span.template attend<2>(queries, lows, highs, scores, out);
    if (count == 1) span.template attend<1>(queries, lows, highs, scores, out);
    count = 0;
  }
};

}  // namespace baton
