// A team of threads that works through phases of tasks, with a barrier behind each.
//
// Tasks are handed out as threads ask for them, so a thread that has lost its core to another process delays the others by
// no more than the task it is at. Which thread computes what never changes a bit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton {

class Team {
 public:
  explicit Team(int threads) : size_(threads < 1 ? 1 : threads) {
    for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { serve(id); });
  }

  ~Team() {
    job_ = nullptr;
    begin();
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs `job(id)` on every thread; the caller is thread 0. Returns when all have returned.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    if (size_ > 1) begin();
    job(0);
    barrier();
  }

  // One phase, called by every thread: `task(i)` for each i below `count`, once; then all wait for all.
  template <class Task>
  void each(int count, Task&& task) {
    int first = next_.load(std::memory_order_relaxed);
    while (first < count) {
      // Large pieces first, so that neighbours stay together; small ones at the end, so that all end together.
      const int share = (count - first) / (2 * size_);
      const int end = first + (share > 1 ? share : 1);
      if (!next_.compare_exchange_weak(first, end, std::memory_order_relaxed)) continue;
      for (int i = first; i < end; ++i) task(i);
      first = next_.load(std::memory_order_relaxed);
    }
    barrier();
  }

 private:
  static constexpr int SPINS = 2000;  // some tens of microseconds: the gap between two layers

  void serve(int id) {
    for (uint32_t seen = 0;;) {
      wait(begun_, seen++);
      if (job_ == nullptr) return;
      (*job_)(id);
      barrier();
    }
  }

  void begin() { release(begun_); }

  void barrier() {
    if (size_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t seen = passed_.load();
    if (arrived_.fetch_add(1) + 1 == size_) {
      arrived_.store(0);
      next_.store(0);
      release(passed_);
    } else {
      wait(passed_, seen);
    }
  }

  // Until `counter` is no longer `seen`: spinning first, then asleep.
  void wait(std::atomic<uint32_t>& counter, uint32_t seen) {
    for (int spin = 0; spin < SPINS; ++spin) {
      if (counter.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    changed_.wait(lock, [&] { return counter.load() != seen; });
    sleeping_.fetch_sub(1);
  }

  void release(std::atomic<uint32_t>& counter) {
    counter.fetch_add(1);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_all();
    }
  }

  const int size_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<uint32_t> begun_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
};

// Memory that only grows, aligned to a cache line; contents are lost when it does.
template <class T>
class Buffer {
 public:
  T* take(size_t count) {
    if (count > size_) {
      memory_.reset(static_cast<T*>(::operator new((count + 64) * sizeof(T), std::align_val_t(64))));
      size_ = count;
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t size_ = 0;
};

}  // namespace baton
