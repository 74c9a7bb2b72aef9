// A job while its data moves: the open files and the digests collected so far. Shared by all lanes
// that copy parts of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "descriptors.h"
#include "job.h"
#include "plan.h"
#include "posix.h"

namespace nvme_resume {

// Where one request goes. Positions count from the start of the job's range, offsets from the start
// of the file.
struct Target {
  int fd;
  int64_t offset;
  int64_t length;
  int64_t alignment;  // a position that is not a multiple of this cannot be continued from
  bool direct;
};

class Source {
 public:
  Source(Posix& posix, const PlannedJob& plan, const Options& options);

  // At least `length` bytes: a direct request is rounded up to the alignment.
  Target target(int64_t position, int64_t length);
  bool direct() const { return files_.direct(); }
  Descriptors& files() { return files_; }

 private:
  Descriptors files_;
  const int64_t start_;
  int64_t alignment_ = 1;
};

class Destination {
 public:
  Destination(Posix& posix, const PlannedJob& plan, const Options& options);

  // At most `length` bytes: the tail of the range that does not fill a granule goes through the
  // buffered descriptor, in a request of its own.
  Target target(int64_t position, int64_t length);
  bool direct() const { return files_.direct() && direct_end_ > 0; }
  Descriptors& files() { return files_; }

 private:
  Descriptors files_;
  const int64_t start_;
  int64_t alignment_ = 1;
  int64_t direct_end_ = 0;  // positions below are written directly
};

class OpenJob {
 public:
  // Opens the files; throws IoError. `index` is the job's place in the caller's list.
  OpenJob(Posix& posix, const PlannedJob& plan, const Options& options, size_t index,
          int64_t strips);

  size_t index() const { return index_; }
  Source& source() { return source_; }
  Destination* destination() { return destination_ ? &*destination_ : nullptr; }

  // Where the digest of the chunk that starts at `position` belongs.
  char* digest_slot(int64_t position);

  // True for the lane that was the last to finish a strip: it finishes the job.
  bool strip_done() { return strips_left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // Closes the files; throws IoError. The engine's name is left to the caller.
  FileResult finish();

 private:
  const size_t index_;
  const int64_t length_;
  const bool hash_;
  std::atomic<int64_t> strips_left_;
  std::string chunk_digests_;
  Source source_;
  std::optional<Destination> destination_;
};

}  // namespace nvme_resume
