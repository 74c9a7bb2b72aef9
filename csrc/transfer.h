// A list of jobs carried out as one: all of them, or an error.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "control.h"
#include "job.h"

namespace nvme_resume {

class Transfer {
 public:
  // Throws std::invalid_argument.
  Transfer(std::vector<Job> jobs, Options options);

  // Once. Throws IoError, Cancelled, std::bad_alloc; no thread and no request outlives it. Files it
  // has created or written to by then stay for the caller to remove.
  std::vector<FileResult> run();

  // From any thread, at any time.
  void cancel() { control_.cancel(); }
  void set_paused(bool paused) { control_.set_paused(paused); }
  // Bytes stored (or read, where nothing is stored), and bytes in all: 0 until run() knows.
  std::pair<int64_t, int64_t> progress() const { return {control_.done(), control_.total()}; }

 private:
  const std::vector<Job> jobs_;
  const Options options_;
  std::atomic<bool> started_{false};
  Control control_;
};

}  // namespace nvme_resume
