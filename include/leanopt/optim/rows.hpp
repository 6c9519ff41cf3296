// Operations on the rows of a parameter together with its state, for programs whose parameters grow
// and shrink while they train, and slots by name. They take any optimizer of ours, and LibTorch's
// Adam and AdamW, as Optimizer&.
#pragma once

#include <leanopt/optim/front.hpp>

#include <ATen/ops/cat.h>
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
inline void set_rows(Optimizer& optimizer, Tensor& param, const Tensor& data) {
  param.mutable_grad() = Tensor();
  param.set_data(data);
  drop_accumulator(&torch::autograd::impl::set_grad_accumulator, param);
  if (auto* ours = dynamic_cast<front*>(&optimizer)) ours->adopt(param);
}

/// LibTorch's Adam and AdamW: f(state) for the state of a parameter, where there is one.
template <class F>
void with_stock_state(const Optimizer& optimizer, const Tensor& param, F f) {
  const auto it = optimizer.state().find(param.unsafeGetTensorImpl());
  if (it == optimizer.state().end() || !it->second) return;
  if (auto* s = dynamic_cast<torch::optim::AdamParamState*>(it->second.get())) return f(*s);
  if (auto* s = dynamic_cast<torch::optim::AdamWParamState*>(it->second.get())) return f(*s);
  TORCH_CHECK(false, "leanopt: the state of ", c10::demangle(typeid(optimizer).name()),
              " is unknown; leanopt's optimizers and LibTorch's Adam and AdamW are known");
}

inline bool holds(const Optimizer& optimizer, const Tensor& param) {
  for (const auto& g : optimizer.param_groups())
    for (const auto& p : g.params())
      if (p.is_same(param)) return true;
  return false;
}
inline void check_rows(const Optimizer& optimizer, const Tensor& param) {
  TORCH_CHECK(holds(optimizer, param), "leanopt: the tensor of shape ", param.sizes(),
              " is no parameter of the optimizer");
  TORCH_CHECK(param.dim() > 0, "leanopt: a parameter without dimensions has no rows");
}

inline void change_state_rows(Optimizer& optimizer, const Tensor& param, std::int64_t rows,
                              const front::change& f) {
  if (auto* ours = dynamic_cast<front*>(&optimizer)) return ours->change_rows(param, rows, f);
  with_stock_state(optimizer, param, [&](auto& s) {
    each_tensor(s, [&](const std::string& name, const Tensor& t) { set_slot(s, name, f(t)); });
  });
}

}  // namespace detail

/// `param` keeps the rows in `index` (positions, or a mask of its length), and so does its state.
/// Its gradient is dropped. Compressed state is decoded and encoded again, one more rounding of the
/// whole tensor. @throws where `param` is no parameter of the optimizer or has no dimensions; so do
/// the next two.
inline void keep_rows(Optimizer& optimizer, Tensor param, const Tensor& index) {
  detail::check_rows(optimizer, param);
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Tensor where = index.to(param.device());
  const auto keep = [&](const Tensor& t) { return t.index({where}); };
  const Tensor data = keep(param.detach());
  detail::change_state_rows(optimizer, param, data.size(0), keep);
  detail::set_rows(optimizer, param, data);
}

/// `param` grows by `rows`, of its shape but for the first dimension, whose state is zero; its step
/// count stays.
inline void append_rows(Optimizer& optimizer, Tensor param, const Tensor& rows) {
  detail::check_rows(optimizer, param);
  TORCH_CHECK(rows.dim() == param.dim() && rows.sizes().slice(1) == param.sizes().slice(1),
              "leanopt: append_rows: rows of shape ", rows.sizes(),
              " do not fit a parameter of shape ", param.sizes());
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Tensor data = at::cat({param.detach(), rows.detach().to(param.options())});
  detail::change_state_rows(optimizer, param, data.size(0), [&](const Tensor& t) {
    auto sizes = t.sizes().vec();
    sizes[0] = rows.size(0);
    return at::cat({t, at::zeros(sizes, t.options())});
  });
  detail::set_rows(optimizer, param, data);
}

/// The state of the rows in `index` (positions, or a mask) becomes that of a fresh parameter; the
/// parameter stays.
inline void zero_rows(Optimizer& optimizer, const Tensor& param, const Tensor& index) {
  detail::check_rows(optimizer, param);
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Tensor where = index.to(param.device());
  detail::change_state_rows(optimizer, param, param.size(0), [&](const Tensor& t) {
    return t.clone().index_put_({where}, at::zeros({}, t.options()));
  });
}

/// `fresh` takes the place of `old` in the optimizer and inherits its state. @throws where the
/// shapes differ, `old` is no parameter of the optimizer, or `fresh` is one.
inline void replace_parameter(Optimizer& optimizer, const Tensor& old, const Tensor& fresh) {
  TORCH_CHECK(old.sizes() == fresh.sizes(), "leanopt: replace_parameter: the shapes ", old.sizes(),
              " and ", fresh.sizes(), " differ");
  TORCH_CHECK(detail::holds(optimizer, old), "leanopt: replace_parameter: the tensor of shape ",
              old.sizes(), " is no parameter of the optimizer");
  TORCH_CHECK(!detail::holds(optimizer, fresh),
              "leanopt: replace_parameter: the new parameter is in the optimizer already");
  const Tensor before = old;  // `old` may be the element of the list that is replaced below
  const auto swap = [&](const Tensor& from, const Tensor& to) {
    for (auto& g : optimizer.param_groups())
      for (auto& p : g.params())
        if (p.is_same(from)) p = to;
  };
  auto* ours = dynamic_cast<detail::front*>(&optimizer);
  if (ours) ours->settle_steps();  // as long as the state is found by the old parameter
  swap(before, fresh);
  if (ours) {
    try {
      ours->check_lists();
    } catch (...) {
      swap(fresh, before);
      throw;
    }
    ours->pin(fresh);
  }
  if (const auto it = optimizer.state().find(before.unsafeGetTensorImpl());
      it != optimizer.state().end()) {
    auto state = std::move(it->second);
    optimizer.state().erase(it);
    optimizer.state()[fresh.unsafeGetTensorImpl()] = std::move(state);
  }
}

/// A copy of the slot `name` of `param` in full precision, decoded where it is compressed;
/// undefined before the first step.
inline Tensor slot(const Optimizer& optimizer, const Tensor& param, const std::string& name) {
  if (const auto* ours = dynamic_cast<const detail::front*>(&optimizer))
    return ours->read_slot(param, name);
  Tensor found;
  detail::with_stock_state(optimizer, param, [&](const auto& s) {
    if (const Tensor t = detail::get_slot(s, name); t.defined()) found = t.clone();
  });
  return found;
}
/// A copy of the weight of `param` as the optimizer steps it: in float32 (float64 parameters in
/// float64), with the residual bits of split weights.
inline Tensor master_weight(const Optimizer& optimizer, const Tensor& param) {
  if (const auto* ours = dynamic_cast<const detail::front*>(&optimizer))
    return ours->read_weight(param);
  return param.detach().to(
      param.scalar_type() == at::kDouble || param.is_complex() ? param.scalar_type() : at::kFloat,
      false, /*copy=*/true);
}
/// Replaces the slot's values, which compressed formats round. @throws where the optimizer keeps no
/// such slot, the shape is another, or a second moment would be negative.
inline void set_slot(Optimizer& optimizer, const Tensor& param, const std::string& name,
                     const Tensor& value) {
  if (auto* ours = dynamic_cast<detail::front*>(&optimizer))
    return ours->write_slot(param, name, value);
  bool done = false;
  detail::with_stock_state(optimizer, param, [&](auto& s) {
    const Tensor t = detail::get_slot(s, name);
    if (!(done = t.defined())) return;
    const at::NoGradGuard no_grad;
    t.copy_(value);
  });
  TORCH_CHECK(done, "leanopt: set_slot: LibTorch's optimizer keeps no ", name,
              " of this tensor yet");
}

}  // namespace leanopt
