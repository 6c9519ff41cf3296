// Behaviours of Adam and AdamW, and of every optimizer, that implementations have got wrong, each
// under its number: parameters without elements, decay, epsilon, gradients, identity of parameters,
// groups, types (D10, D13 to D23). What a wrong implementation gave is noted where a test would
// otherwise seem to look at nothing.

#include <leanopt/leanopt.hpp>

#include "tests/cases/kinds.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using cases::expect_after_two_steps;
using cases::expect_codes_where_compressed;
using cases::expect_values;
using cases::expect_words;
using cases::is_finite;
using cases::make_parameter;
using cases::make_tensor;
using cases::message_of;
using cases::numbers;
using cases::ones_parameter;
using cases::same_bits;
using cases::state_of;
using cases::step_with;
using torch::Tensor;
using torch::optim::OptimizerParamGroup;

/// Options of one of ours under which tensors of any size are compressed, if any are.
template <class Kind, class Optimizer>
typename Optimizer::Options options_with(double lr, double weight_decay) {
  return Kind::every_tensor(typename Optimizer::Options(lr).weight_decay(weight_decay));
}

// D10: parameters without elements. Means over them are 0/0: torch.optim.Adafactor throws and
// Hugging Face's stores NaN.

template <class Optimizer, class Options>
void expect_empty_parameters_to_hold_nothing(const Options& options, const Tensor& start) {
  const Tensor lone = start.clone().requires_grad_();
  const Tensor p = start.clone().requires_grad_();
  const Tensor vector = torch::empty({0}, start.scalar_type()).requires_grad_();
  const Tensor matrix = torch::empty({0, 3}, start.scalar_type()).requires_grad_();
  Optimizer alone({lone}, options);
  Optimizer beside({p, vector, matrix}, options);
  step_with(alone, 1);
  step_with(beside, 1);

  EXPECT_TRUE(same_bits(p, lone));
  EXPECT_FALSE(same_bits(p, start));
  // Each counts its steps, and keeps no number beside that.
  constexpr std::int64_t counters = 2;
  for (const Tensor& each : {vector, matrix}) EXPECT_EQ(state_of(beside, each).step(), 1);
  const auto size = leanopt::compute_optimizer_size(beside);
  EXPECT_EQ(size.elements, leanopt::compute_optimizer_size(alone).elements + counters);
  EXPECT_EQ(leanopt::count_moments(beside), leanopt::count_moments(alone) + counters);
  EXPECT_TRUE(std::isfinite(size.megabytes));
  if constexpr (std::is_base_of_v<leanopt::Adafactor, Optimizer> ||
                std::is_base_of_v<leanopt::Adafactor8bit, Optimizer>) {
    for (const Tensor& each : {p, vector, matrix}) {
      EXPECT_TRUE(std::isfinite(beside.effective_lr(each)));
    }
  }
}

LEANOPT_IN_EVERY_KIND(D10, empty_parameters_hold_nothing) {
  cases::for_every_optimizer<Kind>(1e-3, 0.1, [](auto of, const auto& options) {
    using Optimizer = typename decltype(of)::optimizer;
    expect_empty_parameters_to_hold_nothing<Optimizer>(options, torch::ones({1}, Kind::type));
  });
}

LEANOPT_IN_EVERY_KIND(D10, neighbour_of_empty_parameters_moves_as_known) {
  Tensor p = ones_parameter<Kind>({1});
  const Tensor empty = ones_parameter<Kind>({0});
  typename Kind::AdamW adamw({empty, p}, options_with<Kind, typename Kind::AdamW>(1e-3, 0));
  step_with(adamw, 1);
  expect_values(p, {0.999}, Kind::relative);
  if constexpr (!Kind::compressed) {
    p = ones_parameter<Kind>({1});
    leanopt::Adafactor adafactor({empty, p}, leanopt::AdafactorOptions::hugging_face());
    step_with(adafactor, 1);
    expect_values(p, {0.99}, Kind::relative);
  }
}

// D13: the weight decays before the step moves it; afterwards gives 0.855

LEANOPT_IN_EVERY_KIND(D13, decay_comes_first) {
  using AdamW = typename Kind::AdamW;
  Tensor p = ones_parameter<Kind>({4096});
  AdamW optimizer({p}, typename AdamW::Options(0.1).weight_decay(0.5));
  step_with(optimizer, 1);
  expect_values(p, std::vector<double>(4096, 0.850000001), Kind::relative);
  expect_codes_where_compressed<Kind>(optimizer, p);
}

// D14: eps is added after the bias correction; before it gives -3.065e-5

LEANOPT_IN_EVERY_KIND(D14, eps_is_added_after_bias_correction) {
  using Adam = typename Kind::Adam;
  Tensor p = make_parameter<Kind>({0});
  Adam optimizer({p}, options_with<Kind, Adam>(1e-3, 0).eps(1e-8));
  step_with(optimizer, 1e-8);
  expect_values(p, {-0.0005}, Kind::relative);
  expect_codes_where_compressed<Kind>(optimizer, p);
}

// D15: AdamW's decay is decoupled and multiplied by the rate, Adam's is an L2 term

template <class Kind, class Optimizer>
void expect_decay_alone(double start, double lr, double weight_decay, double expected) {
  Tensor p = make_parameter<Kind>({start});
  Optimizer optimizer({p}, options_with<Kind, Optimizer>(lr, weight_decay));
  step_with(optimizer, 0);
  expect_values(p, {expected}, Kind::relative);
}

LEANOPT_IN_EVERY_KIND(D15, decay_is_decoupled_or_l2) {
  expect_decay_alone<Kind, typename Kind::AdamW>(2, 0.1, 0.1, 1.98);
  expect_decay_alone<Kind, typename Kind::Adam>(2, 0.1, 0.1, 1.900000005);
  expect_decay_alone<Kind, typename Kind::AdamW>(1, 1e-3, 1e-2, 0.99999);
}

LEANOPT_IN_EVERY_KIND(D15, default_decay_is_that_of_the_class) {
  EXPECT_EQ(typename Kind::AdamW::Options().weight_decay(), 1e-2);
  EXPECT_EQ(typename Kind::Adam::Options().weight_decay(), 0);
}

// D16: the L2 term of each parameter of a group comes from that parameter

LEANOPT_IN_EVERY_KIND(D16, l2_decay_reads_its_own_parameter) {
  using Adam = typename Kind::Adam;
  Tensor a = make_parameter<Kind>({1});
  Tensor b = make_parameter<Kind>({-5});
  Adam optimizer({a, b}, options_with<Kind, Adam>(0.01, 0.5));
  const auto step = [&](double gradient_a, double gradient_b) {
    a.mutable_grad() = make_tensor<Kind>({gradient_a});
    b.mutable_grad() = make_tensor<Kind>({gradient_b});
    optimizer.step();
  };
  step(0.1, 0.2);
  step(-0.3, 0.1);
  expect_codes_where_compressed<Kind>(optimizer, a);
  expect_after_two_steps<Kind>(a, 0.99, 0.9813267586);
  expect_after_two_steps<Kind>(b, -4.99, -4.9799915);
}

// D17: the gradient is the caller's

template <class Kind, class Optimizer>
void expect_gradient_untouched() {
  for (const bool maximize : {false, true}) {
    SCOPED_TRACE(maximize ? "maximize" : "minimize");
    Tensor p = torch::randn({300}, Kind::type).requires_grad_();
    const Tensor start = p.detach().clone();
    const Tensor g = torch::randn({300}, Kind::type);
    const Tensor copy = g.clone();
    const void* storage = g.data_ptr();
    Optimizer optimizer({p}, options_with<Kind, Optimizer>(1e-3, 0.1).maximize(maximize));
    step_with(optimizer, p, g);
    EXPECT_TRUE(same_bits(p.grad(), copy));
    EXPECT_TRUE(p.grad().is_same(g));
    EXPECT_EQ(p.grad().data_ptr(), storage);
    EXPECT_FALSE(same_bits(p, start));
  }
}

LEANOPT_IN_EVERY_KIND(D17, gradient_is_the_callers) {
  torch::manual_seed(17);
  expect_gradient_untouched<Kind, typename Kind::AdamW>();
  expect_gradient_untouched<Kind, typename Kind::Adam>();
}

// D18: an undefined gradient is no gradient; a zero one is a step with decay and momentum

LEANOPT_IN_EVERY_KIND(D18, undefined_gradient_is_no_step) {
  using AdamW = typename Kind::AdamW;
  Tensor p = make_parameter<Kind>({1});
  AdamW optimizer({p}, options_with<Kind, AdamW>(1e-3, 1e-2));
  optimizer.step();
  expect_values(p, {1}, 0);
  EXPECT_TRUE(optimizer.state().empty());
  step_with(optimizer, p, make_tensor<Kind>({0}));
  p.mutable_grad() = Tensor();
  const Tensor before = p.detach().clone();
  optimizer.step();
  EXPECT_TRUE(same_bits(p, before));
  EXPECT_EQ(state_of(optimizer, p).step(), 1);
}

LEANOPT_IN_EVERY_KIND(D18, zero_gradient_is_a_step) {
  using AdamW = typename Kind::AdamW;
  Tensor p = make_parameter<Kind>({1});
  AdamW optimizer({p}, options_with<Kind, AdamW>(1e-3, 1e-2));
  step_with(optimizer, 0);
  expect_values(p, {0.99999}, Kind::relative);
  EXPECT_EQ(state_of(optimizer, p).step(), 1);
}

LEANOPT_IN_EVERY_KIND(D18, zero_gradient_keeps_the_momentum) {
  using AdamW = typename Kind::AdamW;
  Tensor p = make_parameter<Kind>({1});
  AdamW optimizer({p}, options_with<Kind, AdamW>(1e-3, 1e-2));
  step_with(optimizer, 0.5);
  expect_values(p, {0.99899}, Kind::relative);
  step_with(optimizer, 0);
  expect_after_two_steps<Kind>(p, 0.99899, 0.9983099519);
  EXPECT_EQ(state_of(optimizer, p).step(), 2);
}

// D19: a rate of 0 changes no parameter, and the state goes on

/// Every slot of a parameter that there is, decoded.
template <class Optimizer>
std::vector<Tensor> slots_of(const Optimizer& optimizer, const Tensor& p) {
  std::vector<Tensor> result;
  for (const char* name :
       {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_var", "col_var", "variance", "RMS"}) {
    const Tensor t = leanopt::slot(optimizer, p, name);
    if (t.defined()) result.push_back(t);
  }
  return result;
}

LEANOPT_IN_EVERY_KIND(D19, rate_of_zero_changes_no_parameter) {
  torch::manual_seed(19);
  cases::for_every_optimizer<Kind>(0, 0.1, [](auto of, const auto& options) {
    using Optimizer = typename decltype(of)::optimizer;
    std::vector<Tensor> params;
    for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{70, 80}, {9}}) {
      params.push_back(torch::randn(sizes, Kind::type).requires_grad_());
    }
    std::vector<Tensor> start;
    for (const Tensor& p : params) start.push_back(p.detach().clone());
    Optimizer optimizer(params, options);
    for (int t = 0; t < 5; ++t) {
      for (Tensor& p : params) p.mutable_grad() = torch::randn_like(p).detach();
      optimizer.step();
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_TRUE(same_bits(params[i], start[i]));
      EXPECT_EQ(state_of(optimizer, params[i]).step(), 5);
      const auto slots = slots_of(optimizer, params[i]);
      int moved = 0;
      for (const Tensor& t : slots) {
        EXPECT_TRUE(is_finite(t));
        moved += (t != 0).any().template item<bool>();
      }
      EXPECT_GT(moved, 0);
    }
  });
}

// D20: the same tensor twice would be stepped twice: LibTorch's classes accept it

template <class Optimizer, class Options>
void expect_duplicates_refused(const Options& options, Tensor p) {
  const Tensor start = p.detach().clone();
  const Tensor other = torch::ones_like(p).detach().requires_grad_();
  p.mutable_grad() = torch::ones_like(p).detach();

  expect_words(message_of([&] {
                 Optimizer({p, other, p}, options);
               }),
               {"parameter 0 of group 0", "parameter 2 of group 0"});
  const std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup({p}),
                                                   OptimizerParamGroup({other, p})};
  expect_words(message_of([&] { Optimizer(groups, options); }),
               {"parameter 0 of group 0", "parameter 1 of group 1"});

  Optimizer optimizer({other, p}, options);
  const OptimizerParamGroup again({p});
  const std::vector<std::string> places = {"parameter 1 of group 0", "parameter 0 of group 1"};
  expect_words(message_of([&] { optimizer.add_param_group(again); }), places);
  expect_words(message_of([&] { leanopt::add_param_group(optimizer, again); }), places);
  EXPECT_TRUE(same_bits(p, start));
  EXPECT_TRUE(optimizer.state().empty());
  ASSERT_EQ(optimizer.param_groups().size(), 1u);
  ASSERT_EQ(optimizer.param_groups()[0].params().size(), 2u);

  // It steps as if nothing had happened.
  Tensor same = start.clone().requires_grad_();
  Optimizer untroubled({torch::ones_like(other).detach().requires_grad_(), same}, options);
  step_with(untroubled, 1);
  step_with(optimizer, 1);
  EXPECT_TRUE(same_bits(p, same));
}

LEANOPT_IN_EVERY_KIND(D20, duplicates_are_refused) {
  cases::for_every_optimizer<Kind>(1e-3, 0, [](auto of, const auto& options) {
    using Optimizer = typename decltype(of)::optimizer;
    expect_duplicates_refused<Optimizer>(options, ones_parameter<Kind>({2, 2}));
  });
}

LEANOPT_IN_EVERY_KIND(D20, one_step_after_a_refusal) {
  using AdamW = typename Kind::AdamW;
  Tensor p = ones_parameter<Kind>({1});
  AdamW optimizer({p}, options_with<Kind, AdamW>(1e-3, 0));
  message_of([&] { optimizer.add_param_group(OptimizerParamGroup({p})); });
  step_with(optimizer, 1);
  expect_values(p, {0.999}, Kind::relative);
  EXPECT_EQ(state_of(optimizer, p).step(), 1);
}

// D21: a group added later starts at step 1, with its own rate, and schedulers see it

LEANOPT_IN_EVERY_KIND(D21, later_group_starts_at_step_one) {
  using AdamW = typename Kind::AdamW;
  Tensor a = ones_parameter<Kind>({1});
  Tensor b = ones_parameter<Kind>({1});
  AdamW optimizer({a}, options_with<Kind, AdamW>(1e-3, 0));
  // Halves the rates in its last call, the seventh.
  torch::optim::StepLR scheduler(optimizer, 6, 0.5);
  for (int t = 0; t < 5; ++t) {
    step_with(optimizer, 1);
    scheduler.step();
  }
  optimizer.add_param_group(
      OptimizerParamGroup({b}, std::make_unique<typename AdamW::Options>(0.01)));
  step_with(optimizer, 1);

  expect_values(b, {0.9900000001}, Kind::relative);
  if constexpr (!Kind::compressed) expect_values(a, {0.99400000006}, Kind::relative);
  EXPECT_EQ(state_of(optimizer, a).step(), 6);
  EXPECT_EQ(state_of(optimizer, b).step(), 1);
  expect_codes_where_compressed<Kind>(optimizer, b);

  scheduler.step();
  scheduler.step();
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 5e-4);
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[1].options().get_lr(), 5e-3);
}

// D22: an eps of 1e-8 is 0 in half precision, and 0/0 follows wherever the step is computed in it

void expect_zero_gradient_to_change_nothing(torch::Dtype type) {
  Tensor p = torch::tensor({1.0, -2.0, 0.5}).to(type).requires_grad_();
  const Tensor start = p.detach().clone();
  leanopt::AdamW optimizer({p}, leanopt::AdamWOptions(1e-3).weight_decay(0));
  for (int t = 0; t < 3; ++t) step_with(optimizer, 0);
  EXPECT_TRUE(same_bits(p, start));
  EXPECT_EQ(state_of(optimizer, p).step(), 3);
  for (const Tensor& t : slots_of(optimizer, p)) EXPECT_TRUE(is_finite(t));
}

TEST(D22, zero_gradient_in_half_changes_nothing) {
  expect_zero_gradient_to_change_nothing(torch::kHalf);
}
TEST(D22, zero_gradient_in_bfloat16_changes_nothing) {
  expect_zero_gradient_to_change_nothing(torch::kBFloat16);
}

// D23: steps are counted exactly whatever the default type; in bfloat16 they would stop at 256

class default_type {
 public:
  explicit default_type(torch::Dtype type) : before_(torch::get_default_dtype()) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(type));
  }
  ~default_type() { torch::set_default_dtype(before_); }
  default_type(const default_type&) = delete;
  default_type& operator=(const default_type&) = delete;

 private:
  caffe2::TypeMeta before_;
};

void expect_exact_count(torch::Dtype type) {
  constexpr double lr = 1e-3;
  constexpr double correction = 0.6323045752;  // 1 - 0.999^1000
  const default_type as_default(type);
  Tensor narrow = torch::ones({1}, torch::kBFloat16).requires_grad_();
  Tensor wide = torch::ones({1}, torch::kFloat64).requires_grad_();
  leanopt::AdamW optimizer({narrow, wide}, leanopt::AdamWOptions(lr).weight_decay(0).eps(0));
  for (int t = 0; t < 999; ++t) step_with(optimizer, 1);

  // With fresh moments, a parameter at 0 and a gradient of 1, the last step is
  // -lr 0.1 / sqrt(0.001 / correction): it shows nothing but the correction.
  for (const Tensor& p : {narrow, wide}) {
    p.detach().zero_();
    state_of(optimizer, p).exp_avg().zero_();
    state_of(optimizer, p).exp_avg_sq().zero_();
  }
  step_with(optimizer, 1);
  const auto shown = [&](const Tensor& p) {
    const double root = numbers(p)[0] / (lr * 0.1);
    return root * root * 0.001;
  };
  EXPECT_NEAR(shown(wide), correction, cases::float64::relative * correction);
  EXPECT_NEAR(shown(narrow), correction, tolerance::case_correction_bf16 * correction);
  EXPECT_EQ(state_of(optimizer, wide).step(), 1000);
  EXPECT_EQ(state_of(optimizer, narrow).step(), 1000);
}

TEST(D23, counts_with_default_type_float) { expect_exact_count(torch::kFloat); }
TEST(D23, counts_with_default_type_half) { expect_exact_count(torch::kHalf); }
TEST(D23, counts_with_default_type_bfloat16) { expect_exact_count(torch::kBFloat16); }
TEST(D23, counts_with_default_type_double) { expect_exact_count(torch::kDouble); }

}  // namespace
