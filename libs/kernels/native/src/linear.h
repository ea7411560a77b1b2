// Products of rows of activations with packed matrices.
//
// Sixteen outputs, a tile of the matrix, are computed at a time. An output is the sum over its groups of 32 k, in their
// order, of (integer dot product) * (scale of the activations) * (scale of the weights), one fused multiply-add each. So it
// does not depend on the number of rows, of threads, or on the width of registers: integer sums are exact in any order.
#pragma once

#include "rows.h"
#if defined(__AMX_INT8__)
#include "amx.h"
#endif

namespace baton {

// As in formats.py.
enum Format : int32_t {
  Q4_F16 = 0,
  Q4_F32 = 1,
  Q8_F16 = 2,
  Q8_F32 = 3,
  Q8_F32_MIN = 4,
  Q8X2_F32 = 5,
  FLOAT32 = 8,
  FLOAT16 = 9,
  BFLOAT16 = 10,
};

struct Matrix {  // shared with ctypes
  const uint8_t* data;
  const float* bias;  // [n] or null
  int32_t n, k;
  int32_t format, reserved;

  int tiles() const { return (n + TILE - 1) / TILE; }
  bool is_float() const { return format >= FLOAT32; }
};

inline simd::F load_scales(const float* p) { return simd::load(p); }
inline simd::F load_scales(const uint16_t* p) { return simd::load_half(p); }

// A record of one quantised tile: data of all groups, then scales, then mins.
template <int BITS_, int SCALES_, class Scale_, bool HAS_MIN_>
struct Quantised {
  static constexpr int BITS = BITS_, SCALES = SCALES_;
  static constexpr bool HAS_MIN = HAS_MIN_;
  using Scale = Scale_;

  static size_t tile_bytes(int groups) {
    return align64(static_cast<size_t>(groups) * (BITS * 64 + (SCALES + HAS_MIN) * TILE * sizeof(Scale)));
  }
};

using FormatQ4_F16 = Quantised<4, 1, uint16_t, true>;
using FormatQ4_F32 = Quantised<4, 1, float, true>;
using FormatQ8_F16 = Quantised<8, 1, uint16_t, false>;
using FormatQ8_F32 = Quantised<8, 1, float, false>;
using FormatQ8_F32_MIN = Quantised<8, 1, float, true>;
using FormatQ8X2_F32 = Quantised<8, 2, float, false>;

// A tile as it lies in memory.
template <class Format>
struct PackedTile {
  const uint8_t* data;
  const typename Format::Scale* scales;
  const typename Format::Scale* mins;

  PackedTile(const Matrix& matrix, int tile) {
    const int groups = groups_of(matrix.k);
    data = matrix.data + tile * Format::tile_bytes(groups);
    scales = reinterpret_cast<const typename Format::Scale*>(data + static_cast<size_t>(groups) * Format::BITS * 64);
    mins = scales + static_cast<size_t>(groups) * Format::SCALES * TILE;
  }

  // The weights of k 4 * chunk ... 4 * chunk + 3 of the group.
  simd::Bytes chunk(int group, int chunk) const {
    if constexpr (Format::BITS == 8) return simd::load_bytes(data + group * 512 + chunk * 64);
    const simd::Bytes both = simd::load_bytes(data + group * 256 + chunk % 4 * 64);
    return chunk < 4 ? simd::low_nibbles(both) : simd::high_nibbles(both);
  }
  simd::F scale(int group, int half) const { return load_scales(scales + (group * Format::SCALES + half) * TILE); }
  simd::F min(int group) const { return load_scales(mins + group * TILE); }
  // The machine's own prefetcher stops at the end of each page; this does not, and may reach past the matrix: a prefetch
  // of what is not there does nothing.
  void prefetch(int group) const {
    const uint8_t* ahead = data + static_cast<size_t>(group) * Format::BITS * 64 + PREFETCH_BYTES;
    for (int line = 0; line < Format::BITS; ++line) __builtin_prefetch(ahead + line * 64);
  }
  static constexpr int PREFETCH_BYTES = 6144;
};

// The same unpacked: a byte for each weight, float for scales. Pays when many rows go over it.
template <class Format>
struct UnpackedTile {
  const uint8_t* data;
  const float* scales;
  const float* mins;

  UnpackedTile(const PackedTile<Format>& packed, int groups, uint8_t* memory) {
    float* to_scales = reinterpret_cast<float*>(memory + static_cast<size_t>(groups) * 512);
    float* to_mins = to_scales + static_cast<size_t>(groups) * Format::SCALES * TILE;
    for (int g = 0; g < groups; ++g) {
      packed.prefetch(g);
      for (int c = 0; c < 8; ++c) simd::store_bytes(memory + g * 512 + c * 64, packed.chunk(g, c));
      for (int h = 0; h < Format::SCALES; ++h) simd::store(to_scales + (g * Format::SCALES + h) * TILE, packed.scale(g, h));
      if constexpr (Format::HAS_MIN) simd::store(to_mins + g * TILE, packed.min(g));
    }
    data = memory, scales = to_scales, mins = to_mins;
  }
  static size_t memory_bytes(int groups) { return static_cast<size_t>(groups) * (512 + 3 * TILE * sizeof(float)); }

  simd::Bytes chunk(int group, int chunk) const { return simd::load_bytes(data + group * 512 + chunk * 64); }
  simd::F scale(int group, int half) const { return simd::load(scales + (group * Format::SCALES + half) * TILE); }
  simd::F min(int group) const { return simd::load(mins + group * TILE); }
  void prefetch(int) const {}
};

// `COUNT` rows from `row` on by one tile, out[COUNT][16].
template <class Format, int COUNT, class Tile>
inline void dot_rows(const Tile& tile, const Rows& x, int row, float* out) {
  constexpr int CHUNKS = 8 / Format::SCALES;
  simd::F sums[COUNT];
  UNROLL for (int r = 0; r < COUNT; ++r) sums[r] = simd::zero();
  const int groups = x.groups();
  for (int g = 0; g < groups; ++g) {
    const size_t cell = x.cell(g, row);
    tile.prefetch(g);
    const int8_t* bytes = x.bytes + cell * GROUP;
    const int32_t* halves = x.halves + 2 * cell;
    const float *scales = x.scales + cell, *totals = x.totals + cell;
    UNROLL for (int half = 0; half < Format::SCALES; ++half) {
      simd::Dot<Format::BITS> dots[COUNT];
      UNROLL for (int r = 0; r < COUNT; ++r)
        dots[r].start(Format::SCALES == 2 ? halves[2 * r + half] : halves[2 * r] + halves[2 * r + 1]);
      UNROLL for (int c = half * CHUNKS; c < (half + 1) * CHUNKS; ++c) {
        const simd::Bytes weights = tile.chunk(g, c);
        UNROLL for (int r = 0; r < COUNT; ++r) dots[r].add(weights, bytes + r * GROUP + 4 * c);
      }
      const simd::F scale = tile.scale(g, half);
      UNROLL for (int r = 0; r < COUNT; ++r)
        sums[r] = simd::fma(simd::mul(simd::to_float(dots[r].total()), simd::set1(scales[r])), scale, sums[r]);
    }
    if constexpr (Format::HAS_MIN) {
      const simd::F min = tile.min(g);
      UNROLL for (int r = 0; r < COUNT; ++r) sums[r] = simd::fma(min, simd::set1(totals[r]), sums[r]);
    }
  }
  UNROLL for (int r = 0; r < COUNT; ++r) simd::store(out + r * TILE, sums[r]);
}

template <class Format, class Tile>
inline void dot_all_rows(const Tile& tile, const Rows& x, float* out, int row = 0) {
  for (; row + simd::ROWS <= x.rows; row += simd::ROWS) dot_rows<Format, simd::ROWS>(tile, x, row, out + row * TILE);
  for (; row + 2 <= x.rows; row += 2) dot_rows<Format, 2>(tile, x, row, out + row * TILE);
  if (row < x.rows) dot_rows<Format, 1>(tile, x, row, out + row * TILE);
}

template <class Format>
void quantised_product(const Matrix& matrix, int index, const Rows& x, float* out, uint8_t* memory) {
  const PackedTile<Format> packed(matrix, index);
  if (x.rows <= simd::ROWS) {
    dot_all_rows<Format>(packed, x, out);
    return;
  }
  const UnpackedTile<Format> tile(packed, x.groups(), memory);
  int row = 0;
#if defined(__AMX_INT8__)
  if (Format::SCALES == 1 && x.rows >= amx::ROWS && amx::usable()) row = amx::dot_rows<Format>(tile, x, out);
#endif
  dot_all_rows<Format>(tile, x, out, row);
}

inline simd::F load_weights(const float* p) { return simd::load(p); }
inline simd::F load_weights(const uint16_t* p) { return simd::load_half(p); }
struct Bfloat {
  uint16_t bits;
};
inline simd::F load_weights(const Bfloat* p) { return simd::load_bfloat(&p->bits); }

// A record of one tile: [k][16]. The sum goes over k in order.
template <class Weight, int COUNT>
inline void float_rows(const Weight* tile, const Rows& x, int row, float* out) {
  const float* floats = x.floats + static_cast<size_t>(row) * x.k;
  simd::F sums[COUNT];
  UNROLL for (int r = 0; r < COUNT; ++r) sums[r] = simd::zero();
  for (int k = 0; k < x.k; ++k) {
    const simd::F weights = load_weights(tile + static_cast<size_t>(k) * TILE);
    UNROLL for (int r = 0; r < COUNT; ++r)
      sums[r] = simd::fma(weights, simd::set1(floats[static_cast<size_t>(r) * x.k + k]), sums[r]);
  }
  UNROLL for (int r = 0; r < COUNT; ++r) simd::store(out + r * TILE, sums[r]);
}

template <class Weight>
void float_product(const Matrix& matrix, int index, const Rows& x, float* out) {
  const size_t bytes = align64(static_cast<size_t>(matrix.k) * TILE * sizeof(Weight));
  const Weight* tile = reinterpret_cast<const Weight*>(matrix.data + index * bytes);
  int row = 0;
  for (; row + simd::ROWS <= x.rows; row += simd::ROWS) float_rows<Weight, simd::ROWS>(tile, x, row, out + row * TILE);
  for (; row + 2 <= x.rows; row += 2) float_rows<Weight, 2>(tile, x, row, out + row * TILE);
  if (row < x.rows) float_rows<Weight, 1>(tile, x, row, out + row * TILE);
}

// out[rows][16] = rows x tile `index` of the matrix, with its bias. `memory` holds `product_memory(k)` bytes.
inline void product(const Matrix& matrix, int index, const Rows& x, float* out, uint8_t* memory) {
  switch (matrix.format) {
    case Q4_F16: quantised_product<FormatQ4_F16>(matrix, index, x, out, memory); break;
    case Q4_F32: quantised_product<FormatQ4_F32>(matrix, index, x, out, memory); break;
    case Q8_F16: quantised_product<FormatQ8_F16>(matrix, index, x, out, memory); break;
    case Q8_F32: quantised_product<FormatQ8_F32>(matrix, index, x, out, memory); break;
    case Q8_F32_MIN: quantised_product<FormatQ8_F32_MIN>(matrix, index, x, out, memory); break;
    case Q8X2_F32: quantised_product<FormatQ8X2_F32>(matrix, index, x, out, memory); break;
    case FLOAT32: float_product<float>(matrix, index, x, out); break;
    case FLOAT16: float_product<uint16_t>(matrix, index, x, out); break;
    case BFLOAT16: float_product<Bfloat>(matrix, index, x, out); break;
  }
  if (matrix.bias == nullptr) return;
  const int count = matrix.n - index * TILE < TILE ? matrix.n - index * TILE : TILE;
  const simd::F bias = simd::load(matrix.bias + index * TILE, count);
  for (int row = 0; row < x.rows; ++row) simd::store(out + row * TILE, simd::add(simd::load(out + row * TILE), bias));
}

inline size_t product_memory(int k) { return UnpackedTile<FormatQ8X2_F32>::memory_bytes(groups_of(k)); }

inline float lane(simd::F x, int i) {
  alignas(64) float lanes[TILE];
  simd::store(lanes, x);
  return lanes[i];
}

template <class Format>
void read_quantised_row(const Matrix& matrix, int row, float* out) {
  const PackedTile<Format> tile(matrix, row / TILE);
  for (int k = 0; k < matrix.k; ++k) {
    const int g = k / GROUP, within = k % GROUP;
    int q;
    if (Format::BITS == 8) {
      q = tile.data[g * 512 + within / 4 * 64 + row % TILE * 4 + within % 4] - 128;
    } else {
      const uint8_t both = tile.data[g * 256 + within % 16 / 4 * 64 + row % TILE * 4 + within % 4];
      q = within < 16 ? both & 15 : both >> 4;
    }
    const float scale = lane(tile.scale(g, within * Format::SCALES / GROUP), row % TILE);
    out[k] = scale * static_cast<float>(q);
    if constexpr (Format::HAS_MIN) out[k] += lane(tile.min(g), row % TILE);
  }
}

template <class Weight>
void read_float_row(const Matrix& matrix, int row, float* out) {
  const size_t bytes = align64(static_cast<size_t>(matrix.k) * TILE * sizeof(Weight));
  const Weight* tile = reinterpret_cast<const Weight*>(matrix.data + row / TILE * bytes);
  for (int k = 0; k < matrix.k; ++k) out[k] = lane(load_weights(tile + static_cast<size_t>(k) * TILE), row % TILE);
}

// Row `row` of the matrix as numbers, [k]: an embedding.
inline void read_row(const Matrix& matrix, int row, float* out) {
  switch (matrix.format) {
    case Q4_F16: read_quantised_row<FormatQ4_F16>(matrix, row, out); break;
    case Q4_F32: read_quantised_row<FormatQ4_F32>(matrix, row, out); break;
    case Q8_F16: read_quantised_row<FormatQ8_F16>(matrix, row, out); break;
    case Q8_F32: read_quantised_row<FormatQ8_F32>(matrix, row, out); break;
    case Q8_F32_MIN: read_quantised_row<FormatQ8_F32_MIN>(matrix, row, out); break;
    case Q8X2_F32: read_quantised_row<FormatQ8X2_F32>(matrix, row, out); break;
    case FLOAT32: read_float_row<float>(matrix, row, out); break;
    case FLOAT16: read_float_row<uint16_t>(matrix, row, out); break;
    case BFLOAT16: read_float_row<Bfloat>(matrix, row, out); break;
  }
}

}  // namespace baton
