// What an optimizer remembers per parameter.
#pragma once

#include <leanopt/optim/options.hpp>

#include <string>
#include <utility>
#include <vector>

namespace leanopt {

/// The state that LibTorch has no class for: a step count and tensors by name. A static_cast of it
/// to LibTorch's AdamParamState is undefined: compressed moments have no `exp_avg()` to edit.
class ParamState : public torch::optim::OptimizerCloneableParamState<ParamState> {
 public:
  TORCH_ARG(std::int64_t, step) = 0;
  /// Which parameter of its optimizer this is, counted from 0 when its state was made; random bits
  /// depend on it, positions in the groups do not.
  TORCH_ARG(std::int64_t, ordinal) = -1;
  /// What Python's class of the same optimizer spends on its step count.
  TORCH_ARG(std::int64_t, counter_bytes) = 8;
  /// A digest of the weight that the residual bits in an archive belong to.
  TORCH_ARG(std::int64_t, weight_digest) = 0;

 public:
  using named = std::vector<std::pair<std::string, torch::Tensor>>;
  const named& tensors() const { return tensors_; }
  named& tensors() { return tensors_; }

  /// The tensor called `name`; undefined where there is none.
  torch::Tensor tensor(const std::string& name) const {
    for (const auto& [n, t] : tensors_)
      if (n == name) return t;
    return {};
  }
  /// Sets the tensor called `name`; an undefined value removes it.
  void tensor(const std::string& name, torch::Tensor value) {
    for (auto it = tensors_.begin(); it != tensors_.end(); ++it) {
      if (it->first != name) continue;
      if (value.defined())
        it->second = std::move(value);
      else
        tensors_.erase(it);
      return;
    }
    if (value.defined()) tensors_.emplace_back(name, std::move(value));
  }

  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", torch::IValue(step()));
    archive.write("ordinal", torch::IValue(ordinal()));
    archive.write("counter_bytes", torch::IValue(counter_bytes()));
    if (weight_digest()) archive.write("weight_digest", torch::IValue(weight_digest()));
    for (const auto& [name, t] : tensors_) archive.write(name, torch::IValue(t));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    tensors_.clear();
    for (const auto& key : archive.keys()) {
      torch::IValue value;
      archive.read(key, value);
      if (value.isTensor())
        tensor(key, value.toTensor());
      else if (key == "step")
        step(value.toInt());
      else if (key == "ordinal")
        ordinal(value.toInt());
      else if (key == "counter_bytes")
        counter_bytes(value.toInt());
      else if (key == "weight_digest")
        weight_digest(value.toInt());
    }
  }

  /// The weight as our last step left it: where it is, and autograd's count of its changes.
  const void* weight = nullptr;
  std::int64_t weight_version = -1;

 private:
  named tensors_;
};

namespace detail {

/// Which class the states of an optimizer are of.
enum class state_kind { ours, adam, adamw };
template <class State>
constexpr state_kind kind_of =
    std::is_same_v<State, torch::optim::AdamParamState>    ? state_kind::adam
    : std::is_same_v<State, torch::optim::AdamWParamState> ? state_kind::adamw
                                                           : state_kind::ours;

/// f(state) with its own class. @pre `s` is of `kind`.
template <class F>
auto with_class(const torch::optim::OptimizerParamState& s, state_kind kind, F f) {
  auto& held = const_cast<torch::optim::OptimizerParamState&>(s);
  if (kind == state_kind::adam) return f(static_cast<torch::optim::AdamParamState&>(held));
  if (kind == state_kind::adamw) return f(static_cast<torch::optim::AdamWParamState&>(held));
  return f(static_cast<ParamState&>(held));
}
inline bool has_class(const torch::optim::OptimizerParamState& s, state_kind kind) {
  if (kind == state_kind::adam) return dynamic_cast<const torch::optim::AdamParamState*>(&s);
  if (kind == state_kind::adamw) return dynamic_cast<const torch::optim::AdamWParamState*>(&s);
  return dynamic_cast<const ParamState*>(&s);
}

// Whether no step has used a state yet.
inline bool is_fresh(const ParamState& s) { return s.ordinal() < 0; }
template <class S, class = decltype(std::declval<S&>().max_exp_avg_sq())>
bool is_fresh(const S& s) {
  return !s.exp_avg().defined();
}

// One way to reach a slot by name, for our state and for LibTorch's.
inline torch::Tensor get_slot(const ParamState& s, const std::string& name) {
  return s.tensor(name);
}
inline void set_slot(ParamState& s, const std::string& name, torch::Tensor t) {
  s.tensor(name, std::move(t));
}
template <class S, class = decltype(std::declval<S&>().max_exp_avg_sq())>
torch::Tensor get_slot(const S& s, const std::string& name) {
  return name == "exp_avg"          ? s.exp_avg()
         : name == "exp_avg_sq"     ? s.exp_avg_sq()
         : name == "max_exp_avg_sq" ? s.max_exp_avg_sq()
                                    : torch::Tensor();
}
template <class S, class = decltype(std::declval<S&>().max_exp_avg_sq())>
void set_slot(S& s, const std::string& name, torch::Tensor t) {
  if (name == "exp_avg")
    s.exp_avg(std::move(t));
  else if (name == "exp_avg_sq")
    s.exp_avg_sq(std::move(t));
  else if (name == "max_exp_avg_sq")
    s.max_exp_avg_sq(std::move(t));
}

/// The residual bits of a split weight.
inline constexpr const char* residual_name = "residual";

/// Whether `name` is a slot of moments, and neither the header of one nor a figure beside them.
inline bool is_moment(const std::string& name) {
  return name.find('.') == std::string::npos && name != "RMS" && name != residual_name;
}

/// f(tensor) for the tensors that a state holds, in one order.
template <class F>
void each_tensor_of(const ParamState& s, F f) {
  for (const auto& named : s.tensors())
    if (named.second.defined()) f(named.second);
}
template <class S, class F, class = decltype(std::declval<const S&>().max_exp_avg_sq())>
void each_tensor_of(const S& s, F f) {
  for (const torch::Tensor* t : {&s.exp_avg(), &s.exp_avg_sq(), &s.max_exp_avg_sq()})
    if (t->defined()) f(*t);
}
/// f(name, tensor) for the same.
template <class F>
void each_tensor(const ParamState& s, F f) {
  for (const auto& [name, t] : s.tensors())
    if (t.defined()) f(name, t);
}
template <class S, class F, class = decltype(std::declval<const S&>().max_exp_avg_sq())>
void each_tensor(const S& s, F f) {
  for (const char* name : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
    if (const auto t = get_slot(s, name); t.defined()) f(std::string(name), t);
}

}  // namespace detail
}  // namespace leanopt
