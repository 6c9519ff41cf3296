// What every optimizer of ours does alike, whatever its rule and format: parameter groups, the
// identity of parameters, the checks of a step, slots by name, archives. No template, so that a
// program compiles it once; optimizer.hpp adds the types.
#pragma once

#include <leanopt/optim/archive.hpp>
#include <leanopt/optim/plan.hpp>
#include <leanopt/optim/scalars.hpp>
#include <leanopt/optim/slots.hpp>
#include <leanopt/optim/state.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace leanopt {

using torch::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace detail {

/// What the front must know of an optimizer's rule, format and weights.
struct description {
  archive_signature who;
  std::vector<slot_spec> slots;  ///< all that a state may hold
  codec compressed;              ///< those of them that the format compresses
  state_kind kind;
  bool takes_complex = false, takes_float16 = true;
  bool squares_in_float = false;  ///< also of float64 parameters
  /// The type of the residual bits of bfloat16 weights, if the weights have some.
  at::ScalarType residual = at::ScalarType::Undefined;
  /// The numbers of a weight, widened.
  void (*widen)(cpu::level, const operand&, std::size_t first, std::size_t n, float* out) = nullptr;
};
/// What a group's options say beside its rule: when moments are compressed, the seed of random
/// bits, what happens to gradients that are not finite.
struct storage {
  std::int64_t min_elements = 0;
  std::uint64_t seed = 0;
  nonfinite bad_gradients = nonfinite::propagate;
};

class front : public Optimizer, public training_hooks {
 public:
  /// One step of every parameter that has a gradient. All parameters, gradients, options and states
  /// are checked before the first changes. @throws for sparse gradients. For parameters without
  /// elements steps are counted, nothing else. A gradient that is not finite in a group with
  /// nonfinite::skip_step leaves out the step of all groups.
  Tensor step(LossClosure closure = nullptr) override {
    Tensor loss;
    if (closure) {
      at::AutoGradMode on(true);
      loss = closure();
    }
    const c10::InferenceMode normal(false);  // state made in this step must serve later ones
    const at::NoGradGuard no_grad;
    collect();
    const bool captured = is_captured();
    // The host waits for scalars in a device's memory only where it needs them itself.
    const bool reads_scalars = !on_host_.empty() || looks_at_all_;
    factor_ = reads_scalars ? value_of(scalars_.inv_scale) * value_of(scalars_.clip) : 1;
    const Tensor& found = scalars_.found_inf;
    const bool found_there = found.defined() && !found.is_cpu() && !reads_scalars;
    const bool found_inf = found.defined() && !found_there && value_of(found) != 0;
    const bool skipped = !found_inf && looks_at_all_ && skips_step();
    if (skipped) ++skipped_steps_;
    if (found_inf || skipped) {
      scalars_ = {};
      return loss;
    }
    const cpu::float_environment guard;  // coefficients are part of the promise of equal bits
    const bool by_device = captured || found_there || reads_rates();
    const bool listed = list_on_devices(captured);
    if (!listed) {
      TORCH_CHECK(
          !captured,
          "leanopt: a step can be captured in a graph only if it is like the one before: do "
          "one with the same parameters, options and tensors before the capture");
      settle_steps();
    }
    for (plan* x : active_)
      if (!x->is_ready) make_ready(*x);
    if (!listed) make_lists();
    run(on_host_);
    lists_.run({scalars_.inv_scale, scalars_.clip, found_there ? found : Tensor()}, by_device,
               captured);
    scalars_ = {};
    for (const plan* x : active_) {  // nothing below can throw
      if (!x->list || !lists_.counts_steps(x->list)) count_step(*x->state);
      bump(*x->p);  // autograd must see what raw pointers changed
      adopt(*x->state, *x->p);
      with_class(*x->state, what_.kind,
                 [](auto& s) { each_tensor_of(s, [](const Tensor& t) { bump(t); }); });
    }
    return loss;
  }

  /// Fields set in the group's options win, the others inherit the defaults. Hides LibTorch's
  /// function, which drops or merges options by version and cannot be overridden; through an
  /// `Optimizer&` use leanopt::add_param_group. @throws and leaves the optimizer as it was when a
  /// parameter is unfit or known already.
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

  void prepare_single_steps() override {
    settle_steps();
    refresh();
    for (std::size_t i = 0; i < param_groups_.size(); ++i)
      TORCH_CHECK(storage_of(*options_in(i)).bad_gradients != nonfinite::skip_step,
                  "leanopt: gradient_release: ", group_name(i),
                  " has nonfinite::skip_step, which needs all gradients at once; use skip_element");
    if (what_.kind != state_kind::ours) return;  // without random bits
    for (const auto& g : param_groups_)
      for (const Tensor& p : g.params())
        if (p.requires_grad() && !state_for(p)) set_ordinal(*make_state(p));
  }

  void set_step_scalars(step_scalars s) override {
    for (const auto& [name, t] : {std::pair("inv_scale", &s.inv_scale),
                                  std::pair("found_inf", &s.found_inf), std::pair("clip", &s.clip)})
      TORCH_CHECK(!t->defined() || (t->numel() == 1 && t->is_floating_point()),
                  "leanopt: set_step_scalars: ", name, " is ", t->toString(), " of shape ",
                  t->sizes(), "; it must be a floating-point tensor of one element");
    scalars_ = std::move(s);
  }
  bool has_step_scalars() const override {
    return scalars_.inv_scale.defined() || scalars_.found_inf.defined() || scalars_.clip.defined();
  }

  /// How many elements nonfinite::skip_element, and steps nonfinite::skip_step, left out since the
  /// optimizer was built. Waits for a device where elements may have been left out.
  std::int64_t skipped_elements() const { return skipped_elements_ + lists_.skipped_elements(); }
  std::int64_t skipped_steps() const { return skipped_steps_; }

  const description& what() const { return what_; }
  /// See leanopt::settle_steps.
  void settle_steps() const {
    lists_.settle([&](const engine::device_step::item& x, std::int64_t known, std::int64_t now) {
      const auto it = state_.find(const_cast<void*>(x.parameter));
      if (it == state_.end() || it->second.get() != x.state || steps(*it->second) != known) return;
      with_class(*it->second, what_.kind, [&](auto& own) {
        if (!is_fresh(own)) own.step(now);  // as one is that took the address of another
      });
    });
  }
  /// See leanopt::set_lr.
  void set_lr(std::size_t group, const Tensor& lr) {
    TORCH_CHECK(group < param_groups_.size(), "leanopt: set_lr: there is no ", group_name(group));
    if (lr.defined()) {
      TORCH_CHECK(lr.numel() == 1 && lr.scalar_type() == at::kDouble,
                  "leanopt: set_lr: the rate is ", lr.toString(), " of shape ", lr.sizes(),
                  "; it must be a tensor of one float64 element");
      for (const Tensor& p : param_groups_[group].params())
        TORCH_CHECK(!lr.is_cpu() && p.device() == lr.device(), "leanopt: set_lr: the rate of ",
                    group_name(group), " is on ", lr.device(), " and a parameter on ", p.device(),
                    "; both must be on the same device other than the CPU");
    }
    if (rates_.size() <= group) rates_.resize(group + 1);
    rates_[group] = lr;
  }
  /// How often `p` was stepped. Settles the steps.
  std::int64_t steps_of(const Tensor& p) const {
    settle_steps();
    const OptimizerParamState* s = state_for(p);
    return s ? steps(*s) : 0;
  }
  /// What Python's class calls the slot `name` of a parameter of a group.
  virtual std::string python_key(const std::string& name, std::size_t group) const = 0;
  /// Memory that steps reuse, of the host and of devices.
  std::int64_t scratch_bytes() const { return host_scratch_bytes() + lists_.bytes(); }
  /// About what lists, keys and objects take on the host, tensors' own data apart.
  std::int64_t bookkeeping_bytes() const {
    constexpr std::int64_t node = 4 * sizeof(void*),
                           tensor = sizeof(c10::TensorImpl) + sizeof(c10::StorageImpl);
    std::int64_t bytes = sizeof(*this);
    for (const auto& [key, s] : state_) {
      bytes += node + std::int64_t(sizeof(ParamState));
      if (s)
        with_class(*s, what_.kind, [&](auto& own) {
          each_tensor(own, [&](const std::string& name, const Tensor&) {
            bytes += tensor + std::int64_t(sizeof(std::pair<std::string, Tensor>) + name.size());
          });
        });
    }
    bytes += std::int64_t(owners_.size()) * std::int64_t(node + sizeof(void*));
    bytes += std::int64_t(plans_.capacity() * sizeof(plan) + active_.capacity() * sizeof(plan*));
    for (const auto& g : param_groups_)
      bytes += std::int64_t(g.params().size() * sizeof(Tensor) + sizeof(g)) + 256;  // its options
    return bytes;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    settle_steps();
    if (has_residuals())
      for (const auto& g : param_groups_)
        for (const Tensor& p : g.params())
          if (const auto it = state_.find(p.unsafeGetTensorImpl());
              it != state_.end() && it->second) {
            auto& s = static_cast<ParamState&>(*it->second);
            const bool current = s.tensor(residual_name).defined() && is_current(s, p);
            s.weight_digest(current ? digest_of(p) : 0);
          }
    write_archive(archive, param_groups_, state_, what_.who, next_ordinal_,
                  [&](std::size_t i) { return options_in(i); });
  }
  /// Everything is read and checked before anything changes. Takes LibTorch's archives of the same
  /// rule.
  void load(torch::serialize::InputArchive& archive) override {
    auto read = read_archive(
        archive, param_groups_, what_.who, [&](std::size_t i) { return options_in(i); },
        [&] { return new_state(); },
        [&](OptimizerParamState& s, const Tensor& p, std::size_t i, std::size_t j) {
          move_to(p.device(), s);
          check_state(s, p, place{i, j});
        },
        [&](const OptimizerOptions& o, std::size_t i) { check_options(o, group_name(i)); });
    for (auto& [p, s] : read.states)
      for (const slot_spec& one : what_.slots)  // an archive in memory may be loaded again
        for (const std::string& name : {std::string(one.name), header_of(one.name)})
          if (const Tensor t = get(*s, name); t.defined()) set(*s, name, t.clone());
    if (has_residuals())
      for (auto& [p, s] : read.states)
        if (const Tensor t = get(*s, residual_name); t.defined()) set(*s, residual_name, t.clone());
    settle_steps();
    state_.clear();
    owners_.clear();
    plans_.clear();
    for (auto& [p, s] : read.states) {
      pin(p);
      state_[p.unsafeGetTensorImpl()] = std::move(s);
    }
    for (std::size_t i = 0; i < param_groups_.size(); ++i)
      assign(param_groups_[i], std::move(read.options[i]));
    next_ordinal_ = read.next_ordinal;
  }

  /// State is keyed by the address of a TensorImpl; a weak reference keeps that address, but no
  /// data, from being given to another tensor while we know it.
  void pin(const Tensor& p) { owners_.try_emplace(p.unsafeGetTensorImpl(), p.getIntrusivePtr()); }
  using change = std::function<Tensor(const Tensor&)>;
  /// Applies `f` to every slot of `p` that has a row per row of it; `rows` is the new number of
  /// rows.
  void change_rows(const Tensor& p, std::int64_t rows, const change& f) {
    settle_steps();  // random bits depend on them
    OptimizerParamState* s = state_for(p);
    if (!s) return;
    if (has_residuals())
      if (auto& own = static_cast<ParamState&>(*s); own.tensor(residual_name).defined())
        own.tensor(residual_name, f(settled_residual(own, p, p, what_.residual)));
    std::vector<Tensor> moments = decoded(*s, p);
    for (Tensor& m : moments) m = f(m);
    for (const slot_spec& one : what_.slots) {
      const bool codes = !moments.empty() && is_compressible(one.name);
      if (const Tensor t = get(*s, one.name); t.defined() && !codes && one.has_rows(int(p.dim())))
        set(*s, one.name, f(t));
    }
    if (moments.empty()) return;
    auto sizes = p.sizes().vec();
    sizes[0] = rows;
    encode_again(*s, at::empty(sizes, p.options()), std::move(moments), p);
  }
  /// The weight in `p` is the one that its state belongs to, however it came there.
  void adopt(const Tensor& p) {
    if (OptimizerParamState* s = has_residuals() ? state_for(p) : nullptr) adopt(*s, p);
  }
  /// The weight of `p` as it is stepped: float32, or float64, with its residual bits.
  Tensor read_weight(const Tensor& p) const {
    find(p);
    const Tensor from = p.detach();
    if (from.scalar_type() == at::kDouble || from.is_complex()) return from.clone();
    Tensor rest;
    if (has_residuals())
      if (const auto* s = static_cast<const ParamState*>(state_for(p)))
        if (is_current(*s, p)) rest = s->tensor(residual_name);
    if (rest.defined()) rest = rest.cpu();
    if (!rest.defined() && has_residuals()) return from.to(at::kFloat, false, /*copy=*/true);
    const Tensor weight = from.cpu(), order = rest.defined() ? rest : weight;
    const Tensor wide = at::empty_like(order, order.options().dtype(at::kFloat));
    engine::operands shapes;
    operand x = shapes.in_order_of(wide, weight);
    if (rest.defined()) x.residual = rest.data_ptr();
    what_.widen(engine::level_from_environment(), x, 0, std::size_t(from.numel()),
                static_cast<float*>(wide.data_ptr()));
    return wide.to(p.device());
  }
  /// The slot called `name` in full precision; undefined where there is none.
  Tensor read_slot(const Tensor& p, const std::string& name) const {
    const OptimizerParamState* s = state_for(p);
    if (!s) return {};
    const auto moments = decoded(*s, p);
    for (std::size_t k = 0; k < moments.size(); ++k)
      if (name == what_.compressed.slots[k].name) return moments[k];
    const Tensor t = get(*s, name);
    return t.defined() ? t.clone() : t;
  }
  void write_slot(const Tensor& p, const std::string& name, const Tensor& value) {
    const auto known = std::find_if(what_.slots.begin(), what_.slots.end(),
                                    [&](const slot_spec& one) { return name == one.name; });
    TORCH_CHECK(known != what_.slots.end(), "leanopt: set_slot: ", what_.who.text(),
                " has no slot ", name);
    const place where = find(p);
    TORCH_CHECK(known->fits(int(p.dim())), "leanopt: set_slot: ", where, " has ", p.dim(),
                " dimensions and no slot ", name);
    TORCH_CHECK(
        known->range == values::any || value.is_complex() || !value.lt(0).any().item<bool>(),
        "leanopt: set_slot: ", name, " of ", where, " cannot be negative");
    const auto sizes = slot_sizes(*known, p);
    TORCH_CHECK(value.sizes() == at::IntArrayRef(sizes), "leanopt: set_slot: ", name, " of ", where,
                " has sizes ", at::IntArrayRef(sizes), ", the value ", value.sizes());
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    settle_steps();
    OptimizerParamState* s = state_for(p);
    if (!s) s = make_state(p);
    set_ordinal(*s);
    std::vector<Tensor> moments = decoded(*s, p);
    for (std::size_t k = 0; k < moments.size(); ++k)
      if (name == what_.compressed.slots[k].name) {
        moments[k] = value;
        return encode_again(*s, p, std::move(moments), p);
      }
    set(*s, name, value.detach().to(p.device(), full_type(p), false, /*copy=*/true));
  }

 protected:
  /// LibTorch sees no group, so it merges and drops nothing; derived constructors append the
  /// groups.
  front(std::unique_ptr<OptimizerOptions> defaults, description what)
      : Optimizer(std::vector<OptimizerParamGroup>{}, std::move(defaults)), what_(std::move(what)) {
    engine::level_from_environment();
  }

  /// `given` as our type, as it stands; own fields come from the defaults where it has none.
  virtual std::unique_ptr<OptimizerOptions> convert(const OptimizerOptions& given,
                                                    std::size_t group) const = 0;
  /// The same with unset fields inherited, checked.
  virtual std::unique_ptr<OptimizerOptions> resolve(const OptimizerOptions& given,
                                                    std::size_t group) const = 0;
  /// The options of a group, as our type; those of one pushed by hand may be unset as yet.
  std::unique_ptr<OptimizerOptions> options_in(std::size_t group) const {
    const OptimizerParamGroup& g = param_groups_[group];
    return g.has_options() ? convert(g.options(), group) : defaults_->clone();
  }
  virtual void assign(OptimizerParamGroup& group, std::unique_ptr<OptimizerOptions> options) = 0;
  virtual bool is_own(const OptimizerOptions& o) const = 0;
  virtual void check_options(const OptimizerOptions& o, const std::string& where) const = 0;
  /// A bit per field that differs, the rate's first.
  virtual std::uint64_t differences_of(const OptimizerOptions& a,
                                       const OptimizerOptions& b) const = 0;
  virtual storage storage_of(const OptimizerOptions& o) const = 0;
  virtual std::unique_ptr<OptimizerParamState> new_state() const = 0;
  virtual std::int64_t host_scratch_bytes() const = 0;
  /// Makes the slots and the work of a plan, of whose parameter, gradient and state all is checked.
  virtual void build(plan& x) = 0;
  /// Steps them all; nothing in them can be wrong.
  virtual void run(const std::vector<plan*>& plans) = 0;

  // ---- a parameter's state

  Tensor get(const OptimizerParamState& s, const std::string& name) const {
    return with_class(s, what_.kind, [&](auto& own) { return get_slot(own, name); });
  }
  void set(OptimizerParamState& s, const std::string& name, Tensor t) const {
    with_class(s, what_.kind, [&](auto& own) { set_slot(own, name, std::move(t)); });
  }
  std::int64_t steps(const OptimizerParamState& s) const {
    return with_class(s, what_.kind, [](auto& own) { return std::int64_t(own.step()); });
  }
  /// What the random bits of a parameter in the step of that number have in common.
  std::uint64_t key_of(const OptimizerParamState& s, std::int64_t step, std::uint64_t seed) const {
    if (what_.kind != state_kind::ours) return 0;
    const auto ordinal = static_cast<const ParamState&>(s).ordinal();
    return random_key(seed, std::uint64_t(step), std::uint64_t(ordinal));
  }

  /// Brings the slots `moments`, which the format compresses, into the form of the next step:
  /// codes, or full precision for a tensor below the group's threshold. Returns whether they are
  /// codes.
  bool recode(const plan& x, const std::vector<slot_spec>& moments) const {
    const codec& c = what_.compressed;
    if (c.slots.empty()) return false;
    const storage o = storage_of(*x.options);
    const Tensor& p = *x.p;
    auto& s = static_cast<ParamState&>(*x.state);
    const bool want = p.numel() >= o.min_elements;
    const bool have = c.compresses(s, moments[0].name, p);
    if (want && !have) {
      bool fresh = true;
      for (const slot_spec& one : moments) fresh = fresh && !s.tensor(one.name).defined();
      if (fresh) {
        make_codes(c, s, p);
      } else {
        std::vector<Tensor> values;
        for (const slot_spec& one : moments) {
          const Tensor held = s.tensor(one.name);
          values.push_back(held.defined() ? held : at::zeros(p.sizes(), at::kFloat));
        }
        encode(c, s, p, ~key_of(s, steps(s), o.seed), std::move(values));
      }
    } else if (!want && have) {
      const auto values = decode(c, s, p);
      for (std::size_t k = 0; k < moments.size(); ++k) {
        s.tensor(moments[k].name, values[k]);
        s.tensor(header_of(moments[k].name), {});
      }
    }
    return want;
  }
  void point_to_codes(const plan& x, const std::vector<slot_spec>& moments,
                      cpu::tensor_step& t) const {
    for (std::size_t k = 0; k < moments.size(); ++k) {
      t.slots[k] = get(*x.state, moments[k].name).data_ptr();
      if (what_.compressed.has_headers())
        t.headers[k] = get(*x.state, header_of(moments[k].name)).data_ptr();
    }
  }
  bool has_residuals() const { return what_.residual != at::ScalarType::Undefined; }
  /// Where the residual bits of a parameter are, for an operand in the order of `order`; null where
  /// it has none.
  void* point_to_residual(const plan& x, const Tensor& order) const {
    if (!has_residuals() || x.p->scalar_type() != at::kBFloat16) return nullptr;
    auto& s = static_cast<ParamState&>(*x.state);
    return settled_residual(s, *x.p, order, what_.residual).data_ptr();
  }
  /// What only this step knows.
  void point_to_gradient(plan& x) {
    x.job.work.g.data = const_cast<void*>(address_of(*x.g));
    x.job.work.g.factor = factor_;
    x.job.work.skipped = x.skips_elements ? &skipped_elements_ : nullptr;  // ours may have moved
  }

  place find(const Tensor& p) const {
    for (std::size_t i = 0; i < param_groups_.size(); ++i)
      for (std::size_t j = 0; j < param_groups_[i].params().size(); ++j)
        if (param_groups_[i].params()[j].is_same(p)) return {i, j};
    TORCH_CHECK(false, "leanopt: a tensor of sizes ", p.sizes(),
                " is no parameter of the optimizer; pass the tensor that is in param_groups()");
  }
  const OptimizerParamState* state_for(const Tensor& p) const {
    const auto it = state_.find(p.unsafeGetTensorImpl());
    if (it == state_.end() || !it->second) return nullptr;
    check_state(*it->second, p, find(p));
    return it->second.get();
  }
  OptimizerParamState* state_for(const Tensor& p) {
    return const_cast<OptimizerParamState*>(std::as_const(*this).state_for(p));
  }

  /// The rate in a device's memory that set_lr() gave a group; null where there is none.
  const Tensor* rate_of(std::size_t group) const {
    return group < rates_.size() && rates_[group].defined() ? &rates_[group] : nullptr;
  }

  description what_;

  static std::string group_name(std::size_t i) { return "group " + std::to_string(i); }

  /// The lists are the user's and change at any time: where they differ from those that the plans
  /// were made for, they are checked and all plans are made anew.
  void refresh() {
    std::size_t n = 0;
    bool same = true;
    for (auto& g : param_groups_) {
      if (!g.has_options()) g.set_options(defaults_->clone());
      for (const auto& p : g.params()) {
        same = same && n < plans_.size() && plans_[n].parameter == identity(p);
        ++n;
      }
    }
    if (same && n == plans_.size()) return;
    check_lists();
    for (auto it = owners_.begin(); it != owners_.end();) {
      if (it->second.expired()) {
        state_.erase(it->first);
        it = owners_.erase(it);
      } else {
        ++it;
      }
    }
    plans_.clear();
    plans_.resize(n);
    auto x = plans_.begin();
    for (const auto& g : param_groups_)
      for (const auto& p : g.params()) {
        pin(p);
        (x++)->parameter = identity(p);
      }
  }

 private:
  /// A scalar of the step; where there is none, the factor that changes nothing.
  static double value_of(const Tensor& scalar) {
    return scalar.defined() ? scalar.item<double>() : 1.0;
  }
  bool is_compressible(const std::string& name) const {
    const auto& slots = what_.compressed.slots;
    return std::any_of(slots.begin(), slots.end(),
                       [&](const slot_spec& one) { return name == one.name; });
  }
  /// The state of a parameter on `device`, wherever it was saved.
  void move_to(at::Device device, OptimizerParamState& s) const {
    std::vector<std::pair<std::string, Tensor>> moved;
    with_class(s, what_.kind, [&](auto& own) {
      each_tensor(own, [&](const std::string& name, const Tensor& t) {
        if (t.device() != device) moved.emplace_back(name, t.to(device));
      });
    });
    for (const auto& [name, t] : moved) set(s, name, t);
  }
  void adopt(OptimizerParamState& s, const Tensor& p) const {
    if (has_residuals()) remember_weight(static_cast<ParamState&>(s), p);
  }
  void count_step(OptimizerParamState& s) const {
    with_class(s, what_.kind, [](auto& own) { own.step(own.step() + 1); });
  }
  static void bump(const Tensor& t) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
  OptimizerParamState* make_state(const Tensor& p) {
    auto fresh = new_state();
    OptimizerParamState* s = fresh.get();
    pin(p);
    state_[p.unsafeGetTensorImpl()] = std::move(fresh);
    return s;
  }
  /// A state gets its ordinal at its first step, wherever it came from.
  void set_ordinal(OptimizerParamState& s) {
    if (what_.kind != state_kind::ours) return;
    auto& own = static_cast<ParamState&>(s);
    if (own.ordinal() < 0) own.ordinal(next_ordinal_);
    next_ordinal_ = std::max(next_ordinal_, own.ordinal() + 1);
  }
  std::vector<Tensor> decoded(const OptimizerParamState& s, const Tensor& p) const {
    if (what_.kind != state_kind::ours) return {};
    return decode(what_.compressed, static_cast<const ParamState&>(s), p);
  }
  /// Moments changed by hand; they draw from a stream of their own, since a step draws from the
  /// key.
  void encode_again(OptimizerParamState& s, const Tensor& like, std::vector<Tensor> moments,
                    const Tensor& p) const {
    const std::uint64_t seed = storage_of(*options_in(find(p).group)).seed;
    encode(what_.compressed, static_cast<ParamState&>(s), like, ~key_of(s, steps(s), seed),
           std::move(moments));
  }

  /// Plans for the parameters with a gradient, all of them checked; nothing has changed yet.
  /// LibTorch's options pushed by hand are read through `views_`, which stay where they are, so
  /// that plans do, and left in place.
  void collect() {
    refresh();
    active_.clear();
    on_host_.clear();
    on_device_.clear();
    looks_at_all_ = false;
    converted_.clear();
    constexpr std::size_t ahead = 4;  // tensors whose objects are fetched while others are checked
    const std::size_t groups = param_groups_.size();
    if (checked_.size() != groups) checked_.resize(groups);
    while (views_.size() < groups) views_.emplace_back(std::vector<Tensor>{});
    std::size_t n = 0;
    for (std::size_t i = 0; i < groups; ++i) {
      auto& group = param_groups_[i];
      const OptimizerOptions* o = &group.options();
      if (!is_own(*o)) {
        assign(views_[i], convert(*o, i));
        o = &views_[i].options();
      }
      const bool changed = look_at_options(*o, i);
      looks_at_all_ |= storage_of(*o).bad_gradients == nonfinite::skip_step;
      for (std::size_t j = 0; j < group.params().size(); ++j, ++n) {
        const Tensor& p = group.params()[j];
        const Tensor& g = std::as_const(p).grad();
        plan& x = plans_[n];
        x.is_ready = x.is_ready && !changed;
        if (!g.defined()) continue;
        if (n + ahead < plans_.size()) plans_[n + ahead].prefetch();
        const auto it = state_.find(p.unsafeGetTensorImpl());
        OptimizerParamState* s = it == state_.end() ? nullptr : it->second.get();
        x.p = &p;
        x.g = &g;
        x.group = i;
        if (!is_valid(x, o, s)) check(x, place{i, j}, o, s);
        active_.push_back(&x);
        (p.is_cpu() ? on_host_ : on_device_).push_back(&x);
      }
    }
  }
  /// Checks options that changed since they were checked last; returns whether plans depend on what
  /// changed, which is all but the rate.
  bool look_at_options(const OptimizerOptions& o, std::size_t group) {
    constexpr std::uint64_t rate = 1;
    auto& known = checked_[group];
    const std::uint64_t changed = known ? differences_of(*known, o) : ~rate;
    if (changed) {
      check_options(o, group_name(group));
      known = o.clone();
    }
    return (changed & ~rate) != 0;
  }
  /// Whether a plan is made of what is there now.
  bool is_valid(const plan& x, const OptimizerOptions* o, OptimizerParamState* s) const {
    if (!x.is_ready || x.options != o || x.state != s || !x.of_p.are_of(*x.p) ||
        !x.of_g.are_of(*x.g))
      return false;
    if (x.job.work.p.residual && !is_current(static_cast<const ParamState&>(*s), *x.p))
      return false;
    return with_class(*s, what_.kind,
                      [&](auto& own) { return own.step() >= 0 && x.held.are_of(own); });
  }
  /// Checks all that a new plan is made of.
  void check(plan& x, place where, const OptimizerOptions* o, OptimizerParamState* s) {
    const Tensor &p = *x.p, &g = *x.g;
    x.is_ready = false;
    TORCH_CHECK(g.layout() == at::kStrided, "leanopt: the gradient of ", where, " is ",
                g.layout() == at::kSparse ? "sparse" : "not strided",
                "; make it dense (for embeddings: sparse(false))");
    TORCH_CHECK(g.sizes() == p.sizes() && g.device() == p.device(), "leanopt: ", where,
                " has sizes ", p.sizes(), " on ", p.device(), ", its gradient ", g.sizes(), " on ",
                g.device());
    check_parameter(p, where);  // its module may have moved since the lists were checked
    if (s) check_state(*s, p, where);
    Tensor plain = g;
    if (g.is_conj() || g.is_neg()) plain = plain.resolve_conj().resolve_neg();
    if (!same_arithmetic(plain, p)) plain = plain.to(p.scalar_type());
    if (!plain.is_same(g)) x.g = &converted_.emplace_back(std::move(plain));
    x.options = o;
    x.state = s;
  }
  /// Whether this step is recorded in a graph. @throws where it cannot be.
  bool is_captured() const {
    at::Device last = at::kCPU;  // neighbours are on one device
    bool captured = false;
    for (const plan* x : on_device_) {
      if (x->p->device() == last) continue;
      last = x->p->device();
      captured |= engine::is_capturing(last);
    }
    TORCH_CHECK(!captured || on_host_.empty(),
                "leanopt: a step with parameters on the CPU cannot be captured in a graph, which "
                "would not step them; give them an optimizer of their own");
    for (const Tensor* t : {&scalars_.inv_scale, &scalars_.found_inf, &scalars_.clip})
      TORCH_CHECK(
          !captured || !t->defined() || !t->is_cpu(),
          "leanopt: a scalar on the CPU cannot be captured in a graph, which would not read "
          "it again; give set_step_scalars() tensors in the device's memory");
    TORCH_CHECK(
        !captured || !looks_at_all_,
        "leanopt: nonfinite::skip_step, for which the host looks at all gradients, cannot be "
        "captured in a graph; use skip_element, or found_inf of set_step_scalars()");
    return captured;
  }
  /// Whether a rate of this step is a device's. @throws where its parameters are not there any
  /// more.
  bool reads_rates() const {
    if (rates_.empty()) return false;
    bool any = false;
    for (const plan* x : active_) {
      const Tensor* lr = rate_of(x->group);
      if (!lr) continue;
      any = true;
      TORCH_CHECK(lr->device() == x->p->device(), "leanopt: the rate of ", group_name(x->group),
                  " is on ", lr->device(), " and a parameter on ", x->p->device(),
                  "; give the group a rate there with set_lr, or an undefined tensor");
    }
    return any;
  }
  /// Lists what is stepped on devices. Returns whether they have it all already, and no count that
  /// another list needs.
  bool list_on_devices(bool captured) {
    lists_.clear();
    for (plan* x : on_device_) {
      if (!x->is_ready) return false;
      point_to_gradient(*x);
      const Tensor* lr = rate_of(x->group);
      const auto ordinal =
          what_.kind == state_kind::ours ? static_cast<const ParamState&>(*x->state).ordinal() : 0;
      x->part = lists_.add(*x->kernel, x->p->device(),
                           {&x->job, std::uint64_t(ordinal), x->number, x->skips_elements,
                            x->p->unsafeGetTensorImpl(), x->state},
                           {x->options, lr ? static_cast<const double*>(lr->data_ptr()) : nullptr,
                            x->seed, x->job.epsilon, steps(*x->state) + 1});
    }
    const bool found = lists_.find(captured);
    for (plan* x : on_device_) {
      const std::uint64_t now = lists_.list_of(x->part);
      if (x->list != now && x->list && lists_.counts_steps(x->list)) return false;
      x->list = now;
    }
    return found;
  }
  /// Makes lists that are not there yet. @pre settle_steps() was called.
  void make_lists() {
    if (list_on_devices(/*captured=*/false)) return;
    lists_.make();
    for (plan* x : on_device_) x->list = lists_.list_of(x->part);
  }
  bool skips_step() const {
    return std::any_of(active_.begin(), active_.end(), [&](const plan* x) {
      return storage_of(*x->options).bad_gradients == nonfinite::skip_step &&
             engine::has_bad_number(*x->g, factor_, what_.squares_in_float);
    });
  }
  /// Makes a plan that was checked.
  void make_ready(plan& x) {
    if (!x.state) x.state = make_state(*x.p);
    set_ordinal(*x.state);
    x.job = {};
    x.shapes.clear();
    x.kernel = nullptr;
    x.list = 0;
    x.number = ++plans_made_;
    build(x);
    x.of_p = tensor_facts(*x.p);
    x.of_g = tensor_facts(*x.g);
    with_class(*x.state, what_.kind, [&](auto& s) { x.held.remember(s); });
    x.is_ready = true;
  }

  /// Whether the engine reads both as they are: it widens 16-bit numbers, not float32 to float64.
  static bool same_arithmetic(const Tensor& g, const Tensor& p) {
    const auto real = [](const Tensor& t) { return c10::toRealValueType(t.scalar_type()); };
    return g.is_complex() == p.is_complex() && g.is_floating_point() == p.is_floating_point() &&
           (real(g) == at::kDouble) == (real(p) == at::kDouble);
  }
  void check_type(const Tensor& p, place where) const {
    const auto type = p.scalar_type();
    TORCH_CHECK(type != at::kHalf || what_.takes_float16, "leanopt: ", where,
                " has type Half, which ", what_.who.weights,
                " weights cannot hold; use BFloat16, or plain weights");
    const bool real =
        type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
    const bool complex = type == at::kComplexFloat || type == at::kComplexDouble;
    TORCH_CHECK(
        real || (complex && what_.takes_complex), "leanopt: ", where, " has type ", type,
        ", which ", what_.who.text(), " cannot step",
        complex ? "; complex parameters are stepped by Adam and AdamW in full precision" : "");
  }
  void check_state(const OptimizerParamState& state, const Tensor& p, place where) const {
    TORCH_CHECK(has_class(state, what_.kind), "leanopt: the state of ", where, " is ",
                c10::demangle(typeid(state).name()), ", which belongs to another optimizer");
    TORCH_CHECK(steps(state) >= 0, "leanopt: the state of ", where, " has step ", steps(state),
                "; a step count is 0 or more");
    with_class(state, what_.kind, [&](auto& s) {
      each_tensor(s,
                  [&](const std::string& name, const Tensor& t) { check_slot(name, t, p, where); });
    });
    if (what_.kind != state_kind::ours) return;
    const auto& s = static_cast<const ParamState&>(state);
    for (const slot_spec& one : what_.compressed.slots) {
      const bool codes = what_.compressed.compresses(s, one.name, p);
      const bool header = s.tensor(header_of(one.name)).defined();
      TORCH_CHECK((codes == header || !what_.compressed.has_headers()) &&
                      codes == what_.compressed.compresses(s, what_.compressed.slots[0].name, p),
                  "leanopt: the state of ", where,
                  " has codes without headers, or headers without "
                  "codes: ",
                  one.name);
    }
  }
  /// Codes and headers are read where they are, in logical order.
  static bool is_raw(const Tensor& t, const Tensor& p) {
    return t.is_contiguous() && t.device() == p.device();
  }
  void check_slot(const std::string& name, const Tensor& t, const Tensor& p, place where) const {
    const codec& c = what_.compressed;
    std::vector<std::int64_t> sizes;
    bool known = false, type = false;
    for (const slot_spec& one : what_.slots) {
      if (name != one.name || !one.fits(int(p.dim()))) continue;
      known = true;
      sizes = slot_sizes(one, p);
      type = at::isFloatingType(t.scalar_type()) || (t.is_complex() && p.is_complex());
    }
    for (const slot_spec& one : c.slots) {
      if (name == one.name && t.scalar_type() == at::kByte)
        type = c.code_type == at::kByte && is_raw(t, p);
      if (name != header_of(one.name) || !c.has_headers()) continue;
      known = true;
      sizes = {c.blocks_of(p.numel())};
      type = t.scalar_type() == c.header_type && is_raw(t, p);
    }
    if (name == residual_name && has_residuals() && p.scalar_type() == at::kBFloat16) {
      known = true;
      sizes = p.sizes().vec();
      type = t.scalar_type() == what_.residual && t.is_non_overlapping_and_dense() &&
             t.device() == p.device();
    }
    TORCH_CHECK(known, "leanopt: the state of ", where, " has ", name, ", which ", what_.who.text(),
                " does not keep");
    TORCH_CHECK(type && t.sizes() == at::IntArrayRef(sizes), "leanopt: ", name, " of ", where,
                " is ", t.scalar_type(), " of shape ", t.sizes(), " on ", t.device(),
                "; a parameter of shape ", p.sizes(), " needs shape ", at::IntArrayRef(sizes),
                ", floating-point moments or contiguous codes, on ", p.device());
  }

 public:
  /// @throws when a parameter in the lists is unfit, there twice, or overlaps another.
  void check_lists() const {
    std::vector<span> memory;
    std::unordered_map<void*, place> known;
    for (std::size_t i = 0; i < param_groups_.size(); ++i) {
      const auto& params = param_groups_[i].params();
      for (std::size_t j = 0; j < params.size(); ++j) {
        const place where{i, j};
        check_parameter(params[j], where);
        const auto [it, fresh] = known.try_emplace(params[j].unsafeGetTensorImpl(), where);
        TORCH_CHECK(fresh, "leanopt: ", where, " is the same tensor as ", it->second,
                    " and would be stepped twice; leanopt::unique_parameters(module) "
                    "(leanopt/train/param_groups.hpp) lists a tied parameter once");
        if (params[j].numel()) memory.push_back(span_of(params[j], where));
      }
    }
    std::sort(memory.begin(), memory.end(),
              [](const span& a, const span& b) { return a.begin < b.begin; });
    for (auto first = memory.begin(), last = first; first != memory.end(); first = last) {
      std::uintptr_t end = first->end;  // of a cluster of spans that meet
      for (++last; last != memory.end() && last->begin < end; ++last)
        end = std::max(end, last->end);
      if (last - first > 1) check_cluster({first, last}, end);
    }
  }

 private:
  /// From the first byte of a parameter to its last.
  struct span {
    std::uintptr_t begin, end;
    const Tensor* p;
    place where;
  };
  static span span_of(const Tensor& p, place where) {
    const auto begin = reinterpret_cast<std::uintptr_t>(p.data_ptr());
    std::uintptr_t last = 0;
    for (std::int64_t d = 0; d < p.dim(); ++d)
      last += std::uintptr_t(p.stride(d)) * std::uintptr_t(p.size(d) - 1);
    return {begin, begin + (last + 1) * p.element_size(), &p, where};
  }
  /// Parameters whose spans meet may lie in each other's gaps: a map of the bytes tells whether two
  /// have an element in common.
  static void check_cluster(const std::vector<span>& spans, std::uintptr_t end) {
    const std::uintptr_t begin = spans[0].begin;
    const Tensor map = at::zeros({std::int64_t(end - begin)}, at::kByte);
    const auto bytes_of = [&](const span& s) {
      auto sizes = s.p->sizes().vec(), strides = s.p->strides().vec();
      const auto width = std::int64_t(s.p->element_size());
      for (std::int64_t& stride : strides) stride *= width;
      sizes.push_back(width);
      strides.push_back(1);
      return map.as_strided(sizes, strides, std::int64_t(s.begin - begin));
    };
    for (const span& s : spans) {
      const Tensor mine = bytes_of(s);
      if (mine.any().item<bool>()) {
        const auto other = std::find_if(spans.begin(), spans.end(), [&](const span& o) {
          map.zero_();
          bytes_of(o).fill_(1);
          return mine.any().item<bool>();
        });
        TORCH_CHECK(
            false, "leanopt: ", s.where, " and ", other->where,
            " overlap in memory and would be stepped twice; give the optimizer one of them");
      }
      mine.fill_(1);
    }
  }
  void check_parameter(const Tensor& p, place where) const {
    TORCH_CHECK(p.defined(), "leanopt: ", where, " is undefined; leave it out of the list");
    TORCH_CHECK(p.is_leaf(), "leanopt: ", where,
                " is not a leaf tensor: it is computed from others; give the optimizer those");
    TORCH_CHECK(p.layout() == at::kStrided, "leanopt: ", where, " has layout ", p.layout(),
                "; only strided tensors can be stepped");
    TORCH_CHECK(engine::can_step_on(p.device()), "leanopt: ", where, " is on ", p.device(),
                p.is_cuda() ? ", which takes a program that links the CMake target leanopt::cuda"
                            : "; tensors can be stepped on the CPU and on CUDA devices");
    TORCH_CHECK(
        !p.is_conj() && !p.is_neg(), "leanopt: ", where,
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

  std::int64_t next_ordinal_ = 0, skipped_elements_ = 0, skipped_steps_ = 0;
  step_scalars scalars_;  // of the next step
  double factor_ = 1;     // of the gradients of this step
  std::unordered_map<void*, c10::weak_intrusive_ptr<c10::TensorImpl>> owners_;
  std::vector<plan> plans_;    // of all parameters, in the order of the lists
  std::vector<plan*> active_;  // those of this step, and the two kinds of them
  std::vector<plan*> on_host_, on_device_;
  bool looks_at_all_ = false;  // at gradients, before it steps: nonfinite::skip_step
  std::uint64_t plans_made_ = 0;
  std::vector<Tensor> rates_;  // in devices' memory, by group
  engine::device_lists lists_;
  std::vector<OptimizerParamGroup> views_;  // without parameters, by group
  std::vector<std::unique_ptr<OptimizerOptions>> checked_;
  std::deque<Tensor> converted_;  // gradients of this step
};

}  // namespace detail

/// From now on steps read the rate of a group from `lr`, a float64 scalar in the memory of the
/// device of all its parameters, when they run there: so that a step captured in a graph follows a
/// schedule; tensor and optimizer must outlive the graph. An undefined tensor gives the rate back
/// to the group's options, whose own is unused until then. Meanwhile the device counts the steps:
/// see settle_steps. Waits for nothing. @throws for optimizers that are not ours, a group that is
/// not there, and other tensors.
inline void set_lr(Optimizer& optimizer, std::size_t group, const Tensor& lr) {
  auto* ours = dynamic_cast<detail::front*>(&optimizer);
  TORCH_CHECK(ours, "leanopt: set_lr takes leanopt's optimizers; set the rate in the options of ",
              c10::demangle(typeid(optimizer).name()));
  ours->set_lr(group, lr);
}
/// Brings to the host the step counts that are a device's: after captured steps and those with
/// found_inf or the rate in its memory, the states' own do not tell before. Saving, inspection and
/// slots do so themselves. Waits for the device where it has counted; does nothing for optimizers
/// that are not ours.
inline void settle_steps(const Optimizer& optimizer) {
  if (auto* ours = dynamic_cast<const detail::front*>(&optimizer)) ours->settle_steps();
}

/// Adds a group whose unset options inherit the defaults, also where the optimizer is held as
/// Optimizer&. LibTorch's own optimizers do as their member does.
inline void add_param_group(Optimizer& optimizer, const OptimizerParamGroup& group) {
  if (auto* ours = dynamic_cast<detail::front*>(&optimizer)) return ours->add_param_group(group);
  optimizer.add_param_group(group);
}

}  // namespace leanopt
