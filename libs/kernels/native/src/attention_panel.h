// Attention for many rows of a sequence: a span's keys and values become float once, and products do the rest.
#pragma once

#include "attention_direct.h"

namespace baton {

#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 4;  // of products: the registers that hold their sums
#elif defined(__AVX2__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 1;
#else
constexpr int BLOCK_ROWS = 2, BLOCK_VECTORS = 1;
#endif

// c[COUNT][16 * VECTORS] = a[COUNT][depth] x b[depth][16 * VECTORS], summed in the order of depth.
template <int COUNT, int VECTORS>
inline void multiply_block(const float* a, int a_stride, const float* b, int b_stride, int depth, float* c, int c_stride) {
  simd::F sums[COUNT][VECTORS];
  for (auto& row : sums)
    for (auto& sum : row) sum = simd::zero();
  for (int k = 0; k < depth; ++k) {
    simd::F right[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) right[v] = simd::load(b + static_cast<size_t>(k) * b_stride + v * TILE);
    UNROLL for (int r = 0; r < COUNT; ++r) {
      const simd::F left = simd::set1(a[static_cast<size_t>(r) * a_stride + k]);
      UNROLL for (int v = 0; v < VECTORS; ++v) sums[r][v] = simd::fma(left, right[v], sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < COUNT; ++r)
    UNROLL for (int v = 0; v < VECTORS; ++v) simd::store(c + static_cast<size_t>(r) * c_stride + v * TILE, sums[r][v]);
}

template <int VECTORS>
inline void multiply_columns(const float* a, int a_stride, const float* b, int b_stride, int depth, float* c, int c_stride,
                             int rows) {
  int r = 0;
  for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS)
    multiply_block<BLOCK_ROWS, VECTORS>(a + static_cast<size_t>(r) * a_stride, a_stride, b, b_stride, depth,
                                        c + static_cast<size_t>(r) * c_stride, c_stride);
  for (; r < rows; ++r)
    multiply_block<1, VECTORS>(a + static_cast<size_t>(r) * a_stride, a_stride, b, b_stride, depth,
                               c + static_cast<size_t>(r) * c_stride, c_stride);
}

// c[rows][columns] = a[rows][depth] x b[depth][columns]; columns are a multiple of 16.
inline void multiply(const float* a, int a_stride, const float* b, int b_stride, int depth, float* c, int c_stride, int rows,
                     int columns) {
  int column = 0;
  for (; column + BLOCK_VECTORS * TILE <= columns; column += BLOCK_VECTORS * TILE)
    multiply_columns<BLOCK_VECTORS>(a, a_stride, b + column, b_stride, depth, c + column, c_stride, rows);
  for (; column < columns; column += TILE)
    multiply_columns<1>(a, a_stride, b + column, b_stride, depth, c + column, c_stride, rows);
}

// Many rows of one sequence by one key head.
template <class Element>
class Panel {
 public:
  Panel(const Pool& pool, int layer, int head, int group_heads, const Batch& batch, AttentionScratch& scratch)
      : pool_(pool), layer_(layer), head_(head), group_(group_heads), batch_(batch), scratch_(scratch),
        dim_(pool.head_dim), span_(span_tokens(pool.block_size)), stride_(padded(span_ + TILE)) {}

  // Rows [row, row + count) of `sequence`. query: [rows][query_stride], the heads of a row one after the other, scaled;
  // out: [rows][heads * dim].
  void attend(int sequence, int row, int count, const float* query, int query_stride, float* out, int out_stride) {
    const int first_row = batch_.first_rows[sequence] + row, position = batch_.starts[sequence] + row;
    for (int r = 0; r < count * group_; ++r)
      std::memcpy(scratch_.queries + static_cast<size_t>(r) * dim_,
                  query + static_cast<size_t>(first_row + r / group_) * query_stride + (head_ * group_ + r % group_) * dim_,
                  dim_ * sizeof(float));
    const int end = position + count;
    const int first_span = batch_.lowest_key(position) / span_;
    const int32_t* table = batch_.tables + batch_.table_offsets[sequence];
    for (int span = first_span; span * span_ < end; ++span) add_span(span, table, position, count);
    for (int r = 0; r < count * group_; ++r)
      finish(running(r), dim_,
             out + static_cast<size_t>(first_row + r / group_) * out_stride + (head_ * group_ + r % group_) * dim_);
  }

 private:
  void add_span(int span, const int32_t* table, int position, int count) {
    const int start = span * span_;
    const int tokens = position + count - start < span_ ? position + count - start : span_;
    const int first = position < start ? start - position : 0;  // rows before it see nothing here
    load(Span<Element>(pool_, layer_, head_, table, start / pool_.block_size, tokens), tokens);
    const int skipped = first * group_, rows = (count - first) * group_;
    multiply(scratch_.queries + static_cast<size_t>(skipped) * dim_, dim_, scratch_.keys, stride_, dim_, scratch_.scores,
             stride_, rows, padded(tokens));
    for (int r = 0; r < rows; ++r) {
      const int at = position + first + r / group_;
      const int low = batch_.lowest_key(at) - start, high = at + 1 - start;
      float* sums = scratch_.sums + 4 * static_cast<size_t>(skipped + r);
      weigh(scratch_.scores + static_cast<size_t>(r) * stride_, low > 0 ? (low < tokens ? low : tokens) : 0,
            high < tokens ? high : tokens, padded(tokens), sums[2], sums[3]);
    }
    multiply(scratch_.scores, stride_, scratch_.values, padded(dim_), tokens, scratch_.mixed, padded(dim_), rows,
             padded(dim_));
    for (int r = 0; r < rows; ++r) {
      const int lowest = batch_.lowest_key(position + first + r / group_);
      if (lowest >= start + tokens) continue;  // its window has left this span
      float* sums = scratch_.sums + 4 * static_cast<size_t>(skipped + r);
      const Partial part{sums + 2, sums + 3, scratch_.mixed + static_cast<size_t>(r) * padded(dim_)};
      merge(running(skipped + r), part, dim_, lowest >= start);  // first: the span of the lowest key it sees
    }
  }

  Partial running(int r) const {
    float* sums = scratch_.sums + 4 * static_cast<size_t>(r);
    return {sums, sums + 1, scratch_.running + static_cast<size_t>(r) * padded(dim_)};
  }

  // The span's keys as [dim][token] and its values as [token][dim], float, with zeros behind what is there.
  void load(const Span<Element>& span, int tokens) {
    const int block_size = pool_.block_size, width = padded(tokens);
    for (int d = 0; d < dim_; ++d) {
      float* to = scratch_.keys + static_cast<size_t>(d) * stride_;
      for (int start = 0; start < tokens; start += block_size) {
        const int count = tokens - start < block_size ? tokens - start : block_size;
        const auto* from = span.keys[start / block_size] + static_cast<size_t>(d) * block_size;
        for (int j = 0; j < count; j += TILE) {
          if (count - j >= TILE)
            simd::store(to + start + j, Element::load(from + j));
          else
            simd::store(to + start + j, Element::load(from + j, count - j), count - j);
        }
      }
      for (int j = tokens; j < width; ++j) to[j] = 0.0f;
    }
    for (int j = 0; j < tokens; ++j) {
      const auto* from = span.values[j / block_size] + static_cast<size_t>(j % block_size) * dim_;
      float* to = scratch_.values + static_cast<size_t>(j) * padded(dim_);
      for (int d = 0; d < dim_; d += TILE)
        simd::store(to + d, dim_ - d >= TILE ? Element::load(from + d) : Element::load(from + d, dim_ - d));
    }
  }

  const Pool& pool_;
  const int layer_, head_, group_;
  const Batch& batch_;
  AttentionScratch& scratch_;
  const int dim_, span_, stride_;
};

}  // namespace baton
