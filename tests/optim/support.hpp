// What the tests of the front share: parameters and gradients of fixed numbers, every optimizer in
// every form, what an optimizer holds at a moment, and the messages of errors.
#pragma once

#include <leanopt/leanopt.hpp>

#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace front_test {

namespace stock = torch::optim;
using torch::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using groups = std::vector<OptimizerParamGroup>;

// Numbers

inline double largest(const Tensor& t) { return t.detach().abs().max().item<double>(); }
inline bool all_of(const Tensor& t) { return t.all().item<bool>(); }

/// Numbers of both signs with magnitudes from 0.25 to 1, a pure function of `salt`. None is near
/// zero, where Adam's normalized update would turn a last bit of difference into a visible one.
inline Tensor pattern(at::IntArrayRef sizes, torch::Dtype type = torch::kFloat32,
                      std::int64_t salt = 0) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  const Tensor wave = torch::arange(count, torch::kFloat64).mul(0.7).add(double(salt) * 1.3).sin();
  const Tensor away_from_zero = wave.abs().mul(0.75).add(0.25).copysign(wave);
  if (c10::isComplexType(type)) {
    const Tensor other = pattern(sizes, torch::kFloat64, salt + 1);
    return torch::complex(away_from_zero.reshape(sizes), other).to(type).clone();
  }
  return away_from_zero.reshape(sizes).to(type).clone();  // no view: zero_grad refuses those
}

inline Tensor leaf(const Tensor& values) {
  return values.detach().clone(torch::MemoryFormat::Preserve).set_requires_grad(true);
}
inline Tensor leaf(at::IntArrayRef sizes, torch::Dtype type = torch::kFloat32,
                   std::int64_t salt = 0) {
  return pattern(sizes, type, salt).set_requires_grad(true);
}

/// Gives each parameter a gradient that depends on its place and on `round`.
inline void set_gradients(const std::vector<Tensor>& params, std::int64_t round = 0) {
  std::int64_t place = 0;
  for (const Tensor& p : params)
    p.mutable_grad() = pattern(p.sizes(), p.scalar_type(), 100 * (round + 1) + place++);
}

// Optimizers

template <class Options>
OptimizerParamGroup group(std::vector<Tensor> params, const Options& options) {
  return {std::move(params), std::make_unique<Options>(options)};
}
inline OptimizerParamGroup group(std::vector<Tensor> params) {
  return OptimizerParamGroup(std::move(params));
}

template <class Options>
Options& options_at(Optimizer& optimizer, std::size_t i) {
  return dynamic_cast<Options&>(optimizer.param_groups().at(i).options());
}
template <class State>
State& state_at(Optimizer& optimizer, const Tensor& p) {
  return dynamic_cast<State&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
}
inline bool has_state(const Optimizer& optimizer, const Tensor& p) {
  return optimizer.state().count(p.unsafeGetTensorImpl()) == 1;
}

/// An optimizer in one of its forms; `options(lr)` takes that rate literally.
template <class Class>
struct subject {
  using optimizer = Class;
  using options_type = typename Class::Options;
  static options_type options(double lr) { return options_type(lr); }
};
using adam = subject<leanopt::Adam>;
using adamw = subject<leanopt::AdamW>;
using adafactor = subject<leanopt::Adafactor>;
using adam8bit = subject<leanopt::Adam8bit>;
using adamw8bit = subject<leanopt::AdamW8bit>;
struct hugging_face_adafactor : subject<leanopt::Adafactor> {
  static options_type options(double lr) {
    return options_type::hugging_face().lr(lr).relative_step(false).beta1(0.8);
  }
};
struct adafactor8bit : subject<leanopt::Adafactor8bit> {
  static options_type options(double lr) { return options_type(lr).relative_step(false); }
};

/// Names of forms for the names of tests.
struct form_names {
  template <class Form>
  static std::string GetName(int) {
    if (std::is_same_v<Form, adam>) return "adam";
    if (std::is_same_v<Form, adamw>) return "adamw";
    if (std::is_same_v<Form, adafactor>) return "adafactor";
    if (std::is_same_v<Form, hugging_face_adafactor>) return "hugging_face_adafactor";
    if (std::is_same_v<Form, adam8bit>) return "adam8bit";
    if (std::is_same_v<Form, adamw8bit>) return "adamw8bit";
    return "adafactor8bit";
  }
};
using every_form = ::testing::Types<adam, adamw, adafactor, hugging_face_adafactor, adam8bit,
                                    adamw8bit, adafactor8bit>;
using every_adam = ::testing::Types<adam, adamw>;
using every_compressed = ::testing::Types<adam8bit, adamw8bit, adafactor8bit>;

// What an optimizer holds

/// Name and value of every tensor in the state of `p`; none if it has no state.
inline std::vector<std::pair<std::string, Tensor>> state_tensors(const Optimizer& optimizer,
                                                                 const Tensor& p) {
  const auto it = optimizer.state().find(p.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return {};
  std::vector<std::pair<std::string, Tensor>> result;
  const auto add = [&](const auto& s) {
    result.emplace_back("step", torch::tensor(s.step()));
    leanopt::detail::each_tensor(
        s, [&](const std::string& name, const Tensor& t) { result.emplace_back(name, t); });
  };
  if (const auto* s = dynamic_cast<const leanopt::ParamState*>(it->second.get())) add(*s);
  if (const auto* s = dynamic_cast<const stock::AdamParamState*>(it->second.get())) add(*s);
  if (const auto* s = dynamic_cast<const stock::AdamWParamState*>(it->second.get())) add(*s);
  return result;
}

/// How often `p` was stepped; 0 without a state.
inline std::int64_t steps_of(const Optimizer& optimizer, const Tensor& p) {
  const auto tensors = state_tensors(optimizer, p);
  return tensors.empty() ? 0 : tensors[0].second.item<std::int64_t>();
}
/// Whether the first moment of `p` is kept as codes.
inline bool is_compressed(const Optimizer& optimizer, const Tensor& p) {
  for (const auto& [name, t] : state_tensors(optimizer, p))
    if (name == "exp_avg") return t.scalar_type() == torch::kUInt8;
  return false;
}

/// A copy of all numbers of parameters and state: two that are equal show that nothing changed.
struct snapshot {
  std::vector<std::pair<std::string, Tensor>> tensors;

  snapshot(const Optimizer& optimizer, const std::vector<Tensor>& params) {
    for (std::size_t i = 0; i < params.size(); ++i) {
      const std::string prefix = std::to_string(i) + '.';
      tensors.emplace_back(prefix + "value", params[i].detach().clone());
      for (const auto& [name, t] : state_tensors(optimizer, params[i]))
        tensors.emplace_back(prefix + name, t.clone());
    }
  }
};

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.defined() == b.defined() &&
         (!a.defined() || (a.scalar_type() == b.scalar_type() && a.equal(b)));
}

inline ::testing::AssertionResult operator==(const snapshot& a, const snapshot& b) {
  if (a.tensors.size() != b.tensors.size())
    return ::testing::AssertionFailure()
           << a.tensors.size() << " tensors against " << b.tensors.size();
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    if (a.tensors[i].first != b.tensors[i].first)
      return ::testing::AssertionFailure()
             << a.tensors[i].first << " against " << b.tensors[i].first;
    if (!same_bits(a.tensors[i].second, b.tensors[i].second))
      return ::testing::AssertionFailure() << a.tensors[i].first << " differs";
  }
  return ::testing::AssertionSuccess();
}

// Errors

/// The first line of what `f` throws; empty when it does not.
template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return text.substr(0, text.find('\n'));
  }
  return "";
}

/// Whether `f` throws with a message that has all of `parts`.
template <class F>
::testing::AssertionResult refuses(F f, const std::vector<std::string>& parts) {
  const std::string text = message_of(f);
  if (text.empty()) return ::testing::AssertionFailure() << "nothing was thrown";
  for (const std::string& part : parts)
    if (text.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
  return ::testing::AssertionSuccess();
}

// Comparison with LibTorch's classes

/// The largest difference that the tests allow between our Adam and another of the same numbers.
inline double adam_tolerance(torch::Dtype type) {
  return c10::toRealValueType(type) == torch::kFloat64 ? tolerance::golden_adam_f64
                                                       : tolerance::golden_adam_f32;
}

inline ::testing::AssertionResult agrees(const Tensor& actual, const Tensor& expected,
                                         double allowed) {
  if (actual.sizes() != expected.sizes())
    return ::testing::AssertionFailure()
           << "sizes " << actual.sizes() << " against " << expected.sizes();
  const auto numbers = [](const Tensor& t) {
    const Tensor real =
        t.is_complex() ? torch::view_as_real(t.detach().resolve_conj()) : t.detach();
    return real.to(torch::kFloat64).contiguous();
  };
  const Tensor a = numbers(actual), b = numbers(expected);
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double x = a.data_ptr<double>()[i], y = b.data_ptr<double>()[i];
    if (!(tolerance::golden_difference(x, y) <= allowed))
      return ::testing::AssertionFailure()
             << "element " << i << ": " << x << " against " << y << ", off by "
             << tolerance::golden_difference(x, y) << ", allowed " << allowed;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace front_test
