// Posix for tests: the real one, but the n-th call of an operation fails, moves half of the data,
// or kills the process.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "posix.h"

namespace nvme_resume {

struct Fault {
  static constexpr int kShort = -1;

  std::string operation;  // the name of the member function of Posix
  int64_t nth_call;       // from 1; 0: every call
  int action;             // an errno, or kShort (pread and pwrite only)
};

// Requests submitted with io_submit also count as the pread, pwrite or fdatasync they carry, so
// that one list of faults means the same for both engines.
class FaultPosix final : public Posix {
 public:
  // `kill_at`: SIGKILL before the n-th call of all; off when not positive. Throws
  // std::invalid_argument when a fault names no operation.
  FaultPosix(std::vector<Fault> faults, int64_t kill_at);

  int open(const char* path, int flags, mode_t mode) override;
  int close(int fd) override;
  int fstat(int fd, struct stat* out) override;
  int64_t pread(int fd, void* data, size_t length, int64_t offset) override;
  int64_t pwrite(int fd, const void* data, size_t length, int64_t offset) override;
  int fallocate(int fd, int64_t offset, int64_t length) override;
  int ftruncate(int fd, int64_t length) override;
  int fdatasync(int fd) override;
  int io_setup(int max_events, io_context_t* context) override;
  int io_destroy(io_context_t context) override;
  int io_submit(io_context_t context, iocb* request) override;
  int io_getevents(io_context_t context, int64_t min, int64_t max, io_event* events,
                   timespec* timeout) override;

 private:
  // Counts the call. 0: carry it out; else the action of the fault that hits it.
  int count(const char* operation);

  const std::shared_ptr<Posix> real_ = real_posix();
  const std::vector<Fault> faults_;
  const int64_t kill_at_;
  std::mutex mutex_;  // guards what follows
  int64_t calls_ = 0;
  std::map<std::string, int64_t> calls_of_;
  // Completions of requests the kernel never saw.
  std::map<io_context_t, std::vector<io_event>> invented_;
};

}  // namespace nvme_resume
