// What a step allocates. This program's operator new and LibTorch's allocator for CPU memory count
// every byte. From its second step on an optimizer allocates nothing whose size grows with a
// tensor, but for one byte per 4096 elements by which LibTorch hands out the work.

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <vector>

namespace {

/// Counts while it is switched on; threads of LibTorch's pool allocate as well.
struct counter {
  std::atomic<bool> on{false};
  std::atomic<std::size_t> bytes{0}, largest{0}, count{0};

  void add(std::size_t n) {
    if (!on) return;
    bytes += n;
    ++count;
    std::size_t before = largest;
    while (before < n && !largest.compare_exchange_weak(before, n)) {
    }
  }
  void start() {
    bytes = largest = count = 0;
    on = true;
  }
};
counter allocated;

class counting_allocator final : public c10::Allocator {
 public:
  explicit counting_allocator(c10::Allocator* real) : real_(real) {}
  c10::DataPtr allocate(std::size_t n) override {
    allocated.add(n);
    return real_->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    real_->copy_data(to, from, n);
  }

 private:
  c10::Allocator* real_;
};

class Allocations : public testing::TestWithParam<classes::subject> {
 protected:
  static void SetUpTestSuite() {
    static counting_allocator counting(c10::GetCPUAllocator());
    c10::SetCPUAllocator(&counting, 1);
  }

  struct amount {
    std::size_t bytes, largest;
  };
  /// What each of some steps allocates; gradients are made outside of it.
  static std::vector<amount> of_steps(const std::vector<torch::Tensor>& parameters, int steps) {
    std::vector<amount> result;
    classes::run(GetParam(), parameters, steps, [&](const std::function<void()>& step) {
      allocated.start();
      step();
      allocated.on = false;
      result.push_back({allocated.bytes, allocated.largest});
    });
    return result;
  }
};
INSTANTIATE_TEST_SUITE_P(Class, Allocations, testing::ValuesIn(classes::all()),
                         [](const auto& info) { return info.param.name; });

using classes::leaf;
using classes::made;

/// One byte per unit of work, and the objects of fixed size that a step is made of.
constexpr std::size_t allowed_once = 64 << 10;
std::size_t allowed(std::size_t elements) { return 2 * allowed_once + 4 * (elements / 4096); }

TEST_P(Allocations, OfLaterStepsDoNotGrowWithTheTensor) {
  const std::int64_t rows = 2100, columns = 2300, n = rows * columns;
  const auto steps = of_steps(
      {leaf(made({rows, columns}, torch::kFloat, 1)), leaf(made({100003}, torch::kFloat, 2)),
       leaf(made({columns, 300}, torch::kFloat, 3).t()),
       leaf(made({300, columns}, torch::kBFloat16, 4)),
       leaf(made({columns, 300}, torch::kBFloat16, 5).t()),
       leaf(made({columns, 300}, torch::kDouble, 6))},
      3);
  for (std::size_t i = 1; i < steps.size(); ++i) {
    EXPECT_LT(steps[i].largest, allowed_once) << "step " << i + 1;
    EXPECT_LT(steps[i].bytes, allowed(2 * n)) << "step " << i + 1;
  }
  EXPECT_GT(steps[0].largest, std::size_t(columns * 4)) << "the first step's state was not counted";
}

/// The first step allocates the state and, for Adafactor, scratch of the size of its factors and of
/// partial column sums per 64 rows.
TEST_P(Allocations, OfTheFirstStepAreTheState) {
  const std::int64_t rows = 2100, columns = 2300;
  const torch::Tensor p = leaf(made({rows, columns}, torch::kFloat, 1));
  std::size_t before = 0, state = 0;
  const auto optimizer = GetParam().make({p});
  p.mutable_grad() = made({rows, columns}, torch::kFloat, 2);
  allocated.start();
  optimizer->step();
  allocated.on = false;
  before = allocated.bytes;
  for (const auto& [name, t] : classes::state_of(*optimizer, p)) state += t.nbytes();
  const auto scratch = std::size_t(4 * (rows + columns) + 4 * columns * (rows / 64 + 1) +
                                   8 * (rows * columns / 4096 + 1));
  EXPECT_GE(before, state);
  EXPECT_LT(before, state + scratch + allowed(std::size_t(rows * columns)));
}

/// Operators of LibTorch that this thread calls while it lives.
class operator_calls {
 public:
  operator_calls()
      : handle_(
            at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
                                         ++count;
                                         return std::unique_ptr<at::ObserverContext>();
                                       }).scopes({at::RecordScope::FUNCTION}))) {
    count = 0;
  }
  ~operator_calls() { at::removeCallback(handle_); }
  operator_calls(const operator_calls&) = delete;
  operator_calls& operator=(const operator_calls&) = delete;

  static inline std::size_t count = 0;

 private:
  at::CallbackHandle handle_;
};

/// From the second step on nothing is allocated and no operator called, however many tensors there
/// are; what LibTorch needs to start its threads is the exception.
TEST_P(Allocations, OfLaterStepsAreNoneOnOneThread) {
  for (const int threads : {1, 2}) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    std::vector<torch::Tensor> parameters;
    for (std::uint64_t i = 0; i < 50; ++i)
      for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
        parameters.push_back(leaf(made({64, 100}, type, i)));
        parameters.push_back(leaf(made({100}, type, i)));
      }
    const auto optimizer = GetParam().make(parameters);
    for (const torch::Tensor& p : parameters)
      p.mutable_grad() = made(p.sizes().vec(), p.scalar_type(), 7);
    for (int step = 1; step <= 3; ++step) {
      const operator_calls calls;
      allocated.start();
      optimizer->step();
      allocated.on = false;
      if (step == 1) {
        EXPECT_GT(calls.count, 100u) << "the first step's state was not counted";
        continue;
      }
      EXPECT_LE(allocated.count, threads == 1 ? 0u : 100u) << "step " << step;
      EXPECT_EQ(calls.count, 0u) << "step " << step;
    }
    at::set_num_threads(before);
  }
}

TEST_P(Allocations, OfManySmallTensorsAreSmall) {
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < 100; ++i) {
    parameters.push_back(leaf(made({64, 100}, torch::kFloat, std::uint64_t(i))));
    parameters.push_back(leaf(made({100}, torch::kFloat, std::uint64_t(i))));
  }
  const auto steps = of_steps(parameters, 3);
  // The list of the work: about 600 bytes a tensor, of which the elements are 25,600.
  EXPECT_LT(steps[2].bytes, parameters.size() * 3200);
}

}  // namespace

// Not inlined, so that the compiler cannot pair a new with a free and warn of it.
[[gnu::noinline]] static void* counted_new(std::size_t n) {
  allocated.add(n);
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t n) { return counted_new(n); }
void* operator new[](std::size_t n) { return counted_new(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
