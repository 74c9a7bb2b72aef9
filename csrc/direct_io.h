// What a file system asks of O_DIRECT requests on a given file.
#pragma once

#include <cstdint>

namespace nvme_resume {

struct DirectLimits {
  bool supported = true;
  // Offsets, lengths and buffer addresses are multiples of this (a power of two).
  int64_t alignment = 4096;
  // Buffered and direct writes to one file must not share a unit of this size: the page cache reads
  // and writes back whole pages (or whole file-system blocks, when those are larger), and would put
  // old bytes over what a direct write has just stored.
  int64_t granule = 4096;
};

// `fd` is open on a regular file. Asks the kernel (STATX_DIOALIGN, Linux 6.1); where it does not
// say, the answer is a guess that fits all common devices, and the first request decides.
DirectLimits query_direct_limits(int fd);

}  // namespace nvme_resume
