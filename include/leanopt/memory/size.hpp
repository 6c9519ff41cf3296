// How large an optimizer's state is: compute_optimizer_size, as the Python function of that name
// counts, and what moments alone will cost before training.
#pragma once

#include <leanopt/optim/optimizer.hpp>

#include <cstdint>
#include <string>

namespace leanopt {

/// Megabytes of 2^20 bytes, and stored numbers of any width: codes, headers, factors, counters.
struct optimizer_size {
  double megabytes;
  std::int64_t elements;
};

namespace detail {

/// Adds up the numbers of states. A step count is one number of 4 bytes where Python's class keeps
/// a float tensor (torch.optim) and of 8 where it keeps an integer.
class state_count {
 public:
  explicit state_count(bool moments_only = false) : moments_only_(moments_only) {}
  std::int64_t elements = 0, bytes = 0;

  void add(const OptimizerParamState& state) {
    using namespace torch::optim;
    if (const auto* s = dynamic_cast<const ParamState*>(&state)) {
      number(s->counter_bytes());
      each_tensor(*s, [&](const std::string& name, const Tensor& t) {
        if (is_moment(name) || !moments_only_) tensor(t);
      });
    } else if (!adam<AdamParamState>(state) && !adam<AdamWParamState>(state)) {
      other(state);
    }
  }

 private:
  void number(std::int64_t width) {
    ++elements;
    bytes += width;
  }
  void tensor(const Tensor& t) {
    if (!t.defined()) return;
    elements += t.numel();
    bytes += std::int64_t(t.nbytes());
  }
  template <class State>
  bool adam(const OptimizerParamState& state) {
    const auto* s = dynamic_cast<const State*>(&state);
    if (!s) return false;
    number(4);
    each_tensor(*s, [&](const std::string&, const Tensor& t) { tensor(t); });
    return true;
  }
  /// LibTorch's other classes.
  void other(const OptimizerParamState& state) {
    using namespace torch::optim;
    if (const auto* s = dynamic_cast<const SGDParamState*>(&state)) {
      tensor(s->momentum_buffer());
    } else if (const auto* r = dynamic_cast<const RMSpropParamState*>(&state)) {
      number(4);
      tensor(r->square_avg());
      tensor(r->momentum_buffer());
      tensor(r->grad_avg());
    } else if (const auto* a = dynamic_cast<const AdagradParamState*>(&state)) {
      number(4);
      tensor(a->sum());
    } else if (const auto* l = dynamic_cast<const LBFGSParamState*>(&state)) {
      for (int k = 0; k < 2; ++k) number(8);  // func_evals, n_iter
      for (int k = 0; k < 2; ++k) number(4);  // t, prev_loss
      for (const Tensor& t : {l->d(), l->H_diag(), l->prev_flat_grad()}) tensor(t);
      for (const auto* list : {&l->old_dirs(), &l->old_stps(), &l->ro()})
        for (const Tensor& t : *list) tensor(t);
      if (l->al())
        for (const Tensor& t : *l->al()) tensor(t);
    } else {
      TORCH_CHECK(false, "leanopt: the size of ", c10::demangle(typeid(state).name()),
                  " is unknown: it is no state of leanopt or LibTorch");
    }
  }

  bool moments_only_;
};

/// Of an optimizer, or of the map that its state() gives.
template <class OptimizerOrState>
state_count count(const OptimizerOrState& of, bool moments_only) {
  if constexpr (std::is_base_of_v<Optimizer, OptimizerOrState>) {
    return count(of.state(), moments_only);
  } else {
    state_count result(moments_only);
    for (const auto& [key, state] : of)
      if (state) result.add(*state);
    return result;
  }
}

}  // namespace detail

/// The size of the state of an optimizer of ours or of LibTorch's, or of its `state()`: what
/// Python's function of this name gives for the same optimizer. (0, 0) before the first step.
/// Nothing is copied.
template <class OptimizerOrState>
optimizer_size compute_optimizer_size(const OptimizerOrState& of) {
  const auto c = detail::count(of, false);
  return {double(c.bytes) / (1 << 20), c.elements};
}

/// Moments and step counts only, without headers: the count of a model's state that does not depend
/// on the format.
template <class OptimizerOrState>
std::int64_t count_moments(const OptimizerOrState& of) {
  return detail::count(of, true).elements;
}

namespace detail {
template <class Rule, class Format, class Weights>
constexpr double bytes_per_parameter(const optimizer<Rule, Format, Weights>*) {
  static_assert(Rule::elementwise,
                "leanopt: the state of Adafactor depends on the shapes of the parameters, not on "
                "their number");
  return Rule::template formula<false>::slot_count * Format::bytes_per_value;
}
constexpr double bytes_per_parameter(const torch::optim::Adam*) {
  return bytes_per_parameter(static_cast<const optimizer<rules::adam, formats::full>*>(nullptr));
}
constexpr double bytes_per_parameter(const torch::optim::AdamW*) {
  return bytes_per_parameter(static_cast<const optimizer<rules::adamw, formats::full>*>(nullptr));
}
}  // namespace detail

/// Megabytes that the moments of so many parameters will take, before training: 8 bytes each for
/// AdamW, 2 for AdamW8bit; headers, counters and small tensors in full precision are left out.
template <class Optimizer>
constexpr double estimate_optimizer_size(std::int64_t parameters) {
  return double(parameters) * detail::bytes_per_parameter(static_cast<const Optimizer*>(nullptr)) /
         (1 << 20);
}

}  // namespace leanopt
