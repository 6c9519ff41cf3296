// Memory as it is handed out and given back: the data of tensors, by LibTorch's allocator for the
// CPU, and what operator new gives, which this header replaces. For one unit of a program.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <malloc.h>
#include <new>

namespace counting {

/// Bytes now, and since start() the most at any moment and all that was taken. Threads of
/// LibTorch's pool allocate as well.
class meter {
 public:
  void take(std::int64_t n) {
    taken_ += n;
    const std::int64_t now = live_ += n;
    std::int64_t before = peak_;
    while (before < now && !peak_.compare_exchange_weak(before, now)) {
    }
  }
  void give(std::int64_t n) { live_ -= n; }

  void start() {
    taken_ = 0;
    peak_ = first_ = live_.load();
  }
  std::int64_t live() const { return live_ - first_; }
  std::int64_t peak() const { return peak_ - first_; }
  std::int64_t taken() const { return taken_; }

 private:
  std::atomic<std::int64_t> live_{0}, peak_{0}, taken_{0};
  std::int64_t first_ = 0;
};
inline meter tensors;  ///< the bytes that were asked for
inline meter host;     ///< as malloc rounds them up

/// Counts on the way to LibTorch's own allocator.
class allocator final : public c10::Allocator {
 public:
  static void install() {
    static allocator counting(c10::GetCPUAllocator());
    c10::SetCPUAllocator(&counting, 1);
  }
  c10::DataPtr allocate(std::size_t n) override {
    auto* b = static_cast<block*>(std::malloc(sizeof(block)));  // none of operator new's bytes
    new (b) block{real_->allocate(n), std::int64_t(n)};
    tensors.take(b->size);
    void* const data = b->data.get();
    return {data, b, release, b->data.device()};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    real_->copy_data(to, from, n);
  }

 private:
  struct block {
    c10::DataPtr data;
    std::int64_t size;
  };
  explicit allocator(c10::Allocator* real) : real_(real) {}
  static void release(void* context) {
    auto* b = static_cast<block*>(context);
    tensors.give(b->size);
    b->~block();
    std::free(b);
  }
  c10::Allocator* real_;
};

// Not inlined, so that the compiler cannot pair a new with a free and warn of it.
[[gnu::noinline]] inline void* new_bytes_or_null(std::size_t n) noexcept {
  void* p = std::malloc(n ? n : 1);
  if (p) host.take(std::int64_t(malloc_usable_size(p)));
  return p;
}
inline void* new_bytes(std::size_t n) {
  if (void* p = new_bytes_or_null(n)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] inline void delete_bytes(void* p) noexcept {
  if (p) host.give(std::int64_t(malloc_usable_size(p)));
  std::free(p);
}

}  // namespace counting

void* operator new(std::size_t n) { return counting::new_bytes(n); }
void* operator new[](std::size_t n) { return counting::new_bytes(n); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  return counting::new_bytes_or_null(n);
}
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept {
  return counting::new_bytes_or_null(n);
}
void operator delete(void* p) noexcept { counting::delete_bytes(p); }
void operator delete[](void* p) noexcept { counting::delete_bytes(p); }
void operator delete(void* p, std::size_t) noexcept { counting::delete_bytes(p); }
void operator delete[](void* p, std::size_t) noexcept { counting::delete_bytes(p); }
