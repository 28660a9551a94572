// Runs kernels: blocks one after the other, warps in turns. Lanes that diverge are executed in the
// order of their instructions, so that they meet again where the code joins.
#include <cxxabi.h>

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <memory>

#include "machine.h"

namespace emulated_gpu {
namespace {

sigjmp_buf segfault;
volatile sig_atomic_t is_running = 0;
struct sigaction former_action;

void OnSegfault(int number, siginfo_t* info, void* context) {
  if (is_running) siglongjmp(segfault, 1);
  if (former_action.sa_flags & SA_SIGINFO)
    former_action.sa_sigaction(number, info, context);
  else
    signal(SIGSEGV, SIG_DFL);
}

std::string Demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

uint32_t Special(const Launch& launch, const Block& block, const std::string& name, int thread) {
  if (name == "%envreg0") return launch.environment;
  if (name == "%laneid") return static_cast<uint32_t>(thread % kLanes);
  if (name == "%warpid") return static_cast<uint32_t>(thread / kLanes);
  const size_t axis = static_cast<size_t>(name.back() - 'x');
  const std::string kind = name.substr(0, name.size() - 2);
  const uint32_t x = launch.threads[0], y = launch.threads[1];
  if (kind == "%ntid") return launch.threads[axis];
  if (kind == "%nctaid") return launch.grid[axis];
  if (kind == "%ctaid") return block.index[axis];
  const uint32_t t = static_cast<uint32_t>(thread);
  return axis == 0 ? t % x : axis == 1 ? t / x % y : t / x / y;
}

// Finds what an instruction may not do with registers of products (wgmma).
void CheckProducts(Warp& w, const Instruction& i) {
  if (i.is_wgmma || i.operands.empty()) return;
  const auto unit = [](const Operand& operand) { return static_cast<size_t>(operand.slot) / 64; };
  const size_t num_written =
      static_cast<size_t>(i.num_results == 0 ? 0 : i.first[static_cast<size_t>(i.num_results)]);
  if (w.products_in_flight > 0) {
    for (size_t k = 0; k < i.operands.size(); ++k) {
      const Operand& operand = i.operands[k];
      if (operand.slot < 0 || operand.is_constant) continue;
      if (w.busy[unit(operand)] >= (k < num_written ? 1 : kSum)) {
        Fail("uses a register of a product (wgmma) that was not waited for");
      }
    }
  }
  for (size_t k = 0; k < num_written; ++k) {
    const Operand& operand = i.operands[k];
    if (operand.slot >= 0) w.register_steps[unit(operand)] = w.fences;
  }
}

Outcome ExecuteAndCount(Warp& w, const Instruction& i, Counters* counters) {
  Counters counted;
  Count(w, i, &counted);
  const Outcome outcome = i.execute(w, i);
  if (outcome != Outcome::kBlocked) counters->Add(counted);
  return outcome;
}

// Executes a warp's lanes until all wait, or for about `quantum` instructions. Returns whether any
// instruction was executed.
bool RunWarp(Block& block, Warp& w, uint64_t quantum) {
  const Kernel& kernel = *block.launch->kernel;
  const Instruction* code = kernel.code.data();
  const bool has_wgmma = kernel.has_wgmma;
  for (Fragment& fragment : w.fragments) fragment.is_blocked = false;
  uint64_t executed = 0;
  block.warp = &w;
  while (w.alive != 0) {
    // The lanes with the lowest instruction that do not wait, with others that are there.
    int pc = INT32_MAX, next = INT32_MAX;
    for (const Fragment& fragment : w.fragments) {
      if (!fragment.is_blocked) pc = std::min(pc, fragment.pc);
    }
    if (pc == INT32_MAX || executed > quantum) break;
    uint32_t lanes = 0;
    for (size_t k = 0; k < w.fragments.size();) {
      if (w.fragments[k].pc == pc) {
        lanes |= w.fragments[k].lanes;
        w.fragments[k] = w.fragments.back();
        w.fragments.pop_back();
      } else {
        if (w.fragments[k].pc > pc) next = std::min(next, w.fragments[k].pc);
        ++k;
      }
    }
    bool is_here = true;
    while (is_here) {
      const Instruction& i = code[pc];
      uint32_t mask = lanes;
      if (i.guard >= 0) {
        const uint32_t p = *reinterpret_cast<const uint32_t*>(w.registers + i.guard);
        mask &= i.guard_negated ? ~p : p;
      }
      if (mask == 0) {
        ++pc;
      } else {
        if (i.is_collective && mask != lanes) {
          w.fragments.push_back({pc + 1, lanes & ~mask, false});
          next = std::min(next, pc + 1);
          lanes = mask;
        }
        w.active = mask;
        block.instruction = &i;
        block.lane = __builtin_ctz(mask);
        if (has_wgmma) CheckProducts(w, i);
        const Outcome outcome =
            block.counters == nullptr ? i.execute(w, i) : ExecuteAndCount(w, i, block.counters);
        if (outcome == Outcome::kDone) {
          ++pc;
          ++executed;
        } else if (outcome == Outcome::kBranch) {
          ++executed;
          if (mask != lanes) {
            w.fragments.push_back({pc + 1, lanes & ~mask, false});
            lanes = mask;
          }
          pc = i.target;
          next = INT32_MAX;
          for (const Fragment& fragment : w.fragments) {
            if (fragment.pc >= pc)
              next = std::min(next, fragment.pc);
            else if (!fragment.is_blocked)
              next = -1;
          }
        } else if (outcome == Outcome::kExit) {
          ++executed;
          w.alive &= ~mask;
          for (int lane = 0; lane < kLanes; ++lane) {
            if (mask >> lane & 1)
              CompleteCopies(&w, lane, w.queues[static_cast<size_t>(lane)].size());
          }
          if (w.alive == 0 && w.products_in_flight > 0)
            Fail("the warp ends before its products (wgmma) are waited for");
          if (mask != lanes) w.fragments.push_back({pc + 1, lanes & ~mask, false});
          break;
        } else {
          w.fragments.push_back({pc, lanes, true});
          break;
        }
      }
      if (pc >= next || executed > quantum) {
        w.fragments.push_back({pc, lanes, false});
        is_here = false;
      }
    }
  }
  block.num_instructions += executed;
  if (block.num_instructions > block.most_instructions) Fail("the kernel does not end");
  if (w.alive == 0) {
    for (BlockBarrier& barrier : block.barriers) {
      if (barrier.arrived > 0 && barrier.is_whole_block) block.CheckBarrier(&barrier);
    }
  }
  return executed > 0;
}

std::string Place(const Instruction& i) { return i.opcode + " in line " + std::to_string(i.line); }

[[noreturn]] void ReportDeadlock(Block& block) {
  std::string message = "a deadlock:";
  for (const auto& [address, barrier] : block.memory_barriers) {
    if (barrier.bytes == 0) continue;
    message += " the mbarrier at shared address " + std::to_string(address) +
               (barrier.bytes > 0 ? " lacks " : " has a surplus of ") +
               std::to_string(std::abs(barrier.bytes)) + " bytes;";
  }
  for (Warp& w : block.warps) {
    for (const Fragment& fragment : w.fragments) {
      const Instruction& i = block.launch->kernel->code[static_cast<size_t>(fragment.pc)];
      message += " threads " + std::to_string(w.number * kLanes + __builtin_ctz(fragment.lanes)) +
                 " to " + std::to_string(w.number * kLanes + 31 - __builtin_clz(fragment.lanes)) +
                 " wait at " + Place(i) + ";";
    }
  }
  block.instruction = nullptr;
  throw Trap(message);
}

}  // namespace

void Fail(const std::string& message) { throw Trap(message); }

int Block::AliveWarps() const {
  return static_cast<int>(
      std::count_if(warps.begin(), warps.end(), [](const Warp& w) { return w.alive != 0; }));
}

// Ends the barrier's phase if all have arrived. Threads that have ended are not waited for.
void Block::CheckBarrier(BlockBarrier* barrier) {
  const int expected = barrier->is_whole_block ? AliveWarps() * kLanes : barrier->expected;
  if (barrier->arrived < expected) return;
  if (barrier->arrived > expected && !barrier->is_whole_block)
    Fail("more threads arrive at a barrier than it expects");
  barrier->released = barrier->arriving;
  barrier->any_before = barrier->any;
  barrier->all_before = barrier->all;
  barrier->num_true_before = barrier->num_true;
  barrier->arriving = {};
  barrier->any = false;
  barrier->all = true;
  barrier->num_true = barrier->arrived = 0;
  barrier->warps = 0;
  ++barrier->phase;
  progressed = true;
}

void Block::Run() {
  std::vector<size_t> order(warps.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  while (AliveWarps() > 0) {
    progressed = false;
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t k : order) {
      if (warps[k].alive != 0) progressed |= RunWarp(*this, warps[k], 1 + random() % 4000);
    }
    if (!progressed && !CompleteSomeCopies(this)) ReportDeadlock(*this);
  }
  if (!tensor_copies.empty()) {
    instruction = tensor_copies[0].instruction;
    Fail("the thread block ends before its tensor copies have arrived");
  }
}

int lets_next_begin = 0;

void RunKernel(const Launch& launch, unsigned seed) {
  const Kernel& kernel = *launch.kernel;
  const size_t num_threads = size_t{launch.threads[0]} * launch.threads[1] * launch.threads[2];
  const size_t num_warps = (num_threads + kLanes - 1) / kLanes;
  const size_t num_blocks = size_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  lets_next_begin = 0;
  global_order.Reset();

  Block block{};
  block.launch = &launch;
  block.random.seed(seed);
  // Threads may read what others write if lengths change: rows may be wrong then.
  block.has_races_checked = !launch.has_change;
  if (const char* races = std::getenv("EMULATED_GPU_RACES"))
    block.has_races_checked &= *races != '0';
  block.allows_unfenced_barriers = std::getenv("EMULATED_GPU_UNFENCED_BARRIERS") != nullptr;
  if (const char* most = std::getenv("EMULATED_GPU_MOST_INSTRUCTIONS")) {
    block.most_instructions = std::strtoull(most, nullptr, 10);
  }
  Counters counters;
  const char* const counts = std::getenv("EMULATED_GPU_COUNTS");
  if (counts != nullptr) block.counters = &counters;
  const size_t bytes = static_cast<size_t>(kernel.register_bytes);
  std::unique_ptr<char, decltype(&std::free)> registers(
      static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(64, bytes * num_warps))),
      &std::free);
  std::vector<size_t> order(num_blocks);
  for (size_t k = 0; k < num_blocks; ++k) order[k] = k;
  std::shuffle(order.begin(), order.end(), block.random);

  struct sigaction action = {};
  action.sa_sigaction = OnSegfault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &former_action);
  std::string failure;
  if (sigsetjmp(segfault, 1) != 0) {
    failure = "an access outside of the arrays in global memory";
  } else {
    is_running = 1;
    try {
      for (const size_t number : order) {
        block.index = {static_cast<unsigned>(number % launch.grid[0]),
                       static_cast<unsigned>(number / launch.grid[0] % launch.grid[1]),
                       static_cast<unsigned>(number / launch.grid[0] / launch.grid[1])};
        block.number = static_cast<uint32_t>(number);
        block.acquired.clear();
        block.shared.Reset(&block, kernel.shared_bytes + launch.shared_bytes,
                           static_cast<int>(num_warps));
        block.barriers.fill({});
        block.memory_barriers.clear();
        block.tensor_maps.clear();
        block.copy_steps.fill(0);
        block.num_instructions = 0;
        block.warps.resize(num_warps);
        for (size_t k = 0; k < num_warps; ++k) {
          Warp& w = block.warps[k];
          w = Warp{};
          w.block = &block;
          w.number = static_cast<int>(k);
          w.registers = registers.get() + k * bytes;
          const size_t lanes = std::min<size_t>(kLanes, num_threads - k * kLanes);
          w.alive = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
          w.fragments.push_back({0, w.alive, false});
          w.seen.generic[k] = 1;
          w.queues.resize(kLanes);
          w.local.assign(static_cast<size_t>(kernel.local_bytes) * kLanes, '\xff');
          w.product_groups.resize(1);
          if (kernel.has_wgmma) {
            w.busy.assign(bytes / 64, 0);
            w.register_steps.assign(bytes / 64, 0);
          }
          for (const Kernel::Constant& constant : kernel.constants) {
            for (int lane = 0; lane < kLanes; ++lane) {
              std::memcpy(w.registers + constant.slot + lane * constant.size, &constant.value,
                          constant.size);
            }
          }
          for (const auto& [slot, name] : kernel.specials) {
            for (int lane = 0; lane < kLanes; ++lane) {
              reinterpret_cast<uint32_t*>(w.registers + slot)[lane] =
                  Special(launch, block, name, static_cast<int>(k) * kLanes + lane);
            }
          }
        }
        block.Run();
        ++counters.blocks;
        counters.longest_block = std::max(counters.longest_block, block.num_instructions);
      }
    } catch (const Trap& trap) {
      failure = trap.what();
    }
  }
  is_running = 0;
  sigaction(SIGSEGV, &former_action, nullptr);
  if (counts != nullptr) counters.Write(Demangled(kernel.name), counts);
  if (!failure.empty()) {
    std::string place =
        Demangled(kernel.name).substr(0, 200) + ", block " + std::to_string(block.index[0]);
    if (block.instruction != nullptr) {
      place += ", thread " + std::to_string(block.warp->number * kLanes + block.lane) + ", " +
               Place(*block.instruction);
    }
    throw Trap(failure + " (" + place + ")");
  }
}

}  // namespace emulated_gpu
