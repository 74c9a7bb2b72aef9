// Bandwidth limit shared by all lanes of a transfer.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace nvme_resume {

using Clock = std::chrono::steady_clock;

class Limiter {
 public:
  // 0: no limit.
  explicit Limiter(int64_t bytes_per_second) : rate_(bytes_per_second) {}

  // Books `bytes` and returns the time before which they must not be moved. Bookings queue up one
  // behind the other, so a block larger than one second's worth needs no special case.
  Clock::time_point book(int64_t bytes);

 private:
  const int64_t rate_;
  std::mutex mutex_;
  Clock::time_point free_at_{};  // when the next booking may start
};

}  // namespace nvme_resume
