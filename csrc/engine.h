// How requests reach the kernel. Each implementation drives the same lanes to the same result.
#pragma once

#include <memory>
#include <vector>

#include "control.h"
#include "job.h"
#include "lane.h"
#include "posix.h"
#include "scheduler.h"

namespace nvme_resume {

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;

  // Copies until the scheduler has no more work or the control says stop; errors go to the control.
  // When it returns, no request is under way: the lanes' buffers may be reused.
  virtual void run(Scheduler& scheduler, Control& control, std::vector<Lane>& lanes) = 0;
};

std::unique_ptr<Engine> make_threads_engine(Posix& posix);

// Throws IoError ("setup") when the kernel has no room for another context.
std::unique_ptr<Engine> make_libaio_engine(Posix& posix, int lanes);

}  // namespace nvme_resume
