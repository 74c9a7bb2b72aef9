// Kernel AIO: one thread submits the requests of all lanes and waits for them.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <optional>
#include <utility>

#include "engine.h"

namespace nvme_resume {

namespace {

// The kernel's slots are shared with the other contexts of the system; waits up to five seconds.
constexpr std::chrono::milliseconds kSubmitPause{5};
constexpr int kMaxSubmitAgain = 1000;

class AioContext {
 public:
  AioContext(Posix& posix, int events) : posix_(posix) {
    if (const int result = posix.io_setup(events, &context_); result < 0) {
      throw IoError(-result, "setup", {}, 0, "io_setup failed; is fs.aio-max-nr used up?");
    }
  }
  AioContext(const AioContext&) = delete;
  AioContext& operator=(const AioContext&) = delete;
  // Waits in the kernel for whatever is still under way.
  ~AioContext() { posix_.io_destroy(context_); }

  io_context_t get() const { return context_; }

 private:
  Posix& posix_;
  io_context_t context_ = nullptr;
};

class LibaioEngine final : public Engine {
 public:
  LibaioEngine(Posix& posix, int lanes) : posix_(posix), lanes_(lanes) {}

  const char* name() const override { return "libaio"; }

  void run(Scheduler& scheduler, Control& control, std::vector<Lane>& lanes) override {
    try {
      // Its end is the end of this call: no request survives an exception.
      AioContext context(posix_, std::max(1, lanes_));
      Loop(posix_, context.get(), scheduler, control, lanes).run();
    } catch (const IoError& error) {
      control.fail(error);
    } catch (const std::bad_alloc&) {
      control.fail(IoError(ENOMEM, "setup", {}, 0));
    }
  }

 private:
  class Loop {
   public:
    Loop(Posix& posix, io_context_t context, Scheduler& scheduler, Control& control,
         std::vector<Lane>& lanes)
        : posix_(posix), context_(context), scheduler_(scheduler), control_(control) {
      slots_.reserve(lanes.size());
      for (Lane& lane : lanes) {
        slots_.push_back(Slot{&lane});
      }
      events_.resize(lanes.size());
    }

    // After a stop nothing new is submitted, and what is under way is waited for. Its results are
    // not looked at: the run has failed or was cancelled.
    void run() {
      while (true) {
        std::optional<Clock::time_point> wake = submit_all();
        if (under_way_ > 0) {
          reap(wake);
        } else if (wake) {
          control_.wait_until(*wake);
        } else {
          return;
        }
      }
    }

   private:
    struct Slot {
      Lane* lane;
      iocb request{};
      std::optional<Request> pending{};  // asked for, not yet taken by the kernel
      Clock::time_point held_until{};    // end of the longest pause of the pending request
      bool under_way = false;
    };

    // Submits what can be submitted now. Returns when the first of the rest is due.
    std::optional<Clock::time_point> submit_all() {
      std::optional<Clock::time_point> wake;
      for (Slot& slot : slots_) {
        while (!slot.under_way && !control_.stopping()) {
          if (!prepare(slot)) break;
          const Clock::time_point now = Clock::now();
          const Clock::time_point due = std::max(slot.pending->not_before, submit_after_);
          const bool held = due <= now && control_.paused() && now < slot.held_until;
          if (due > now || held) {
            const Clock::time_point look = held ? now + kPauseTick : due;
            wake = wake ? std::min(*wake, look) : look;
            break;
          }
          submit(slot);
        }
      }
      return wake;
    }

    // False when there is no work left for this slot.
    bool prepare(Slot& slot) {
      while (slot.lane->idle()) {
        if (drained_) return false;
        std::optional<Strip> strip = scheduler_.next();
        drained_ = !strip;
        if (strip) slot.lane->start(std::move(*strip));
      }
      if (!slot.pending) {
        slot.pending = slot.lane->next();
        slot.held_until = std::max(slot.pending->not_before, Clock::now()) + kMaxPause;
      }
      return true;
    }

    void submit(Slot& slot) {
      const Request& request = *slot.pending;
      const auto length = static_cast<size_t>(request.length);
      switch (request.kind) {
        case Request::Kind::kRead:
          io_prep_pread(&slot.request, request.fd, request.data, length, request.offset);
          break;
        case Request::Kind::kWrite:
          io_prep_pwrite(&slot.request, request.fd, request.data, length, request.offset);
          break;
        default:
          io_prep_fdsync(&slot.request, request.fd);
          break;
      }
      slot.request.data = &slot;

      const int result = posix_.io_submit(context_, &slot.request);
      if (result == 1) {
        submit_again_ = 0;
        slot.pending.reset();
        slot.under_way = true;
        ++under_way_;
      } else if (result == -EINTR) {
        return;
      } else if (result == -EAGAIN && ++submit_again_ < kMaxSubmitAgain) {
        // The kernel is out of slots for us; nothing was looked at yet.
        submit_after_ = Clock::now() + kSubmitPause;
      } else if (result == -EINVAL && request.kind == Request::Kind::kSync) {
        // Kernels before 4.18 do not know the command; nothing was synced yet, so this is no
        // repetition.
        const int fd = request.fd;
        slot.pending.reset();
        slot.lane->complete(posix_.fdatasync(fd));
      } else {
        slot.pending.reset();
        slot.lane->complete(result < 0 ? result : -EIO);
      }
    }

    void reap(std::optional<Clock::time_point> wake) {
      timespec timeout{};
      if (wake) {
        const auto left = std::max(Clock::duration::zero(), *wake - Clock::now());
        const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
        timeout.tv_sec = nanoseconds / 1'000'000'000;
        timeout.tv_nsec = nanoseconds % 1'000'000'000;
      }
      const int count = posix_.io_getevents(context_, 1, static_cast<int64_t>(events_.size()),
                                            events_.data(), wake ? &timeout : nullptr);
      if (count == -EINTR || count == -EAGAIN) return;
      if (count < 0) throw IoError(-count, "setup", {}, 0, "io_getevents failed");
      for (int i = 0; i < count; ++i) {
        Slot& slot = *static_cast<Slot*>(events_[i].data);
        slot.under_way = false;
        --under_way_;
        if (!control_.stopping()) slot.lane->complete(static_cast<int64_t>(events_[i].res));
      }
    }

    Posix& posix_;
    const io_context_t context_;
    Scheduler& scheduler_;
    Control& control_;
    std::vector<Slot> slots_;
    std::vector<io_event> events_;
    int under_way_ = 0;
    int submit_again_ = 0;
    Clock::time_point submit_after_{};
    bool drained_ = false;
  };

  Posix& posix_;
  const int lanes_;
};

}  // namespace

std::unique_ptr<Engine> make_libaio_engine(Posix& posix, int lanes) {
  return std::make_unique<LibaioEngine>(posix, lanes);
}

}  // namespace nvme_resume
