// One lane of a transfer: a buffer, and the copying of one strip at a time through it, as a state
// machine that says which request comes next and is told how it ended. All decisions about short
// transfers, retries, stepping down from O_DIRECT, hashing and syncing are here; an engine only
// carries requests to the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "buffer_pool.h"
#include "chunk_hash.h"
#include "control.h"
#include "job.h"
#include "limiter.h"
#include "scheduler.h"

namespace nvme_resume {

struct Request {
  enum class Kind { kRead, kWrite, kSync };

  Kind kind;
  int fd;
  std::byte* data;
  int64_t length;
  int64_t offset;
  Clock::time_point not_before;  // bandwidth limit, or a pause before a repetition
};

// What the lanes of one run have in common.
struct LaneContext {
  const Options& options;
  Control& control;
  Limiter& limiter;
  std::vector<FileResult>& results;  // each job's slot is written by the lane that finishes it
};

class Lane {
 public:
  Lane(const LaneContext& context, BufferPool::Lease buffer);

  // Only when idle(). Both may finish the strip, and with it the job; throw IoError.
  void start(Strip strip);
  void complete(int64_t result);  // of the request of the last next(): bytes, or -errno

  bool idle() const { return state_ == State::kIdle; }

  // The request to carry out, again and again the same until complete(). Only when not idle.
  Request next();

 private:
  enum class State { kIdle, kReading, kWriting, kSyncing };

  void begin_block();
  void block_read();
  void block_done();
  void strip_done();
  void finish_job();
  void read_complete(int64_t bytes);
  void write_complete(int64_t bytes);
  void failed(int code);
  bool advance(int64_t bytes);
  [[noreturn]] void fail(int code, const char* detail = "") const;
  Descriptors& files() const;

  const LaneContext context_;
  BufferPool::Lease buffer_;
  ChunkHasher hasher_;

  State state_ = State::kIdle;
  Strip strip_;
  int64_t block_begin_ = 0;  // position in the job's range
  int64_t block_length_ = 0;
  int64_t moved_ = 0;  // bytes of the block read, then written; always a place to continue from
  Target target_{};    // of the request under way
  Clock::time_point not_before_{};
  int again_ = 0;    // EAGAIN in a row
  int stalled_ = 0;  // results in a row that brought nothing
};

}  // namespace nvme_resume
