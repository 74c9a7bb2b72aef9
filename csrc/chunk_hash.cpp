#include "chunk_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "job.h"

namespace nvme_resume {

namespace {

void store_canonical(XXH128_hash_t hash, void* out) {
  XXH128_canonical_t canonical;
  static_assert(sizeof canonical == kDigestBytes);
  XXH128_canonicalFromHash(&canonical, hash);
  std::memcpy(out, &canonical, sizeof canonical);
}

}  // namespace

int64_t chunk_count(int64_t length) {
  return length / kChunkBytes + (length % kChunkBytes != 0 ? 1 : 0);
}

std::string digest_of_chunks(std::string_view chunk_digests) {
  unsigned char digest[kDigestBytes];
  store_canonical(XXH3_128bits(chunk_digests.data(), chunk_digests.size()), digest);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * kDigestBytes);
  for (unsigned char byte : digest) {
    text.push_back(kHex[byte >> 4]);
    text.push_back(kHex[byte & 15]);
  }
  return text;
}

struct ChunkHasher::State {
  XXH3_state_t xxh3;
};

ChunkHasher::ChunkHasher() : state_(std::make_unique<State>()) {}
ChunkHasher::ChunkHasher(ChunkHasher&&) noexcept = default;
ChunkHasher::~ChunkHasher() = default;

void ChunkHasher::begin(char* out) {
  out_ = out;
  filled_ = 0;
  XXH3_128bits_reset(&state_->xxh3);
}

void ChunkHasher::update(const std::byte* data, size_t length) {
  while (length > 0) {
    const size_t take = std::min(length, static_cast<size_t>(kChunkBytes) - filled_);
    XXH3_128bits_update(&state_->xxh3, data, take);
    data += take;
    length -= take;
    filled_ += take;
    if (filled_ == static_cast<size_t>(kChunkBytes)) store();
  }
}

void ChunkHasher::finish() {
  if (filled_ > 0) store();
}

void ChunkHasher::store() {
  store_canonical(XXH3_128bits_digest(&state_->xxh3), out_);
  begin(out_ + kDigestBytes);
}

}  // namespace nvme_resume
