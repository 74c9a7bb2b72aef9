// The one seam to the operating system: every storage call of a transfer goes through Posix.
// Tests put FaultPosix (fault_posix.h) in its place.
#pragma once

#include <libaio.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace nvme_resume {

// Results follow the kernel's convention: >= 0 is success, < 0 is -errno. Nothing is retried here.
// Implementations must be callable from several threads at once.
class Posix {
 public:
  virtual ~Posix() = default;

  virtual int open(const char* path, int flags, mode_t mode) = 0;
  virtual int close(int fd) = 0;
  virtual int fstat(int fd, struct stat* out) = 0;
  virtual int64_t pread(int fd, void* data, size_t length, int64_t offset) = 0;
  virtual int64_t pwrite(int fd, const void* data, size_t length, int64_t offset) = 0;
  virtual int fallocate(int fd, int64_t offset, int64_t length) = 0;
  virtual int ftruncate(int fd, int64_t length) = 0;
  virtual int fdatasync(int fd) = 0;

  virtual int io_setup(int max_events, io_context_t* context) = 0;
  virtual int io_destroy(io_context_t context) = 0;
  virtual int io_submit(io_context_t context, iocb* request) = 0;  // 1 when taken
  virtual int io_getevents(io_context_t context, int64_t min, int64_t max, io_event* events,
                           timespec* timeout) = 0;
};

// The implementation new transfers use; a transfer keeps the one it started with.
std::shared_ptr<Posix> current_posix();

// Null puts the real one back.
void set_current_posix(std::shared_ptr<Posix> replacement);

std::shared_ptr<Posix> real_posix();

}  // namespace nvme_resume
