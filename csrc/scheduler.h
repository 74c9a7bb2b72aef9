// Hands out the work of a transfer, in order, to whichever lane is free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "job.h"
#include "open_job.h"
#include "plan.h"
#include "posix.h"

namespace nvme_resume {

// What one lane copies from start to end, block by block. Never smaller than a hash chunk (but for
// the last of a job), so each chunk is hashed by one lane, in order.
struct Strip {
  std::shared_ptr<OpenJob> job;
  int64_t begin = 0;  // positions in the job's range
  int64_t end = 0;
};

class Scheduler {
 public:
  Scheduler(Posix& posix, const Options& options, std::vector<PlannedJob> plan);

  // The next strip, or none when all were handed out. Opens the files of a job with its first
  // strip, so that only as many jobs as there are lanes are open at a time; throws IoError.
  std::optional<Strip> next();

  // Upper bound for the lanes that can be busy, and for the block any of them needs.
  int64_t strip_count() const { return strip_count_; }
  int64_t largest_block() const { return largest_block_; }
  int64_t total_bytes() const { return total_bytes_; }

 private:
  int64_t strips_of(const PlannedJob& job) const;

  Posix& posix_;
  const Options& options_;
  const std::vector<PlannedJob> plan_;
  const int64_t strip_bytes_;
  int64_t strip_count_ = 0;
  int64_t largest_block_ = 0;
  int64_t total_bytes_ = 0;

  std::mutex mutex_;  // guards what follows
  size_t next_job_ = 0;
  std::shared_ptr<OpenJob> job_;
  int64_t position_ = 0;
  int64_t length_ = 0;
};

}  // namespace nvme_resume
