// State shared by everything that takes part in one run: stop flag, first error, progress.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

#include "errors.h"
#include "limiter.h"

namespace nvme_resume {

inline constexpr std::chrono::milliseconds kMaxPause{500};
inline constexpr std::chrono::milliseconds kPauseTick{2};

class Control {
 public:
  // From any thread, also before the run.
  void cancel();

  // The first error wins and stops all lanes.
  void fail(IoError error);

  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

  // False when the run was stopped first.
  bool wait_until(Clock::time_point when);

  // From any thread: hold new requests back while somebody more important uses the disk. Each
  // request waits kMaxPause at most, so that a run under constant load still ends some day.
  void set_paused(bool paused);
  bool paused() const { return paused_.load(std::memory_order_relaxed); }

  // wait_until(when), then until the pause is over. False when the run was stopped first.
  bool wait_turn(Clock::time_point when);

  // Throws the first error, else Cancelled if the run was cancelled.
  void throw_if_stopped() const;

  void set_total(int64_t bytes) { total_.store(bytes, std::memory_order_relaxed); }
  void add_done(int64_t bytes) { done_.fetch_add(bytes, std::memory_order_relaxed); }
  int64_t done() const { return done_.load(std::memory_order_relaxed); }
  int64_t total() const { return total_.load(std::memory_order_relaxed); }

 private:
  mutable std::mutex mutex_;  // guards error_, and the wake-up of waiters
  std::condition_variable wake_;
  std::optional<IoError> error_;
  std::atomic<bool> paused_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> done_{0};
  std::atomic<int64_t> total_{0};
};

}  // namespace nvme_resume
