#include "descriptors.h"

#include <fcntl.h>

#include <cerrno>

#include "errors.h"

namespace nvme_resume {

namespace {

constexpr mode_t kNewFileMode = 0666;  // less the umask

bool means_not_supported(int code) {
  return code == EINVAL || code == EOPNOTSUPP;
}

int open_retrying(Posix& posix, const std::string& path, int flags) {
  int fd;
  do {
    fd = posix.open(path.c_str(), flags | O_CLOEXEC, kNewFileMode);
  } while (fd == -EINTR);
  return fd;
}

}  // namespace

UniqueFd open_regular(Posix& posix, const std::string& path, int flags, struct stat* out) {
  const int opened = open_retrying(posix, path, flags);
  if (opened < 0) throw IoError(-opened, "open", path, 0);
  UniqueFd fd(posix, opened);
  struct stat st;
  if (const int result = posix.fstat(fd.get(), &st); result < 0) {
    throw IoError(-result, "open", path, 0, "fstat failed");
  }
  if (S_ISDIR(st.st_mode)) throw IoError(EISDIR, "open", path, 0);
  if (!S_ISREG(st.st_mode)) throw IoError(EINVAL, "open", path, 0, "not a regular file");
  if (out) *out = st;
  return fd;
}

void Descriptors::give_up_direct(const char* why) {
  direct_.store(false, std::memory_order_relaxed);
  if (mode_ != DirectMode::kOn) return;
  throw IoError(
      EINVAL, "open", path_, 0,
      std::string("direct='on', but O_DIRECT is not possible (") + why + "); use direct='auto'");
}

bool Descriptors::open_direct(DirectLimits* limits) {
  if (mode_ == DirectMode::kOff) return false;
  const int opened = open_retrying(posix_, path_, flags_ | O_DIRECT);
  if (means_not_supported(-opened)) {
    give_up_direct("the file system refuses it");
    return false;
  }
  if (opened < 0) throw IoError(-opened, "open", path_, 0);
  UniqueFd fd(posix_, opened);
  *limits = query_direct_limits(opened);
  if (!limits->supported) {
    give_up_direct("the file system has no direct I/O for this file");
    return false;
  }
  direct_fd_ = std::move(fd);
  direct_.store(true, std::memory_order_relaxed);
  return true;
}

int Descriptors::buffered_fd() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!buffered_fd_) buffered_fd_ = open_regular(posix_, path_, flags_, nullptr);
  return buffered_fd_.get();
}

bool Descriptors::step_down(int code) {
  if (!means_not_supported(code) || mode_ == DirectMode::kOn) return false;
  direct_.store(false, std::memory_order_relaxed);
  return true;
}

int Descriptors::any_fd() {
  return direct_fd_ ? direct_fd_.get() : buffered_fd();
}

void Descriptors::close() {
  for (UniqueFd* fd : {&direct_fd_, &buffered_fd_}) {
    const int result = fd->close();
    // The descriptor is released even then, and what matters of the data was settled by fdatasync.
    if (result < 0 && result != -EINTR) throw IoError(-result, "close", path_, 0);
  }
}

}  // namespace nvme_resume
