// Plain C++: compilers turn the loops into what the machine has (NEON, SSE2, ...).
#pragma once

#define BATON_ISA "portable"

namespace simd {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};

constexpr int ROWS = 2;

#define BATON_LANES for (int i = 0; i < 16; ++i)

inline F set1(float x) {
  F r;
  BATON_LANES r.v[i] = x;
  return r;
}
inline F zero() { return set1(0.0f); }
inline F load(const float* p) {
  F r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline F load(const float* p, int n) {
  F r = zero();
  std::memcpy(r.v, p, n * sizeof(float));
  return r;
}
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof(x.v)); }
inline void store(float* p, F x, int n) { std::memcpy(p, x.v, n * sizeof(float)); }
inline F add(F a, F b) {
  BATON_LANES a.v[i] += b.v[i];
  return a;
}
inline F sub(F a, F b) {
  BATON_LANES a.v[i] -= b.v[i];
  return a;
}
inline F mul(F a, F b) {
  BATON_LANES a.v[i] *= b.v[i];
  return a;
}
inline F div(F a, F b) {
  BATON_LANES a.v[i] /= b.v[i];
  return a;
}
inline F fma(F a, F b, F c) {
  BATON_LANES c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return c;
}
// A NaN in `a` is kept.
inline F max(F a, F b) {
  BATON_LANES a.v[i] = b.v[i] > a.v[i] ? b.v[i] : a.v[i];
  return a;
}
inline F min(F a, F b) {
  BATON_LANES a.v[i] = b.v[i] < a.v[i] ? b.v[i] : a.v[i];
  return a;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// IEEE half precision: 5 bits of exponent, 10 of fraction.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(h & 0x7fff) << 13;
  if (rest >= 0x0f800000) return from_bits(sign | (rest + 0x70000000));  // infinity and NaN
  return from_bits(sign | bits_of(from_bits(rest) * 0x1p112f));          // exact, subnormal numbers too
}
inline uint16_t float_to_half(float x) {
  const uint16_t sign = static_cast<uint16_t>(bits_of(x) >> 16 & 0x8000);
  const uint32_t magnitude = bits_of(x) & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | static_cast<uint16_t>(magnitude >> 13 & 0x1ff);
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {  // subnormal: let an addition round
    const float rounded = from_bits(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(bits_of(rounded) - bits_of(0.5f));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

inline F load_half(const uint16_t* p) {
  F r;
  BATON_LANES r.v[i] = half_to_float(p[i]);
  return r;
}
inline F load_half(const uint16_t* p, int n) {
  F r = zero();
  for (int i = 0; i < n; ++i) r.v[i] = half_to_float(p[i]);
  return r;
}
inline void store_half(uint16_t* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = float_to_half(x.v[i]);
}
inline F load_bfloat(const uint16_t* p) {
  F r;
  BATON_LANES r.v[i] = from_bits(static_cast<uint32_t>(p[i]) << 16);
  return r;
}

inline F to_float(I x) {
  F r;
  BATON_LANES r.v[i] = static_cast<float>(x.v[i]);
  return r;
}
inline I round(F x) {
  I r;
  BATON_LANES r.v[i] = std::fabs(x.v[i]) < 2e9f ? static_cast<int32_t>(std::nearbyint(x.v[i])) : INT32_MIN;
  return r;
}
inline F power_of_2(I n) {
  F r;
  BATON_LANES r.v[i] = from_bits(static_cast<uint32_t>(n.v[i] + 127) << 23);
  return r;
}
inline void store_bytes(int8_t* p, I x) { BATON_LANES p[i] = static_cast<int8_t>(x.v[i]); }
inline int32_t sum(I x) {
  int32_t total = 0;
  BATON_LANES total += x.v[i];
  return total;
}
// (0 + 8) + (4 + 12) ...: halves are added to halves.
inline float sum(F x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  return x.v[0];
}
inline float largest(F x) {
  float most = x.v[0];
  BATON_LANES most = x.v[i] > most ? x.v[i] : most;
  return most;
}
// Bits of the largest magnitude, as an unsigned number: infinities and NaN are at least 0x7f800000.
inline uint32_t largest_magnitude(F a, F b) {
  uint32_t most = 0;
  BATON_LANES {
    const uint32_t x = bits_of(a.v[i]) & 0x7fffffff, y = bits_of(b.v[i]) & 0x7fffffff;
    most = x > most ? x : most;
    most = y > most ? y : most;
  }
  return most;
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, x.v, 64); }
inline Bytes low_nibbles(Bytes x) {
  for (uint8_t& byte : x.v) byte &= 15;
  return x;
}
inline Bytes high_nibbles(Bytes x) {
  for (uint8_t& byte : x.v) byte >>= 4;
  return x;
}

template <int BITS>
struct Dot {
  I value;
  void start(int32_t sum) { BATON_LANES value.v[i] = BITS == 8 ? -128 * sum : 0; }
  void add(const Bytes& weights, const int8_t* quad) {
    BATON_LANES for (int j = 0; j < 4; ++j) value.v[i] += weights.v[4 * i + j] * quad[j];
  }
  I total() const { return value; }
};

#undef BATON_LANES

}  // namespace simd
