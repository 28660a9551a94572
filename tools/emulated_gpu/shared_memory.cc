// Shared memory that knows of each word who wrote and who read it, and finds what is not in order.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace emulated_gpu {

void Join(Clock* clock, const Clock& other) {
  for (size_t i = 0; i < clock->size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

namespace {

// The bytes of a word that an access to [first, last) touches, as bits.
uint8_t BytesOf(uint64_t word, uint64_t first, uint64_t last) {
  const uint64_t from = std::max(first, word * 4) - word * 4,
                 to = std::min(last, word * 4 + 4) - word * 4;
  return static_cast<uint8_t>((1u << to) - (1u << from));
}

std::string At(uint64_t address) { return " at shared address " + std::to_string(address); }

std::string Writer(const Word& word) {
  if (word.write_warp >= kMaxWarps) return "a tensor copy";
  return "thread " + std::to_string(word.write_warp * kLanes + word.write_lane);
}

}  // namespace

void SharedMemory::Reset(Block*, int bytes, int num_warps) {
  size_ = bytes;
  num_warps_ = num_warps;
  allows_unwritten_ = std::getenv("EMULATED_GPU_UNWRITTEN") != nullptr;
  allows_unfenced_copies_ = std::getenv("EMULATED_GPU_UNFENCED_COPIES") != nullptr;
  allows_equal_writes_ = std::getenv("EMULATED_GPU_EQUAL_WRITES") != nullptr;
  const size_t words = static_cast<size_t>(bytes + 3) / 4;
  bytes_.assign(words * 4, static_cast<char>(0xff));
  words_.assign(words, Word{});
  reads_.assign(words * static_cast<size_t>(num_warps), 0);
}

void SharedMemory::CheckBounds(uint64_t address, int bytes) const {
  if (address + static_cast<uint64_t>(bytes) > static_cast<uint64_t>(size_) ||
      address > static_cast<uint64_t>(size_)) {
    Fail("an access of " + std::to_string(bytes) + " bytes" + At(address) + ", past the " +
         std::to_string(size_) + " bytes that the kernel has");
  }
  if (address % static_cast<uint64_t>(bytes) != 0)
    Fail("a misaligned access of " + std::to_string(bytes) + " bytes" + At(address));
}

const char* SharedMemory::Read(const Warp& warp, int lane, uint64_t address, int bytes,
                               uint32_t used_bytes) {
  CheckBounds(address, bytes);
  const uint64_t last = address + static_cast<uint64_t>(bytes);
  const size_t me = static_cast<size_t>(warp.number);
  const uint32_t step = warp.seen.generic[me];
  for (uint64_t w = address / 4; w * 4 < last; ++w) {
    const Word& word = words_[w];
    uint8_t mine = bytes % 4 == 0 ? 0xf : BytesOf(w, address, last);
    if (used_bytes != ~0u && bytes % 4 == 0) {
      mine = used_bytes >> (w * 4 - address) & 0xf;
      if (mine == 0) continue;
    }
    if (word.copies_in_flight)
      Fail("a read" + At(address) + ", where a copy of line " + std::to_string(word.copy_line) +
           " has not been waited for");
    if ((word.written_bytes & mine) != mine && !allows_unwritten_)
      Fail("a read" + At(address) + ", which was never written");
    if (word.is_barrier) Fail("a read" + At(address) + ", where an mbarrier lies");
    if (word.write_bytes & mine) {
      if (word.write_warp != me) {
        if (word.write_step > warp.seen.generic[word.write_warp])
          Fail("a race: a read" + At(address) + " that is not in order with a write by " +
               Writer(word));
      } else if (word.write_lane != lane && word.write_step == step && !word.last_was_copy) {
        Fail("a race: a read" + At(address) + " without a barrier of the warp after a write by " +
             Writer(word));
      }
    }
    reads_[w * static_cast<size_t>(num_warps_) + me] = step;
  }
  return bytes_.data() + address;
}

void SharedMemory::CheckWrite(const Warp& warp, int, uint64_t first, uint64_t last) {
  const size_t me = static_cast<size_t>(warp.number);
  for (uint64_t w = first / 4; w * 4 < last; ++w) {
    const Word& word = words_[w];
    if (word.copies_in_flight)
      Fail("a write" + At(first) + ", where a copy of line " + std::to_string(word.copy_line) +
           " has not been waited for");
    if ((word.write_bytes & BytesOf(w, first, last)) && word.write_warp != me &&
        word.write_step > warp.seen.generic[word.write_warp]) {
      Fail("a race: a write" + At(first) + " that is not in order with a write by " + Writer(word));
    }
    const uint32_t* reads = reads_.data() + w * static_cast<size_t>(num_warps_);
    for (size_t other = 0; other < static_cast<size_t>(num_warps_); ++other) {
      if (reads[other] > warp.seen.generic[other] && other != me) {
        Fail("a race: a write" + At(first) + " that is not in order with a read by warp " +
             std::to_string(other));
      }
    }
  }
}

char* SharedMemory::Write(const Warp& warp, int lane, uint64_t address, int bytes) {
  CheckBounds(address, bytes);
  const uint64_t last = address + static_cast<uint64_t>(bytes);
  CheckWrite(warp, lane, address, last);
  for (uint64_t w = address / 4; w * 4 < last; ++w) {
    Word& word = words_[w];
    if (word.is_barrier) Fail("a write" + At(address) + ", where an mbarrier lies");
    const uint8_t mine = BytesOf(w, address, last);
    word.written_bytes |= mine;
    word.write_bytes = mine;
    word.write_warp = static_cast<uint8_t>(warp.number);
    word.write_lane = static_cast<uint8_t>(lane);
    word.write_step = warp.seen.generic[static_cast<size_t>(warp.number)];
    word.last_was_copy = 0;
  }
  return bytes_.data() + address;
}

bool SharedMemory::Holds(uint64_t address, int bytes, const char* value) const {
  if (!allows_equal_writes_) return false;
  CheckBounds(address, bytes);
  const uint64_t last = address + static_cast<uint64_t>(bytes);
  for (uint64_t w = address / 4; w * 4 < last; ++w) {
    const uint8_t mine = BytesOf(w, address, last);
    if (words_[w].copies_in_flight || (words_[w].written_bytes & mine) != mine) return false;
  }
  return std::memcmp(bytes_.data() + address, value, static_cast<size_t>(bytes)) == 0;
}

void SharedMemory::BeginCopy(const Warp& warp, int lane, uint64_t address, int bytes, int line,
                             bool is_async) {
  CheckBounds(address, bytes);
  const uint64_t last = address + static_cast<uint64_t>(bytes);
  CheckWrite(warp, lane, address, last);
  for (uint64_t w = address / 4; w * 4 < last; ++w) {
    Word& word = words_[w];
    if (is_async && word.is_barrier) Fail("a copy" + At(address) + ", where an mbarrier lies");
    if (is_async && word.write_step > warp.seen.async[word.write_warp]) {
      Fail("a tensor copy to" + At(address) + ", which " + Writer(word) +
           " wrote without fence.proxy.async before the copy");
    }
    word.copies_in_flight = 1;
    word.copy_line = static_cast<uint32_t>(line);
  }
}

char* SharedMemory::EndCopy(size_t writer, int lane, uint32_t step, uint64_t address, int bytes) {
  const uint64_t last = address + static_cast<uint64_t>(bytes);
  for (uint64_t w = address / 4; w * 4 < last; ++w) {
    Word& word = words_[w];
    word.copies_in_flight = 0;
    word.written_bytes = word.write_bytes = 0xf;
    word.write_warp = static_cast<uint8_t>(writer);
    word.write_lane = static_cast<uint8_t>(lane);
    word.write_step = step;
    word.last_was_copy = 1;
  }
  return bytes_.data() + address;
}

const char* SharedMemory::ReadAsync(const Warp& warp, const Seen& began, uint64_t address,
                                    int bytes) {
  CheckBounds(address, bytes);
  const uint64_t last = address + static_cast<uint64_t>(bytes);
  const size_t me = static_cast<size_t>(warp.number);
  for (uint64_t w = address / 4; w * 4 < last; ++w) {
    const Word& word = words_[w];
    if (word.copies_in_flight)
      Fail("a product reads" + At(address) + ", where a copy of line " +
           std::to_string(word.copy_line) + " has not been waited for");
    if (word.written_bytes != 0xf && !allows_unwritten_)
      Fail("a product reads" + At(address) + ", which was never written");
    if (word.write_step > began.generic[word.write_warp]) {
      Fail("a race: a product reads" + At(address) + ", which " + Writer(word) +
           " wrote after it began or not in order with it");
    }
    const bool needs_fence = !word.last_was_copy || !allows_unfenced_copies_;
    if (needs_fence && word.write_step > began.async[word.write_warp]) {
      Fail("a product reads" + At(address) + ", which " + Writer(word) +
           " wrote without fence.proxy.async before the product");
    }
    uint32_t& read = reads_[w * static_cast<size_t>(num_warps_) + me];
    read = warp.seen.generic[me];
  }
  return bytes_.data() + address;
}

void SharedMemory::MarkBarrier(const Warp& warp, int lane, uint64_t address, bool is_barrier) {
  CheckBounds(address, 8);
  for (uint64_t w = address / 4; w < address / 4 + 2; ++w) words_[w].is_barrier = 0;
  Write(warp, lane, address, 8);
  for (uint64_t w = address / 4; w < address / 4 + 2; ++w) {
    words_[w].is_barrier = is_barrier;
    words_[w].written_bytes = 0;
  }
}

}  // namespace emulated_gpu
