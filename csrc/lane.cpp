#include "lane.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "errors.h"

namespace nvme_resume {

namespace {

// Two seconds: regular files have no business with EAGAIN, so it is either over soon or for good.
constexpr int kMaxAgain = 400;
constexpr std::chrono::milliseconds kAgainPause{5};
constexpr int kMaxStalled = 3;

}  // namespace

Lane::Lane(const LaneContext& context, BufferPool::Lease buffer)
    : context_(context), buffer_(std::move(buffer)) {}

void Lane::start(Strip strip) {
  strip_ = std::move(strip);
  if (context_.options.hash) hasher_.begin(strip_.job->digest_slot(strip_.begin));
  block_begin_ = strip_.begin;
  begin_block();
}

void Lane::begin_block() {
  block_length_ = std::min(context_.options.block_bytes, strip_.end - block_begin_);
  if (block_length_ == 0) {
    strip_done();
    return;
  }
  moved_ = 0;
  again_ = stalled_ = 0;
  not_before_ = context_.limiter.book(block_length_);
  state_ = State::kReading;
}

Request Lane::next() {
  const int64_t position = block_begin_ + moved_;
  const int64_t left = block_length_ - moved_;
  switch (state_) {
    case State::kReading:
      target_ = strip_.job->source().target(position, left);
      return {Request::Kind::kRead, target_.fd,     buffer_.data() + moved_,
              target_.length,       target_.offset, not_before_};
    case State::kWriting:
      target_ = strip_.job->destination()->target(position, left);
      return {Request::Kind::kWrite, target_.fd,     buffer_.data() + moved_,
              target_.length,        target_.offset, not_before_};
    default:
      target_ = {files().any_fd(), 0, 0, 1, false};
      return {Request::Kind::kSync, target_.fd, nullptr, 0, 0, not_before_};
  }
}

void Lane::complete(int64_t result) {
  if (result < 0) {
    failed(static_cast<int>(-result));
  } else if (state_ == State::kReading) {
    read_complete(result);
  } else if (state_ == State::kWriting) {
    write_complete(result);
  } else {
    finish_job();
  }
}

void Lane::read_complete(int64_t bytes) {
  if (bytes == 0) fail(EIO, "the file ended inside the range to read; did it shrink?");
  if (moved_ + bytes >= block_length_) {  // a direct request may return more than was wanted
    block_read();
  } else if (!advance(bytes)) {
    fail(EIO, "the file ended inside the range to read; did it shrink?");
  }
}

void Lane::write_complete(int64_t bytes) {
  if (moved_ + bytes == block_length_) {
    block_done();
  } else if (!advance(bytes)) {
    fail(EIO, "the kernel took nothing of what was to be written");
  }
}

// Continues after a short transfer. A direct one may have ended between two multiples of the
// alignment; the piece after the last multiple is then moved again. False when that has led nowhere
// several times.
bool Lane::advance(int64_t bytes) {
  const int64_t before = moved_;
  moved_ += bytes;
  moved_ -= moved_ % target_.alignment;
  again_ = 0;
  stalled_ = moved_ == before ? stalled_ + 1 : 0;
  return stalled_ < kMaxStalled;
}

void Lane::failed(int code) {
  // After a failed fsync the kernel may have dropped the dirty pages: a second one that succeeds
  // would prove nothing.
  if (state_ == State::kSyncing) fail(code);
  if (code == EINTR) return;
  if (code == EAGAIN && ++again_ < kMaxAgain) {
    not_before_ = Clock::now() + kAgainPause;
    return;
  }
  if (target_.direct && files().step_down(code)) return;
  fail(code);
}

void Lane::block_read() {
  if (context_.options.hash) {
    hasher_.update(buffer_.data(), static_cast<size_t>(block_length_));
  }
  if (!strip_.job->destination()) {
    block_done();
    return;
  }
  moved_ = 0;
  again_ = stalled_ = 0;
  state_ = State::kWriting;
}

void Lane::block_done() {
  context_.control.add_done(block_length_);
  block_begin_ += block_length_;
  begin_block();
}

void Lane::strip_done() {
  if (context_.options.hash) hasher_.finish();
  if (!strip_.job->strip_done()) {
    state_ = State::kIdle;
    strip_.job.reset();
  } else if (strip_.job->destination() && context_.options.sync) {
    // Allocation and size change with the data; fdatasync covers both, where they are needed to
    // read the data back.
    not_before_ = {};
    state_ = State::kSyncing;
  } else {
    finish_job();
  }
}

void Lane::finish_job() {
  context_.results[strip_.job->index()] = strip_.job->finish();
  state_ = State::kIdle;
  strip_.job.reset();
}

Descriptors& Lane::files() const {
  return state_ == State::kReading ? strip_.job->source().files()
                                   : strip_.job->destination()->files();
}

void Lane::fail(int code, const char* detail) const {
  const char* operation = state_ == State::kReading   ? "read"
                          : state_ == State::kWriting ? "write"
                                                      : "fsync";
  throw IoError(code, operation, files().path(), target_.offset, detail);
}

}  // namespace nvme_resume
