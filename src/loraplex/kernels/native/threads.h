// A pool of threads that hands out small pieces of work, made for steps of many short operations.
//
// Waiting spins for a while, so that the next operation finds its threads awake, and then sleeps. How long depends on
// whether others want the cores: a virtual processor that sleeps is slow to wake (31 instead of 19 ms a decode step of
// SmolLM2-135M on 2 cores), while spinning beside a busy neighbour keeps the thread that is waited for from running.
// Involuntary context switches tell the two apart.
#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace lp {

const int64_t kPatientSpinNs = 300000, kCrowdedSpinNs = 3000, kReviewNs = 50000000;
const long kCrowdedSwitches = 6;  // involuntary switches in one review period

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Wait until `word` differs from `seen`: spin, then sleep. `sleepers` tells the other side whether to wake.
inline void wait_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int>& sleepers, int64_t spin_ns) {
  for (int64_t start = 0, turn = 0; word.load(std::memory_order_acquire) == seen; turn++) {
    __builtin_ia32_pause();
    if (turn % 16) continue;
    const int64_t now = now_ns();
    if (!start) start = now;
    if (now - start < spin_ns) continue;
    sleepers.fetch_add(1);
    while (word.load() == seen) syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers.fetch_sub(1);
    return;
  }
}

inline void wake(std::atomic<uint32_t>& word, std::atomic<int>& sleepers) {
  if (sleepers.load()) syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

class Pool {
 public:
  explicit Pool(int threads) : size_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    stop_ = true;
    epoch_.fetch_add(1);
    wake(epoch_, epoch_sleepers_);
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // Run task(thread) on every thread of the pool and wait for all. Called from one thread at a time.
  template <class Task>
  void run(const Task& task) {
    if (size_ == 1) return task(0);
    if (busy_.exchange(true) || getpid() != owner_) {
      fprintf(stderr, "loraplex: the kernels of one engine were entered from two threads, or after a fork\n");
      abort();
    }
    review();
    task_ = [](const void* t, int thread) { (*(const Task*)t)(thread); };
    argument_ = &task;
    pending_.store(size_ - 1);
    epoch_.fetch_add(1);
    wake(epoch_, epoch_sleepers_);
    task(0);
    for (uint32_t left; (left = pending_.load(std::memory_order_acquire)) != 0;)
      wait_change(pending_, left, pending_sleepers_, spin_ns_.load(std::memory_order_relaxed));
    busy_.store(false);
  }

  // Inside a task: wait until every thread of the pool has come here.
  void barrier() {
    if (size_ == 1) return;
    const uint32_t seen = generation_.load();
    if (arrived_.fetch_add(1) + 1 == size_) {
      arrived_.store(0);
      generation_.fetch_add(1);
      wake(generation_, generation_sleepers_);
    } else {
      wait_change(generation_, seen, generation_sleepers_, spin_ns_.load(std::memory_order_relaxed));
    }
  }

 private:
  void serve(int thread) {
    for (uint32_t seen = 0;; seen++) {
      wait_change(epoch_, seen, epoch_sleepers_, spin_ns_.load(std::memory_order_relaxed));
      if (stop_) return;
      task_(argument_, thread);
      pending_.fetch_sub(1);
      wake(pending_, pending_sleepers_);
    }
  }

  // Now and then: are the cores ours?
  void review() {
    if (++runs_ % 32) return;
    const int64_t now = now_ns();
    if (now - reviewed_ns_ < kReviewNs) return;
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const bool crowded = usage.ru_nivcsw - switches_ >= kCrowdedSwitches;
    spin_ns_.store(crowded ? kCrowdedSpinNs : kPatientSpinNs, std::memory_order_relaxed);
    switches_ = usage.ru_nivcsw;
    reviewed_ns_ = now;
  }

  const int size_;
  std::vector<std::thread> workers_;
  void (*task_)(const void*, int) = nullptr;
  const void* argument_ = nullptr;
  bool stop_ = false;
  const pid_t owner_ = getpid();
  std::atomic<bool> busy_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> epoch_sleepers_{0};
  alignas(64) std::atomic<uint32_t> pending_{0};
  std::atomic<int> pending_sleepers_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> generation_sleepers_{0}, arrived_{0};
  std::atomic<int64_t> spin_ns_{kPatientSpinNs};
  uint64_t runs_ = 0;
  long switches_ = 0;
  int64_t reviewed_ns_ = 0;
};

// Pieces [0, count) handed out `grain` at a time to whichever thread asks; which thread does which changes no result.
class Pieces {
 public:
  Pieces(int64_t count, int64_t grain) : count_(count), grain_(grain) {}

  bool take(int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    *end = *begin + grain_ < count_ ? *begin + grain_ : count_;
    return *begin < count_;
  }

 private:
  const int64_t count_, grain_;
  alignas(64) std::atomic<int64_t> next_{0};
};

// body(begin, end) over [0, count) on all threads; on this one alone where `work` elements are not worth the wake-up.
template <class Body>
void parallel_for(Pool* pool, int64_t count, int64_t grain, int64_t work, const Body& body) {
  if (work < 65536 || count <= grain) return body((int64_t)0, count);
  Pieces pieces(count, grain);
  pool->run([&](int) {
    for (int64_t begin, end; pieces.take(&begin, &end);) body(begin, end);
  });
}

}  // namespace lp
