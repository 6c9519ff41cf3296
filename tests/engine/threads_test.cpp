// Threads. This program is compiled without OpenMP, as a consumer's is that does not ask for it:
// there LibTorch's own at::parallel_for is serial. The number of threads changes how long a step
// takes and no bit of its result.

#include <leanopt/leanopt.hpp>

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#ifdef _OPENMP
#error "this test is worth nothing in a program that is compiled with OpenMP"
#endif

namespace {

/// Sets the number of LibTorch's threads while it lives.
class with_threads {
 public:
  explicit with_threads(int n) : before_(at::get_num_threads()) { at::set_num_threads(n); }
  ~with_threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

std::size_t threads_of(std::size_t units, std::size_t grain) {
  std::set<std::thread::id> seen;
  std::mutex lock;
  leanopt::engine::for_units(units, grain, [&](std::size_t, std::size_t) {
    const std::lock_guard<std::mutex> guard(lock);
    seen.insert(std::this_thread::get_id());
  });
  return seen.size();
}

TEST(ForUnits, UsesAsManyThreadsAsLibTorch) {
  for (const int n : {1, 2, 3}) {
    const with_threads guard(n);
    EXPECT_EQ(threads_of(10000, 4), std::size_t(n));
  }
  const with_threads guard(2);
  EXPECT_EQ(threads_of(4, 4), 1u);  // too little to share
  EXPECT_EQ(threads_of(0, 4), 0u);
}

TEST(ForUnits, HandsOutEveryUnitOnce) {
  for (const int n : {1, 2, 7}) {
    const with_threads guard(n);
    for (const std::size_t count : {1u, 4u, 5u, 8u, 9u, 1000u, 16117u}) {
      std::vector<std::atomic<int>> times(count);
      leanopt::engine::for_units(count, 4, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) ++times[i];
      });
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(times[i], 1) << i << " of " << count;
    }
  }
}

/// A way to read weights that tells which threads make a step.
struct watched_weights : leanopt::weights::plain {
  template <class Bits, class V>
  LEANOPT_HD static V read(const leanopt::ints<V>& word, const leanopt::ints<V>& rest) {
    note();
    return plain::read<Bits, V>(word, rest);
  }
  [[gnu::noinline]] static void note() {
    const std::lock_guard<std::mutex> guard(lock);
    seen.insert(std::this_thread::get_id());
  }
  static inline std::mutex lock;
  static inline std::set<std::thread::id> seen;
};

template <class Rule>
std::size_t threads_of_a_step(std::vector<std::vector<std::int64_t>> shapes) {
  std::vector<torch::Tensor> parameters;
  for (const auto& sizes : shapes) {
    parameters.push_back(classes::leaf(classes::made(sizes, torch::kBFloat16, 1)));
    parameters.back().mutable_grad() = classes::made(sizes, torch::kBFloat16, 2);
  }
  leanopt::optimizer<Rule, leanopt::formats::full, watched_weights> optimizer(parameters);
  watched_weights::seen.clear();
  optimizer.step();
  return watched_weights::seen.size();
}

TEST(Step, OfALargeTensorUsesAllThreads) {
  for (const int n : {1, 2, 3}) {
    const with_threads guard(n);
    EXPECT_EQ((threads_of_a_step<leanopt::rules::adamw>({{1000, 1000}})), std::size_t(n));
    EXPECT_EQ((threads_of_a_step<leanopt::rules::adafactor>({{2100, 2100}})), std::size_t(n));
  }
}

TEST(Step, OfManySmallTensorsUsesAllThreads) {
  const with_threads guard(2);
  const std::vector<std::vector<std::int64_t>> shapes(100, {100, 100});
  EXPECT_EQ(threads_of_a_step<leanopt::rules::adamw>(shapes), 2u);
}

TEST(Step, OfOneSmallTensorStaysOnTheCallersThread) {
  const with_threads guard(2);
  EXPECT_EQ((threads_of_a_step<leanopt::rules::adamw>({{100, 100}})), 1u);
  EXPECT_EQ(watched_weights::seen.count(std::this_thread::get_id()), 1u);
}

/// Backward calls a tensor's hooks, on whatever thread it runs.
TEST(Step, InsideAHookIsAStep) {
  const auto moved = [](bool in_hook) {
    const torch::Tensor p = classes::leaf(classes::made({300, 300}, torch::kFloat, 1));
    const torch::Tensor other = classes::leaf(classes::made({300, 300}, torch::kFloat, 2));
    leanopt::AdamW optimizer({p});
    p.mutable_grad() = classes::made({300, 300}, torch::kFloat, 3);
    if (in_hook) other.register_hook([&](const torch::Tensor&) { optimizer.step(); });
    (other * other).sum().backward();
    if (!in_hook) optimizer.step();
    return p.detach().clone();
  };
  EXPECT_TRUE(torch::equal(moved(true), moved(false)));
}

TEST(Step, OfTwoOptimizersOnTwoThreads) {
  const auto run = [](std::uint64_t seed) {
    const torch::Tensor p = classes::leaf(classes::made({300, 301}, torch::kFloat, seed));
    leanopt::AdamW8bit optimizer({p});
    for (int step = 0; step < 20; ++step) {
      p.mutable_grad() = classes::made({300, 301}, torch::kFloat, seed + 10);
      optimizer.step();
    }
    return p.detach().clone();
  };
  const torch::Tensor expected[] = {run(1), run(2)};
  torch::Tensor actual[2];
  std::thread first([&] { actual[0] = run(1); }), second([&] { actual[1] = run(2); });
  first.join();
  second.join();
  EXPECT_TRUE(torch::equal(actual[0], expected[0]));
  EXPECT_TRUE(torch::equal(actual[1], expected[1]));
}

// ---- bits ---------------------------------------------------------------------------------------

/// Shapes that are worth more than one thread, and small ones between them. Adafactor's threads
/// share large matrices only.
std::vector<torch::Tensor> parameters(const classes::subject& s) {
  auto result = classes::small_parameters(torch::kFloat);
  if (s.name.find("Adafactor") == 0)
    result.push_back(classes::leaf(classes::made({2100, 2100}, torch::kFloat, 8)));
  result.push_back(classes::leaf(classes::made({300001}, torch::kFloat, 9)));
  result.push_back(classes::leaf(classes::made({1001, 129}, torch::kBFloat16, 10)));
  return result;
}

class SameBits : public testing::TestWithParam<classes::subject> {
 protected:
  static std::uint64_t run(const classes::condition& under,
                           patterns::kind gradients = patterns::kind::normal) {
    return classes::run(GetParam(), parameters(GetParam()), 2, under, gradients);
  }
  static std::uint64_t on_one_thread(patterns::kind gradients = patterns::kind::normal) {
    const with_threads guard(1);
    return run(classes::as_it_is, gradients);
  }
};
INSTANTIATE_TEST_SUITE_P(Class, SameBits, testing::ValuesIn(classes::all()),
                         [](const auto& info) { return info.param.name; });

TEST_P(SameBits, OnAnyNumberOfThreads) {
  const std::uint64_t expected = on_one_thread();
  for (const int n : {2, 7}) {
    const with_threads guard(n);
    EXPECT_EQ(run(classes::as_it_is), expected) << n << " threads";
  }
}

TEST_P(SameBits, InsideAParallelRegion) {
  const std::uint64_t expected = on_one_thread();
  const with_threads guard(2);
  EXPECT_EQ(run([](const std::function<void()>& step) {
              at::parallel_for(0, 1, 1, [&](std::int64_t, std::int64_t) { step(); });
            }),
            expected);
  bool elsewhere = false;
  const auto caller = std::this_thread::get_id();
  EXPECT_EQ(run([&](const std::function<void()>& step) {  // on the pool's second thread
              leanopt::engine::for_units(2, 1, [&](std::size_t, std::size_t end) {
                if (end < 2) return;
                elsewhere = std::this_thread::get_id() != caller;
                step();
              });
            }),
            expected);
  EXPECT_TRUE(elsewhere);
}

/// at::set_flush_denormal(true) makes zeros of subnormal numbers in the calling thread; a step
/// neither feels it nor ends it.
TEST_P(SameBits, WhenSubnormalNumbersAreFlushed) {
  const std::uint64_t expected = on_one_thread(patterns::kind::octaves);
  const with_threads guard(2);
  if (!at::globalContext().setFlushDenormal(true)) GTEST_SKIP() << "this processor cannot flush";
  const std::uint64_t flushed = run(classes::as_it_is, patterns::kind::octaves);
  volatile float smallest = std::numeric_limits<float>::min();
  const float half = smallest / 2;
  at::globalContext().setFlushDenormal(false);
  EXPECT_EQ(half, 0) << "a step must leave the caller's floating-point environment as it was";
  EXPECT_EQ(flushed, expected);
}

}  // namespace
