#include "scheduler.h"

#include <algorithm>
#include <utility>

namespace nvme_resume {

Scheduler::Scheduler(Posix& posix, const Options& options, std::vector<PlannedJob> plan)
    : posix_(posix),
      options_(options),
      plan_(std::move(plan)),
      strip_bytes_(std::max(options.block_bytes, kChunkBytes)) {
  for (const PlannedJob& job : plan_) {
    strip_count_ += strips_of(job);
    largest_block_ = std::max(largest_block_, std::min(options.block_bytes, job.length));
    total_bytes_ += job.length;
  }
}

// An empty job has one empty strip: its file still has to be opened, synced and closed.
int64_t Scheduler::strips_of(const PlannedJob& job) const {
  const int64_t full = job.length / strip_bytes_;
  return std::max<int64_t>(1, full + (job.length % strip_bytes_ != 0 ? 1 : 0));
}

std::optional<Strip> Scheduler::next() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!job_) {
    if (next_job_ == plan_.size()) return std::nullopt;
    const size_t index = next_job_++;
    const PlannedJob& planned = plan_[index];
    job_ = std::make_shared<OpenJob>(posix_, planned, options_, index, strips_of(planned));
    position_ = 0;
    length_ = planned.length;
  }
  Strip strip{job_, position_, std::min(position_ + strip_bytes_, length_)};
  position_ = strip.end;
  if (position_ == length_) job_.reset();
  return strip;
}

}  // namespace nvme_resume
