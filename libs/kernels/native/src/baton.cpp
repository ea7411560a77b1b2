// The C interface: what libs/kernels/native/interface.py declares to ctypes.
//
// Pointers are to memory of the caller's, which stays where it is during the call. Every function returns 0, or 1 where
// memory ran out; none throws. An engine serves one call at a time.
// gcc 12 calls the undefined operand of its own intrinsics uninitialised.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <new>

#include "layer.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class Work>
int32_t guarded(Work&& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (...) {
    return 2;
  }
}

}  // namespace

EXPORT int32_t baton_abi() { return 1; }
EXPORT const char* baton_isa() { return BATON_ISA; }
EXPORT int32_t baton_uses_amx() {
#if defined(__AMX_INT8__)
  return baton::amx::usable();
#else
  return 0;
#endif
}

EXPORT baton::Engine* baton_engine_new(int32_t threads) {
  try {
    return new baton::Engine(threads);
  } catch (...) {
    return nullptr;
  }
}
EXPORT void baton_engine_delete(baton::Engine* engine) { delete engine; }

EXPORT int32_t baton_embed(baton::Engine* engine, const baton::Matrix* embedding, const int32_t* tokens, int32_t count,
                           float* out) {
  return guarded([&] { engine->embed(*embedding, tokens, count, out); });
}

EXPORT int32_t baton_linear(baton::Engine* engine, const baton::Matrix* matrix, const float* x, int32_t rows,
                            const float* norm, float eps, float* out) {
  return guarded([&] { engine->linear(*matrix, x, rows, norm, eps, out); });
}

EXPORT int32_t baton_layer(baton::Engine* engine, const baton::Model* model, const baton::Layer* layer,
                           const baton::Batch* batch, const baton::Pool* pool, int32_t index, float* hidden) {
  return guarded([&] { engine->layer(*model, *layer, *batch, *pool, index, hidden); });
}

EXPORT int32_t baton_rope_and_write(baton::Engine* engine, const baton::Model* model, const float* q_norm,
                                    const float* k_norm, const baton::Batch* batch, const baton::Pool* pool, int32_t index,
                                    float* qkv) {
  return guarded([&] { engine->rope_and_write(*model, q_norm, k_norm, *batch, *pool, index, qkv); });
}

EXPORT int32_t baton_attention(baton::Engine* engine, const baton::Batch* batch, const baton::Pool* pool, int32_t index,
                               int32_t num_heads, const float* query, float* out) {
  return guarded([&] { engine->attention(*batch, *pool, index, num_heads, query, out); });
}

EXPORT void baton_rms_norm(const float* x, const float* weight, float eps, int32_t rows, int32_t dim, float* out) {
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) baton::rms_norm(x + r * dim, weight, eps, dim, out + r * dim);
}

EXPORT void baton_exp(const float* x, int32_t count, float* out) {
  for (int i = 0; i < count; i += baton::TILE) {
    const int n = count - i < baton::TILE ? count - i : baton::TILE;
    simd::store(out + i, simd::exp(simd::load(x + i, n)), n);
  }
}

// gate_up[rows][2 * dim], gates first: out[rows][dim] = silu(gate) * up
EXPORT void baton_silu_mul(const float* gate_up, int32_t rows, int32_t dim, float* out) {
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r)
    for (int i = 0; i < dim; i += baton::TILE) {
      const int n = dim - i < baton::TILE ? dim - i : baton::TILE;
      const float* gate = gate_up + 2 * r * dim + i;
      simd::store(out + r * dim + i, simd::mul(simd::silu(simd::load(gate, n)), simd::load(gate + dim, n)), n);
    }
}
