// AVX-512 with VNNI: one register is sixteen lanes.
#pragma once

#include <immintrin.h>

#define BATON_ISA "avx512vnni"

namespace simd {

using F = __m512;
using I = __m512i;
using Bytes = __m512i;

constexpr int ROWS = 8;  // rows of activations that share a pass over a tile of weights

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// A NaN in `a` is kept (the instruction returns its second operand then).
inline F max(F a, F b) { return _mm512_max_ps(b, a); }
inline F min(F a, F b) { return _mm512_min_ps(b, a); }

inline F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F load_half(const uint16_t* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store_half(uint16_t* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_bfloat(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I round(F x) { return _mm512_cvtps_epi32(x); }
inline F power_of_2(I n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// The sixteen lanes, each between -128 and 127, as bytes.
inline void store_bytes(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
inline int32_t sum(I x) { return _mm512_reduce_add_epi32(x); }

// (0 + 8) + (4 + 12) ...: halves are added to halves.
inline float sum(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(F x) { return _mm512_reduce_max_ps(x); }
// Bits of the largest magnitude, as an unsigned number: infinities and NaN are at least 0x7f800000.
inline uint32_t largest_magnitude(F a, F b) {
  const __m512i bits = _mm512_set1_epi32(0x7fffffff);
  return static_cast<uint32_t>(
      _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), bits),
                                               _mm512_and_si512(_mm512_castps_si512(b), bits))));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
inline Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

inline I set1_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}

template <int BITS>
struct Dot {
  I value;
  // Weights of 8 bits have 128 added to them: `sum` of the activations takes it off again.
  void start(int32_t sum) { value = BITS == 8 ? _mm512_set1_epi32(-128 * sum) : _mm512_setzero_si512(); }
  void add(Bytes weights, const int8_t* quad) { value = _mm512_dpbusd_epi32(value, weights, set1_quad(quad)); }
  I total() const { return value; }
};

}  // namespace simd
