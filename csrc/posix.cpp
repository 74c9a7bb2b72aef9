#include "posix.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace nvme_resume {

namespace {

template <typename T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

class RealPosix final : public Posix {
 public:
  int open(const char* path, int flags, mode_t mode) override {
    return or_errno(::open(path, flags, mode));
  }
  int close(int fd) override { return or_errno(::close(fd)); }
  int fstat(int fd, struct stat* out) override { return or_errno(::fstat(fd, out)); }
  int64_t pread(int fd, void* data, size_t length, int64_t offset) override {
    return or_errno<int64_t>(::pread(fd, data, length, offset));
  }
  int64_t pwrite(int fd, const void* data, size_t length, int64_t offset) override {
    return or_errno<int64_t>(::pwrite(fd, data, length, offset));
  }
  int fallocate(int fd, int64_t offset, int64_t length) override {
    return or_errno(::fallocate(fd, 0, offset, length));
  }
  int ftruncate(int fd, int64_t length) override { return or_errno(::ftruncate(fd, length)); }
  int fdatasync(int fd) override { return or_errno(::fdatasync(fd)); }

  // libaio already returns -errno.
  int io_setup(int max_events, io_context_t* context) override {
    return ::io_setup(max_events, context);
  }
  int io_destroy(io_context_t context) override { return ::io_destroy(context); }
  int io_submit(io_context_t context, iocb* request) override {
    return ::io_submit(context, 1, &request);
  }
  int io_getevents(io_context_t context, int64_t min, int64_t max, io_event* events,
                   timespec* timeout) override {
    return ::io_getevents(context, min, max, events, timeout);
  }
};

std::mutex current_mutex;
std::shared_ptr<Posix> current;  // null: the real one

}  // namespace

std::shared_ptr<Posix> real_posix() {
  static const std::shared_ptr<Posix> instance = std::make_shared<RealPosix>();
  return instance;
}

std::shared_ptr<Posix> current_posix() {
  std::lock_guard<std::mutex> lock(current_mutex);
  return current ? current : real_posix();
}

void set_current_posix(std::shared_ptr<Posix> replacement) {
  std::lock_guard<std::mutex> lock(current_mutex);
  current = std::move(replacement);
}

}  // namespace nvme_resume
