// Gradients that are not finite, and finite ones whose squares are not, through the classes. They
// are as visible as in LibTorch's classes, and in a compressed format they touch no other element,
// in their step or later.

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// A parameter and its optimizer's state after some steps.
struct outcome {
  Tensor p;
  std::map<std::string, Tensor> state;
};

constexpr std::int64_t elements = 5000, blocks = 20;
constexpr int steps = 40, bad_step = 3;

/// Runs a vector whose element `at` has no gradient, but `value` in one step. It starts as 0, so
/// that weight decay leaves it alone.
outcome run(const classes::subject& s, torch::ScalarType type, std::int64_t at, double value,
            int number_of_steps) {
  Tensor start = classes::made({elements}, type, 1);
  start[at] = 0;
  const Tensor p = classes::leaf(start);
  const auto optimizer = s.make({p});
  for (int step = 1; step <= number_of_steps; ++step) {
    Tensor g = classes::made({elements}, type, std::uint64_t(10 + step));
    g[at] = step == bad_step ? value : 0.0;
    p.mutable_grad() = g;
    optimizer->step();
  }
  outcome result{p.detach().clone(), {}};
  for (const auto& [name, t] : classes::state_of(*optimizer, p)) result.state[name] = t.clone();
  return result;
}

/// Whether two tensors have the same bits everywhere but at one element.
bool same_but_for(const Tensor& a, const Tensor& b, std::int64_t at) {
  Tensor x = a.clone(), y = b.clone();
  if (x.numel() == elements) {
    x[at] = 0;
    y[at] = 0;
  }
  return torch::equal(x, y);
}

std::string name_of(const testing::TestParamInfo<classes::subject>& info) {
  return info.param.name;
}

/// The classes of these names; there is no test without one.
std::vector<classes::subject> named(const std::vector<std::string>& names) {
  std::vector<classes::subject> result;
  for (const auto& s : classes::all())
    if (std::count(names.begin(), names.end(), s.name)) result.push_back(s);
  return result;
}

class Compressed : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Compressed, testing::ValuesIn(named({"Adam8bit", "AdamW8bit"})),
                         name_of);

TEST_P(Compressed, ElementTouchesNoOther) {
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kDouble})
    for (const std::int64_t at : {0, 255, 256, 1000, 4998, 4999})
      for (const int number_of_steps : {bad_step, bad_step + 1, steps}) {
        const outcome clean = run(GetParam(), type, at, 0, number_of_steps);
        for (const double value : {double(inf), -double(inf), double(nan), 1e30, -1e30}) {
          SCOPED_TRACE(testing::Message() << torch::toString(type) << ", element " << at << " = "
                                          << value << ", " << number_of_steps << " steps");
          const outcome dirty = run(GetParam(), type, at, value, number_of_steps);
          ASSERT_EQ(clean.state.size(), 4u);
          ASSERT_EQ(clean.state.at("exp_avg.header").numel(), blocks);
          ASSERT_EQ(clean.state.at("exp_avg").scalar_type(), torch::kByte);
          EXPECT_TRUE(std::isfinite(clean.p[at].item<double>()));
          EXPECT_FALSE(std::isfinite(dirty.p[at].item<double>())) << "the element must be visible";
          EXPECT_TRUE(same_but_for(clean.p, dirty.p, at)) << "a neighbour's p changed";
          for (const auto& [name, t] : clean.state)
            EXPECT_TRUE(same_but_for(t, dirty.state.at(name), at)) << name;
        }
      }
}

/// Ordinary gradients before and after, so that the element has a history and a future.
TEST_P(Compressed, ElementLeavesTheOthersFinite) {
  for (const float value : {inf, nan, 1e30f}) {
    const Tensor p = classes::leaf(classes::made({elements}, torch::kFloat, 1));
    const auto optimizer = GetParam().make({p});
    for (int step = 1; step <= 30; ++step) {
      Tensor g = classes::made({elements}, torch::kFloat, std::uint64_t(10 + step));
      if (step == bad_step) g[77] = value;
      p.mutable_grad() = g;
      optimizer->step();
    }
    const std::int64_t lost = elements - torch::isfinite(p).sum().item<std::int64_t>();
    EXPECT_EQ(lost, 1) << value;
  }
}

/// Adafactor's sums join all elements by its very formula, so there a NaN is everywhere, as in
/// Python's.
class Joined : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Joined, testing::ValuesIn(named({"Adafactor", "Adafactor8bit"})),
                         name_of);

TEST_P(Joined, ElementIsVisibleEverywhere) {
  for (const double value : {double(inf), double(nan)}) {
    const outcome result = run(GetParam(), torch::kFloat, 77, value, bad_step);
    EXPECT_FALSE(torch::isfinite(result.p).any().item<bool>()) << value;
  }
}

class Full : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Full, testing::ValuesIn(named({"Adam", "AdamW"})), name_of);

/// In full precision what is not finite stands where LibTorch's classes have it, in p and in both
/// moments.
TEST_P(Full, ElementIsAsVisibleAsInLibTorch) {
  for (const double value : {double(inf), -double(inf), double(nan), 1e30}) {
    const std::int64_t at = 1234;
    const outcome ours = run(GetParam(), torch::kFloat, at, value, steps);
    Tensor start = classes::made({elements}, torch::kFloat, 1);
    start[at] = 0;
    const Tensor p = classes::leaf(start);
    std::unique_ptr<torch::optim::Optimizer> theirs;
    if (GetParam().name == "Adam")
      theirs = std::make_unique<torch::optim::Adam>(
          std::vector<Tensor>{p}, torch::optim::AdamOptions(1e-2).weight_decay(0.1));
    else
      theirs = std::make_unique<torch::optim::AdamW>(
          std::vector<Tensor>{p}, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 1; step <= steps; ++step) {
      Tensor g = classes::made({elements}, torch::kFloat, std::uint64_t(10 + step));
      g[at] = step == bad_step ? value : 0.0;
      p.mutable_grad() = g;
      theirs->step();
    }
    // Inf in the first moment becomes NaN a step later in the one formula, m + w (g - m), and stays
    // Inf in the other, b m + w g.
    const auto agree = [&](const Tensor& a, const Tensor& b, const std::string& name) {
      EXPECT_TRUE(torch::equal(torch::isfinite(a), torch::isfinite(b))) << name << ", " << value;
    };
    EXPECT_TRUE(torch::equal(torch::isnan(ours.p), torch::isnan(p.detach()))) << value;
    agree(ours.p, p.detach(), "p");
    const auto expected = classes::state_of(*theirs, p);
    ASSERT_EQ(expected.size(), 2u);
    for (const auto& [name, t] : expected) agree(ours.state.at(name), t, name);
    EXPECT_FALSE(std::isfinite(ours.state.at("exp_avg_sq")[at].item<float>())) << value;
  }
}

}  // namespace
