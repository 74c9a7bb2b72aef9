// XXH3-128 over chunks, and over the list of chunk digests. The format is in csrc/README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace nvme_resume {

inline constexpr size_t kDigestBytes = 16;

// Number of chunks a range of `length` bytes has.
int64_t chunk_count(int64_t length);

// Digest of a file from the digests of its chunks, as 32 hex characters.
std::string digest_of_chunks(std::string_view chunk_digests);

// Takes data in order and stores one digest at every chunk boundary.
class ChunkHasher {
 public:
  ChunkHasher();
  ChunkHasher(ChunkHasher&&) noexcept;
  ~ChunkHasher();

  // Starts at a chunk boundary; digests go to `out` and onwards, which must have room for them.
  void begin(char* out);
  void update(const std::byte* data, size_t length);
  // Stores the digest of a last chunk that is shorter than the others, if there is one.
  void finish();

 private:
  struct State;  // keeps xxhash.h out of this header

  void store();

  std::unique_ptr<State> state_;
  char* out_ = nullptr;
  size_t filled_ = 0;  // bytes of the current chunk seen so far
};

}  // namespace nvme_resume
