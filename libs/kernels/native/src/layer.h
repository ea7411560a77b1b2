// One layer of a Llama-family model over a batch of rows, as phases of tasks for a team of threads.
//
//   rms norm -> q, k, v -> (head norms) rope, KV into the pool -> attention -> output product + residual
//   rms norm -> gate, up, silu -> down product + residual
#pragma once

#include <algorithm>
#include <initializer_list>

#include "attention_tasks.h"

namespace baton {

struct Model {  // shared with ctypes
  int32_t hidden, num_heads, num_kv_heads, head_dim, intermediate, vocabulary;
  float rms_norm_eps;
  int32_t num_positions;
  const float* cos;  // [positions, head_dim / 2]
  const float* sin;
};

struct Layer {  // shared with ctypes
  Matrix q, k, v, o, gate, up, down;
  const float* attention_norm;  // [hidden]
  const float* mlp_norm;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
};

// Scratch memory of one thread.
struct Scratch {
  Buffer<uint8_t> tile;
  Buffer<float> products, row;
};

class Engine {
 public:
  explicit Engine(int threads) : team_(threads), scratch_(static_cast<size_t>(team_.size())) {}

  int threads() const { return team_.size(); }

  // out[i] = row tokens[i] of `embedding`
  void embed(const Matrix& embedding, const int32_t* tokens, int count, float* out) {
    team_.run([&](int) {
      team_.each(count, [&](int i) { read_row(embedding, tokens[i], out + static_cast<size_t>(i) * embedding.k); });
    });
  }

  // out[rows][n] = x[rows][k] of the matrix, with its bias. `norm` (or null) is applied to x first.
  void linear(const Matrix& matrix, const float* x, int rows, const float* norm, float eps, float* out) {
    const Rows in = inputs_.take(rows, matrix.k, !matrix.is_float(), matrix.is_float());
    prepare(rows, matrix.k);
    team_.run([&](int id) {
      team_.each(rows, [&](int r) { put(in, r, x + static_cast<size_t>(r) * matrix.k, norm, eps, scratch_[id]); });
      team_.each(matrix.tiles(), [&](int tile) {
        float* sums = multiply_tile(matrix, tile, in, scratch_[id], 0);
        for_rows(sums, rows, matrix.n, tile, [&](int r, simd::F sum, int count) {
          simd::store(out + static_cast<size_t>(r) * matrix.n + tile * TILE, sum, count);
        });
      });
    });
  }

  // hidden[rows][hidden] goes through the layer in place; the rows' KV goes to the pool. Where no row of the batch is
  // drawn, the last layer's result is of no use: it ends with the KV.
  void layer(const Model& model, const Layer& layer, const Batch& batch, const Pool& pool, int index, float* hidden);

  // Attention alone: query[rows][heads * dim], scaled; out[rows][heads * dim].
  void attention(const Batch& batch, const Pool& pool, int index, int num_heads, const float* query, float* out) {
    attention_.plan(batch, pool, num_heads, team_.size());
    team_.run([&](int id) {
      attention_.run(team_, id, index, query, num_heads * pool.head_dim, out);
      team_.each(batch.num_rows, [&](int r) { attention_.finish_row(r, out); });
    });
  }

  // The KV of the batch's rows into the pool, q and k rotated in place. qkv[rows][(heads + 2 * kv_heads) * dim].
  void rope_and_write(const Model& model, const float* q_norm, const float* k_norm, const Batch& batch, const Pool& pool,
                      int index, float* qkv) {
    find_rows(batch);
    prepare(batch.num_rows, model.head_dim);
    team_.run([&](int id) {
      team_.each(batch.num_rows,
                 [&](int r) { rope_row(model, q_norm, k_norm, batch, pool, index, r, qkv, scratch_[id]); });
    });
  }

 private:
  struct RowPlace {
    int32_t sequence, position;
  };
  void prepare(int rows, int k) {
    for (Scratch& scratch : scratch_) {
      scratch.tile.take(product_memory(k));
      scratch.products.take(4 * static_cast<size_t>(rows) * TILE);
      scratch.row.take(static_cast<size_t>(padded(k)) + TILE);
    }
  }

  static void put(const Rows& in, int row, const float* x, const float* norm, float eps, Scratch& scratch) {
    if (norm == nullptr) return put_row(in, row, x);
    float* y = scratch.row.get();
    rms_norm(x, norm, eps, in.k, y);
    put_row(in, row, y);
  }

  // Sums of a tile for all rows, [rows][16], in the thread's `slot`-th piece of memory.
  static float* multiply_tile(const Matrix& matrix, int tile, const Rows& in, Scratch& scratch, int slot) {
    float* sums = scratch.products.get() + static_cast<size_t>(slot) * in.rows * TILE;
    product(matrix, tile, in, sums, scratch.tile.get());
    return sums;
  }

  template <class Use>
  static void for_rows(const float* sums, int rows, int n, int tile, Use&& use) {
    const int count = n - tile * TILE < TILE ? n - tile * TILE : TILE;
    for (int r = 0; r < rows; ++r) use(r, simd::load(sums + static_cast<size_t>(r) * TILE), count);
  }

  // q, k and v of all rows, side by side in qkv[rows][width].
  void project(const Layer& layer, const Rows& in, float* qkv, int width, Scratch& scratch) {
    const Matrix* parts[] = {&layer.q, &layer.k, &layer.v};
    const int q = layer.q.tiles(), k = layer.k.tiles(), v = layer.v.tiles();
    team_.each(q + k + v, [&](int i) {
      const int part = i < q ? 0 : i < q + k ? 1 : 2;
      const int tile = i - (part > 0 ? q : 0) - (part > 1 ? k : 0);
      float* to = qkv + (part > 0 ? layer.q.n : 0) + (part > 1 ? layer.k.n : 0) + tile * TILE;
      for_rows(multiply_tile(*parts[part], tile, in, scratch, 0), in.rows, parts[part]->n, tile,
               [&](int r, simd::F sum, int count) { simd::store(to + static_cast<size_t>(r) * width, sum, count); });
    });
  }

  // silu(gate) * up, 32 outputs at a time: a group of the next product's input.
  void gate(const Layer& layer, const Rows& in, const Rows& out, Scratch& scratch) {
    const int tiles = layer.gate.tiles();
    team_.each((tiles + 1) / 2, [&](int pair) {
      const float *gates[2], *ups[2];
      const int count = 2 * pair + 1 < tiles ? 2 : 1;
      for (int i = 0; i < count; ++i) {
        gates[i] = multiply_tile(layer.gate, 2 * pair + i, in, scratch, 2 * i);
        ups[i] = multiply_tile(layer.up, 2 * pair + i, in, scratch, 2 * i + 1);
      }
      for (int r = 0; r < in.rows; ++r) {
        simd::F values[2] = {simd::zero(), simd::zero()};
        for (int i = 0; i < count; ++i)
          values[i] = simd::mul(simd::silu(simd::load(gates[i] + r * TILE)), simd::load(ups[i] + r * TILE));
        if (out.want_bytes) quantise_group(out, r, pair, values[0], values[1]);
        for (int i = 0; out.want_floats && i < count; ++i) {
          const int at = (2 * pair + i) * TILE, left = out.k - at < TILE ? out.k - at : TILE;
          simd::store(out.floats + static_cast<size_t>(r) * out.k + at, values[i], left);
        }
      }
    });
  }

  void find_rows(const Batch& batch) {
    places_.resize(static_cast<size_t>(batch.num_rows));
    for (int s = 0; s < batch.num_sequences; ++s)
      for (int r = 0; r < batch.rows_of(s); ++r)
        places_[static_cast<size_t>(batch.first_rows[s] + r)] = {s, batch.starts[s] + r};
  }

  void rope_row(const Model& model, const float* q_norm, const float* k_norm, const Batch& batch, const Pool& pool,
                int index, int row, float* qkv, Scratch& scratch) const {
    const int dim = model.head_dim, heads = model.num_heads, kv_heads = model.num_kv_heads;
    const RowPlace place = places_[static_cast<size_t>(row)];
    const float* cos = model.cos + static_cast<size_t>(place.position) * (dim / 2);
    const float* sin = model.sin + static_cast<size_t>(place.position) * (dim / 2);
    float* x = qkv + static_cast<size_t>(row) * (heads + 2 * kv_heads) * dim;
    const simd::F scale = simd::set1(1.0f / std::sqrt(static_cast<float>(dim)));
    for (int h = 0; h < heads + kv_heads; ++h) {
      float* head = x + h * dim;
      const float* norm = h < heads ? q_norm : k_norm;
      if (norm != nullptr) {
        rms_norm(head, norm, model.rms_norm_eps, dim, scratch.row.get());
        std::memcpy(head, scratch.row.get(), dim * sizeof(float));
      }
      rope(head, cos, sin, dim);
      for (int d = 0; h < heads && d < dim; d += TILE) {
        const int count = dim - d < TILE ? dim - d : TILE;
        simd::store(head + d, simd::mul(simd::load(head + d, count), scale), count);
      }
    }
    const int block = batch.tables[batch.table_offsets[place.sequence] + place.position / pool.block_size];
    const int offset = place.position % pool.block_size;
    const float *keys = x + heads * dim, *values = keys + kv_heads * dim;
    if (pool.is_half)
      write_kv<Half>(pool, index, block, offset, keys, values);
    else
      write_kv<Single>(pool, index, block, offset, keys, values);
  }

  Team team_;
  std::vector<Scratch> scratch_;
  RowsBuffer inputs_, attended_, second_, gated_;
  Buffer<float> qkv_, mixed_;
  std::vector<RowPlace> places_;
  AttentionTasks attention_;
};

inline void Engine::layer(const Model& model, const Layer& layer, const Batch& batch, const Pool& pool, int index,
                          float* hidden) {
  const int rows = batch.num_rows, width = model.hidden, dim = model.head_dim, heads = model.num_heads;
  const int qkv_width = (heads + 2 * model.num_kv_heads) * dim;
  const auto inputs = [&](RowsBuffer& buffer, int k, std::initializer_list<const Matrix*> readers) {
    bool bytes = false, floats = false;
    for (const Matrix* matrix : readers) (matrix->is_float() ? floats : bytes) = true;
    return buffer.take(rows, k, bytes, floats);
  };
  float* qkv = qkv_.take(static_cast<size_t>(rows) * qkv_width);
  float* mixed = mixed_.take(static_cast<size_t>(rows) * heads * dim);
  prepare(rows, std::max(std::max(width, heads * dim), model.intermediate));
  find_rows(batch);
  attention_.plan(batch, pool, heads, team_.size());

  const Rows normed = inputs(inputs_, width, {&layer.q, &layer.k, &layer.v});
  const Rows attended = inputs(attended_, heads * dim, {&layer.o});
  const Rows gated = inputs(gated_, model.intermediate, {&layer.down});
  const Rows second = inputs(second_, width, {&layer.gate, &layer.up});

  team_.run([&](int id) {
    Scratch& scratch = scratch_[static_cast<size_t>(id)];
    const auto norm = [&](const Rows& to, const float* weight) {
      team_.each(rows, [&](int r) {
        put(to, r, hidden + static_cast<size_t>(r) * width, weight, model.rms_norm_eps, scratch);
      });
    };
    const auto add_product = [&](const Matrix& matrix, const Rows& in) {
      team_.each(matrix.tiles(), [&](int tile) {
        for_rows(multiply_tile(matrix, tile, in, scratch, 0), rows, matrix.n, tile, [&](int r, simd::F sum, int count) {
          float* to = hidden + static_cast<size_t>(r) * width + tile * TILE;
          simd::store(to, simd::add(simd::load(to, count), sum), count);
        });
      });
    };

    norm(normed, layer.attention_norm);
    project(layer, normed, qkv, qkv_width, scratch);
    team_.each(rows, [&](int r) {
      rope_row(model, layer.q_norm, layer.k_norm, batch, pool, index, r, qkv, scratch);
    });
    if (!batch.is_drawn && index + 1 == pool.num_layers) return;
    attention_.run(team_, id, index, qkv, qkv_width, mixed);
    team_.each(rows, [&](int r) {
      attention_.finish_row(r, mixed);
      put_row(attended, r, mixed + static_cast<size_t>(r) * heads * dim);
    });
    add_product(layer.o, attended);
    norm(second, layer.mlp_norm);
    gate(layer, second, gated, scratch);
    add_product(layer.down, gated);
  });
}

}  // namespace baton
