// Passes: runs the work items of CPU kernels in parallel, in memory and on threads of the host.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>

#include "library/float_control.h"
#include "library/profile.h"

namespace pyattn {
namespace {

// Memory of the host, given back at the end of its life.
class Buffer {
 public:
  Buffer() : owner_(nullptr, nullptr) {}
  Buffer(const Host& host, int64_t bytes) : Buffer(host.allocate(bytes)) {}
  void* data() const { return data_; }

 private:
  explicit Buffer(const Memory& memory) : data_(memory.data), owner_(memory.context, memory.free) {}

  void* data_ = nullptr;
  std::unique_ptr<void, void (*)(void*)> owner_;
};

// Runs all work items of a pass. A task that has finished its items claims the next ones. Scratch belongs
// to a task, not to a thread number.
template <class Params>
void run(const Host& host, const Pass<Params>& pass, const Plan& plan, const Params& p) {
  if (plan.items == 0) return;
  // Waking the other threads costs about 5 us, in which one thread does some 100,000 multiply-adds
  // of a small shape. It pays from ten times as many on.
  constexpr double kWorthThreads = 1 << 20;
  const double work = p.cpu.pairs * static_cast<double>(p.num_heads_q * (p.head_dim + p.head_dim_v));
  const int64_t tasks = work < kWorthThreads ? 1 : std::min(plan.items, host.max_tasks());
  // A task claims several small items at once, up to what is worth a thread: heads of one sequence
  // share memory pages. On two threads, 2000 sequences of up to 64 tokens took 9 % less time.
  const double most = static_cast<double>(plan.items) / static_cast<double>(16 * tasks);  // so tasks end together
  auto take =
      static_cast<int64_t>(std::max(1.0, std::min(most, kWorthThreads * static_cast<double>(plan.items) / work)));
  // Items that belong together are claimed together, unless a task would get none.
  if (plan.items >= tasks * plan.together) take = (take + plan.together - 1) / plan.together * plan.together;

  std::atomic<int64_t> next{0};
  const auto task = [&, control = float_control()] {
    const CallersControl same(control);
    const Buffer scratch(host, plan.scratch_bytes + kScratchAlign);
    auto address = reinterpret_cast<uintptr_t>(scratch.data());
    address = (address + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
    std::memset(reinterpret_cast<void*>(address), 0, std::min(plan.scratch_bytes, kScratchAlign));
    std::optional<TaskProfile> profile = begin_task(pass.name);
    Params own = p;
    own.cpu.counts = profile ? &profile->counts : nullptr;
    int64_t items = 0;
    for (int64_t item; (item = next.fetch_add(take)) < plan.items;) {
      const int64_t end = std::min(item + take, plan.items);
      pass.run(own, item, end, reinterpret_cast<void*>(address));
      items += end - item;
    }
    if (profile) end_task(*profile, items);
  };
  if (tasks == 1) return task();
  host.run_tasks(
      tasks, [](void* data) { (*static_cast<decltype(&task)>(data))(); },
      const_cast<void*>(static_cast<const void*>(&task)));
}

// Runs a pass whose result is an array, if it has any, and points `array`, a member of p, to it.
template <class Entry>
Buffer make_array(const Host& host, const Pass<ForwardParams>& pass, ForwardParams& p, Entry*& array) {
  const Plan plan = pass.plan(p);
  if (plan.workspace_bytes == 0) return {};
  Buffer memory(host, plan.workspace_bytes);
  array = static_cast<Entry*>(memory.data());
  run(host, pass, plan, p);
  return memory;
}

// The keys that a bool mask or a bias leaves each of its rows; null if it masks none.
Buffer make_rows(const Host& host, const Pass<ForwardParams>& pass, ForwardParams& p, RowKeys*& rows) {
  Buffer memory = make_array(host, pass, p, rows);
  const auto count = pass.plan(p).workspace_bytes / static_cast<int64_t>(sizeof(RowKeys));
  const auto whole = [&](const RowKeys& row) { return row.begin == 0 && row.end == p.seqlen_k && !row.holes; };
  if (std::all_of(rows, rows + count, whole)) rows = nullptr;
  return memory;
}

// Runs the passes that come before forward and backward: the units of packed sequences, and the visible
// keys of each row and block of rows, unless formulas give them.
std::array<Buffer, 4> prepare(const Host& host, const Kernels& table, ForwardParams& p) {
  std::array<Buffer, 4> memory;
  if (p.packed.sequences) memory[0] = make_array(host, table.count_units, p, p.cpu.before);
  memory[1] = make_rows(host, table.mask_rows, p, p.mask.mask_rows);
  memory[2] = make_rows(host, table.bias_rows, p, p.mask.bias_rows);
  memory[3] = make_array(host, table.mask_blocks, p, p.mask.blocks);
  return memory;
}

// Runs a pass, then the passes that combine its partial results in the workspace.
template <class Params, class... Next>
void run(const Host& host, const Pass<Params>& pass, Params& p, const Next&... next) {
  const Plan plan = pass.plan(p);
  const Buffer workspace(host, plan.workspace_bytes);
  p.workspace = workspace.data();
  run(host, pass, plan, p);
  (run(host, next, next.plan(p), p), ...);
}

const Pass<ForwardParams>& forward_pass(const Kernels& table, const ForwardParams& p) {
  const ByteType bytes = p.cpu.bytes.type;
  if (bytes == ByteType::kNone) return table.forward;
  return bytes == ByteType::kFloat8 ? table.forward_float8 : table.forward_int8;
}

}  // namespace

void run_forward(const Host& host, DType type, ForwardParams& p) {
  const Kernels table = kernels(type, is_plain(p));
  p.cpu.prefetch_to_l2 = prefetches_to_l2();
  const auto memory = prepare(host, table, p);
  run(host, forward_pass(table, p), p, table.merge_out);
}

void run_backward(const Host& host, DType type, BackwardParams& p) {
  const Kernels table = kernels(type, is_plain(p));
  p.cpu.prefetch_to_l2 = prefetches_to_l2();
  const auto memory = prepare(host, table, p);
  run(host, table.backward, p, table.reduce, table.bias_gradient, table.head_gradients, table.relative_gradient);
}

}  // namespace pyattn
