#include "transfer.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <thread>

#include "buffer_pool.h"
#include "engine.h"
#include "lane.h"
#include "limiter.h"
#include "plan.h"
#include "posix.h"
#include "priority.h"
#include "scheduler.h"

namespace nvme_resume {

namespace {

std::unique_ptr<Engine> make_engine(EngineKind kind, Posix& posix, int lanes) {
  // On an idle machine both are as fast as the disk; beside a busy training step threads are
  // faster.
  return kind == EngineKind::kLibaio ? make_libaio_engine(posix, lanes)
                                     : make_threads_engine(posix);
}

}  // namespace

Transfer::Transfer(std::vector<Job> jobs, Options options)
    : jobs_(std::move(jobs)), options_(options) {
  validate(jobs_, options_);
}

std::vector<FileResult> Transfer::run() {
  if (started_.exchange(true)) throw std::logic_error("a Transfer runs only once");
  control_.throw_if_stopped();

  const std::shared_ptr<Posix> posix = current_posix();
  Scheduler scheduler(*posix, options_, make_plan(*posix, jobs_, control_));
  control_.set_total(scheduler.total_bytes());

  std::vector<FileResult> results(jobs_.size());
  Limiter limiter(options_.bandwidth_limit);
  const LaneContext context{options_, control_, limiter, results};
  const auto lane_count = std::min<int64_t>(options_.in_flight, scheduler.strip_count());
  std::vector<Lane> lanes;
  lanes.reserve(static_cast<size_t>(lane_count));
  for (int64_t i = 0; i < lane_count; ++i) {
    lanes.emplace_back(context, BufferPool::shared().lease(scheduler.largest_block()));
  }

  // After the lanes, so that it goes before their buffers do.
  const auto engine = make_engine(options_.engine, *posix, static_cast<int>(lanes.size()));
  if (options_.low_priority) {
    // In a thread of its own: one that has lowered itself cannot be raised again without rights.
    // Those the engine starts inherit it.
    std::thread([&] {
      lower_own_priority();
      engine->run(scheduler, control_, lanes);
    }).join();
  } else {
    engine->run(scheduler, control_, lanes);
  }

  control_.throw_if_stopped();
  for (FileResult& result : results) result.engine = engine->name();
  return results;
}

}  // namespace nvme_resume
