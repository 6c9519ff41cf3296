// How large an optimizer's state is: compute_optimizer_size, as the Python function of that name
// counts, and what moments alone will cost before training.
#pragma once

#include <leanopt/formats/dynamic8.hpp>
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

/// Whether `t` is the header of codes that a table decodes.
inline bool uses_code_books(const std::string& name, const Tensor& t) {
  return is_header(name) && t.scalar_type() == at::kFloat;
}

/// counter(bytes) and tensor(name, t) for all that a state of ours or of LibTorch's holds. A step
/// count is one number of 4 bytes where Python's class keeps a float tensor (torch.optim) and of 8
/// where it keeps an integer.
template <class Counter, class OfTensor>
void each_part(const OptimizerParamState& state, Counter counter, OfTensor tensor) {
  using namespace torch::optim;
  const auto some = [&](const char* name, const Tensor& t) {
    if (t.defined()) tensor(std::string(name), t);
  };
  const auto adam = [&](const auto* s) {
    if (!s) return false;
    counter(4);
    each_tensor(*s, tensor);
    return true;
  };
  if (const auto* s = dynamic_cast<const ParamState*>(&state)) {
    counter(s->counter_bytes());
    each_tensor(*s, tensor);
  } else if (adam(dynamic_cast<const AdamParamState*>(&state)) ||
             adam(dynamic_cast<const AdamWParamState*>(&state))) {
  } else if (const auto* sgd = dynamic_cast<const SGDParamState*>(&state)) {
    some("momentum_buffer", sgd->momentum_buffer());
  } else if (const auto* r = dynamic_cast<const RMSpropParamState*>(&state)) {
    counter(4);
    some("square_avg", r->square_avg());
    some("momentum_buffer", r->momentum_buffer());
    some("grad_avg", r->grad_avg());
  } else if (const auto* a = dynamic_cast<const AdagradParamState*>(&state)) {
    counter(4);
    some("sum", a->sum());
  } else if (const auto* l = dynamic_cast<const LBFGSParamState*>(&state)) {
    for (int k = 0; k < 2; ++k) counter(8);  // func_evals, n_iter
    for (int k = 0; k < 2; ++k) counter(4);  // t, prev_loss
    for (const Tensor& t : {l->d(), l->H_diag(), l->prev_flat_grad()}) some("direction", t);
    for (const auto* list : {&l->old_dirs(), &l->old_stps(), &l->ro()})
      for (const Tensor& t : *list) some("history", t);
    if (l->al())
      for (const Tensor& t : *l->al()) some("history", t);
  } else {
    TORCH_CHECK(false, "leanopt: the size of ", c10::demangle(typeid(state).name()),
                " is unknown: it is no state of leanopt or LibTorch");
  }
}

/// Adds up the numbers of states.
class state_count {
 public:
  explicit state_count(bool moments_only = false) : moments_only_(moments_only) {}
  std::int64_t elements = 0, bytes = 0;

  void add(const OptimizerParamState& state) {
    each_part(
        state, [&](std::int64_t width) { numbers(1, width); },
        [&](const std::string& name, const Tensor& t) {
          if (is_moment(name) || !moments_only_) numbers(t.numel(), std::int64_t(t.element_size()));
          if (!moments_only_ && uses_code_books(name, t) && !has_code_books_) {
            has_code_books_ = true;  // one pair, however many tensors are decoded with it
            numbers(formats::dynamic8::table_elements, 4);
          }
        });
  }

 private:
  void numbers(std::int64_t n, std::int64_t width) {
    elements += n;
    bytes += n * width;
  }
  bool moments_only_, has_code_books_ = false;
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
/// What a parameter has per element, in bytes: codes of moments, their headers, residual bits.
struct element_bytes {
  double moments, headers, residual;
};
template <class Rule, class Format, class Weights>
constexpr element_bytes bytes_of(const optimizer<Rule, Format, Weights>*) {
  using header = typename Format::header;
  using residual = typename Weights::residual;
  constexpr bool first_moment = !Rule::elementwise && Format::compressed;
  constexpr int slots = Rule::template formula<first_moment>::slot_count;
  element_bytes result{double(slots * sizeof(typename Format::template stored<float>)), 0, 0};
  if constexpr (has_headers<Format>)
    result.headers = double(slots * sizeof(header)) / Format::block;
  if constexpr (!std::is_void_v<residual>) result.residual = sizeof(residual);
  return result;
}
constexpr element_bytes bytes_of(const torch::optim::Adam*) { return {8, 0, 0}; }
constexpr element_bytes bytes_of(const torch::optim::AdamW*) { return {8, 0, 0}; }
}  // namespace detail

/// Bytes of state per element of a parameter of float32, or of bfloat16 where the weights have
/// residual bits: AdamW 8, AdamW8bit 2.0156. Left out are counters, code books, and Adafactor's
/// factors, which depend on shapes.
template <class Optimizer>
inline constexpr double bytes_per_parameter = [] {
  const auto b = detail::bytes_of(static_cast<const Optimizer*>(nullptr));
  return b.moments + b.headers + b.residual;
}();

/// Megabytes that the moments of so many parameters will take, before training: 8 bytes each for
/// AdamW, 2 for AdamW8bit; headers, counters and small tensors in full precision are left out.
template <class Optimizer>
constexpr double estimate_optimizer_size(std::int64_t parameters) {
  constexpr double each = detail::bytes_of(static_cast<const Optimizer*>(nullptr)).moments;
  static_assert(each > 0,
                "leanopt: the state of Adafactor depends on the shapes of the parameters, not on "
                "their number");
  return double(parameters) * each / (1 << 20);
}

}  // namespace leanopt
