// Behaviours of Adafactor that implementations have got wrong, each under its number: both
// published forms with known results, shapes, edges, options (D01 to D09, D11, D12). Expected
// numbers are the formulas of the papers and of the Python classes in 50 digits. What a wrong
// implementation gave is noted where a test would otherwise seem to look at nothing.

#include <leanopt/leanopt.hpp>

#include "tests/cases/kinds.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using cases::expect_changes;
using cases::expect_values;
using cases::expect_words;
using cases::make_parameter;
using cases::make_tensor;
using cases::message_of;
using cases::numbers;
using cases::ones_parameter;
using cases::state_of;
using cases::step_with;
using leanopt::Adafactor;
using leanopt::AdafactorOptions;
using torch::Tensor;

// The matrix of the first cases and three gradients of it.
const std::vector<double> start = {1, -2, 3, 0.5, 0.25, -1.5};
const std::vector<std::vector<double>> gradients = {
    {0.1, -0.2, 0.3, 0.4, 0.5, -0.6}, {-0.3, 0.1, 0.05, 0.2, -0.4, 0.7}, {0, 0, 0, 1, -1, 2}};
// Root mean square of the first update, before it is clipped.
constexpr double first_rms = 0.9708645162;

/// That matrix after `steps` steps, its gradients multiplied by `scale`.
template <class Kind>
Tensor run(const AdafactorOptions& options, int steps, double scale = 1) {
  Tensor p = make_parameter<Kind>(start, {2, 3});
  Adafactor optimizer({p}, options);
  for (int t = 0; t < steps; ++t) {
    step_with(optimizer, p, scale * make_tensor<Kind>(gradients[t], {2, 3}));
  }
  return p;
}

AdafactorOptions fixed_rate(double lr) {
  return AdafactorOptions::hugging_face().lr(lr).relative_step(false);
}
AdafactorOptions fixed_rate_unscaled(double lr) { return fixed_rate(lr).scale_parameter(false); }

/// The root mean square of how far a parameter is from where it started.
double rms_of_change(const Tensor& p) {
  const std::vector<double> values = numbers(p);
  double sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += (values[i] - start[i]) * (values[i] - start[i]);
  }
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// D01: both forms agree with their defaults

LEANOPT_IN_FULL_PRECISION(D01, both_forms_give_the_known_values) {
  for (const auto& options : {AdafactorOptions::hugging_face(), AdafactorOptions()}) {
    SCOPED_TRACE(options.is_hugging_face() ? "Hugging Face's form" : "torch.optim's form");
    expect_values(
        run<Kind>(options, 1),
        {0.9897264737, -1.984268324, 2.981056553, 0.4824774146, 0.233229977, -1.483844975},
        Kind::relative);
    expect_values(
        run<Kind>(options, 3),
        {1.021393433, -1.992876465, 2.978118394, 0.4503638275, 0.2697750602, -1.524458446},
        Kind::relative);
  }
}

// An update of RMS below 1 is not scaled up to the threshold, so a first step shows that RMS; with
// a lower threshold it shows the threshold.
LEANOPT_IN_FULL_PRECISION(D01, clips_by_the_root_mean_square_of_the_update) {
  const Tensor fresh = make_parameter<Kind>(start, {2, 3});
  const double rate = Adafactor({fresh}, AdafactorOptions::hugging_face()).effective_lr(fresh);
  const auto lower = AdafactorOptions::hugging_face().clip_threshold(0.5);
  EXPECT_NEAR(rms_of_change(run<Kind>(AdafactorOptions::hugging_face(), 1)), rate * first_rms,
              Kind::relative_change * rate * first_rms);
  EXPECT_NEAR(rms_of_change(run<Kind>(lower, 1)), rate * 0.5, Kind::relative_change * rate * 0.5);
}

// torch.optim's form floors the mean of the row means by the epsilon of the type, which for float32
// acts on gradients below 3e-4: the update grows and is clipped to RMS 1. Hugging Face's does not
// depend on the gradient's scale.
TEST(D01, the_forms_part_below_the_floor_float32) {
  using cases::float32;
  const Tensor ordinary = run<float32>(AdafactorOptions::hugging_face(), 1);
  const Tensor unfloored = run<float32>(AdafactorOptions::hugging_face(), 1, 1e-4);
  const Tensor floored = run<float32>(AdafactorOptions(), 1, 1e-4);
  expect_values(unfloored, numbers(ordinary), float32::relative);
  std::vector<double> clipped;
  for (std::size_t i = 0; i < start.size(); ++i) {
    clipped.push_back(start[i] + (numbers(ordinary)[i] - start[i]) / first_rms);
  }
  expect_values(floored, clipped, float32::relative);
}

// D02: the modes of Hugging Face's form

LEANOPT_IN_FULL_PRECISION(D02, fixed_rate_gives_the_known_values) {
  expect_values(run<Kind>(fixed_rate_unscaled(1e-3), 3),
                {1.001303361, -1.99957552, 2.998681522, 0.4970021447, 0.2512029916, -1.501486574},
                Kind::relative);
}

LEANOPT_IN_FULL_PRECISION(D02, warm_up_gives_the_known_changes) {
  expect_changes<Kind>(run<Kind>(AdafactorOptions::hugging_face().warmup_init(true), 3), start,
                       {5.358286347e-6, -1.626630955e-7, -2.486824233e-6, -1.057687305e-5,
                        7.945890968e-6, -8.963054952e-6},
                       3);
}

LEANOPT_IN_FULL_PRECISION(D02, first_moment_gives_the_known_values) {
  expect_values(run<Kind>(fixed_rate_unscaled(1e-3).beta1(0.9), 3),
                {1.000197553, -1.999842653, 2.999657135, 0.4994732299, 0.2500237657, -1.500073259},
                Kind::relative);
}

// D03: weight decay differs by form. Both results are within a hundredth of each other in places,
// so values are compared beside changes.

template <class Kind>
void expect_decayed(const Tensor& actual, const std::vector<double>& changes) {
  expect_changes<Kind>(actual, start, changes, 3);
  std::vector<double> values;
  for (std::size_t i = 0; i < start.size(); ++i) values.push_back(start[i] + changes[i]);
  expect_values(actual, values, Kind::relative);
}

LEANOPT_IN_FULL_PRECISION(D03, hugging_face_decays_by_the_scaled_rate) {
  expect_decayed<Kind>(run<Kind>(fixed_rate(1e-3).weight_decay(0.01), 3),
                       {2.112959904e-3, 8.055816202e-4, -2.339732517e-3, -5.003812308e-3,
                        1.984064792e-3, -2.392648422e-3});
}

LEANOPT_IN_FULL_PRECISION(D03, torch_decays_by_the_raw_rate) {
  expect_decayed<Kind>(run<Kind>(AdafactorOptions(1e-3).weight_decay(0.01), 3),
                       {2.132809946e-3, 7.659480973e-4, -2.280297206e-3, -4.993967401e-3,
                        1.989046566e-3, -2.422413190e-3});
}

// D04: tensors of rank above 2 are batches of matrices

LEANOPT_IN_FULL_PRECISION(D04, factors_the_last_two_dimensions) {
  Tensor p = ones_parameter<Kind>({2, 3, 4});
  Adafactor optimizer({p}, fixed_rate_unscaled(1e-3));
  step_with(optimizer, 0.1);
  expect_values(p, std::vector<double>(24, 0.999), Kind::relative);
  const auto& state = state_of(optimizer, p);
  EXPECT_EQ(state.tensor("row_var").sizes().vec(), (std::vector<std::int64_t>{2, 3, 1}));
  EXPECT_EQ(state.tensor("col_var").sizes().vec(), (std::vector<std::int64_t>{2, 1, 4}));
  EXPECT_FALSE(state.tensor("variance").defined());
}

// D05: small last dimensions make factors no smaller than the tensor, which is the price of a rule
// that never looks at sizes

LEANOPT_IN_FULL_PRECISION(D05, counts_the_factors_of_convolutions) {
  struct shape_and_size {
    std::vector<std::int64_t> sizes;
    std::int64_t elements;
  };
  for (const auto& [sizes, elements] : std::vector<shape_and_size>{
           {{8, 4, 3, 3}, 192}, {{8, 4, 1, 1}, 64}, {{5, 1}, 6}, {{7}, 7}, {{}, 1}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    Tensor p = ones_parameter<Kind>(sizes);
    Adafactor optimizer({p});
    step_with(optimizer, 0.1);
    std::int64_t held = 0;
    for (const auto& [name, tensor] : state_of(optimizer, p).tensors()) held += tensor.numel();
    EXPECT_EQ(held, elements);
    EXPECT_EQ(leanopt::compute_optimizer_size(optimizer).elements, elements + 1);  // and a counter
  }
}

// D06: an all-zero gradient divides 0 by 0 unless eps1 is there

LEANOPT_IN_FULL_PRECISION(D06, zero_gradient_changes_nothing) {
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{2, 2}, {4}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    Tensor p = make_parameter<Kind>({1, 2, 3, 4}, sizes);
    Adafactor optimizer({p}, fixed_rate_unscaled(0.01));
    step_with(optimizer, 0);
    expect_values(p, {1, 2, 3, 4}, 0);
    EXPECT_EQ(state_of(optimizer, p).step(), 1);
    for (const auto& [name, tensor] : state_of(optimizer, p).tensors()) {
      EXPECT_TRUE(cases::is_finite(tensor)) << name << ' ' << tensor;
    }
  }
}

LEANOPT_IN_FULL_PRECISION(D06, zero_eps_is_refused_at_construction) {
  const auto options = fixed_rate_unscaled(0.01).eps(std::make_tuple(0.0, 1e-3));
  const Tensor p = make_parameter<Kind>({1, 2, 3, 4}, {2, 2});
  expect_words(message_of([&] { Adafactor({p}, options); }), {"eps"});
}

// D07: contradictory options throw at construction, not when the rate has gone to nothing

template <class Optimizer, class Options>
void expect_contradictions(const Options& form) {
  const Tensor p = torch::ones({2, 2}).requires_grad_();
  expect_words(message_of([&] { Optimizer({p}, Options(form).lr(1e-3)); }),
               {"lr", "relative_step"});
  // The default rate, spelled out, is a rate given all the same.
  expect_words(message_of([&] { Optimizer({p}, Options(form).lr(1e-2).relative_step(true)); }),
               {"lr", "relative_step"});
  const auto warm = Options(form).lr(1e-3).relative_step(false).warmup_init(true);
  expect_words(message_of([&] { Optimizer({p}, warm); }), {"warmup_init", "relative_step"});
}

TEST(D07, contradictory_options_throw) {
  expect_contradictions<Adafactor>(AdafactorOptions::hugging_face());
}

TEST(D07, contradictory_options_throw_with_8bit_state) {
  expect_contradictions<leanopt::Adafactor8bit>(leanopt::Adafactor8bitOptions());
}

TEST(D07, contradictory_options_of_a_group_throw) {
  const Tensor p = torch::ones({2, 2}).requires_grad_();
  Adafactor optimizer(std::vector<Tensor>{}, AdafactorOptions::hugging_face());
  const torch::optim::OptimizerParamGroup group({p},
                                                AdafactorOptions::hugging_face().lr(1e-3).clone());
  expect_words(message_of([&] { optimizer.add_param_group(group); }), {"lr", "relative_step"});
}

// D08: the rate can be asked for at any time

LEANOPT_IN_FULL_PRECISION(D08, rate_is_always_known) {
  Tensor p = make_parameter<Kind>({3, 4});
  Adafactor optimizer({p}, AdafactorOptions::hugging_face());
  const auto group_rate = [&] { return optimizer.param_groups()[0].options().get_lr(); };

  EXPECT_TRUE(std::isfinite(group_rate()));
  EXPECT_NEAR(optimizer.effective_lr(p), 0.03535533906, Kind::relative * 0.03535533906);
  for (int t = 1; t <= 400; ++t) {
    step_with(optimizer, t % 2 ? 0.1 : -0.1);
    if (t != 1 && t != 400) continue;
    EXPECT_TRUE(std::isfinite(group_rate()));
    EXPECT_TRUE(std::isfinite(optimizer.effective_lr(p)));
    EXPECT_GT(optimizer.effective_lr(p), 0);
  }
  EXPECT_EQ(state_of(optimizer, p).step(), 400);
}

LEANOPT_IN_FULL_PRECISION(D08, rate_falls_with_the_root_of_the_step) {
  Tensor p = ones_parameter<Kind>({2});
  Adafactor optimizer({p}, AdafactorOptions::hugging_face());
  step_with(optimizer, 0.1);
  state_of(optimizer, p).step(39999);
  p.detach().fill_(1);
  EXPECT_NEAR(optimizer.effective_lr(p), 0.005, Kind::relative * 0.005);
  step_with(optimizer, 0.1);  // the update has RMS 1, so the step is as long as the rate
  expect_values(p, {0.995, 0.995}, Kind::relative);
}

// D09: a column of a matrix behaves as a vector

LEANOPT_IN_FULL_PRECISION(D09, column_behaves_as_vector) {
  std::vector<Tensor> results;
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{4}, {4, 1}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    Tensor p = make_parameter<Kind>({1, -1, 2, 0.5}, sizes);
    Adafactor optimizer({p}, AdafactorOptions::hugging_face());
    step_with(optimizer, p, make_tensor<Kind>({0.1, -0.2, 0.3, 0.4}, sizes));
    step_with(optimizer, p, make_tensor<Kind>({0.5, 0, -0.1, 0.2}, sizes));
    expect_values(p, {0.9713914551, -0.9875, 1.993402075, 0.47929061}, Kind::relative);
    results.push_back(p);
  }
  expect_values(results[0], numbers(results[1]), 0);
}

// D11: the root mean square of a large tensor. A sum of squares in float32 stops growing:
// LibTorch's own norm gives 9.8784e-4 here.

TEST(D11, root_mean_square_of_a_large_tensor_float32) {
  const double element = 1e-3;
  Tensor p = torch::full({4000, 5000}, element, torch::kFloat32).requires_grad_();
  p.mutable_grad() = torch::full_like(p, element).detach();
  // eps2 below the RMS, which would hide it; the clipped update is as long as the threshold if its
  // own RMS, 1, is right.
  const auto options =
      AdafactorOptions::hugging_face().eps(std::make_tuple(1e-30, 1e-6)).clip_threshold(0.5);
  Adafactor optimizer({p}, options);
  const double rate = 0.01;
  EXPECT_NEAR(optimizer.effective_lr(p), rate * element, cases::float32::relative * rate * element);
  optimizer.step();
  const double stored = state_of(optimizer, p).tensor("RMS").item<double>();
  EXPECT_NEAR(stored, element, cases::float32::relative * element);
  const double moved = element - p[0][0].item<double>();
  const double rounding = tolerance::half_ulp_f32 * element;
  EXPECT_NEAR(moved, 0.5 * rate * element,
              cases::float32::relative * 0.5 * rate * element + 2 * rounding);
}

// D12: each parameter of a group has the epsilon of its own type. With the first one's for all, the
// float32 parameter after a bfloat16 one ends at 0.99998719 and a bfloat16 one after a float32 one
// at 0.98828125. The floor of bfloat16 makes a step of 1.28e-5, too small for bfloat16 to show.

TEST(D12, types_in_one_group_keep_their_own_epsilon_float32_bfloat16) {
  std::vector<std::vector<Tensor>> results;
  for (const bool float32_first : {true, false}) {
    SCOPED_TRACE(float32_first ? "float32 first" : "bfloat16 first");
    Tensor narrow = torch::ones({4}, torch::kBFloat16).requires_grad_();
    Tensor wide = torch::ones({4}, torch::kFloat32).requires_grad_();
    Adafactor optimizer(
        float32_first ? std::vector<Tensor>{wide, narrow} : std::vector<Tensor>{narrow, wide},
        AdafactorOptions(0.01));
    step_with(optimizer, 1e-5);
    expect_values(wide, std::vector<double>(4, 0.99), cases::float32::relative);
    expect_values(narrow, std::vector<double>(4, 1), 0);
    results.push_back({wide, narrow});
  }
  for (const int k : {0, 1}) EXPECT_TRUE(cases::same_bits(results[0][k], results[1][k]));
}

}  // namespace
