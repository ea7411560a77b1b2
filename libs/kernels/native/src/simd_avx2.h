// AVX2 with FMA and F16C: two registers are sixteen lanes.
#pragma once

#include <immintrin.h>

#define BATON_ISA "avx2"

namespace simd {

struct F {
  __m256 low, high;
};
struct I {
  __m256i low, high;
};
using Bytes = I;

constexpr int ROWS = 4;

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load(const float* p, int n) {
  alignas(32) float lanes[16] = {};
  std::memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
}
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline void store(float* p, F x, int n) {
  alignas(32) float lanes[16];
  store(lanes, x);
  std::memcpy(p, lanes, n * sizeof(float));
}
inline F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// A NaN in `a` is kept (the instruction returns its second operand then).
inline F max(F a, F b) { return {_mm256_max_ps(b.low, a.low), _mm256_max_ps(b.high, a.high)}; }
inline F min(F a, F b) { return {_mm256_min_ps(b.low, a.low), _mm256_min_ps(b.high, a.high)}; }

inline F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F load_half(const uint16_t* p, int n) {
  alignas(32) uint16_t lanes[16] = {};
  std::memcpy(lanes, p, n * sizeof(uint16_t));
  return load_half(lanes);
}
inline void store_half(uint16_t* p, F x, int n) {
  alignas(32) uint16_t lanes[16];
  constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_store_si128(reinterpret_cast<__m128i*>(lanes), _mm256_cvtps_ph(x.low, rounding));
  _mm_store_si128(reinterpret_cast<__m128i*>(lanes + 8), _mm256_cvtps_ph(x.high, rounding));
  std::memcpy(p, lanes, n * sizeof(uint16_t));
}
inline __m256 bfloat8(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load_bfloat(const uint16_t* p) { return {bfloat8(p), bfloat8(p + 8)}; }

inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline I round(F x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline __m256 power_of_2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline F power_of_2(I n) { return {power_of_2(n.low), power_of_2(n.high)}; }
// The sixteen lanes, each between -128 and 127, as bytes.
inline void store_bytes(int8_t* p, I x) {
  alignas(32) int32_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x.low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), x.high);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
inline int32_t sum(I x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// (0 + 8) + (4 + 12) ...: halves are added to halves.
inline float sum(F x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(F x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Bits of the largest magnitude, as an unsigned number: infinities and NaN are at least 0x7f800000.
inline uint32_t largest_magnitude(F a, F b) {
  const __m256i bits = _mm256_set1_epi32(0x7fffffff);
  const auto magnitude = [bits](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), bits); };
  const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(magnitude(a.low), magnitude(a.high)),
                                         _mm256_max_epi32(magnitude(b.low), magnitude(b.high)));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void store_bytes(uint8_t* p, Bytes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.high);
}
inline __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes low_nibbles(Bytes x) { return {low_nibbles(x.low), low_nibbles(x.high)}; }
inline Bytes high_nibbles(Bytes x) {
  return {low_nibbles(_mm256_srli_epi16(x.low, 4)), low_nibbles(_mm256_srli_epi16(x.high, 4))};
}

inline __m256i set1_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

template <int BITS>
struct Dot;

// Pairs of products fit 16 bits: at most 2 * 15 * 127 each, of which 8 are added (30480) before they are widened.
template <>
struct Dot<4> {
  I pairs;
  void start(int32_t) { pairs = {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void add(Bytes weights, const int8_t* quad) {
    const __m256i a = set1_quad(quad);
    pairs.low = _mm256_add_epi16(pairs.low, _mm256_maddubs_epi16(weights.low, a));
    pairs.high = _mm256_add_epi16(pairs.high, _mm256_maddubs_epi16(weights.high, a));
  }
  I total() const {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(pairs.low, ones), _mm256_madd_epi16(pairs.high, ones)};
  }
};

// Unsigned bytes up to 255 would overflow the 16 bits of a pair. So the 128 is taken off again and the sign of each
// weight goes to its activation: 2 * 128 * 127 fits.
template <>
struct Dot<8> {
  I value;
  void start(int32_t) { value = {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void add(Bytes weights, const int8_t* quad) {
    const __m256i a = set1_quad(quad);
    value.low = add(value.low, weights.low, a);
    value.high = add(value.high, weights.high, a);
  }
  static __m256i add(__m256i sum, __m256i biased, __m256i a) {
    const __m256i weight = _mm256_xor_si256(biased, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(a, weight));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  I total() const { return value; }
};

}  // namespace simd
