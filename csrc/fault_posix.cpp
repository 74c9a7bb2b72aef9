#include "fault_posix.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <set>
#include <stdexcept>
#include <utility>

namespace nvme_resume {

namespace {

const std::set<std::string> kOperations = {"open",     "close",      "fstat",     "pread",
                                           "pwrite",   "fallocate",  "ftruncate", "fdatasync",
                                           "io_setup", "io_destroy", "io_submit", "io_getevents"};

// Half of a transfer, still acceptable to O_DIRECT where the whole was.
size_t half(size_t length) {
  return length >= 1024 ? length / 2 / 512 * 512 : std::max<size_t>(1, length / 2);
}

const char* operation_of(const iocb& request) {
  switch (request.aio_lio_opcode) {
    case IO_CMD_PREAD:
      return "pread";
    case IO_CMD_PWRITE:
      return "pwrite";
    default:
      return "fdatasync";
  }
}

}  // namespace

FaultPosix::FaultPosix(std::vector<Fault> faults, int64_t kill_at)
    : faults_(std::move(faults)), kill_at_(kill_at) {
  for (const Fault& fault : faults_) {
    if (kOperations.count(fault.operation) == 0) {
      throw std::invalid_argument("no such operation: " + fault.operation);
    }
    if (fault.nth_call < 0) throw std::invalid_argument("nth_call is negative");
    const bool moves_data = fault.operation == "pread" || fault.operation == "pwrite";
    if (fault.action <= 0 && !(fault.action == Fault::kShort && moves_data)) {
      throw std::invalid_argument("action must be an errno, or 'short' for pread and pwrite");
    }
  }
}

int FaultPosix::count(const char* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (++calls_ == kill_at_) ::raise(SIGKILL);
  const int64_t nth = ++calls_of_[operation];
  for (const Fault& fault : faults_) {
    if (fault.operation == operation && (fault.nth_call == nth || fault.nth_call == 0)) {
      return fault.action;
    }
  }
  return 0;
}

int FaultPosix::open(const char* path, int flags, mode_t mode) {
  const int action = count("open");
  return action ? -action : real_->open(path, flags, mode);
}

int FaultPosix::close(int fd) {
  const int action = count("close");
  const int result = real_->close(fd);  // like Linux, which frees the descriptor in any case
  return action ? -action : result;
}

int FaultPosix::fstat(int fd, struct stat* out) {
  const int action = count("fstat");
  return action ? -action : real_->fstat(fd, out);
}

int64_t FaultPosix::pread(int fd, void* data, size_t length, int64_t offset) {
  const int action = count("pread");
  if (action == Fault::kShort) return real_->pread(fd, data, half(length), offset);
  return action ? -action : real_->pread(fd, data, length, offset);
}

int64_t FaultPosix::pwrite(int fd, const void* data, size_t length, int64_t offset) {
  const int action = count("pwrite");
  if (action == Fault::kShort) return real_->pwrite(fd, data, half(length), offset);
  return action ? -action : real_->pwrite(fd, data, length, offset);
}

int FaultPosix::fallocate(int fd, int64_t offset, int64_t length) {
  const int action = count("fallocate");
  return action ? -action : real_->fallocate(fd, offset, length);
}

int FaultPosix::ftruncate(int fd, int64_t length) {
  const int action = count("ftruncate");
  return action ? -action : real_->ftruncate(fd, length);
}

int FaultPosix::fdatasync(int fd) {
  const int action = count("fdatasync");
  return action ? -action : real_->fdatasync(fd);
}

int FaultPosix::io_setup(int max_events, io_context_t* context) {
  const int action = count("io_setup");
  return action ? -action : real_->io_setup(max_events, context);
}

int FaultPosix::io_destroy(io_context_t context) {
  const int action = count("io_destroy");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    invented_.erase(context);
  }
  const int result = real_->io_destroy(context);
  return action ? -action : result;
}

int FaultPosix::io_submit(io_context_t context, iocb* request) {
  if (const int action = count("io_submit")) return -action;
  const int action = count(operation_of(*request));
  if (action == Fault::kShort) {
    request->u.c.nbytes = half(request->u.c.nbytes);
  } else if (action) {
    io_event event{};
    event.data = request->data;
    event.obj = request;
    event.res = static_cast<unsigned long>(-static_cast<long>(action));
    std::lock_guard<std::mutex> lock(mutex_);
    invented_[context].push_back(event);
    return 1;
  }
  return real_->io_submit(context, request);
}

int FaultPosix::io_getevents(io_context_t context, int64_t min, int64_t max, io_event* events,
                             timespec* timeout) {
  if (const int action = count("io_getevents")) return -action;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<io_event>& invented = invented_[context];
    if (!invented.empty()) {
      const auto given = std::min<int64_t>(max, static_cast<int64_t>(invented.size()));
      std::copy_n(invented.begin(), given, events);
      invented.erase(invented.begin(), invented.begin() + given);
      return static_cast<int>(given);
    }
  }
  return real_->io_getevents(context, min, max, events, timeout);
}

}  // namespace nvme_resume
