// The scalars of a step, with every class: gradients multiplied as they are read, a step left out
// as if it had never been called.

#include <leanopt/optim/scalars.hpp>

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace {

using leanopt::step_scalars;
using torch::Tensor;

constexpr torch::ScalarType types[] = {torch::kFloat, torch::kBFloat16, torch::kHalf,
                                       torch::kDouble};

std::string name_of(const testing::TestParamInfo<classes::subject>& info) {
  return info.param.name;
}
Tensor number(double x) { return torch::tensor(x, torch::kFloat); }

/// Parameters and their optimizer.
struct subject_run {
  std::vector<Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  subject_run(const classes::subject& s, torch::ScalarType type,
              leanopt::nonfinite what = leanopt::nonfinite::propagate)
      : parameters(classes::small_parameters(type)), optimizer(s.make(parameters, what)) {}
  /// A step whose made-up gradients are multiplied by `factor` beforehand.
  void step(int count, double factor, const step_scalars& scalars = {}) {
    std::uint64_t seed = std::uint64_t(count) * 1000;
    for (const Tensor& p : parameters) {
      const Tensor g = classes::made(p.sizes().vec(), p.scalar_type(), ++seed);
      p.mutable_grad() = factor == 1 ? g : g * factor;
    }
    ASSERT_TRUE(leanopt::set_step_scalars(*optimizer, scalars));
    optimizer->step();
  }
  std::uint64_t digest() { return classes::digest_of(*optimizer); }
};

class Scalars : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Scalars, testing::ValuesIn(classes::all()), name_of);

/// Products with powers of two are exact in every type.
TEST_P(Scalars, MultiplyTheGradient) {
  for (const auto type : types) {
    if (type == torch::kHalf && !GetParam().takes_float16) continue;
    SCOPED_TRACE(torch::toString(type));
    subject_run scaled(GetParam(), type), plain(GetParam(), type), other(GetParam(), type);
    for (int step = 1; step <= 3; ++step) {
      scaled.step(step, 1, {number(4), number(0), number(2)});
      plain.step(step, 8);
      other.step(step, 1);
    }
    EXPECT_EQ(scaled.digest(), plain.digest());
    EXPECT_NE(scaled.digest(), other.digest()) << "the factor changed nothing";
  }
}

TEST_P(Scalars, LeaveOutAStep) {
  for (const auto type : types) {
    if (type == torch::kHalf && !GetParam().takes_float16) continue;
    SCOPED_TRACE(torch::toString(type));
    subject_run with(GetParam(), type), without(GetParam(), type);
    with.step(7, 1, {{}, number(1), {}});
    EXPECT_EQ(classes::steps_of(*with.optimizer, with.parameters[0]), 0) << "before the first";
    for (int step = 1; step <= 3; ++step) {
      with.step(step, 1);
      with.step(9, 1, {number(0.5), number(2), {}});
      without.step(step, 1);
    }
    EXPECT_EQ(with.digest(), without.digest());
    EXPECT_EQ(classes::steps_of(*with.optimizer, with.parameters[0]), 3);
    EXPECT_EQ(classes::skipped_by(*with.optimizer).steps, 0);
  }
}

TEST_P(Scalars, ServeOneStep) {
  subject_run x(GetParam(), torch::kFloat), y(GetParam(), torch::kFloat);
  x.step(1, 1, {number(0.5), {}, {}});
  x.optimizer->step();
  y.step(1, 0.5);
  for (const Tensor& p : y.parameters) p.mutable_grad().mul_(2);
  y.optimizer->step();
  EXPECT_EQ(x.digest(), y.digest());
}

TEST_P(Scalars, OutliveAStepThatThrows) {
  subject_run x(GetParam(), torch::kFloat), y(GetParam(), torch::kFloat);
  x.step(1, 1);
  y.step(1, 1);
  ASSERT_TRUE(leanopt::set_step_scalars(*x.optimizer, {number(0.5), {}, {}}));
  const Tensor kept = x.parameters[0].grad();
  x.parameters[0].mutable_grad() = torch::sparse_coo_tensor({70, 65}, torch::kFloat);
  EXPECT_THROW(x.optimizer->step(), c10::Error);
  x.parameters[0].mutable_grad() = kept;
  x.optimizer->step();
  y.step(1, 0.5);
  EXPECT_EQ(x.digest(), y.digest());
}

/// A gradient that overflows its square is fine once it is scaled, and the other way round.
TEST_P(Scalars, ScaleBeforeTheFiniteCheck) {
  for (const auto what : {leanopt::nonfinite::skip_step, leanopt::nonfinite::skip_element}) {
    subject_run x(GetParam(), torch::kFloat, what);
    x.step(1, 0x1p80, {number(0x1p-80), {}, {}});
    EXPECT_EQ(classes::skipped_by(*x.optimizer).steps, 0);
    EXPECT_EQ(classes::skipped_by(*x.optimizer).elements, 0);
    subject_run y(GetParam(), torch::kFloat);
    y.step(1, 1);
    EXPECT_EQ(x.digest(), y.digest());
    x.step(1, 1, {number(0x1p80), {}, {}});
    EXPECT_GT(classes::skipped_by(*x.optimizer).steps + classes::skipped_by(*x.optimizer).elements,
              0);
  }
}

TEST_P(Scalars, AreCheckedWhenTheyAreSet) {
  subject_run x(GetParam(), torch::kFloat);
  const auto refuses = [&](step_scalars s, const char* word) {
    try {
      leanopt::set_step_scalars(*x.optimizer, std::move(s));
      ADD_FAILURE() << word << " was taken";
    } catch (const c10::Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
    }
  };
  refuses({torch::ones({2}), {}, {}}, "inv_scale");
  refuses({{}, torch::ones({}, torch::kLong), {}}, "found_inf");
  refuses({{}, {}, torch::ones({0})}, "clip");
}

TEST(LibTorchsOwn, UseNoScalars) {
  const Tensor p = torch::ones({2}, torch::requires_grad());
  torch::optim::SGD sgd({p}, 0.1);
  EXPECT_FALSE(leanopt::set_step_scalars(sgd, {}));
}

}  // namespace
