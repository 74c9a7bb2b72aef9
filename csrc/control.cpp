#include "control.h"

#include <utility>

namespace nvme_resume {

void Control::cancel() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true, std::memory_order_relaxed);
  }
  wake_.notify_all();
}

void Control::fail(IoError error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::move(error);
    stopping_.store(true, std::memory_order_relaxed);
  }
  wake_.notify_all();
}

bool Control::wait_until(Clock::time_point when) {
  if (when <= Clock::now()) return !stopping();
  std::unique_lock<std::mutex> lock(mutex_);
  return !wake_.wait_until(lock, when, [this] { return stopping(); });
}

void Control::set_paused(bool paused) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_.store(paused, std::memory_order_relaxed);
  }
  wake_.notify_all();
}

bool Control::wait_turn(Clock::time_point when) {
  if (!wait_until(when)) return false;
  if (!paused()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, kMaxPause, [this] { return stopping() || !paused(); });
  return !stopping();
}

void Control::throw_if_stopped() const {
  if (!stopping()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_) throw *error_;
  throw Cancelled();
}

}  // namespace nvme_resume
