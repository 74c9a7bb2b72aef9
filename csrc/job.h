// What a caller asks for: plain values, checked once by validate(), never changed afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nvme_resume {

// Part of the on-disk format: digests are taken over pieces of this size, whatever the block size.
inline constexpr int64_t kChunkBytes = int64_t{4} << 20;

// Blocks are a multiple of this, so that every block of an aligned range is itself aligned.
inline constexpr int64_t kMinBlockBytes = 4096;
inline constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;
inline constexpr int kMaxInFlight = 256;

inline constexpr int64_t kToEndOfFile = -1;

struct Job {
  std::string src;
  std::optional<std::string> dst;  // none: read and hash only
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int64_t length = kToEndOfFile;
  bool truncate = true;  // false: write into an existing file, its other bytes stay
};

enum class EngineKind { kAuto, kThreads, kLibaio };
enum class DirectMode { kAuto, kOn, kOff };

struct Options {
  int64_t block_bytes = int64_t{16} << 20;
  int in_flight = 4;
  EngineKind engine = EngineKind::kAuto;
  DirectMode direct = DirectMode::kAuto;
  bool sync = true;
  bool hash = true;
  int64_t bandwidth_limit = 0;  // bytes per second, 0: none
  bool low_priority = false;    // its threads give way to all others, for the CPU and the disk
};

struct FileResult {
  int64_t bytes = 0;
  std::string digest;         // hex; empty when hashing is off
  std::string chunk_digests;  // 16 bytes a chunk, canonical (big-endian) form
  bool direct = false;        // O_DIRECT on every side, but for an unaligned tail
  std::string engine;
};

// Throw std::invalid_argument naming the value at fault.
void validate(const Job& job);
void validate(const std::vector<Job>& jobs, const Options& options);

}  // namespace nvme_resume
