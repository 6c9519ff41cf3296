// Fibers: functions with stacks of their own, of which one runs until it hands over to another. On
// x86-64 a switch saves the registers that a call preserves, without the system call that makes
// ucontext ten times slower; elsewhere it is ucontext. AddressSanitizer is told of every switch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if defined(__x86_64__)
// Saves the callee's registers and the stack pointer at *from, and takes those at `to`.
asm(R"(
  .text
  .weak emulator_switch
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");
extern "C" void emulator_switch(void** from, void* to);
#endif

namespace emulator {

/// A stack and where it was left. One without a stack of its own is the thread's.
class fiber {
 public:
  static constexpr std::size_t stack_bytes = 256 << 10;

  fiber() = default;
  ~fiber() {
    if (stack_) spare_stacks().push_back(std::move(stack_));
  }
  fiber(const fiber&) = delete;
  fiber& operator=(const fiber&) = delete;

  /// Makes it begin in `entry`, which never returns, at the next switch to it.
  void start(void (*entry)()) {
    if (!stack_) stack_ = take_stack();
    begin_ = stack_.get();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(begin_, stack_bytes);  // frames that a fault has left there
#endif
#if defined(__x86_64__)
    auto* top = reinterpret_cast<void**>(
        (reinterpret_cast<std::uintptr_t>(stack_.get() + stack_bytes) & ~std::uintptr_t(15)));
    *--top = nullptr;  // entry's return address, so that the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = stack_bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  /// Leaves `from` here and goes on in `to`.
  static void change(fiber& from, fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack_, to.begin_, to.size());
#endif
#if defined(__x86_64__)
    emulator_switch(&from.pointer_, to.pointer_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
    arrived(from);
  }
  /// The first thing that a fiber does.
  static void begun(fiber& previous) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &previous.begin_, &previous.thread_bytes_);
#else
    (void)previous;
#endif
  }

 private:
  using stack = std::unique_ptr<char[]>;
  /// Stacks of launches that are over: to make new ones costs more than to run most kernels.
  static std::vector<stack>& spare_stacks() {
    static std::vector<stack> spare;
    return spare;
  }
  static stack take_stack() {
    if (spare_stacks().empty()) return stack(new char[stack_bytes]);
    stack s = std::move(spare_stacks().back());
    spare_stacks().pop_back();
    return s;
  }

  static void arrived([[maybe_unused]] fiber& back) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(back.fake_stack_, nullptr, nullptr);
#endif
  }
  std::size_t size() const { return stack_ ? stack_bytes : thread_bytes_; }

  stack stack_;
  const void* begin_ = nullptr;
#if defined(__x86_64__)
  void* pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
  [[maybe_unused]] void* fake_stack_ = nullptr;
  std::size_t thread_bytes_ = 0;
};

}  // namespace emulator
