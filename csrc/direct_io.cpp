#include "direct_io.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>

namespace nvme_resume {

namespace {

constexpr int64_t kMaxGranule = 64 << 10;  // st_blksize beyond this is a wish, not a block size

bool is_power_of_two(int64_t value) {
  return value > 0 && (value & (value - 1)) == 0;
}

}  // namespace

DirectLimits query_direct_limits(int fd) {
  DirectLimits limits;
  limits.granule = std::max<int64_t>(limits.granule, ::sysconf(_SC_PAGESIZE));

  // These live in the page cache; newer kernels accept the flag and then ignore it.
  struct statfs fs;
  if (::fstatfs(fd, &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC)) {
    limits.supported = false;
    return limits;
  }

  unsigned mask = STATX_BASIC_STATS;
#ifdef STATX_DIOALIGN
  mask |= STATX_DIOALIGN;
#endif
  struct statx st;
  if (::statx(fd, "", AT_EMPTY_PATH, mask, &st) != 0) return limits;
#ifdef STATX_DIOALIGN
  if (st.stx_mask & STATX_DIOALIGN) {
    limits.supported = st.stx_dio_offset_align != 0;
    if (limits.supported) {
      limits.alignment = std::max(st.stx_dio_offset_align, st.stx_dio_mem_align);
    }
  }
#endif
  limits.granule = std::max(limits.granule, limits.alignment);
  if (is_power_of_two(st.stx_blksize) && st.stx_blksize <= kMaxGranule) {
    limits.granule = std::max<int64_t>(limits.granule, st.stx_blksize);
  }
  return limits;
}

}  // namespace nvme_resume
