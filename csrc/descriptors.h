// The descriptors through which one job reaches one of its files: an O_DIRECT one for the bulk and
// a buffered one for what O_DIRECT cannot do. Safe to use from all lanes of the job at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "direct_io.h"
#include "job.h"
#include "posix.h"
#include "unique_fd.h"

namespace nvme_resume {

// open() that retries EINTR and accepts only regular files. `out` may be null. Throws IoError.
UniqueFd open_regular(Posix& posix, const std::string& path, int flags, struct stat* out);

class Descriptors {
 public:
  Descriptors(Posix& posix, const std::string& path, int flags, DirectMode mode)
      : posix_(posix), path_(path), flags_(flags), mode_(mode) {}

  // Opens with O_DIRECT if the mode asks for it. False: use buffered().
  // Throws IoError, also when the mode is kOn and direct I/O is not possible.
  bool open_direct(DirectLimits* limits);

  // Direct I/O turns out not to be possible, before any was done. Throws IoError when the mode is
  // kOn.
  void give_up_direct(const char* why);

  bool direct() const { return direct_.load(std::memory_order_relaxed); }
  int direct_fd() const { return direct_fd_.get(); }

  // Opens at first use.
  int buffered_fd();

  // The first answer of some file systems to a direct request is EINVAL. True: repeat the request,
  // it will be buffered.
  bool step_down(int code);

  // Any descriptor that is open: fdatasync covers the file, not the descriptor.
  int any_fd();

  // Closes both; throws IoError.
  void close();

  const std::string& path() const { return path_; }

 private:
  Posix& posix_;
  const std::string path_;
  const int flags_;
  const DirectMode mode_;
  UniqueFd direct_fd_;  // stays open after a step down: other lanes may be using it
  std::atomic<bool> direct_{false};
  std::mutex mutex_;  // guards buffered_fd_
  UniqueFd buffered_fd_;
};

}  // namespace nvme_resume
