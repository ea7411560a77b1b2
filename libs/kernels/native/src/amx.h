// The matrix unit of Xeons since Sapphire Rapids: 16 rows by 16 outputs by 32 k in one instruction.
//
// Its sums are integers, so they are those of the vector instructions to the bit. linear.h includes this file.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rows.h"

namespace baton::amx {

constexpr int ROWS = 16;
constexpr int AHEAD = 2;  // groups that are multiplied before one is read: products take long to be written

// Linux grants the registers to a process that asks.
inline bool usable() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return granted;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 32, 64};  // products, activations, weights
  uint8_t rows[16] = {16, 16, 8};
};

// Activations [16][32] by a group of weights [8 chunks][16 outputs][4 k]: products [16][16].
inline void multiply_group(const int8_t* activations, const uint8_t* weights, int32_t* products) {
  _tile_zero(0);
  _tile_loadd(1, activations, GROUP);
  _tile_loadd(2, weights, 64);
  _tile_dpbsud(0, 1, 2);
  _tile_stored(0, products, 64);
}

// As dot_rows of linear.h, for 16 rows.
template <class Format, class Tile>
void dot_16_rows(const Tile& tile, const Rows& x, int row, float* out) {
  alignas(64) int32_t products[AHEAD + 1][ROWS * TILE];
  simd::F sums[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) sums[r] = simd::zero();
  const int groups = x.groups();
  const auto start = [&](int g) {
    if (g >= groups) return;
    multiply_group(x.bytes + x.cell(g, row) * GROUP, tile.data + static_cast<size_t>(g) * 512, products[g % (AHEAD + 1)]);
  };
  for (int g = 0; g < AHEAD; ++g) start(g);
  for (int g = 0; g < groups; ++g) {
    start(g + AHEAD);
    const size_t cell = x.cell(g, row);
    const int32_t* halves = x.halves + 2 * cell;
    const float *scales = x.scales + cell, *totals = x.totals + cell;
    const int32_t* dots = products[g % (AHEAD + 1)];
    const simd::F scale = tile.scale(g, 0);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      simd::I dot = _mm512_load_si512(dots + r * TILE);
      if constexpr (Format::BITS == 8)
        dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(128 * (halves[2 * r] + halves[2 * r + 1])));
      sums[r] = simd::fma(simd::mul(simd::to_float(dot), simd::set1(scales[r])), scale, sums[r]);
    }
    if constexpr (Format::HAS_MIN) {
      const simd::F min = tile.min(g);
      UNROLL for (int r = 0; r < ROWS; ++r) sums[r] = simd::fma(min, simd::set1(totals[r]), sums[r]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) simd::store(out + r * TILE, sums[r]);
}

// As many rows as come in sixteens; returns how many.
template <class Format, class Tile>
int dot_rows(const Tile& tile, const Rows& x, float* out) {
  const TileShapes shapes;
  _tile_loadconfig(&shapes);
  int row = 0;
  for (; row + ROWS <= x.rows; row += ROWS) dot_16_rows<Format>(tile, x, row, out + row * TILE);
  _tile_release();
  return row;
}

}  // namespace baton::amx
