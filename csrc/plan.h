// From the jobs a caller asked for to jobs that are known to be possible: every length resolved,
// every destination created and allocated. No data moves here, so a transfer that cannot fit fails
// before it has written a byte.
#pragma once

#include <cstdint>
#include <vector>

#include "control.h"
#include "job.h"
#include "posix.h"

namespace nvme_resume {

struct PlannedJob {
  const Job* job = nullptr;
  int64_t length = 0;  // never kToEndOfFile
};

// Throws IoError or Cancelled. `jobs` must outlive the plan.
std::vector<PlannedJob> make_plan(Posix& posix, const std::vector<Job>& jobs,
                                  const Control& control);

}  // namespace nvme_resume
