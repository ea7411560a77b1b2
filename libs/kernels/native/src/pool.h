// The paged KV pool, as libs/engine/kv/layout.py lays it out: [block][layer][k, v][kv_head], where the keys of a block and
// head are stored transposed, [dim][token], and its values as [token][dim].
#pragma once

#include "rows.h"

namespace baton {

struct Pool {  // shared with ctypes
  uint8_t* data;
  int32_t num_layers, num_kv_heads, head_dim, block_size;
  int32_t is_half, reserved;  // float16, else float32

  size_t element_bytes() const { return is_half ? 2 : 4; }
  size_t part_elements() const { return static_cast<size_t>(block_size) * head_dim; }
  uint8_t* part(int block, int layer, int is_value, int head) const {
    const size_t parts = (static_cast<size_t>(block) * num_layers + layer) * 2 + is_value;
    return data + (parts * num_kv_heads + head) * part_elements() * element_bytes();
  }
};

// An element of the pool: how it is read and written.
struct Half {
  using Type = uint16_t;
  static simd::F load(const uint16_t* p) { return simd::load_half(p); }
  static simd::F load(const uint16_t* p, int n) { return simd::load_half(p, n); }
  // Saturates: an infinity would turn weights of zero into NaN.
  static void store(uint16_t* p, simd::F x, int n) {
    simd::store_half(p, simd::max(simd::min(x, simd::set1(65504.0f)), simd::set1(-65504.0f)), n);
  }
};
struct Single {
  using Type = float;
  static simd::F load(const float* p) { return simd::load(p); }
  static simd::F load(const float* p, int n) { return simd::load(p, n); }
  static void store(float* p, simd::F x, int n) { simd::store(p, x, n); }
};

template <class Element>
void write_kv(const Pool& pool, int layer, int block, int offset, const float* keys, const float* values) {
  const int dim = pool.head_dim;
  for (int head = 0; head < pool.num_kv_heads; ++head, keys += dim, values += dim) {
    auto* to_keys = reinterpret_cast<typename Element::Type*>(pool.part(block, layer, 0, head));
    auto* to_values = reinterpret_cast<typename Element::Type*>(pool.part(block, layer, 1, head));
    for (int d = 0; d < dim; d += TILE) {
      const int count = dim - d < TILE ? dim - d : TILE;
      typename Element::Type column[TILE];
      Element::store(column, simd::load(keys + d, count), count);
      for (int i = 0; i < count; ++i) to_keys[(d + i) * pool.block_size + offset] = column[i];
      Element::store(to_values + static_cast<size_t>(offset) * dim + d, simd::load(values + d, count), count);
    }
  }
}

// `x` [dim] rotated in place; pair i is (i, i + dim / 2). cos and sin of the position, [dim / 2].
inline void rope(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += TILE) {
    const int count = half - i < TILE ? half - i : TILE;
    const simd::F c = simd::load(cos + i, count), s = simd::load(sin + i, count);
    const simd::F first = simd::load(x + i, count), second = simd::load(x + half + i, count);
    simd::store(x + i, simd::sub(simd::mul(first, c), simd::mul(second, s)), count);
    simd::store(x + half + i, simd::add(simd::mul(second, c), simd::mul(first, s)), count);
  }
}

}  // namespace baton
