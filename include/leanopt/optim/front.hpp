// What every optimizer of ours does alike, whatever its rule and format: parameter groups, the identity
// of parameters, checks of the lists, archives. optimizer.hpp adds the types and the step.
#pragma once

#include <leanopt/optim/archive.hpp>
#include <leanopt/optim/state.hpp>

#include <algorithm>
#include <sstream>
#include <unordered_map>

namespace leanopt {

using torch::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace detail {

/// Where a parameter stands in the groups, for messages.
struct place {
  std::size_t group, index;
  friend std::ostream& operator<<(std::ostream& out, const place& p) {
    return out << "parameter " << p.index << " of group " << p.group;
  }
};

class front : public Optimizer {
 public:
  /// Fields set in the group's options win, the others inherit the defaults. Hides LibTorch's function,
  /// which drops or merges options by version and cannot be overridden; through an `Optimizer&` use
  /// leanopt::add_param_group. @throws and leaves the optimizer as it was when a parameter is unfit or
  /// known already.
  void add_param_group(const OptimizerParamGroup& group) {
    const std::size_t i = param_groups_.size();
    auto options = group.has_options() ? resolve(group.options(), i) : defaults_->clone();
    param_groups_.emplace_back(group.params(), std::move(options));
    try {
      check_lists();
    } catch (...) {
      param_groups_.pop_back();
      throw;
    }
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    write_archive(archive, param_groups_, state_, signature(), next_ordinal_,
                  [&](std::size_t i) { return convert(param_groups_[i].options(), i); });
  }
  /// Everything is read and checked before anything changes. Takes LibTorch's archives of the same rule.
  void load(torch::serialize::InputArchive& archive) override {
    auto read = read_archive(
        archive, param_groups_, signature(),
        [&](std::size_t i) { return convert(param_groups_[i].options(), i); },
        [&] { return new_state(); },
        [&](OptimizerParamState& s, const Tensor& p, std::size_t i, std::size_t j) {
          check_state(s, p, place{i, j});
        },
        [&](const OptimizerOptions& o, std::size_t i) { check_options(o, group_name(i)); });
    state_.clear();
    owners_.clear();
    seen_.clear();
    for (auto& [p, s] : read.states) {
      own(p);
      state_[p.unsafeGetTensorImpl()] = std::move(s);
    }
    for (std::size_t i = 0; i < param_groups_.size(); ++i)
      assign(param_groups_[i], std::move(read.options[i]));
    next_ordinal_ = std::max(next_ordinal_, read.next_ordinal);
  }

  using change = std::function<Tensor(const Tensor&)>;
  /// Applies `f` to every slot of `p` that has a row per row of it; `rows` is the new number of rows.
  virtual void change_rows(const Tensor& p, std::int64_t rows, const change& f) = 0;
  /// The slot called `name` as float32 (or float64) numbers; undefined where there is none.
  virtual Tensor read_slot(const Tensor& p, const std::string& name) const = 0;
  virtual void write_slot(const Tensor& p, const std::string& name, const Tensor& value) = 0;
  /// `fresh` takes the place of `old` in the lists and inherits its state.
  void replace(const Tensor& old, const Tensor& fresh) {
    for (auto& g : param_groups_)
      for (auto& p : g.params()) {
        TORCH_CHECK(!p.is_same(fresh), "leanopt: replace_parameter: the new parameter is in the "
                    "optimizer already");
      }
    const Tensor before = old;  // `old` may be the element of the list that is replaced below
    if (const auto it = state_.find(before.unsafeGetTensorImpl()); it != state_.end()) {
      auto state = std::move(it->second);
      state_.erase(it);
      own(fresh);
      state_[fresh.unsafeGetTensorImpl()] = std::move(state);
    }
    for (auto& g : param_groups_)
      for (auto& p : g.params())
        if (p.is_same(before)) p = fresh;
  }

 protected:
  /// LibTorch sees no group, so it merges and drops nothing; derived constructors append the groups.
  explicit front(std::unique_ptr<OptimizerOptions> defaults)
      : Optimizer(std::vector<OptimizerParamGroup>{}, std::move(defaults)) {}

  /// `given` as our type, as it stands; own fields come from the defaults where it has none.
  virtual std::unique_ptr<OptimizerOptions> convert(const OptimizerOptions& given,
                                                    std::size_t group) const = 0;
  /// The same with unset fields inherited, checked.
  virtual std::unique_ptr<OptimizerOptions> resolve(const OptimizerOptions& given,
                                                    std::size_t group) const = 0;
  virtual void assign(OptimizerParamGroup& group, std::unique_ptr<OptimizerOptions> options) = 0;
  virtual void check_options(const OptimizerOptions& o, const std::string& where) const = 0;
  virtual std::unique_ptr<OptimizerParamState> new_state() const = 0;
  virtual void check_state(const OptimizerParamState& s, const Tensor& p, place where) const = 0;
  virtual void check_type(const Tensor& p, place where) const = 0;
  virtual archive_signature signature() const = 0;

  static std::string group_name(std::size_t i) { return "group " + std::to_string(i); }

  /// The lists are the user's and change at any time: each step compares them with those it saw last.
  void refresh() {
    std::size_t n = 0;
    bool same = true;
    for (auto& g : param_groups_) {
      if (!g.has_options()) g.set_options(defaults_->clone());
      for (const auto& p : g.params()) {
        same = same && n < seen_.size() && seen_[n] == p.unsafeGetTensorImpl();
        ++n;
      }
    }
    if (same && n == seen_.size()) return;
    check_lists();
    for (auto it = owners_.begin(); it != owners_.end();) {
      if (it->second.expired()) {
        state_.erase(it->first);
        it = owners_.erase(it);
      } else {
        ++it;
      }
    }
    seen_.clear();
    for (const auto& g : param_groups_)
      for (const auto& p : g.params()) {
        own(p);
        seen_.push_back(p.unsafeGetTensorImpl());
      }
  }

  std::int64_t next_ordinal_ = 0;

 private:
  /// State is keyed by the address of a TensorImpl; a weak reference keeps that address, but no data,
  /// from being given to another tensor while we know it.
  void own(const Tensor& p) { owners_.try_emplace(p.unsafeGetTensorImpl(), p.getIntrusivePtr()); }

  void check_lists() const {
    struct span {
      std::uintptr_t begin, end;
      place where;
    };
    std::vector<span> memory;
    std::unordered_map<void*, place> known;
    for (std::size_t i = 0; i < param_groups_.size(); ++i) {
      const auto& params = param_groups_[i].params();
      for (std::size_t j = 0; j < params.size(); ++j) {
        const place where{i, j};
        check_parameter(params[j], where);
        const auto [it, fresh] = known.try_emplace(params[j].unsafeGetTensorImpl(), where);
        TORCH_CHECK(fresh, "leanopt: ", where, " is the same tensor as ", it->second,
                    " and would be stepped twice; leanopt::unique_parameters(module) lists a tied "
                    "parameter once");
        if (params[j].numel() && params[j].is_non_overlapping_and_dense()) {
          const auto begin = reinterpret_cast<std::uintptr_t>(params[j].data_ptr());
          memory.push_back({begin, begin + params[j].nbytes(), where});
        }
      }
    }
    std::sort(memory.begin(), memory.end(),
              [](const span& a, const span& b) { return a.begin < b.begin; });
    for (std::size_t k = 1; k < memory.size(); ++k)
      TORCH_CHECK(memory[k].begin >= memory[k - 1].end, "leanopt: ", memory[k].where, " and ",
                  memory[k - 1].where,
                  " overlap in memory and would be stepped twice; give the optimizer one of them");
  }
  void check_parameter(const Tensor& p, place where) const {
    TORCH_CHECK(p.defined(), "leanopt: ", where, " is undefined; leave it out of the list");
    TORCH_CHECK(p.is_leaf(), "leanopt: ", where,
                " is not a leaf tensor: it is computed from others; give the optimizer those");
    TORCH_CHECK(p.layout() == at::kStrided, "leanopt: ", where, " has layout ", p.layout(),
                "; only strided tensors can be stepped");
    TORCH_CHECK(p.device().is_cpu(), "leanopt: ", where, " is on ", p.device(),
                "; this version steps tensors on the CPU only");
    TORCH_CHECK(!p.is_conj() && !p.is_neg(), "leanopt: ", where,
                " is a lazily conjugated or negated view; call resolve_conj() or resolve_neg() first");
    TORCH_CHECK(!overlaps_itself(p), "leanopt: ", where,
                " has elements that share memory (an expanded tensor?); make it contiguous first");
    check_type(p, where);
  }
  static bool overlaps_itself(const Tensor& p) {
    if (p.numel() <= 1 || p.is_non_overlapping_and_dense()) return false;
    std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
    for (std::int64_t d = 0; d < p.dim(); ++d)
      if (p.size(d) > 1) dims.emplace_back(p.stride(d), p.size(d));
    std::sort(dims.begin(), dims.end());
    std::int64_t reach = 0;
    for (const auto& [stride, size] : dims) {
      if (stride <= reach) return true;
      reach += stride * (size - 1);
    }
    return false;
  }

  std::unordered_map<void*, c10::weak_intrusive_ptr<c10::TensorImpl>> owners_;
  std::vector<void*> seen_;
};

}  // namespace detail

/// Adds a group whose unset options inherit the defaults, also where the optimizer is held as
/// Optimizer&. @throws for optimizers of other libraries.
inline void add_param_group(Optimizer& optimizer, const OptimizerParamGroup& group) {
  auto* ours = dynamic_cast<detail::front*>(&optimizer);
  TORCH_CHECK(ours, "leanopt: add_param_group: not an optimizer of leanopt; call its own member");
  ours->add_param_group(group);
}

}  // namespace leanopt
