// One thread a lane, blocking calls. The calling thread is one of them.
#include <cerrno>
#include <exception>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "engine.h"

namespace nvme_resume {

namespace {

class ThreadsEngine final : public Engine {
 public:
  explicit ThreadsEngine(Posix& posix) : posix_(posix) {}

  const char* name() const override { return "threads"; }

  void run(Scheduler& scheduler, Control& control, std::vector<Lane>& lanes) override {
    std::vector<std::thread> threads;
    threads.reserve(lanes.size());
    try {
      for (size_t i = 1; i < lanes.size(); ++i) {
        threads.emplace_back([&, i] { drive(scheduler, control, lanes[i]); });
      }
    } catch (const std::exception&) {
      // No more threads to be had: those that run, and this one, do the work.
    }
    if (!lanes.empty()) drive(scheduler, control, lanes[0]);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void drive(Scheduler& scheduler, Control& control, Lane& lane) noexcept {
    try {
      while (!control.stopping()) {
        if (lane.idle()) {
          std::optional<Strip> strip = scheduler.next();
          if (!strip) return;
          lane.start(std::move(*strip));
        } else {
          const Request request = lane.next();
          if (!control.wait_turn(request.not_before)) return;
          lane.complete(carry_out(request));
        }
      }
    } catch (const IoError& error) {
      control.fail(error);
    } catch (const std::bad_alloc&) {
      control.fail(IoError(ENOMEM, "setup", {}, 0));
    }
  }

  int64_t carry_out(const Request& request) {
    const auto length = static_cast<size_t>(request.length);
    switch (request.kind) {
      case Request::Kind::kRead:
        return posix_.pread(request.fd, request.data, length, request.offset);
      case Request::Kind::kWrite:
        return posix_.pwrite(request.fd, request.data, length, request.offset);
      default:
        return posix_.fdatasync(request.fd);
    }
  }

  Posix& posix_;
};

}  // namespace

std::unique_ptr<Engine> make_threads_engine(Posix& posix) {
  return std::make_unique<ThreadsEngine>(posix);
}

}  // namespace nvme_resume
