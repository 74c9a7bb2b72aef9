// Aligned I/O buffers, kept between transfers: mapping and populating them costs more than using
// them, and huge pages more than double the speed of O_DIRECT.
#pragma once

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace nvme_resume {

class BufferPool {
 public:
  // Buffers handed back beyond this are unmapped, oldest first.
  static constexpr size_t kMaxIdleBytes = size_t{64} << 20;
  static constexpr size_t kAlignment = size_t{2} << 20;

  // A buffer on loan: returned to the pool when the lease goes.
  class Lease {
   public:
    Lease(Lease&& other) noexcept
        : pool_(other.pool_),
          data_(std::exchange(other.data_, nullptr)),
          capacity_(std::exchange(other.capacity_, 0)) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (data_) pool_->give_back(data_, capacity_);
    }

    std::byte* data() const { return data_; }
    size_t capacity() const { return capacity_; }

   private:
    friend class BufferPool;
    Lease(BufferPool* pool, std::byte* data, size_t capacity)
        : pool_(pool), data_(data), capacity_(capacity) {}

    BufferPool* pool_;
    std::byte* data_;
    size_t capacity_;
  };

  // The pool of this process. It is never destroyed: a lease may outlive static destructors.
  static BufferPool& shared();

  // Throws std::bad_alloc.
  Lease lease(size_t length);

  // Unmaps every idle buffer.
  void trim();

  size_t idle_bytes() const;

 private:
  struct Buffer {
    std::byte* data;
    size_t capacity;
  };

  BufferPool() = default;
  void give_back(std::byte* data, size_t capacity) noexcept;
  void watch_forks();

  mutable std::mutex mutex_;
  std::vector<Buffer> idle_;  // oldest first
  size_t idle_bytes_ = 0;
};

}  // namespace nvme_resume
