// Updates far below a unit in the last place of a bfloat16 weight: to the nearest it stands still,
// with random or residual bits it arrives. AdamW with constant gradients, whose step is the rate.

#include <leanopt/formats/full.hpp>
#include <leanopt/rules/adam.hpp>

#include "tests/conformance/lists.hpp"
#include "tests/engine/kernel_runs.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using namespace kernel_runs;
using leanopt::formats::full;
using leanopt::weights::plain;
using leanopt::weights::split24;
using leanopt::weights::split32;
using leanopt::weights::stochastic;
using adamw = way<leanopt::rules::adamw, false>;

constexpr std::size_t elements = 256;

/// The weights after `steps` steps of size `rate` from 0.1, and the tensor.
struct outcome {
  std::vector<double> weights;
  tensor last;
  double mean() const {
    double sum = 0;
    for (const double w : weights) sum += w;
    return sum / double(weights.size());
  }
};
template <class Weights>
outcome walk(number type, double rate, int steps) {
  patterns::source random(1);
  tensor t = fresh<adamw::formula, full, Weights>(type, {1, 1, elements, true}, random);
  const leanopt::operand p{t.p.data(), type, {}, t.residual.data()};
  const std::vector<float> start(elements, 0.1f);
  leanopt::cpu::write<float, Weights>(level::scalar, p, 0, elements, start.data(), 7);
  const bool is_float = type == number::float32;
  for (std::size_t i = 0; i < elements; ++i) t.g.set(i, is_float ? 0x3f800000u : 0x3f80u);  // 1
  plain_options::adamw o;
  o.lr(rate).eps(0);
  for (int i = 1; i <= steps; ++i) step<adamw, full, Weights>(leanopt::cpu::best_level(), o, i, t);
  std::vector<float> end(elements);
  leanopt::cpu::read<float, Weights>(level::scalar, p, 0, elements, end.data());
  return {{end.begin(), end.end()}, t};
}

struct trip {
  double rate;
  int steps;
};
constexpr trip trips[] = {{1e-6, 10000}, {1e-7, 100000}};
constexpr double goal = 0.09;

TEST(Stall, NearestStandsStill) {
  for (const trip& t : trips) {
    const outcome o = walk<plain>(number::bfloat16, t.rate, t.steps);
    for (const double w : o.weights) EXPECT_EQ(w, double(0x1.9ap-4f));  // 0.1 as bfloat16
  }
}
/// `unit` is the distance of neighbours at the weights' values.
template <class Weights>
void expect_arrival(double unit) {
  for (const trip& t : trips) {
    const outcome o = walk<Weights>(number::bfloat16, t.rate, t.steps);
    const double spread = tolerance::walk_spread(unit, t.rate, t.steps);
    for (const double w : o.weights)
      EXPECT_NEAR(w, goal, tolerance::largest_deviation * spread + tolerance::walk_bias(t.steps));
    EXPECT_NEAR(o.mean(), goal,
                tolerance::largest_deviation * spread / std::sqrt(double(elements)) +
                    tolerance::walk_bias(t.steps));
  }
}
TEST(Stall, StochasticArrives) { expect_arrival<stochastic>(0x1p-11); }
TEST(Stall, Split24Arrives) { expect_arrival<split24>(0x1p-19); }
TEST(Stall, Split32IsFloat32) {
  for (const trip& t : trips) {
    const outcome split = walk<split32>(number::bfloat16, t.rate, t.steps);
    const outcome expected = walk<plain>(number::float32, t.rate, t.steps);
    EXPECT_EQ(split.weights, expected.weights);
    for (const double w : split.weights) EXPECT_NEAR(w, goal, tolerance::walk_bias(t.steps));
  }
}

}  // namespace
