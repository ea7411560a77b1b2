// Sixteen lanes, whatever the width of the machine's registers.
//
// Every instruction set offers the same operations with the same rounding (fused multiply-add, round to nearest
// even), and sums of lanes are taken in one fixed order. So a kernel that is written once on top of this header gives
// the same bits on every machine.
//
//   F     16 x float            I     16 x int32
//   Bytes 64 bytes: for each of 16 lanes the 4 bytes of 4 consecutive k
//   Dot<bits>  integer dot products of 16 outputs, 4 k at a time: unsigned weights by signed activations
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

// Loops over registers: those stay registers only where the loop is gone.
#define UNROLL _Pragma("GCC unroll 16")

namespace simd {

constexpr int LANES = 16;
constexpr float LOWEST = -1e30f;  // below any score, and finite: the difference of two of them is 0, not NaN

// Lanes [low, high) of `x`; `fill` elsewhere.
inline F keep(F x, int low, int high, float fill) {
  alignas(64) float lanes[LANES];
  if (low <= 0 && high >= LANES) return x;
  store(lanes, x);
  for (int i = 0; i < LANES; ++i)
    if (i < low || i >= high) lanes[i] = fill;
  return load(lanes);
}

// exp(x) for x <= 88, within 2 units in the last place; exp(0) is exactly 1; below -87 it is exp(-87). NaN stays NaN.
inline F exp(F x) {
  const F bounded = max(x, set1(-87.0f));  // keeps a NaN that is the first operand's: see max
  const I n = round(mul(bounded, set1(1.44269504088896341f)));
  const F whole = to_float(n);
  F r = fma(whole, set1(-0.693359375f), bounded);
  r = fma(whole, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return mul(p, power_of_2(n));
}

// x / (1 + exp(-x)): no overflow at either end.
inline F silu(F x) {
  const F e = exp(min(sub(zero(), x), set1(87.0f)));
  return div(x, add(set1(1.0f), e));
}

}  // namespace simd
