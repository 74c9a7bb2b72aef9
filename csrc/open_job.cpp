#include "open_job.h"

#include <fcntl.h>

#include <algorithm>

#include "chunk_hash.h"

namespace nvme_resume {

namespace {

int64_t round_down(int64_t value, int64_t step) {
  return value / step * step;
}

int64_t round_up(int64_t value, int64_t step) {
  return round_down(value + step - 1, step);
}

// No device does direct I/O in smaller units.
constexpr int64_t kSectorBytes = 512;

}  // namespace

Source::Source(Posix& posix, const PlannedJob& plan, const Options& options)
    : files_(posix, plan.job->src, O_RDONLY, options.direct), start_(plan.job->src_offset) {
  if (start_ % kSectorBytes != 0) {
    files_.give_up_direct("src_offset is not a multiple of 512");
    return;
  }
  DirectLimits limits;
  if (!files_.open_direct(&limits)) return;
  if (start_ % limits.alignment != 0 || options.block_bytes % limits.alignment != 0) {
    files_.give_up_direct("src_offset or block_bytes is not aligned as the device needs it");
    return;
  }
  alignment_ = limits.alignment;
}

Target Source::target(int64_t position, int64_t length) {
  if (files_.direct()) {
    return {files_.direct_fd(), start_ + position, round_up(length, alignment_), alignment_, true};
  }
  return {files_.buffered_fd(), start_ + position, length, 1, false};
}

Destination::Destination(Posix& posix, const PlannedJob& plan, const Options& options)
    : files_(posix, *plan.job->dst, O_WRONLY, options.direct), start_(plan.job->dst_offset) {
  if (start_ % kMinBlockBytes != 0) {
    files_.give_up_direct("dst_offset is not a multiple of 4096");
    return;
  }
  // All tail: spare small files the second descriptor.
  if (plan.length < kMinBlockBytes && options.direct != DirectMode::kOn) return;
  DirectLimits limits;
  if (!files_.open_direct(&limits)) return;
  // A range that starts inside a granule would share it with the tail of the range before, which
  // another job may be writing through the page cache.
  if (start_ % limits.granule != 0 || options.block_bytes % limits.granule != 0) {
    files_.give_up_direct("dst_offset or block_bytes is not a multiple of the file system's block");
    return;
  }
  alignment_ = limits.alignment;
  direct_end_ = round_down(plan.length, limits.granule);
}

Target Destination::target(int64_t position, int64_t length) {
  if (files_.direct() && position < direct_end_) {
    return {files_.direct_fd(), start_ + position, std::min(length, direct_end_ - position),
            alignment_, true};
  }
  return {files_.buffered_fd(), start_ + position, length, 1, false};
}

OpenJob::OpenJob(Posix& posix, const PlannedJob& plan, const Options& options, size_t index,
                 int64_t strips)
    : index_(index),
      length_(plan.length),
      hash_(options.hash),
      strips_left_(strips),
      source_(posix, plan, options) {
  if (plan.job->dst) destination_.emplace(posix, plan, options);
  if (hash_) chunk_digests_.resize(static_cast<size_t>(chunk_count(length_)) * kDigestBytes);
}

char* OpenJob::digest_slot(int64_t position) {
  return chunk_digests_.data() + static_cast<size_t>(position / kChunkBytes) * kDigestBytes;
}

FileResult OpenJob::finish() {
  FileResult result;
  result.bytes = length_;
  result.direct = length_ > 0 && source_.direct() && (!destination_ || destination_->direct());
  source_.files().close();
  if (destination_) destination_->files().close();
  if (hash_) {
    result.digest = digest_of_chunks(chunk_digests_);
    result.chunk_digests = std::move(chunk_digests_);
  }
  return result;
}

}  // namespace nvme_resume
