#include "priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace nvme_resume {

namespace {

// <linux/ioprio.h> is not everywhere: IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE << IOPRIO_CLASS_SHIFT.
constexpr int kIoPriorityOfProcess = 1;
constexpr int kIoPriorityIdle = 3 << 13;
constexpr int kLowest = 19;

}  // namespace

void lower_own_priority() noexcept {
  // On Linux both calls mean the calling thread alone.
  const auto self = static_cast<id_t>(::syscall(SYS_gettid));
  (void)::setpriority(PRIO_PROCESS, self, kLowest);
  (void)::syscall(SYS_ioprio_set, kIoPriorityOfProcess, 0, kIoPriorityIdle);
}

}  // namespace nvme_resume
