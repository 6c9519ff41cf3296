// optimizer<Rule, Format, Weights>: a torch::optim::Optimizer from any rule, storage format and way to
// write parameters.
#pragma once

#include <leanopt/engine/dispatch.hpp>
#include <leanopt/optim/front.hpp>
#include <leanopt/optim/slots.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>

#include <memory>
#include <type_traits>

namespace leanopt {

/// Steps parameters in place by `Rule`, with state stored in `Format`.
/// @cost per parameter: Format's bytes for each slot of the rule with a value per element; tensors with
/// fewer elements than min_compressed_elements keep full precision.
/// One optimizer belongs to one thread at a time; a step uses at::get_num_threads() threads.
template <class Rule, class Format, class Weights = weights::plain>
class optimizer : public detail::front {
  using Stock = typename stock<Rule>::options;
  using StockState = typename stock<Rule>::state;
  static constexpr bool plain_weights = std::is_same_v<Weights, weights::plain>;

 public:
  using Options = options<Rule, Format, Weights>;
  /// LibTorch's class where the rule is LibTorch's and everything is in full precision.
  using State = std::conditional_t<
      std::is_same_v<Format, formats::full> && plain_weights && !std::is_void_v<StockState>,
      StockState, ParamState>;

  /// @throws when a parameter is undefined, no leaf, listed twice or of a type that the rule cannot
  /// step, or when options are out of range or contradict each other.
  explicit optimizer(const std::vector<OptimizerParamGroup>& groups, Options defaults = {})
      : front(std::make_unique<Options>(defaults)) {
    engine::level_from_environment();
    defaults.check("defaults", Format::compressed);
    for (const auto& g : groups) add_param_group(g);
  }
  explicit optimizer(std::vector<Tensor> params, Options defaults = {})
      : optimizer({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// One step of every parameter that has a gradient. All parameters, gradients, options and states are
  /// checked before the first changes. @throws for sparse gradients. Parameters without elements are
  /// left alone and have no state.
  Tensor step(LossClosure closure = nullptr) override {
    Tensor loss;
    if (closure) {
      at::AutoGradMode on(true);
      loss = closure();
    }
    const c10::InferenceMode normal(false);  // state made in this step must serve later ones
    const at::NoGradGuard no_grad;
    refresh();
    std::vector<Options> views;  // LibTorch's options pushed by hand are read and left in place
    std::vector<entry> entries = collect(views);
    for (entry& e : entries)
      if (!e.state) e.state = make_state(e.p);
    if constexpr (Rule::elementwise)
      step_elements(entries);
    else
      step_tensors(entries);
    for (const entry& e : entries) {  // autograd must see what raw pointers changed
      bump(e.p);
      detail::each_tensor(*e.state, [](const std::string&, const Tensor& t) { bump(t); });
    }
    return loss;
  }

  /// The rate of the next step of `parameter`, scaling by its root mean square included: what
  /// `get_lr()` of its group cannot tell.
  template <class R = Rule, class = std::enable_if_t<!R::elementwise>>
  double effective_lr(const Tensor& parameter) const {
    const auto [group, index] = find(parameter);
    (void)index;
    const auto o = options_of_group(group);
    const auto it = state_.find(parameter.unsafeGetTensorImpl());
    const std::int64_t done =
        it == state_.end() ? 0 : static_cast<const State&>(*it->second).step();
    double rms = 0;
    if (parameter.numel())
      engine::with_arithmetic(parameter.scalar_type(), [&](auto zero) {
        engine::operands shapes;
        std::vector<double> sums(cpu::units_of(parameter.numel()));
        rms = cpu::root_mean_square<decltype(zero), Weights>(
            engine::level_from_environment(), shapes.in_logical_order(parameter),
            parameter.numel(), sums.data(), engine::serially{});
      });
    return Rule::rate(static_cast<const Options&>(*o), done + 1, rms);
  }

  void change_rows(const Tensor& p, std::int64_t rows, const change& f) override {
    const auto it = state_.find(p.unsafeGetTensorImpl());
    if (it == state_.end() || !it->second) return;
    auto& s = state_of(*it->second, find(p));
    std::vector<Tensor> decoded = decode(s, p);
    std::size_t k = 0;
    for (const slot& one : slots()) {
      if (!one.has_rows(int(p.dim()))) continue;
      if constexpr (Format::compressed)
        if (detail::is_compressed(s, one.name)) {
          decoded[k] = f(decoded[k]);
          ++k;
          continue;
        }
      if (const Tensor t = detail::get_slot(s, one.name); t.defined())
        detail::set_slot(s, one.name, f(t));
    }
    if (!decoded.empty()) {
      auto sizes = p.sizes().vec();
      sizes[0] = rows;
      encode(s, at::empty(sizes, p.options()), decoded);
    }
  }

  Tensor read_slot(const Tensor& p, const std::string& name) const override {
    const auto it = state_.find(p.unsafeGetTensorImpl());
    if (it == state_.end() || !it->second) return {};
    const auto& s = static_cast<const State&>(*it->second);
    if constexpr (Format::compressed)
      if (detail::is_compressed(s, name.c_str())) {
        const auto compressed = slot_codes::slots();
        for (std::size_t k = 0; k < compressed.size(); ++k)
          if (name == compressed[k].name) return slot_codes::decode(s, p)[k];
      }
    const Tensor t = detail::get_slot(s, name);
    return t.defined() ? t.clone() : t;
  }

  void write_slot(const Tensor& p, const std::string& name, const Tensor& value) override {
    const auto where = find(p);
    const slot* known = nullptr;
    for (const slot& one : slots())
      if (name == one.name) known = &one;
    TORCH_CHECK(known, "leanopt: set_slot: ", signature().text(), " has no slot ", name);
    TORCH_CHECK(value.sizes() == detail::slot_sizes(*known, p), "leanopt: set_slot: ", name, " of ",
                where, " has sizes ", detail::slot_sizes(*known, p), ", the value ", value.sizes());
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    auto& held = state_[p.unsafeGetTensorImpl()];
    if (!held) held = adopt(make_state(p));
    auto& s = state_of(*held, where);
    std::vector<Tensor> decoded = decode(s, p);
    for (std::size_t k = 0; k < decoded.size(); ++k)
      if (name == slots()[k].name) {
        decoded[k] = value;
        return encode(s, p, decoded);
      }
    const Tensor t = detail::get_slot(s, name);
    if (t.defined())
      t.copy_(value);
    else
      detail::set_slot(s, name, detail::settled({}, p).copy_(value));
  }

 protected:
  std::unique_ptr<OptimizerOptions> convert(const OptimizerOptions& given,
                                            std::size_t group) const override {
    if (const auto* o = dynamic_cast<const Options*>(&given)) return std::make_unique<Options>(*o);
    if constexpr (!std::is_same_v<Stock, OptimizerOptions>)
      if (const auto* o = dynamic_cast<const Stock*>(&given);
          o && typeid(*o) == typeid(Stock)) {  // no other class of ours, which derives from it, too
        auto out = std::make_unique<Options>(static_cast<const Options&>(*defaults_));
        static_cast<Stock&>(*out) = *o;
        return out;
      }
    TORCH_CHECK(false, "leanopt: the options of group ", group, " are ",
                c10::demangle(typeid(given).name()), ", which belong to another optimizer; give ",
                c10::demangle(typeid(Options).name()));
  }
  std::unique_ptr<OptimizerOptions> resolve(const OptimizerOptions& given,
                                            std::size_t group) const override {
    auto out = convert(given, group);
    auto& o = static_cast<Options&>(*out);
    if (!dynamic_cast<const Options*>(&given)) o.forget();
    o.inherit(static_cast<const Options&>(*defaults_));
    o.check(group_name(group), Format::compressed);
    return out;
  }
  void assign(OptimizerParamGroup& group, std::unique_ptr<OptimizerOptions> o) override {
    if (auto* held = dynamic_cast<Options*>(&group.options()))
      *held = static_cast<Options&>(*o);  // references to a group's options stay valid
    else
      group.set_options(std::move(o));
  }
  void check_options(const OptimizerOptions& o, const std::string& where) const override {
    static_cast<const Options&>(o).check(where, Format::compressed);
  }
  std::unique_ptr<OptimizerParamState> new_state() const override {
    return std::make_unique<State>();
  }
  detail::archive_signature signature() const override {
    return {Rule::name, Format::name, Weights::name};
  }

  void check_type(const Tensor& p, detail::place where) const override {
    const auto type = p.scalar_type();
    const bool real = type == at::kFloat || type == at::kDouble || type == at::kBFloat16 ||
                      type == at::kHalf;
    const bool complex = type == at::kComplexFloat || type == at::kComplexDouble;
    TORCH_CHECK(real || (complex && Rule::elementwise && !Format::compressed), "leanopt: ", where,
                " has type ", type, ", which ", signature().text(), " cannot step",
                complex ? "; complex parameters are stepped by Adam and AdamW in full precision" : "");
  }

  void check_state(const OptimizerParamState& state, const Tensor& p,
                   detail::place where) const override {
    const auto* s = dynamic_cast<const State*>(&state);
    TORCH_CHECK(s, "leanopt: the state of ", where, " is ",
                c10::demangle(typeid(state).name()), "; this optimizer keeps ",
                c10::demangle(typeid(State).name()));
    detail::each_tensor(*s, [&](const std::string& name, const Tensor& t) {
      if (!t.defined()) return;
      const auto expect = [&](const std::vector<std::int64_t>& sizes, bool type) {
        TORCH_CHECK(t.sizes() == at::IntArrayRef(sizes) && type, "leanopt: ", name, " of ", where,
                    " is ", t.scalar_type(), ' ', t.sizes(), "; a parameter of sizes ", p.sizes(),
                    " needs sizes ", at::IntArrayRef(sizes));
      };
      for (const slot& one : slots()) {
        const bool codes = Format::compressed && t.scalar_type() == at::kByte;
        if (name == one.name)
          return expect(detail::slot_sizes(one, p),
                        codes || at::isFloatingType(t.scalar_type()) ||
                            (t.is_complex() && p.is_complex()));
        if constexpr (Format::compressed)
          if (name == detail::header_of(one.name))
            return expect({slot_codes::blocks_of(p.numel())}, t.scalar_type() == at::kShort);
      }
      TORCH_CHECK(false, "leanopt: the state of ", where, " has ", name, ", which ",
                  signature().text(), " does not keep");
    });
    if constexpr (Format::compressed)
      for (const slot& one : slot_codes::slots())
        TORCH_CHECK(detail::is_compressed(*s, one.name) ==
                            s->tensor(detail::header_of(one.name)).defined() &&
                        detail::is_compressed(*s, one.name) ==
                            detail::is_compressed(*s, slot_codes::slots()[0].name),
                    "leanopt: the state of ", where, " has codes without headers, or headers without "
                    "codes: ", one.name);
  }

 private:
  using formula = typename Rule::template formula<!Rule::elementwise>;
  using slot_codes = detail::codes<formula, Format>;

  /// A parameter with a gradient, about to be stepped.
  struct entry {
    const Options* o;
    Tensor p, g;
    detail::place where;
    State* state;
  };

  static void bump(const Tensor& t) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }

  /// All slots that this optimizer may keep.
  static std::vector<slot> slots() {
    if constexpr (Rule::elementwise) {
      using all = typename Rule::template formula<!Format::compressed>;
      return {all::slots, all::slots + all::slot_count};
    } else {
      std::vector<slot> result(std::begin(Rule::moments), std::end(Rule::moments));
      result.push_back({"RMS", values::non_negative, extent::one});
      return result;
    }
  }

  detail::place find(const Tensor& p) const {
    for (std::size_t i = 0; i < param_groups_.size(); ++i)
      for (std::size_t j = 0; j < param_groups_[i].params().size(); ++j)
        if (param_groups_[i].params()[j].is_same(p)) return {i, j};
    TORCH_CHECK(false, "leanopt: this tensor is no parameter of the optimizer");
  }
  std::unique_ptr<OptimizerOptions> options_of_group(std::size_t i) const {
    return param_groups_[i].has_options() ? convert(param_groups_[i].options(), i)
                                          : defaults_->clone();
  }
  State& state_of(OptimizerParamState& s, detail::place where) const {
    auto* mine = dynamic_cast<State*>(&s);
    TORCH_CHECK(mine, "leanopt: the state of ", where, " has a foreign type, ",
                c10::demangle(typeid(s).name()));
    return *mine;
  }

  std::vector<entry> collect(std::vector<Options>& views) {
    std::vector<entry> entries;
    views.reserve(param_groups_.size());
    for (std::size_t i = 0; i < param_groups_.size(); ++i) {
      auto& group = param_groups_[i];
      const auto* o = dynamic_cast<const Options*>(&group.options());
      if (!o) o = &views.emplace_back(static_cast<Options&>(*convert(group.options(), i)));
      o->check(group_name(i), Format::compressed);
      for (std::size_t j = 0; j < group.params().size(); ++j) {
        const detail::place where{i, j};
        const Tensor& p = group.params()[j];
        Tensor g = p.grad();
        if (!g.defined()) continue;
        TORCH_CHECK(g.layout() == at::kStrided, "leanopt: the gradient of ", where, " is ",
                    g.layout(), "; make it dense (embeddings: sparse(false))");
        TORCH_CHECK(g.sizes() == p.sizes() && g.device() == p.device(), "leanopt: ", where,
                    " has sizes ", p.sizes(), " on ", p.device(), ", its gradient ", g.sizes(),
                    " on ", g.device());
        check_type(p, where);  // a module may have moved to another type since the lists were checked
        State* s = nullptr;
        if (const auto it = state_.find(p.unsafeGetTensorImpl());
            it != state_.end() && it->second) {
          check_state(*it->second, p, where);
          s = static_cast<State*>(it->second.get());
        }
        if (p.numel() == 0) continue;
        if (g.is_conj() || g.is_neg()) g = g.resolve_conj().resolve_neg();
        if (g.scalar_type() != p.scalar_type()) g = g.to(p.scalar_type());
        entries.push_back({o, p, g, where, s});
      }
    }
    return entries;
  }

  State* make_state(const Tensor& p) {
    auto fresh = std::make_unique<State>();
    if constexpr (std::is_same_v<State, ParamState>) fresh->ordinal(next_ordinal_++);
    State* s = fresh.get();
    state_[p.unsafeGetTensorImpl()] = std::move(fresh);
    return s;
  }
  std::unique_ptr<OptimizerParamState> adopt(State* s) {
    for (auto& [key, held] : state_)
      if (held.get() == s) return std::move(held);
    return nullptr;
  }

  static std::uint64_t key_of(const Options& o, const State& s) {
    if constexpr (Format::compressed)
      return random_key(std::uint64_t(o.seed()), std::uint64_t(s.step()),
                        std::uint64_t(s.ordinal()));
    else
      return 0;
  }

  // Moments in full precision, all of a parameter together; empty where they are not compressed.
  static std::vector<Tensor> decode(const State& s, const Tensor& p) {
    if constexpr (Format::compressed)
      if (detail::is_compressed(s, slot_codes::slots()[0].name)) return slot_codes::decode(s, p);
    return {};
  }
  void encode(State& s, const Tensor& p, const std::vector<Tensor>& moments) const {
    if constexpr (Format::compressed)  // its own stream: a step draws from the key itself
      slot_codes::encode(s, p, moments,
                         ~key_of(static_cast<const Options&>(*defaults_), s));
  }

  /// Brings the slots with a value per element into the form of the next step; says whether it is codes.
  static bool settle(State& s, const Tensor& p, const Options& o, const std::vector<slot>& moments) {
    if constexpr (Format::compressed) {
      const bool want = p.numel() >= o.min_compressed_elements();
      const bool have = detail::is_compressed(s, moments[0].name);
      if (want && !have) {
        std::vector<Tensor> values;
        bool fresh = true;
        for (const slot& one : moments) {
          const Tensor t = s.tensor(one.name);
          fresh = fresh && !t.defined();
          values.push_back(t.defined() ? t : at::zeros(p.sizes(), p.options().dtype(at::kFloat)));
        }
        fresh ? slot_codes::make(s, p) : slot_codes::encode(s, p, values, ~key_of(o, s));
      } else if (!want && have) {
        const auto values = slot_codes::decode(s, p);
        for (std::size_t k = 0; k < moments.size(); ++k) {
          s.tensor(moments[k].name, values[k]);
          s.tensor(detail::header_of(moments[k].name), {});
        }
      }
      if (want) return true;
    }
    for (const slot& one : moments)
      detail::set_slot(s, one.name, detail::settled(detail::get_slot(s, one.name), p));
    return false;
  }

  /// Slots as pointers; returns whether they are codes.
  static void point(cpu::tensor_step& t, const State& s, const std::vector<slot>& moments,
                    bool compressed) {
    for (std::size_t k = 0; k < moments.size(); ++k) {
      t.slots[k] = detail::get_slot(s, moments[k].name).data_ptr();
      if (compressed)
        t.headers[k] = static_cast<std::uint16_t*>(
            detail::get_slot(s, detail::header_of(moments[k].name)).data_ptr());
    }
  }

  void step_elements(std::vector<entry>& entries) {
    engine::elementwise_work<Rule, Weights> work;
    for (entry& e : entries) {
      State& s = *e.state;
      const bool amsgrad = e.o->amsgrad();
      std::vector<slot> moments = slots();
      moments.resize(amsgrad ? 3 : 2);
      const bool compressed = settle(s, e.p, *e.o, moments);
      s.step(s.step() + 1);
      cpu::tensor_step t;
      point(t, s, moments, compressed);
      t.elements = std::size_t(e.p.numel()) * (e.p.is_complex() ? 2 : 1);
      t.key = key_of(*e.o, s);
      const auto type = e.p.scalar_type();
      if (compressed) {
        t.p = work.shapes.in_logical_order(e.p);
        t.g = work.shapes.in_logical_order(e.g);
        work.template add<Format>(t, 2, type, *e.o, s.step());
      } else {
        const Tensor order = detail::get_slot(s, moments[0].name);
        t.p = work.shapes.in_order_of(order, e.p);
        t.g = work.shapes.in_order_of(order, e.g);
        work.template add<formats::full>(t, int(moments.size()), type, *e.o, s.step());
      }
    }
    work.run(engine::level_from_environment());
  }

  void step_tensors(std::vector<entry>& entries) {
    engine::tensor_work<Rule, Weights> work;
    for (entry& e : entries) {
      State& s = *e.state;
      const Tensor& p = e.p;
      cpu::matrix_step t;
      t.elements = std::size_t(p.numel());
      const auto hold = [&](const slot& one) {
        Tensor x = s.tensor(one.name);
        const auto type = p.options().dtype(detail::full_type(p));
        if (!x.defined())
          x = at::zeros(detail::slot_sizes(one, p), type);
        else if (x.scalar_type() != detail::full_type(p) || !x.is_contiguous() ||
                 x.device() != p.device())
          x = x.to(type).contiguous();
        s.tensor(one.name, x);
        return x.data_ptr();
      };
      const auto& [exp_avg, row, column, variance] = Rule::moments;
      if (p.dim() > 1) {
        t.rows = std::size_t(p.size(-2));
        t.columns = std::size_t(p.size(-1));
        t.batch = t.elements / (t.rows * t.columns);
        t.row = hold(row);
        t.column = hold(column);
      } else {
        t.variance = hold(variance);
      }
      bool compressed = false;
      const bool first_moment = e.o->beta1().has_value();
      if (first_moment) {
        if constexpr (Format::compressed) compressed = settle(s, p, *e.o, {exp_avg});
        if (!compressed) hold(exp_avg);
        point(t, s, {exp_avg}, compressed);
      }
      float* rms = nullptr;
      if (Rule::keeps_rms(*e.o)) {
        if (!s.tensor("RMS").defined()) s.tensor("RMS", at::zeros({}, p.options().dtype(at::kFloat)));
        rms = s.tensor("RMS").template data_ptr<float>();
      }
      s.step(s.step() + 1);
      s.counter_bytes(Rule::keeps_rms(*e.o) ? 8 : 4);
      t.key = key_of(*e.o, s);
      t.p = work.shapes.in_logical_order(p);
      t.g = work.shapes.in_logical_order(e.g);
      if (compressed)
        work.template add<Format>(t, first_moment, p.scalar_type(), *e.o, s.step(), rms);
      else
        work.template add<formats::full>(t, first_moment, p.scalar_type(), *e.o, s.step(), rms);
    }
    work.run(engine::level_from_environment(), scratch_);
  }

  engine::scratch_memory scratch_;  // of tensor rules
};

}  // namespace leanopt
