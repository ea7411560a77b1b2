// Rows of activations on their way into a product: as float, as 8 bits per number, or both.
#pragma once

#include "simd.h"
#include "threads.h"

namespace baton {

constexpr int GROUP = 32;  // consecutive k that share a scale
constexpr int TILE = simd::LANES;

inline int groups_of(int k) { return (k + GROUP - 1) / GROUP; }
inline size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// `rows` x `k`. A number is close to scale * quantised, one scale for each row and group. What belongs to a group lies
// together, row after row: a kernel's rows are at fixed distances.
struct Rows {
  int rows = 0, k = 0;
  bool want_bytes = false, want_floats = false;
  int8_t* bytes = nullptr;     // [groups][rows][32]
  float* scales = nullptr;     // [groups][rows]
  float* totals = nullptr;     // [groups][rows] scale * sum of the group's bytes
  int32_t* halves = nullptr;   // [groups][rows][2] sums of the bytes of k 0..15 and 16..31 of the group
  float* floats = nullptr;     // [rows][k]

  int groups() const { return groups_of(k); }
  size_t cell(int group, int row) const { return static_cast<size_t>(group) * rows + row; }
};

class RowsBuffer {
 public:
  Rows take(int rows, int k, bool want_bytes, bool want_floats) {
    Rows r;
    r.rows = rows, r.k = k, r.want_bytes = want_bytes, r.want_floats = want_floats;
    const size_t cells = static_cast<size_t>(rows) * groups_of(k);
    if (want_bytes) {
      r.bytes = bytes_.take(cells * GROUP);
      r.scales = scales_.take(cells);
      r.totals = totals_.take(cells);
      r.halves = halves_.take(2 * cells);
    }
    if (want_floats) r.floats = floats_.take(static_cast<size_t>(rows) * k);
    return r;
  }

 private:
  Buffer<int8_t> bytes_;
  Buffer<float> scales_, totals_, floats_;
  Buffer<int32_t> halves_;
};

// 32 numbers of `row`. A group that holds an infinity or NaN poisons its row: its scale is NaN.
inline void quantise_group(const Rows& rows, int row, int group, simd::F a, simd::F b) {
  const size_t cell = rows.cell(group, row);
  const uint32_t bits = simd::largest_magnitude(a, b);
  float most;
  std::memcpy(&most, &bits, 4);
  float scale = most / 127.0f, inverse = 127.0f / most;
  if (bits >= 0x7f800000u) {
    scale = NAN, inverse = 0.0f;
    a = b = simd::zero();
  } else if (!(inverse < 3e38f)) {  // zeros, or too small to matter
    scale = inverse = 0.0f;
  }
  const simd::I first = simd::round(simd::mul(a, simd::set1(inverse)));
  const simd::I second = simd::round(simd::mul(b, simd::set1(inverse)));
  int8_t* bytes = rows.bytes + cell * GROUP;
  simd::store_bytes(bytes, first);
  simd::store_bytes(bytes + 16, second);
  const int32_t half[2] = {simd::sum(first), simd::sum(second)};
  rows.halves[2 * cell] = half[0];
  rows.halves[2 * cell + 1] = half[1];
  rows.scales[cell] = scale;
  rows.totals[cell] = scale * static_cast<float>(half[0] + half[1]);
}

// Takes the float numbers of one row, [k], in the forms that are wanted. Bytes are for k that are multiples of 32.
inline void put_row(const Rows& rows, int row, const float* x) {
  if (rows.want_bytes)
    for (int g = 0; g < rows.groups(); ++g)
      quantise_group(rows, row, g, simd::load(x + g * GROUP), simd::load(x + g * GROUP + 16));
  if (rows.want_floats) std::memcpy(rows.floats + static_cast<size_t>(row) * rows.k, x, rows.k * sizeof(float));
}

// y = x / sqrt(mean(x^2) + eps) * weight
inline void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  simd::F squares = simd::zero();
  int i = 0;
  for (; i + TILE <= n; i += TILE) {
    const simd::F v = simd::load(x + i);
    squares = simd::fma(v, v, squares);
  }
  if (i < n) {
    const simd::F v = simd::load(x + i, n - i);
    squares = simd::fma(v, v, squares);
  }
  const simd::F factor = simd::set1(1.0f / std::sqrt(simd::sum(squares) / static_cast<float>(n) + eps));
  for (i = 0; i + TILE <= n; i += TILE)
    simd::store(y + i, simd::mul(simd::mul(simd::load(x + i), factor), simd::load(weight + i)));
  if (i < n)
    simd::store(y + i, simd::mul(simd::mul(simd::load(x + i, n - i), factor), simd::load(weight + i, n - i)), n - i);
}

}  // namespace baton
