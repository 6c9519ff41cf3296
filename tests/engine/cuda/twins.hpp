// Optimizers in pairs, one on the CPU and one on a device: the same numbers, the classes that tests
// step on both, and what then differs between the two.
#pragma once

#include <leanopt/leanopt.hpp>

#include "tests/engine/cuda/place.hpp"

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace twins {

using leanopt::Tensor;
using place::copy_on, place::same_bits;

/// What a program has at a time: tensors of several kinds, in the order in which it steps them.
inline std::vector<Tensor> numbers(bool wide, std::uint64_t seed) {
  torch::manual_seed(seed);
  std::vector<Tensor> all = {torch::randn({5000}),     torch::randn({7}),
                             torch::randn({70, 90}),   torch::randn({90, 61}).t(),
                             torch::randn({2, 3, 40}), torch::randn({0, 4})};
  if (wide) all.push_back(torch::randn({66, 64}, at::kDouble));
  all.push_back(torch::randn({64, 80}).to(at::kBFloat16));
  return all;
}
/// The same on the CPU and on a device.
struct parameters {
  bool wide;
  std::vector<Tensor> here, there;
  explicit parameters(at::Device device, bool with_wide = true) : wide(with_wide) {
    for (const Tensor& t : numbers(wide, 1)) {
      here.push_back(t.clone().requires_grad_());
      there.push_back(copy_on(device, t).requires_grad_());
    }
  }
  void set_gradients(std::uint64_t seed) {
    const auto g = numbers(wide, 100 + seed);
    for (std::size_t i = 0; i < g.size(); ++i) {
      here[i].mutable_grad() = g[i] * 0.1;
      there[i].mutable_grad() = copy_on(there[i].device(), here[i].grad());
    }
  }
};

template <class State>
std::string difference_of_states(const State& a, const State& b) {
  std::string result;
  if (a.step() != b.step()) result += "step ";
  leanopt::detail::each_tensor(a, [&](const std::string& name, const Tensor& t) {
    const Tensor other = leanopt::detail::get_slot(b, name);
    if (!other.defined() || !same_bits(t, other)) result += name + " ";
  });
  return result;
}
/// What differs, as text. States that a device counts must be settled.
template <class Optimizer>
std::string difference(const Optimizer& a, const Optimizer& b) {
  std::string result;
  using State = typename Optimizer::State;
  for (std::size_t g = 0; g < a.param_groups().size(); ++g) {
    const auto &here = a.param_groups()[g].params(), &there = b.param_groups()[g].params();
    for (std::size_t i = 0; i < here.size(); ++i) {
      std::string of_one = same_bits(here[i], there[i]) ? "" : "numbers ";
      const auto x = a.state().find(here[i].unsafeGetTensorImpl());
      const auto y = b.state().find(there[i].unsafeGetTensorImpl());
      if ((x == a.state().end()) != (y == b.state().end()))
        of_one += "state ";
      else if (x != a.state().end())
        of_one += difference_of_states(static_cast<const State&>(*x->second),
                                       static_cast<const State&>(*y->second));
      if (!of_one.empty()) result += std::to_string(i) + ": " + of_one;
    }
  }
  return result;
}

template <class Options, class = void>
constexpr bool has_betas = false;
template <class Options>
constexpr bool has_betas<Options, std::void_t<decltype(std::declval<Options>().betas())>> = true;

template <class Optimizer>
struct named {
  using type = Optimizer;
  static constexpr bool is_elementwise = has_betas<typename Optimizer::Options>;
  typename Optimizer::Options options;
};
/// f(optimizer's type, options) for the classes and some of what can be made of their parts.
template <class F>
void with_each(F f) {
  using namespace leanopt;  // NOLINT: a list of names
  f(named<AdamW>{AdamWOptions(1e-2).weight_decay(0.1)});
  f(named<AdamW>{AdamWOptions(1e-2).amsgrad(true)});
  f(named<AdamW8bit>{AdamW8bitOptions(1e-2).weight_decay(0.1)});
  f(named<basic_adamw<formats::dynamic8>>{basic_adamw<formats::dynamic8>::Options(1e-2)});
  f(named<basic_adamw<formats::log8, weights::split24>>{
      basic_adamw<formats::log8, weights::split24>::Options(1e-2)});
  f(named<Adafactor>{AdafactorOptions()});
  f(named<Adafactor>{AdafactorOptions::hugging_face()});
  f(named<Adafactor8bit>{Adafactor8bitOptions()});
}

}  // namespace twins
