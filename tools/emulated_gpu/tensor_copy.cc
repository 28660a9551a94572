// Copies from global to shared memory by the async proxy: of a box of a tensor that a tensor map
// describes (cp.async.bulk.tensor), and of bytes in a row (cp.async.bulk).
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "tables.h"

namespace emulated_gpu {
namespace {

constexpr int kUnit = 16;  // bytes that stay together

// Calls what(to, from, begin, end) for each unit of a box: its address in shared memory, that in
// global memory, and which of its bytes the tensor has. The others are zeros.
template <typename What>
void ForUnits(const TensorCopy& copy, const What& what) {
  const TensorMap& map = copy.map;
  const int64_t element = static_cast<int64_t>(map.strides[0]);
  const int64_t row_bytes = map.box[0] * element, first = copy.first[0] * element;
  const int64_t tensor_bytes = static_cast<int64_t>(map.sizes[0]) * element;
  const uint64_t rows = uint64_t{map.box[1]} * map.box[2] * map.box[3] * map.box[4];
  for (uint64_t row = 0; row < rows; ++row) {
    uint64_t from = map.address, rest = row;
    bool is_inside = true;
    for (size_t k = 1; k < 5; ++k) {
      const int64_t at = copy.first[k] + static_cast<int64_t>(rest % map.box[k]);
      rest /= map.box[k];
      is_inside &= at >= 0 && at < static_cast<int64_t>(map.sizes[k]);
      from += static_cast<uint64_t>(at) * map.strides[k];
    }
    for (int64_t unit = 0; unit < row_bytes; unit += kUnit) {
      const int64_t at = first + unit;
      const int64_t begin = std::clamp<int64_t>(-at, 0, kUnit),
                    end = std::clamp<int64_t>(tensor_bytes - at, begin, kUnit);
      what(Swizzled(copy.to + row * static_cast<uint64_t>(row_bytes) + static_cast<uint64_t>(unit),
                    map.span),
           from + static_cast<uint64_t>(at), begin, is_inside ? end : begin);
    }
  }
}

int64_t BytesOf(const TensorMap& map) {
  int64_t bytes = static_cast<int64_t>(map.strides[0]);
  for (const uint32_t elements : map.box) bytes *= elements;
  return bytes;
}

std::string Number(uint64_t number) { return std::to_string(number); }

void CheckMultiple(uint64_t number, uint64_t of, const char* what) {
  if (number % of != 0)
    Fail(std::string(what) + " " + Number(number) + ", which is no multiple of " + Number(of));
}

// The map at a generic address: in a parameter, or in global memory, whose maps must be fenced.
TensorMap MapAt(Warp& w, int lane, uint64_t address) {
  w.block->lane = lane;
  CheckMultiple(address, 64, "a tensor map at address");
  Instruction generic;
  const Space space = SpaceOf(generic, &address);
  const std::vector<char>& parameters = w.block->launch->parameters;
  TensorMap map;
  if (space == Space::kParam && address + 128 <= parameters.size()) {
    std::memcpy(&map, parameters.data() + address, sizeof(map));
  } else if (space == Space::kGlobal) {
    std::memcpy(&map, GlobalAddress(w, lane, address, 64), sizeof(map));
    const auto& fences = w.block->tensor_maps[address];
    if (std::none_of(fences.begin(), fences.end(), [&](const auto& fence) {
          return fence.second <= w.seen.generic[fence.first];
        }))
      Fail("a tensor map in global memory without fence.proxy.tensormap::generic.acquire");
  } else {
    Fail("a tensor map that is neither a parameter nor in global memory");
  }
  if (map.mark != kTensorMap) Fail("no tensor map at address " + Number(address));
  return map;
}

// Everything is checked when the copy begins. It reads and writes when it ends.
void Begin(Warp& w, const TensorCopy& copy) {
  Block& block = *w.block;
  const MemoryBarrier& barrier = FindBarrier(w, copy.lane, copy.barrier);
  if (!barrier.is_fenced && !block.allows_unfenced_barriers &&
      barrier.init_step > w.seen.async[static_cast<size_t>(barrier.init_warp)]) {
    Fail("an mbarrier counts a tensor copy without fence.mbarrier_init after its mbarrier.init");
  }
  uint64_t sector = 0;
  ForUnits(copy, [&](uint64_t to, uint64_t from, int64_t begin, int64_t end) {
    block.shared.BeginCopy(w, copy.lane, to, kUnit, copy.instruction->line, true);
    // By words: the elements may lie anywhere.
    const uint64_t last = from + static_cast<uint64_t>(end);
    for (uint64_t at = (from + static_cast<uint64_t>(begin)) & ~uint64_t{3};
         begin < end && at < last; at += 4) {
      GlobalAddress(w, copy.lane, at, 4);
      if (block.has_races_checked) global_order.CheckAsyncRead(at);
      if (block.counters != nullptr && at / 32 != sector) {
        sector = at / 32;
        ++block.counters->global_sectors;
      }
    }
    if (block.counters != nullptr) {
      block.counters->global_bytes += static_cast<uint64_t>(end - begin);
    }
  });
  if (block.counters != nullptr) {  // 128 bytes at a time
    const uint64_t accesses = static_cast<uint64_t>(BytesOf(copy.map) + 127) / 128;
    block.counters->shared_accesses += accesses;
    block.counters->shared_wavefronts += accesses;
  }
  block.tensor_copies.push_back(copy);
}

// cp.async.bulk.tensor [to], [map, {first elements}], [mbarrier][, cache policy]
Outcome CopyBox(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    TensorCopy copy{&i,
                    &w,
                    lane,
                    MapAt(w, lane, w.Address(i.At(1), lane)),
                    {},
                    SharedAddress(w, i.At(0), lane),
                    SharedAddress(w, i.At(2), lane)};
    const size_t map = static_cast<size_t>(i.first[1]);
    if (i.count != copy.map.rank || i.first[2] - i.first[1] != i.count + 1) {
      Fail("a copy of " + Number(i.count) + " dimensions by a tensor map of " +
           Number(copy.map.rank));
    }
    CheckMultiple(copy.to, 128, "a tensor copy to shared address");
    for (size_t k = 0; k < i.count; ++k)
      copy.first[k] = static_cast<int32_t>(w.Integer(i.operands[map + 1 + k], lane));
    Begin(w, copy);
  });
  return Outcome::kDone;
}

// cp.async.bulk [to], [from], bytes, [mbarrier][, cache policy]: a box of one dimension
Outcome CopyBytes(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    w.block->lane = lane;
    uint64_t from = w.Address(i.At(1), lane);
    const uint64_t to = SharedAddress(w, i.At(0), lane), bytes = w.Integer(i.At(2), lane);
    Instruction generic;
    if (SpaceOf(generic, &from) != Space::kGlobal) Fail("a copy that is not from global memory");
    CheckMultiple(to, kUnit, "a copy to shared address");
    CheckMultiple(from, kUnit, "a copy from global address");
    CheckMultiple(bytes, kUnit, "a copy of bytes:");
    const TensorMap map{
        kTensorMap, from, {bytes, 1, 1, 1, 1}, {1}, {static_cast<uint32_t>(bytes), 1, 1, 1, 1},
        1,          kUnit};
    Begin(w, {&i, &w, lane, map, {}, to, SharedAddress(w, i.At(3), lane)});
  });
  return Outcome::kDone;
}

Outcome PrefetchMap(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) { MapAt(w, lane, w.Address(i.At(0), lane)); });
  return Outcome::kDone;
}

// fence.proxy.tensormap::generic.acquire [map], 128
Outcome FenceMap(Warp& w, const Instruction& i) {
  const size_t me = static_cast<size_t>(w.number);
  ForActive(w.active, [&](int lane) {
    w.block->lane = lane;
    if (w.Integer(i.At(1), lane) != 128) Fail("a fence of a tensor map that has not 128 bytes");
    w.block->tensor_maps[w.Address(i.At(0), lane)].emplace_back(me, w.seen.generic[me]);
  });
  w.Step();
  return Outcome::kDone;
}

}  // namespace

bool CompleteTensorCopies(Block* block) {
  std::vector<TensorCopy>& copies = block->tensor_copies;
  if (copies.empty()) return false;
  while (!copies.empty() && !block->progressed) {
    std::swap(copies[block->random() % copies.size()], copies.back());
    const TensorCopy copy = copies.back();
    copies.pop_back();
    block->instruction = copy.instruction;
    block->warp = copy.warp;
    MemoryBarrier& barrier = FindBarrier(*copy.warp, copy.lane, copy.barrier);
    const uint32_t step = ++block->copy_steps[barrier.clock - kMaxWarps];
    ForUnits(copy, [&](uint64_t to, uint64_t from, int64_t begin, int64_t end) {
      char* place = block->shared.EndCopy(barrier.clock, copy.lane, step, to, kUnit);
      std::memset(place, 0, kUnit);
      if (begin < end)
        std::memcpy(place + begin, reinterpret_cast<const char*>(from) + begin,
                    static_cast<size_t>(end - begin));
    });
    barrier.arriving.generic[barrier.clock] = barrier.arriving.async[barrier.clock] = step;
    barrier.bytes -= BytesOf(copy.map);
    CheckPhase(block, &barrier);
  }
  return true;
}

// Refuses what the documentation of the driver's function forbids, as the driver does; and, with
// another error, what a GPU can and this one cannot.
int PtxEncodeTiled(void* to, int type, uint32_t rank, void* address, const uint64_t* sizes,
                   const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                   int interleave, int swizzle, int l2_promotion, int fill) {
  constexpr int kInvalidValue = 1, kNotSupported = 801;
  constexpr uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 0, 0, 0};
  constexpr int kFloat16 = 6, kBFloat16 = 9, kNumSpans = 7;
  constexpr uint8_t kSpans[kNumSpans] = {16, 32, 64, 128, 128, 128, 128};
  if (const int outcome = OutcomeOf("cuTensorMapEncodeTiled")) return outcome;
  const auto unknown = [](const char* what) {
    std::fprintf(stderr, "emulated GPU: cuTensorMapEncodeTiled: %s is not known\n", what);
    return kNotSupported;
  };
  if (Capability() < 90) return kNotSupported;
  const auto is_multiple = [](const void* pointer, uintptr_t of) {
    return reinterpret_cast<uintptr_t>(pointer) % of == 0;
  };
  if (to == nullptr || !is_multiple(to, 64) || !is_multiple(address, 16) || address == nullptr ||
      rank < 1 || rank > 5 || type < 0 || type > 15 || interleave < 0 || interleave > 2 ||
      swizzle < 0 || swizzle >= kNumSpans || l2_promotion < 0 || l2_promotion > 3 || fill < 0 ||
      fill > 1 || sizes == nullptr || box == nullptr || steps == nullptr ||
      (rank > 1 && strides == nullptr)) {
    return kInvalidValue;
  }
  if (interleave != 0) return rank < 3 ? kInvalidValue : unknown("an interleaved layout");
  const uint64_t element = kBytes[type], span = kSpans[swizzle];
  if (element == 0) return unknown("a type of packed elements");
  TensorMap map{
      kTensorMap,      reinterpret_cast<uintptr_t>(address), {1, 1, 1, 1, 1},           {element},
      {1, 1, 1, 1, 1}, static_cast<uint8_t>(rank),           static_cast<uint8_t>(span)};
  for (uint32_t k = 0; k < rank; ++k) {
    if (sizes[k] == 0 || sizes[k] > uint64_t{1} << 32 || box[k] == 0 || box[k] > 256 ||
        steps[k] == 0 || steps[k] > 8 ||
        (k > 0 && (strides[k - 1] % 16 != 0 || strides[k - 1] >= uint64_t{1} << 40))) {
      return kInvalidValue;
    }
    if (k > 0 && steps[k] != 1) return unknown("an element stride other than 1");
    map.sizes[k] = sizes[k];
    map.box[k] = box[k];
    if (k > 0) map.strides[k] = strides[k - 1];
  }
  const uint64_t row = box[0] * element;
  if (row % 16 != 0 || (swizzle != 0 && row > span)) return kInvalidValue;
  if (swizzle > 3) return unknown("a swizzle of larger units");
  if (swizzle != 0 && row < span) return unknown("a box narrower than its swizzle");
  if (fill != 0) {
    const bool is_float = type >= kFloat16 && type <= 12;
    return is_float ? unknown("a fill with NaN") : kInvalidValue;
  }
  if (type > kBFloat16) return unknown("a type that is rounded");
  std::memset(to, 0, 128);
  std::memcpy(to, &map, sizeof(map));
  return 0;
}

bool DecodeTensorCopy(const Words&, Instruction* i) {
  std::string opcode = i->opcode;
  if (opcode == "prefetch.tensormap") {
    i->execute = PrefetchMap;
    return true;
  }
  if (opcode.rfind("fence.proxy.tensormap::generic.acquire.", 0) == 0) {
    i->execute = FenceMap;
    return true;
  }
  const std::string hint = ".L2::cache_hint";
  if (opcode.size() > hint.size() && opcode.substr(opcode.size() - hint.size()) == hint)
    opcode.resize(opcode.size() - hint.size());
  for (const char* shared : {"shared::cluster", "shared::cta"}) {
    const std::string from = std::string(".") + shared + ".global",
                      completion = ".mbarrier::complete_tx::bytes";
    if (opcode == "cp.async.bulk" + from + completion) {
      i->execute = CopyBytes;
      return true;
    }
    for (char rank = '1'; rank <= '5'; ++rank) {
      const std::string begin = std::string("cp.async.bulk.tensor.") + rank + "d" + from;
      if (opcode != begin + completion && opcode != begin + ".tile" + completion) continue;
      i->execute = CopyBox;
      i->count = static_cast<uint8_t>(rank - '0');
      return true;
    }
  }
  return false;
}

}  // namespace emulated_gpu
