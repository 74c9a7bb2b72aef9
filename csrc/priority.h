// How much a thread of ours may ask for beside the training it serves.
#pragma once

namespace nvme_resume {

// The calling thread, and those it starts later, give way to all others: nice 19, and the idle
// class of the disk scheduler. Best effort: where the system refuses, the thread stays as it is.
void lower_own_priority() noexcept;

}  // namespace nvme_resume
