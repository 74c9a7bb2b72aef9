#include "buffer_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace nvme_resume {

namespace {

size_t round_up(size_t value, size_t step) {
  return (value + step - 1) / step * step;
}

// `capacity` is a multiple of the alignment. Only the mapping itself can fail; the advice is
// exactly that, and older kernels do not know all of it.
std::byte* map_buffer(size_t capacity) {
  const size_t alignment = BufferPool::kAlignment;
  void* mapping = ::mmap(nullptr, capacity + alignment, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();

  // Cut the mapping down to its aligned part.
  auto* begin = static_cast<std::byte*>(mapping);
  const size_t head =
      round_up(reinterpret_cast<uintptr_t>(begin), alignment) - reinterpret_cast<uintptr_t>(begin);
  if (head > 0) ::munmap(begin, head);
  std::byte* data = begin + head;
  if (const size_t tail = alignment - head; tail > 0) ::munmap(data + capacity, tail);

  ::madvise(data, capacity, MADV_HUGEPAGE);
  // A fork while O_DIRECT reads into a private mapping can send the data to the child's copy of
  // the page (open(2), NOTES); data loaders fork at any time, so children do not get these pages.
  ::madvise(data, capacity, MADV_DONTFORK);
  if (::madvise(data, capacity, MADV_POPULATE_WRITE) != 0 && errno == EINVAL) {
    std::memset(data, 0, capacity);
  }
  ::madvise(data, capacity, MADV_COLLAPSE);
  return data;
}

}  // namespace

BufferPool& BufferPool::shared() {
  static BufferPool* const instance = [] {
    auto* pool = new BufferPool();
    pool->watch_forks();
    return pool;
  }();
  return *instance;
}

// In a child the buffers are not mapped (MADV_DONTFORK): forget them. The lock is held across the
// fork so that the child's copy of the list is whole.
void BufferPool::watch_forks() {
  ::pthread_atfork([] { shared().mutex_.lock(); }, [] { shared().mutex_.unlock(); },
                   [] {
                     BufferPool& pool = shared();
                     pool.idle_.clear();
                     pool.idle_bytes_ = 0;
                     pool.mutex_.unlock();
                   });
}

BufferPool::Lease BufferPool::lease(size_t length) {
  const size_t capacity = round_up(std::max<size_t>(length, 1), kAlignment);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->capacity < capacity) continue;
      if (best == idle_.end() || it->capacity < best->capacity) best = it;
    }
    if (best != idle_.end()) {
      const Buffer buffer = *best;
      idle_.erase(best);
      idle_bytes_ -= buffer.capacity;
      return Lease(this, buffer.data, buffer.capacity);
    }
  }
  return Lease(this, map_buffer(capacity), capacity);
}

void BufferPool::give_back(std::byte* data, size_t capacity) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    idle_.push_back({data, capacity});
    idle_bytes_ += capacity;
  } catch (const std::bad_alloc&) {
    ::munmap(data, capacity);
  }
  while (idle_bytes_ > kMaxIdleBytes) {
    const Buffer oldest = idle_.front();
    idle_.erase(idle_.begin());
    idle_bytes_ -= oldest.capacity;
    ::munmap(oldest.data, oldest.capacity);
  }
}

void BufferPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Buffer& buffer : idle_) ::munmap(buffer.data, buffer.capacity);
  idle_.clear();
  idle_bytes_ = 0;
}

size_t BufferPool::idle_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes_;
}

}  // namespace nvme_resume
