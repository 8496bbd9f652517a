// Work that the threads of XLA share.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Blocks of outputs that threads take in turn. Each thread begins at a place of its own, so that it reads kernels in
// long stretches, and helps the others when it is done. A thread that comes late finds no block and does not touch the
// arrays, so the call need not wait for it.
struct Work {
  struct Stretch {
    alignas(64) std::atomic<int64_t> next;
    int64_t end;
  };

  std::function<void(int64_t first, int64_t last)> run;     // computes the outputs from `first` to `last`
  int64_t outputs = 0, block = 1, blocks = 0, stretches = 1;
  std::unique_ptr<Stretch[]> all;
  std::atomic<int64_t> joined{0}, done{0};

  void Divide(int64_t parts) {
    stretches = parts;
    all.reset(new Stretch[parts]);
    for (int64_t i = 0; i < parts; ++i) {
      all[i].next = blocks * i / parts;
      all[i].end = blocks * (i + 1) / parts;
    }
  }

  void Take() {
    const int64_t own = joined++;
    for (int64_t turn = 0; turn < stretches; ++turn) {
      Stretch& from = all[(own + turn) % stretches];
      for (int64_t i = from.next++; i < from.end; i = from.next++) {
        const int64_t last = (i + 1) * block < outputs ? (i + 1) * block : outputs;
        run(i * block, last);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  }
};

constexpr int64_t kWeights = 1 << 16;       // of a block
constexpr auto kPatience = std::chrono::microseconds(200);

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The newest work, and the threads that help with it. To wake a thread takes longer than most products, so a helper
// stays for a while after its work and waits for the next.
class Board {
 public:
  void Post(ffi::ThreadPool& pool, const std::shared_ptr<Work>& work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      newest_ = work;
    }
    version_.fetch_add(1);
    const int64_t most = pool.num_threads() - 1;
    for (int64_t i = 1; i <= most && i < work->blocks && helpers_.load() < most; ++i) {
      helpers_.fetch_add(1);
      pool.Schedule([this] { Help(); });
    }
  }

 private:
  void Help() {
    uint64_t seen = 0;
    for (;;) {
      const auto until = std::chrono::steady_clock::now() + kPatience;
      uint64_t now;
      while ((now = version_.load()) == seen && std::chrono::steady_clock::now() < until) Pause();
      if (now == seen) {
        helpers_.fetch_sub(1);
        return;
      }
      seen = now;
      std::shared_ptr<Work> work;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        work = newest_;
      }
      work->Take();
    }
  }

  std::mutex mutex_;
  std::shared_ptr<Work> newest_;
  std::atomic<uint64_t> version_{0};
  std::atomic<int64_t> helpers_{0};
};

// Computes `outputs` outputs of `weights` weights each. Blocks do not depend on the number of rows: in small ones, much
// of what is fetched ahead is for the next block, which may be that of another thread.
inline void Compute(ffi::ThreadPool& pool, int64_t outputs, int64_t weights,
                    std::function<void(int64_t, int64_t)> run) {
  auto work = std::make_shared<Work>();
  work->run = std::move(run);
  work->outputs = outputs;
  work->block = (kWeights / (weights + 1) + 4) / 4 * 4;
  work->blocks = (outputs + work->block - 1) / work->block;
  const int64_t threads = pool.num_threads();
  work->Divide(work->blocks < threads ? work->blocks : threads);
  static Board* board = new Board;        // never destroyed: helpers may outlive the process's static objects
  if (work->blocks > 1) board->Post(pool, work);
  work->Take();
  while (work->done.load(std::memory_order_acquire) < work->blocks) Pause();
}

}  // namespace
