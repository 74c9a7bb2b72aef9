// Owner of one file descriptor.
#pragma once

#include <utility>

#include "posix.h"

namespace nvme_resume {

class UniqueFd {
 public:
  UniqueFd() = default;
  UniqueFd(Posix& posix, int fd) : posix_(&posix), fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : posix_(other.posix_), fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      close();
      posix_ = other.posix_;
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

  // 0 or -errno. The descriptor is gone either way (Linux frees it before it reports), so a failed
  // close is never repeated. The destructor is for paths on which another error is already known.
  int close() { return fd_ < 0 ? 0 : posix_->close(std::exchange(fd_, -1)); }

 private:
  Posix* posix_ = nullptr;
  int fd_ = -1;
};

}  // namespace nvme_resume
