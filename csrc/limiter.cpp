#include "limiter.h"

#include <algorithm>

namespace nvme_resume {

Clock::time_point Limiter::book(int64_t bytes) {
  if (rate_ == 0) return Clock::time_point::min();
  const std::chrono::duration<double> cost(static_cast<double>(bytes) / static_cast<double>(rate_));
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point start = std::max(Clock::now(), free_at_);
  free_at_ = start + std::chrono::duration_cast<Clock::duration>(cost);
  return start;
}

}  // namespace nvme_resume
