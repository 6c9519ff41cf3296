// Operations on the rows of a parameter together with its state, for programs whose parameters grow
// and shrink while they train. They take any optimizer of ours, and LibTorch's Adam and AdamW, as
// Optimizer&.
#pragma once

#include <leanopt/optim/front.hpp>

#include <torch/csrc/autograd/variable.h>

#include <string>

namespace leanopt {

namespace detail {

/// A graph that is still held keeps the parameter's gradient accumulator, which remembers the old
/// shape. The pointer's type differs by LibTorch's version.
template <class Weak>
void drop_accumulator(void (*set)(const torch::autograd::Variable&, Weak), const Tensor& param) {
  set(param, Weak(decltype(std::declval<Weak>().lock())()));
}

/// Other data, of another shape perhaps, in the same tensor object: modules, groups and every other
/// handle follow, and no key of a state changes.
inline void set_rows(Tensor& param, const Tensor& data) {
  param.mutable_grad() = Tensor();
  param.set_data(data);
  drop_accumulator(&torch::autograd::impl::set_grad_accumulator, param);
}

inline void change_state_rows(Optimizer& optimizer, const Tensor& param, std::int64_t rows,
                              const front::change& f) {
  TORCH_CHECK(param.dim() > 0, "leanopt: a parameter without dimensions has no rows");
  if (auto* ours = dynamic_cast<front*>(&optimizer)) return ours->change_rows(param, rows, f);
  const auto it = optimizer.state().find(param.unsafeGetTensorImpl());
  if (it == optimizer.state().end() || !it->second) return;
  const auto change_all = [&](auto* s) {
    for (const char* name : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
      if (const Tensor t = get_slot(*s, name); t.defined()) set_slot(*s, name, f(t));
  };
  if (auto* s = dynamic_cast<torch::optim::AdamParamState*>(it->second.get())) return change_all(s);
  if (auto* s = dynamic_cast<torch::optim::AdamWParamState*>(it->second.get()))
    return change_all(s);
  TORCH_CHECK(false, "leanopt: the rows of the state of ", c10::demangle(typeid(optimizer).name()),
              " are unknown");
}

}  // namespace detail

/// `param` keeps the rows in `index` (positions, or a mask), and so does its state. Its gradient is
/// dropped. Compressed state is decoded and encoded again, one more rounding of the whole tensor.
inline void keep_rows(Optimizer& optimizer, Tensor param, const Tensor& index) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Tensor where = index.to(param.device());
  const auto keep = [&](const Tensor& t) { return t.index({where}); };
  const Tensor data = keep(param.detach());
  detail::change_state_rows(optimizer, param, data.size(0), keep);
  detail::set_rows(param, data);
}

/// `param` grows by `rows`, whose state is zero; its step count stays.
inline void append_rows(Optimizer& optimizer, Tensor param, const Tensor& rows) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Tensor data = at::cat({param.detach(), rows.detach().to(param.options())});
  detail::change_state_rows(optimizer, param, data.size(0), [&](const Tensor& t) {
    auto sizes = t.sizes().vec();
    sizes[0] = rows.size(0);
    return at::cat({t, at::zeros(sizes, t.options())});
  });
  detail::set_rows(param, data);
}

/// The state of the rows in `index` becomes that of a fresh parameter; the parameter stays.
inline void zero_rows(Optimizer& optimizer, const Tensor& param, const Tensor& index) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Tensor where = index.to(param.device());
  detail::change_state_rows(optimizer, param, param.size(0), [&](const Tensor& t) {
    return t.clone().index_put_({where}, at::zeros({}, t.options()));
  });
}

/// `fresh` takes the place of `old` in the optimizer and inherits its state. The shapes must agree.
inline void replace_parameter(Optimizer& optimizer, const Tensor& old, const Tensor& fresh) {
  TORCH_CHECK(old.sizes() == fresh.sizes(), "leanopt: replace_parameter: the shapes ", old.sizes(),
              " and ", fresh.sizes(), " differ");
  if (auto* ours = dynamic_cast<detail::front*>(&optimizer)) return ours->replace(old, fresh);
  const Tensor before = old;  // `old` may be the element of the list that is replaced below
  if (const auto it = optimizer.state().find(before.unsafeGetTensorImpl());
      it != optimizer.state().end()) {
    auto state = std::move(it->second);
    optimizer.state().erase(it);
    optimizer.state()[fresh.unsafeGetTensorImpl()] = std::move(state);
  }
  for (auto& g : optimizer.param_groups())
    for (auto& p : g.params())
      if (p.is_same(before)) p = fresh;
}

/// A copy of the slot `name` of `param`, decoded where it is compressed; undefined before the first
/// step.
inline Tensor slot(const Optimizer& optimizer, const Tensor& param, const std::string& name) {
  const auto* ours = dynamic_cast<const detail::front*>(&optimizer);
  TORCH_CHECK(ours, "leanopt: slot: not an optimizer of leanopt");
  return ours->read_slot(param, name);
}
/// Replaces the slot's values, which compressed formats round.
inline void set_slot(Optimizer& optimizer, const Tensor& param, const std::string& name,
                     const Tensor& value) {
  auto* ours = dynamic_cast<detail::front*>(&optimizer);
  TORCH_CHECK(ours, "leanopt: set_slot: not an optimizer of leanopt");
  ours->write_slot(param, name, value);
}

}  // namespace leanopt
