#include "plan.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <string>

#include "descriptors.h"
#include "errors.h"

namespace nvme_resume {

namespace {

struct Identity {
  dev_t device;
  ino_t inode;
  bool operator==(const Identity& other) const {
    return device == other.device && inode == other.inode;
  }
};

Identity identity(const struct stat& st) {
  return {st.st_dev, st.st_ino};
}

void close_checked(UniqueFd& fd, const std::string& path) {
  const int result = fd.close();
  if (result < 0 && result != -EINTR) throw IoError(-result, "close", path, 0);
}

int64_t resolve_length(const Job& job, int64_t file_size) {
  const int64_t available = file_size - job.src_offset;
  const int64_t length = job.length == kToEndOfFile ? available : job.length;
  if (available < 0 || length > available) {
    throw IoError(
        EIO, "read", job.src, file_size,
        "the file has " + std::to_string(file_size) + " bytes, shorter than the range to read");
  }
  return length;
}

// For a job whose source and destination are one file. Blocks move in no fixed order, so ranges
// that overlap would read back what was just written.
bool destroys_its_source(const Job& job, int64_t length) {
  return job.truncate || std::abs(job.src_offset - job.dst_offset) < length;
}

// Allocates first and cuts afterwards: when space runs out the file still has what it had before.
void reserve(Posix& posix, const Job& job, int64_t length, int fd, int64_t size) {
  const int64_t end = job.dst_offset + length;
  if (length > 0) {
    int result;
    do {
      result = posix.fallocate(fd, job.dst_offset, length);
    } while (result == -EINTR);
    if (result == 0) {
      size = std::max(size, end);
    } else if (result != -EOPNOTSUPP && result != -ENOSYS) {
      throw IoError(-result, "fallocate", *job.dst, job.dst_offset,
                    "cannot allocate " + std::to_string(length) + " bytes");
    }
  }
  if (job.truncate && size != end) {
    int result;
    do {
      result = posix.ftruncate(fd, end);
    } while (result == -EINTR);
    if (result < 0) throw IoError(-result, "truncate", *job.dst, end);
  }
}

}  // namespace

std::vector<PlannedJob> make_plan(Posix& posix, const std::vector<Job>& jobs,
                                  const Control& control) {
  std::vector<PlannedJob> plan;
  std::vector<Identity> sources;
  plan.reserve(jobs.size());
  sources.reserve(jobs.size());

  // All sources before the first destination: a missing source leaves no files behind.
  for (const Job& job : jobs) {
    control.throw_if_stopped();
    struct stat st;
    UniqueFd fd = open_regular(posix, job.src, O_RDONLY, &st);
    close_checked(fd, job.src);
    const int64_t length = resolve_length(job, st.st_size);
    if (job.dst && length > std::numeric_limits<int64_t>::max() - job.dst_offset) {
      throw IoError(EFBIG, "truncate", *job.dst, job.dst_offset);
    }
    plan.push_back({&job, length});
    sources.push_back(identity(st));
  }

  for (size_t i = 0; i < plan.size(); ++i) {
    const Job& job = *plan[i].job;
    if (!job.dst) continue;
    control.throw_if_stopped();
    struct stat st;
    UniqueFd fd = open_regular(posix, *job.dst, O_WRONLY | (job.truncate ? O_CREAT : 0), &st);
    if (identity(st) == sources[i] && destroys_its_source(job, plan[i].length)) {
      throw IoError(EINVAL, "open", *job.dst, 0, "the job would overwrite its own source");
    }
    reserve(posix, job, plan[i].length, fd.get(), st.st_size);
    close_checked(fd, *job.dst);
  }
  return plan;
}

}  // namespace nvme_resume
