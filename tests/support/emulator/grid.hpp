// The grid of a launch: blocks one after the other, their threads as fibers that meet in warp
// intrinsics and barriers. One random warp runs as far as it can go, then another: of the orders
// tried, the one under which a missing barrier shows. A fault of the kernel is an exception of the
// launch: lanes that meet in different intrinsics or with different masks, a barrier or an
// intrinsic that some threads never reach, threads that leave while others wait for them.
#pragma once

#include "tests/support/emulator/fiber.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr unsigned count() const { return x * y * z; }
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

/// What kernels declare as extern __shared__ uint4 dynamic_shared[].
inline uint4 dynamic_shared[(48 << 10) / sizeof(uint4)];

namespace emulator {

/// What is wrong with a kernel, and where it was found.
struct fault : std::logic_error {
  using logic_error::logic_error;
};

/// How the launches of this process run: set by tests.
struct settings {
  unsigned seed = 1;
  int processors = 2;
  int launches = 0;  ///< counted
  /// What a seed of a reciprocal or of a reciprocal root is off by, in units of its last place.
  int seed_error = 0;
  /// Where there is one, launches are recorded here instead.
  std::vector<std::function<void()>>* graph = nullptr;
};
inline settings& here() {
  static settings all;
  return all;
}

inline constexpr int warp_size = 32;

class grid {
 public:
  grid(dim3 blocks, dim3 threads, std::size_t shared_bytes, std::function<void()> kernel)
      : blocks_(blocks),
        size_(threads),
        shared_bytes_(shared_bytes),
        kernel_(std::move(kernel)),
        threads_(threads.count()),
        warps_((threads.count() + warp_size - 1) / warp_size),
        random_(here().seed) {
    if (threads_.size() > 1024 || threads_.empty() || blocks.count() == 0)
      throw fault("emulator: a launch has 1 to 1024 threads a block, and a block");
    if (shared_bytes_ > sizeof dynamic_shared)
      throw fault("emulator: more than 48 KiB of shared memory");
  }

  void run() {
    current_grid() = this;
    for (unsigned b = 0; b < blocks_.count() && fault_.empty(); ++b) {
      block_ = dim3(b % blocks_.x, b / blocks_.x % blocks_.y, b / (blocks_.x * blocks_.y));
      run_block();
    }
    current_grid() = nullptr;
    if (!fault_.empty()) throw fault(fault_);
  }

  // What the kernel's text sees, of the running thread.
  static grid& now() { return *current_grid(); }
  dim3 block() const { return block_; }
  dim3 blocks() const { return blocks_; }
  dim3 threads() const { return size_; }
  dim3 thread() const {
    return {current_ % size_.x, current_ / size_.x % size_.y, current_ / (size_.x * size_.y)};
  }
  unsigned lane() const { return current_ % warp_size; }

  void barrier() {
    threads_[current_].waits = state::at_barrier;
    leave();
  }

  /// The values that the lanes of `mask` bring to the intrinsic `name`: all wait for all. Good
  /// until the next meeting but one.
  const std::uint64_t* meet(unsigned mask, std::uint64_t value, const char* name) {
    warp& w = warps_[current_ / warp_size];
    if (!(mask >> lane() & 1)) fail("a lane is not in its own mask, in ", name);
    if (w.arrived == 0) {
      w.mask = mask;
      w.name = name;
    } else if (w.mask != mask) {
      fail("lanes of a warp meet with different masks, in ", name);
    } else if (std::strcmp(w.name, name) != 0) {
      fail("lanes of a warp meet in different intrinsics, of which one is ", name);
    }
    std::uint64_t* values = w.values[w.turn];
    values[lane()] = value;
    w.arrived |= 1u << lane();
    if (w.arrived == mask) {
      w.arrived = 0;
      w.turn ^= 1;
      const unsigned first = current_ - lane();
      for (unsigned l = 0; l < warp_size && first + l < threads_.size(); ++l)
        if (mask >> l & 1) threads_[first + l].waits = state::ready;
    } else {
      threads_[current_].waits = state::at_meeting;
      leave();
    }
    return values;
  }

  /// Ends the launch from inside a thread, whose stack is never used again: what stands there is
  /// not destroyed.
  void fail(const char* why, const char* where = "") {
    report(why, where);
    leave();
  }

 private:
  enum class state { ready, at_barrier, at_meeting, gone };
  struct thread_t {
    fiber stack;
    state waits = state::ready;
  };
  struct warp {
    std::uint64_t values[2][warp_size];
    unsigned arrived = 0, mask = 0;
    int turn = 0;
    const char* name = "";
  };

  static grid*& current_grid() {
    static grid* g = nullptr;
    return g;
  }
  static void entry() {
    fiber::begun(now().scheduler_);
    now().kernel_();
    now().threads_[now().current_].waits = state::gone;
    now().leave();
  }
  void leave() { fiber::change(threads_[current_].stack, scheduler_); }
  void go_on(unsigned thread) {
    current_ = thread;
    fiber::change(scheduler_, threads_[thread].stack);
  }
  void report(const char* why, const char* where = "") {
    std::ostringstream s;
    s << "emulator: " << why << where << " (block " << block_.x << ", thread " << current_ << ")";
    fault_ = s.str();
  }

  void run_block() {
    // Garbage, so that nothing is read that this block did not write.
    std::memset(static_cast<void*>(dynamic_shared), 0xff, shared_bytes_);
    for (thread_t& t : threads_) {
      t.stack.start(entry);
      t.waits = state::ready;
    }
    for (warp& w : warps_) w = {};
    while (fault_.empty() && count(state::gone) < threads_.size()) {
      const std::size_t start = random_() % warps_.size();
      bool ran = false;
      for (std::size_t i = 0; i < warps_.size() && !ran; ++i)
        ran = run_warp((start + i) % warps_.size());
      if (!ran) release_barrier();
    }
  }
  /// Runs the lanes of a warp, in random order, as far as they go. Whether any could.
  bool run_warp(std::size_t w) {
    const unsigned first = unsigned(w) * warp_size;
    const unsigned lanes = std::min<unsigned>(warp_size, unsigned(threads_.size()) - first);
    bool ran = false;
    for (bool more = true; more && fault_.empty();) {
      more = false;
      const unsigned start = unsigned(random_()) % lanes;
      for (unsigned i = 0; i < lanes && fault_.empty(); ++i) {
        const unsigned t = first + (start + i) % lanes;
        if (threads_[t].waits != state::ready) continue;
        go_on(t);
        more = ran = true;
      }
    }
    return ran;
  }
  /// All threads wait or are gone: only a barrier that all have reached lets them go on.
  void release_barrier() {
    if (count(state::at_meeting))
      return report("lanes wait in a warp intrinsic that others of their mask never reach");
    if (count(state::at_barrier) < threads_.size())
      return report("threads wait at a barrier that others left without");
    for (thread_t& t : threads_) t.waits = state::ready;
  }
  std::size_t count(state s) const {
    std::size_t n = 0;
    for (const thread_t& t : threads_) n += t.waits == s;
    return n;
  }

  dim3 blocks_, size_, block_;
  std::size_t shared_bytes_;
  std::function<void()> kernel_;
  fiber scheduler_;
  std::vector<thread_t> threads_;
  std::vector<warp> warps_;
  unsigned current_ = 0;
  std::mt19937 random_;
  std::string fault_;
};

}  // namespace emulator
