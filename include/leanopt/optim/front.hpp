// What every optimizer of ours does alike, whatever its rule and format: parameter groups, the
// identity of parameters, the checks of a step, slots by name, archives. No template, so that a
// program compiles it once; optimizer.hpp adds the types.
#pragma once

#include <leanopt/optim/archive.hpp>
#include <leanopt/optim/slots.hpp>
#include <leanopt/optim/state.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>

#include <algorithm>
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

/// Where a parameter stands in the groups, for messages.
struct place {
  std::size_t group, index;
  friend std::ostream& operator<<(std::ostream& out, const place& p) {
    return out << "parameter " << p.index << " of group " << p.group;
  }
};

/// What the front must know of an optimizer's rule, format and weights.
struct description {
  archive_signature who;
  std::vector<slot_spec> slots;  ///< all that a state may hold
  codec compressed;              ///< those of them that the format compresses
  state_kind kind;
  bool takes_complex;
};
/// When a parameter's moments are compressed, and the seed of its random bits.
struct compression {
  std::int64_t min_elements = 0;
  std::uint64_t seed = 0;
};

class front : public Optimizer {
 public:
  /// One step of every parameter that has a gradient. All parameters, gradients, options and states
  /// are checked before the first changes. @throws for sparse gradients. For parameters without
  /// elements steps are counted, nothing else.
  Tensor step(LossClosure closure = nullptr) override {
    Tensor loss;
    if (closure) {
      at::AutoGradMode on(true);
      loss = closure();
    }
    const c10::InferenceMode normal(false);  // state made in this step must serve later ones
    const at::NoGradGuard no_grad;
    refresh();
    converted views;
    std::vector<entry> entries = collect(views);
    for (entry& e : entries) {
      if (!e.state) e.state = make_state(e.p);
      set_ordinal(*e.state);
    }
    const cpu::float_environment guard;  // coefficients are part of the promise of equal bits
    run(entries);
    for (const entry& e : entries) {  // nothing below can throw
      count_step(*e.state);
      bump(e.p);  // autograd must see what raw pointers changed
      with_class(*e.state, what_.kind, [](auto& s) {
        each_tensor(s, [](const std::string&, const Tensor& t) { bump(t); });
      });
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

  void save(torch::serialize::OutputArchive& archive) const override {
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
          check_state(s, p, place{i, j});
        },
        [&](const OptimizerOptions& o, std::size_t i) { check_options(o, group_name(i)); });
    for (auto& [p, s] : read.states)
      for (const slot_spec& one : what_.slots)  // an archive in memory may be loaded again
        for (const std::string& name : {std::string(one.name), header_of(one.name)})
          if (const Tensor t = get(*s, name); t.defined()) set(*s, name, t.clone());
    state_.clear();
    owners_.clear();
    seen_.clear();
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
    OptimizerParamState* s = state_for(p);
    if (!s) return;
    std::vector<Tensor> moments = decoded(*s, p);
    for (Tensor& m : moments) m = f(m);
    for (const slot_spec& one : what_.slots)
      if (const Tensor t = get(*s, one.name);
          t.defined() && t.scalar_type() != at::kByte && one.has_rows(int(p.dim())))
        set(*s, one.name, f(t));
    if (moments.empty()) return;
    auto sizes = p.sizes().vec();
    sizes[0] = rows;
    encode_again(*s, at::empty(sizes, p.options()), std::move(moments), p);
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
  /// A parameter with a gradient, about to be stepped.
  struct entry {
    const OptimizerOptions* options;
    Tensor p, g;
    place where;
    OptimizerParamState* state;
  };

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
  virtual compression compression_of(const OptimizerOptions& o) const = 0;
  virtual std::unique_ptr<OptimizerParamState> new_state() const = 0;
  /// Steps them all; nothing in them can be wrong.
  virtual void run(std::vector<entry>& entries) = 0;

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
  bool recode(const entry& e, const std::vector<slot_spec>& moments) const {
    const codec& c = what_.compressed;
    if (c.slots.empty()) return false;
    const auto [min_elements, seed] = compression_of(*e.options);
    auto& s = static_cast<ParamState&>(*e.state);
    const bool want = e.p.numel() >= min_elements, have = is_compressed(s, moments[0].name);
    if (want && !have) {
      bool fresh = true;
      for (const slot_spec& one : moments) fresh = fresh && !s.tensor(one.name).defined();
      if (fresh) {
        make_codes(c, s, e.p);
      } else {
        std::vector<Tensor> values;
        for (const slot_spec& one : moments) {
          const Tensor x = s.tensor(one.name);
          values.push_back(x.defined() ? x : at::zeros(e.p.sizes(), at::kFloat));
        }
        encode(c, s, e.p, ~key_of(s, steps(s), seed), std::move(values));
      }
    } else if (!want && have) {
      const auto values = decode(c, s, e.p);
      for (std::size_t k = 0; k < moments.size(); ++k) {
        s.tensor(moments[k].name, values[k]);
        s.tensor(header_of(moments[k].name), {});
      }
    }
    return want;
  }
  void point_to_codes(const entry& e, const std::vector<slot_spec>& moments,
                      cpu::tensor_step& t) const {
    for (std::size_t k = 0; k < moments.size(); ++k) {
      t.slots[k] = get(*e.state, moments[k].name).data_ptr();
      t.headers[k] =
          static_cast<std::uint16_t*>(get(*e.state, header_of(moments[k].name)).data_ptr());
    }
  }

  place find(const Tensor& p) const {
    for (std::size_t i = 0; i < param_groups_.size(); ++i)
      for (std::size_t j = 0; j < param_groups_[i].params().size(); ++j)
        if (param_groups_[i].params()[j].is_same(p)) return {i, j};
    TORCH_CHECK(false, "leanopt: this tensor is no parameter of the optimizer");
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

  description what_;

  static std::string group_name(std::size_t i) { return "group " + std::to_string(i); }

  /// The lists are the user's and change at any time: each step compares them with those it saw
  /// last.
  void refresh() {
    std::size_t n = 0;
    bool same = true;
    for (auto& g : param_groups_) {
      if (!g.has_options()) g.set_options(defaults_->clone());
      for (const auto& p : g.params()) {
        same = same && n < seen_.size() && seen_[n] == identity_of(p);
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
        pin(p);
        seen_.push_back(identity_of(p));
      }
  }

 private:
  /// A tensor and its memory, which set_data() changes.
  using identity = std::tuple<const void*, const void*, std::int64_t>;
  static identity identity_of(const Tensor& p) {
    const auto* impl = p.unsafeGetTensorImpl();
    return {impl, impl->has_storage() ? p.data_ptr() : nullptr, p.defined() ? p.numel() : 0};
  }

  using converted = std::vector<std::unique_ptr<OptimizerOptions>>;

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
    const std::uint64_t seed = compression_of(*options_in(find(p).group)).seed;
    encode(what_.compressed, static_cast<ParamState&>(s), like, ~key_of(s, steps(s), seed),
           std::move(moments));
  }

  /// The parameters with a gradient. LibTorch's options pushed by hand are read through `views` and
  /// left in place.
  std::vector<entry> collect(converted& views) {
    std::vector<entry> entries;
    for (std::size_t i = 0; i < param_groups_.size(); ++i) {
      auto& group = param_groups_[i];
      const OptimizerOptions* o = &group.options();
      if (!is_own(*o)) o = views.emplace_back(convert(*o, i)).get();
      check_options(*o, group_name(i));
      for (std::size_t j = 0; j < group.params().size(); ++j) {
        const place where{i, j};
        const Tensor& p = group.params()[j];
        Tensor g = p.grad();
        if (!g.defined()) continue;
        TORCH_CHECK(g.layout() == at::kStrided, "leanopt: the gradient of ", where, " is ",
                    g.layout() == at::kSparse ? "sparse" : "not strided",
                    "; make it dense (for embeddings: sparse(false))");
        TORCH_CHECK(g.sizes() == p.sizes() && g.device() == p.device(), "leanopt: ", where,
                    " has sizes ", p.sizes(), " on ", p.device(), ", its gradient ", g.sizes(),
                    " on ", g.device());
        check_parameter(p, where);  // its module may have moved since the lists were checked
        OptimizerParamState* s = nullptr;
        if (const auto it = state_.find(p.unsafeGetTensorImpl());
            it != state_.end() && it->second) {
          s = it->second.get();
          check_state(*s, p, where);
        }
        if (g.is_conj() || g.is_neg()) g = g.resolve_conj().resolve_neg();
        if (!same_arithmetic(g, p)) g = g.to(p.scalar_type());
        entries.push_back({o, p, g, where, s});
      }
    }
    return entries;
  }

  /// Whether the engine reads both as they are: it widens 16-bit numbers, not float32 to float64.
  static bool same_arithmetic(const Tensor& g, const Tensor& p) {
    const auto real = [](const Tensor& t) { return c10::toRealValueType(t.scalar_type()); };
    return g.is_complex() == p.is_complex() && g.is_floating_point() == p.is_floating_point() &&
           (real(g) == at::kDouble) == (real(p) == at::kDouble);
  }
  void check_type(const Tensor& p, place where) const {
    const auto type = p.scalar_type();
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
      const bool codes = is_compressed(s, one.name);
      TORCH_CHECK(codes == s.tensor(header_of(one.name)).defined() &&
                      codes == is_compressed(s, what_.compressed.slots[0].name),
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
      if (name == one.name && t.scalar_type() == at::kByte) type = is_raw(t, p);
      if (name != header_of(one.name)) continue;
      known = true;
      sizes = {c.blocks_of(p.numel())};
      type = t.scalar_type() == at::kShort && is_raw(t, p);
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
    std::vector<const span*> open;  // those that reach beyond the begin of the next
    for (const span& s : memory) {
      open.erase(std::remove_if(open.begin(), open.end(),
                                [&](const span* o) { return o->end <= s.begin; }),
                 open.end());
      for (const span* o : open)
        TORCH_CHECK(
            !share_elements(*o, s), "leanopt: ", s.where, " and ", o->where,
            " overlap in memory and would be stepped twice; give the optimizer one of them");
      open.push_back(&s);
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
  /// Whether two parameters whose spans meet have an element in common, or lie in each other's
  /// gaps: a map of the bytes tells.
  static bool share_elements(const span& a, const span& b) {
    if (a.p->is_non_overlapping_and_dense() && b.p->is_non_overlapping_and_dense()) return true;
    const Tensor map = at::zeros({std::int64_t(std::max(a.end, b.end) - a.begin)}, at::kByte);
    const auto bytes_of = [&](const span& s) {
      auto sizes = s.p->sizes().vec(), strides = s.p->strides().vec();
      const auto width = std::int64_t(s.p->element_size());
      for (std::int64_t& stride : strides) stride *= width;
      sizes.push_back(width);
      strides.push_back(1);
      return map.as_strided(sizes, strides, std::int64_t(s.begin - a.begin));
    };
    bytes_of(a).fill_(1);
    return bytes_of(b).any().item<bool>();
  }
  void check_parameter(const Tensor& p, place where) const {
    TORCH_CHECK(p.defined(), "leanopt: ", where, " is undefined; leave it out of the list");
    TORCH_CHECK(p.is_leaf(), "leanopt: ", where,
                " is not a leaf tensor: it is computed from others; give the optimizer those");
    TORCH_CHECK(p.layout() == at::kStrided, "leanopt: ", where, " has layout ", p.layout(),
                "; only strided tensors can be stepped");
    TORCH_CHECK(p.device().is_cpu(), "leanopt: ", where, " is on ", p.device(),
                "; this version steps tensors on the CPU only");
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

  std::int64_t next_ordinal_ = 0;
  std::unordered_map<void*, c10::weak_intrusive_ptr<c10::TensorImpl>> owners_;
  std::vector<identity> seen_;
};

}  // namespace detail

/// Adds a group whose unset options inherit the defaults, also where the optimizer is held as
/// Optimizer&. LibTorch's own optimizers do as their member does.
inline void add_param_group(Optimizer& optimizer, const OptimizerParamGroup& group) {
  if (auto* ours = dynamic_cast<detail::front*>(&optimizer)) return ours->add_param_group(group);
  optimizer.add_param_group(group);
}

}  // namespace leanopt
