// What the tests of the cases share: the kinds of optimizers they run with (float64 and float32
// parameters in full precision, float32 parameters with 8-bit state), tensors from numbers, and
// comparisons.
#pragma once

#include <leanopt/leanopt.hpp>

#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <regex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cases {

using torch::Tensor;

// The kinds

struct full_precision {
  using Adam = leanopt::Adam;
  using AdamW = leanopt::AdamW;
  static constexpr bool compressed = false;

  template <class Options>
  static Options every_tensor(Options options) {
    return options;
  }
};

struct float64 : full_precision {
  static constexpr torch::Dtype type = torch::kFloat64;
  static constexpr double relative = tolerance::case_f64;
  static constexpr double relative_change = tolerance::case_change_f64;
  static constexpr double half_ulp = tolerance::half_ulp_f64;
};

struct float32 : full_precision {
  static constexpr torch::Dtype type = torch::kFloat32;
  static constexpr double relative = tolerance::case_f32;
  static constexpr double relative_change = tolerance::case_change_f32;
  static constexpr double half_ulp = tolerance::half_ulp_f32;
};

/// A step computes the parameter before its moments are rounded to codes, so after one step the
/// parameter is as exact as that of float32.
struct eight_bit {
  using Adam = leanopt::Adam8bit;
  using AdamW = leanopt::AdamW8bit;
  static constexpr bool compressed = true;
  static constexpr torch::Dtype type = torch::kFloat32;
  static constexpr double relative = tolerance::case_f32;

  /// Options under which tensors of any size are compressed.
  template <class Options>
  static Options every_tensor(Options options) {
    return options.min_compressed_elements(1);
  }
};

// A case runs as one test per kind, with the kind at the end of its name. The body follows the
// macro and knows the kind as `Kind`. They are not typed tests because ctest cannot spell the names
// of those.

#define LEANOPT_IN_FULL_PRECISION(id, behaviour)                        \
  template <class Kind>                                                 \
  void id##_##behaviour();                                              \
  TEST(id, behaviour##_float64) { id##_##behaviour<cases::float64>(); } \
  TEST(id, behaviour##_float32) { id##_##behaviour<cases::float32>(); } \
  template <class Kind>                                                 \
  void id##_##behaviour()

#define LEANOPT_IN_EVERY_KIND(id, behaviour)                            \
  template <class Kind>                                                 \
  void id##_##behaviour();                                              \
  TEST(id, behaviour##_float64) { id##_##behaviour<cases::float64>(); } \
  TEST(id, behaviour##_float32) { id##_##behaviour<cases::float32>(); } \
  TEST(id, behaviour##_8bit) { id##_##behaviour<cases::eight_bit>(); }  \
  template <class Kind>                                                 \
  void id##_##behaviour()

// Every optimizer

template <class T>
struct tag {
  using optimizer = T;
};

/// f(tag<Optimizer>, options) for every class of a kind, and for both forms of Adafactor, with a
/// fixed rate.
template <class Kind, class F>
void for_every_optimizer(double lr, double weight_decay, F f) {
  const auto visit = [&](const char* name, auto of, auto options) {
    SCOPED_TRACE(name);
    f(of, Kind::every_tensor(options.lr(lr).weight_decay(weight_decay)));
  };
  using adam = typename Kind::Adam;
  using adamw = typename Kind::AdamW;
  visit("Adam", tag<adam>(), typename adam::Options());
  visit("AdamW", tag<adamw>(), typename adamw::Options());
  if constexpr (Kind::compressed) {
    visit("Adafactor8bit", tag<leanopt::Adafactor8bit>(),
          leanopt::Adafactor8bitOptions().relative_step(false));
  } else {
    using leanopt::AdafactorOptions;
    const auto of = tag<leanopt::Adafactor>();
    const auto hugging_face = AdafactorOptions::hugging_face().relative_step(false);
    visit("Adafactor", of, AdafactorOptions());
    visit("Adafactor of Hugging Face", of, hugging_face);
    visit("Adafactor of Hugging Face with beta1", of, AdafactorOptions(hugging_face).beta1(0.9));
  }
}

// Tensors

/// A tensor of the kind's type; a row of numbers where no sizes are given.
template <class Kind>
Tensor make_tensor(const std::vector<double>& values, std::vector<std::int64_t> sizes = {-1}) {
  return torch::tensor(values, torch::kFloat64).to(Kind::type).reshape(sizes);
}

template <class Kind>
Tensor make_parameter(const std::vector<double>& values, std::vector<std::int64_t> sizes = {-1}) {
  return make_tensor<Kind>(values, std::move(sizes)).requires_grad_();
}

template <class Kind>
Tensor ones_parameter(std::vector<std::int64_t> sizes) {
  return torch::ones(sizes, Kind::type).requires_grad_();
}

/// A step in which every element of every parameter has the gradient `g`.
template <class Optimizer>
void step_with(Optimizer& optimizer, double g) {
  for (auto& group : optimizer.param_groups()) {
    for (Tensor& p : group.params()) p.mutable_grad() = torch::full_like(p, g).detach();
  }
  optimizer.step();
}

/// A step of the optimizer in which only `p` has a gradient that is new.
template <class Optimizer>
void step_with(Optimizer& optimizer, Tensor& p, const Tensor& g) {
  p.mutable_grad() = g;
  optimizer.step();
}

/// The state of a parameter, as the class that its optimizer keeps.
template <class Optimizer>
typename Optimizer::State& state_of(Optimizer& optimizer, const Tensor& p) {
  return static_cast<typename Optimizer::State&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
}

// Comparisons

inline std::vector<double> numbers(const Tensor& t) {
  const Tensor wide = t.detach().to(torch::kFloat64).contiguous();
  return {wide.data_ptr<double>(), wide.data_ptr<double>() + wide.numel()};
}

inline void expect_values(const Tensor& actual, const std::vector<double>& expected,
                          double relative) {
  const std::vector<double> values = numbers(actual);
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], relative * std::abs(expected[i])) << "element " << i;
  }
}

/// Compares how far `actual` has moved from `start`. Each step rounds the parameter once, and where
/// it moves little that rounding is a visible part of the change.
template <class Kind>
void expect_changes(const Tensor& actual, const std::vector<double>& start,
                    const std::vector<double>& expected, int steps) {
  const std::vector<double> values = numbers(actual);
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double rounding = steps * Kind::half_ulp * std::abs(start[i] + expected[i]);
    EXPECT_NEAR(values[i] - start[i], expected[i],
                Kind::relative_change * std::abs(expected[i]) + rounding)
        << "element " << i;
  }
}

/// After a second step the rounding of the first one's moments shows, if they are codes.
template <class Kind>
void expect_after_two_steps(const Tensor& actual, double after_one, double expected) {
  double bound = Kind::relative * std::abs(expected);
  if (Kind::compressed) bound += tolerance::case_second_step_8bit * std::abs(expected - after_one);
  EXPECT_NEAR(numbers(actual).at(0), expected, bound);
}

/// Bits, not values: -0 is not 0, and a NaN is itself.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         torch::equal(a.detach().flatten().view(torch::kByte),
                      b.detach().flatten().view(torch::kByte));
}

inline bool is_finite(const Tensor& t) { return torch::isfinite(t).all().item<bool>(); }

/// Without this, a test of 8-bit state would pass where nothing was compressed.
template <class Kind, class Optimizer>
void expect_codes_where_compressed(Optimizer& optimizer, const Tensor& p) {
  if constexpr (Kind::compressed) {
    const auto& state = state_of(optimizer, p);
    for (const char* name : {"exp_avg", "exp_avg_sq"}) {
      const Tensor codes = state.tensor(name);
      ASSERT_TRUE(codes.defined()) << name;
      EXPECT_EQ(codes.scalar_type(), torch::kByte) << name;
    }
  }
}

/// Expects f to throw, and gives its message without the stack.
template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_TRUE(std::regex_search(message, std::regex("\\b" + word + "\\b")))
        << '\'' << word << "' is not in: " << message;
  }
}

}  // namespace cases
