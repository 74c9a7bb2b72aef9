#include "job.h"

#include <limits>
#include <stdexcept>
#include <unordered_set>

namespace nvme_resume {

namespace {

[[noreturn]] void reject(const std::string& message) {
  throw std::invalid_argument(message);
}

void check_path(const char* name, const std::string& path) {
  if (path.empty()) reject(std::string(name) + " is empty");
  if (path.find('\0') != std::string::npos)
    reject(std::string(name) + " contains a null character");
}

void check_range(const char* name, int64_t offset, int64_t length) {
  if (offset < 0) reject(std::string(name) + " is negative");
  if (length > std::numeric_limits<int64_t>::max() - offset) {
    reject(std::string(name) + " + length does not fit into 63 bits");
  }
}

}  // namespace

void validate(const Job& job) {
  check_path("src", job.src);
  if (job.dst) check_path("dst", *job.dst);
  if (job.length < kToEndOfFile)
    reject("length is negative (only -1 has a meaning: to end of file)");
  check_range("src_offset", job.src_offset, job.length);
  check_range("dst_offset", job.dst_offset, job.length);
}

void validate(const std::vector<Job>& jobs, const Options& options) {
  const int64_t block = options.block_bytes;
  if (block < kMinBlockBytes || block > kMaxBlockBytes || block % kMinBlockBytes != 0) {
    reject("block_bytes must be a multiple of 4096 between 4096 and 1 GiB");
  }
  // Chunks in blocks or blocks in chunks: a strip of max(block, chunk) bytes is then hashed by one
  // lane from start to end, and no digest ever depends on the order in which blocks arrive.
  if (block % kChunkBytes != 0 && kChunkBytes % block != 0) {
    reject("block_bytes must divide, or be a multiple of, CHUNK_BYTES (4194304)");
  }
  if (options.in_flight < 1 || options.in_flight > kMaxInFlight) {
    reject("in_flight must be between 1 and 256");
  }
  if (options.bandwidth_limit < 0) reject("bandwidth_limit is negative");

  // Each of two such jobs would cut off what the other wrote, depending on their order.
  std::unordered_set<std::string> truncated;
  for (const Job& job : jobs) {
    if (job.dst && job.truncate && !truncated.insert(*job.dst).second) {
      reject("two jobs with truncate=True write the same dst: " + *job.dst);
    }
  }
}

}  // namespace nvme_resume
