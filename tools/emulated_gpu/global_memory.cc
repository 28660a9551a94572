// The order of accesses to global memory between the thread blocks of a kernel.
#include <cstdlib>

#include "machine.h"

namespace emulated_gpu {
namespace {

void JoinViews(View* view, const View& other) {
  for (const auto& [block, clock] : other) Join(&(*view)[block], clock);
}

// Calls what(view) for what the warp has seen of other blocks, until that returns true.
template <typename What>
bool AnySeen(const Warp& warp, const What& what) {
  for (const Acquired& acquired : warp.block->acquired) {
    const uint32_t seen = warp.seen.generic[static_cast<size_t>(acquired.warp)];
    if (acquired.step <= seen && what(acquired.view)) return true;
  }
  return false;
}

// All that the warp has seen.
View SeenBy(const Warp& warp) {
  View view;
  view[warp.block->number] = warp.seen.generic;
  AnySeen(warp, [&](const View& seen) {
    JoinViews(&view, seen);
    return false;
  });
  return view;
}

void Acquire(Warp* warp, const View& view) {
  if (view.empty()) return;
  const uint32_t step = warp->seen.generic[static_cast<size_t>(warp->number)];
  warp->block->acquired.push_back({warp->number, step, view});
}

}  // namespace

GlobalOrder global_order;

void GlobalOrder::Reset() {
  pages_.clear();
  released_.clear();
}

void GlobalOrder::Write(const Warp& warp, uint64_t address, int bytes) {
  for (int k = 0; k + 4 <= bytes; k += 4) {
    const uint64_t at = address + static_cast<uint64_t>(k);
    std::vector<Stamp>& page = pages_[at / kPage];
    page.resize(kPage / 4);
    const size_t number = static_cast<size_t>(warp.number);
    page[at % kPage / 4] = {warp.block->number + 1, warp.seen.generic[number],
                            static_cast<uint8_t>(number)};
  }
}

void GlobalOrder::CheckRead(const Warp& warp, uint64_t address, int bytes) {
  const auto page = pages_.find(address / kPage);
  if (page == pages_.end()) return;
  for (int k = 0; k + 4 <= bytes; k += 4) {
    const Stamp& stamp = page->second[address % kPage / 4 + static_cast<size_t>(k / 4)];
    if (stamp.block == 0 || stamp.block - 1 == warp.block->number) continue;
    const bool is_seen = AnySeen(warp, [&](const View& view) {
      const auto clock = view.find(stamp.block - 1);
      return clock != view.end() && stamp.step <= clock->second[stamp.warp];
    });
    if (is_seen) continue;
    Fail("a race: a read at global address " + std::to_string(address) +
         " that is not in order with a write by block " + std::to_string(stamp.block - 1) +
         ", warp " + std::to_string(stamp.warp));
  }
}

void GlobalOrder::CheckAsyncRead(uint64_t address) const {
  const auto page = pages_.find(address / kPage);
  if (page != pages_.end() && page->second[address % kPage / 4].block != 0)
    Fail("a tensor copy of what the kernel has written at global address " +
         std::to_string(address));
}

void GlobalOrder::Atomic(Warp* warp, uint64_t address, bool acquires, bool releases) {
  View& released = released_[address];
  const View before = released;
  if (acquires) {
    Acquire(warp, before);
  } else {
    JoinViews(&warp->observed, before);
  }
  JoinViews(&released, releases ? SeenBy(*warp) : warp->fenced);
  warp->Step();
}

void GlobalOrder::Fence(Warp* warp) {
  Acquire(warp, warp->observed);
  warp->observed.clear();
  warp->fenced = SeenBy(*warp);
  warp->Step();
}

}  // namespace emulated_gpu
