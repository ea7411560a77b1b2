// Attention of a whole batch, cut into tasks for a team of threads.
#pragma once

#include <vector>

#include "attention_panel.h"

namespace baton {

class AttentionTasks {
 public:
  // To be called before threads `run`; takes all memory that they will need.
  void plan(const Batch& batch, const Pool& pool, int num_heads, int threads) {
    batch_ = &batch, pool_ = &pool, num_heads_ = num_heads;
    direct_tasks_.clear(), panel_tasks_.clear(), direct_rows_.clear();
    direct_of_row_.assign(static_cast<size_t>(batch.num_rows), -1);
    num_partials_ = 0;
    for (int s = 0; s < batch.num_sequences; ++s) {
      if (batch.rows_of(s) > DIRECT_ROWS)
        plan_panels(s);
      else
        plan_direct(s);
    }
    partials_.take(num_partials_ * partial_size());
    scratch_.resize(static_cast<size_t>(threads));
    for (AttentionScratch& scratch : scratch_)
      scratch.prepare(pool.head_dim, span_tokens(pool.block_size), num_heads / pool.num_kv_heads);
  }

  // Called by every thread of the team: out[rows][heads * dim] from query[rows][query_stride], scaled. A row of `out` is
  // complete after `finish_row`.
  void run(Team& team, int id, int layer, const float* query, int query_stride, float* out) {
    if (pool_->is_half)
      run_as<Half>(team, id, layer, query, query_stride, out);
    else
      run_as<Single>(team, id, layer, query, query_stride, out);
  }

  // Merges the spans of a row that was computed in several.
  void finish_row(int row, float* out) {
    const int32_t index = direct_of_row_[static_cast<size_t>(row)];
    if (index >= 0) merge_row(direct_rows_[static_cast<size_t>(index)], out);
  }

 private:
  struct PanelTask {
    int32_t sequence, row, count, head;
  };
  struct DirectTask {  // the rows of a sequence by one key head, one span
    int32_t sequence, head, span;
  };
  struct DirectRow {
    int32_t row, first_span, num_spans;
    size_t partials;  // of its first head and span
  };

  int span() const { return span_tokens(pool_->block_size); }
  size_t partial_size() const { return static_cast<size_t>(padded(pool_->head_dim)) + TILE; }

  void plan_panels(int sequence) {
    const int rows = batch_->rows_of(sequence);
    for (int row = 0; row < rows; row += PANEL_ROWS)
      for (int head = 0; head < pool_->num_kv_heads; ++head)
        panel_tasks_.push_back({sequence, row, rows - row < PANEL_ROWS ? rows - row : PANEL_ROWS, head});
  }

  void plan_direct(int sequence) {
    const int rows = batch_->rows_of(sequence), start = batch_->starts[sequence];
    if (rows == 0) return;
    for (int r = 0; r < rows; ++r) {
      direct_of_row_[static_cast<size_t>(batch_->first_rows[sequence] + r)] = static_cast<int32_t>(direct_rows_.size());
      const int first = batch_->lowest_key(start + r) / span(), count = (start + r) / span() - first + 1;
      direct_rows_.push_back({batch_->first_rows[sequence] + r, first, count, num_partials_});
      num_partials_ += static_cast<size_t>(num_heads_) * count;
    }
    for (int i = batch_->lowest_key(start) / span(); i * span() < start + rows; ++i)
      for (int head = 0; head < pool_->num_kv_heads; ++head) direct_tasks_.push_back({sequence, head, i});
  }

  template <class Element>
  void run_as(Team& team, int id, int layer, const float* query, int query_stride, float* out) {
    const int panels = static_cast<int>(panel_tasks_.size()), directs = static_cast<int>(direct_tasks_.size());
    AttentionScratch& scratch = scratch_[static_cast<size_t>(id)];
    team.each(panels + directs, [&](int i) {
      if (i >= panels)
        return attend_direct<Element>(direct_tasks_[static_cast<size_t>(i - panels)], layer, query, query_stride, scratch);
      const PanelTask& task = panel_tasks_[static_cast<size_t>(panels - 1 - i)];  // the longest first
      Panel<Element>(*pool_, layer, task.head, num_heads_ / pool_->num_kv_heads, *batch_, scratch)
          .attend(task.sequence, task.row, task.count, query, query_stride, out, num_heads_ * pool_->head_dim);
    });
  }

  template <class Element>
  void attend_direct(const DirectTask& task, int layer, const float* query, int query_stride, AttentionScratch& scratch) {
    const int dim = pool_->head_dim, group = num_heads_ / pool_->num_kv_heads;
    const int first = batch_->starts[task.sequence], rows = batch_->rows_of(task.sequence);
    const int start = task.span * span(), tokens = first + rows - start < span() ? first + rows - start : span();
    const Span<Element> keys(*pool_, layer, task.head, batch_->tables + batch_->table_offsets[task.sequence],
                             start / pool_->block_size, tokens);
    DirectQueries queries;
    for (int r = 0; r < rows; ++r) {
      const int32_t index = direct_of_row_[static_cast<size_t>(batch_->first_rows[task.sequence] + r)];
      const DirectRow& row = direct_rows_[static_cast<size_t>(index)];
      if (task.span < row.first_span || task.span >= row.first_span + row.num_spans) continue;
      const int low = batch_->lowest_key(first + r) - start, high = first + r + 1 - start;
      for (int g = 0; g < group; ++g) {
        const int head = task.head * group + g;
        queries.add(query + static_cast<size_t>(row.row) * query_stride + head * dim, low > 0 ? low : 0,
                    high < tokens ? high : tokens, partial(row, head, task.span - row.first_span));
        if (queries.count == DirectQueries::MOST) queries.attend(keys, scratch.scores);
      }
      if (queries.count + group > DirectQueries::MOST) queries.attend(keys, scratch.scores);  // keeps a row's together
    }
    queries.attend(keys, scratch.scores);
  }

  void merge_row(const DirectRow& row, float* out) {
    const int dim = pool_->head_dim;
    for (int head = 0; head < num_heads_; ++head) {
      const Partial first = partial(row, head, 0);
      for (int i = 1; i < row.num_spans; ++i) merge(first, partial(row, head, i), dim, false);
      finish(first, dim, out + (static_cast<size_t>(row.row) * num_heads_ + head) * dim);
    }
  }

  Partial partial(const DirectRow& row, int head, int index) {
    float* at = partials_.get() + (row.partials + static_cast<size_t>(head) * row.num_spans + index) * partial_size();
    return {at, at + 1, at + TILE};
  }

  const Batch* batch_ = nullptr;
  const Pool* pool_ = nullptr;
  int num_heads_ = 0;
  size_t num_partials_ = 0;
  std::vector<PanelTask> panel_tasks_;
  std::vector<DirectTask> direct_tasks_;
  std::vector<DirectRow> direct_rows_;
  std::vector<int32_t> direct_of_row_;  // index in direct_rows_ of a row of the batch, -1 for rows of panels
  std::vector<AttentionScratch> scratch_;
  Buffer<float> partials_;
};

}  // namespace baton
