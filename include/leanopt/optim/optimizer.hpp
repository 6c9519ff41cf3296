// optimizer<Rule, Format, Weights>: a torch::optim::Optimizer from any rule, storage format and way
// to write parameters.
#pragma once

#include <leanopt/engine/dispatch.hpp>
#ifdef LEANOPT_WITH_CUDA
#include <leanopt/engine/device_list.hpp>
#endif
#include <leanopt/optim/front.hpp>

#include <deque>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace leanopt {

/// Steps parameters in place by `Rule`, with state stored in `Format`.
/// @cost per parameter: Format's bytes for each slot of the rule with a value per element; tensors
/// with fewer elements than min_compressed_elements keep full precision. One optimizer belongs to
/// one thread at a time; a step uses at::get_num_threads() threads. Parameters may be on CUDA
/// devices in a program that links leanopt::cuda: a step puts its work on the current stream of
/// each and waits for none, but for the first, for nonfinite::skip_step, for scalars of a device
/// that parameters on the CPU need, and where steps that a device counted are followed by one of
/// other tensors.
template <class Rule, class Format, class Weights = weights::plain>
class optimizer : public detail::front {
  using Stock = typename stock<Rule>::options;
  using StockState = typename stock<Rule>::state;
  static constexpr bool full_precision =
      std::is_same_v<Format, formats::full> && std::is_same_v<Weights, weights::plain>;

 public:
  using Options = options<Rule, Format, Weights>;
  /// LibTorch's class where the rule is LibTorch's and everything is in full precision.
  using State =
      std::conditional_t<full_precision && !std::is_void_v<StockState>, StockState, ParamState>;

  /// @throws when a parameter is undefined, no leaf, listed twice or of a type that the rule cannot
  /// step, or when options are out of range or contradict each other.
  explicit optimizer(const std::vector<OptimizerParamGroup>& groups, Options defaults = {})
      : front(std::make_unique<Options>(defaults), describe()) {
    defaults.check("defaults", Format::compressed);
    for (const auto& g : groups) add_param_group(g);
  }
  explicit optimizer(std::vector<Tensor> params, Options defaults = {})
      : optimizer({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// The rate of the next step of `parameter`, scaling by its root mean square included: what
  /// `get_lr()` of its group cannot tell. @throws where it is no parameter of this optimizer. @cost
  /// one pass over the parameter, on the calling thread; on a device, a wait and a copy.
  template <class R = Rule, class = std::enable_if_t<!R::elementwise>>
  double effective_lr(const Tensor& parameter) const {
    const std::size_t group = find(parameter).group;
    const auto o = options_in(group);
    if (const Tensor* lr = rate_of(group)) static_cast<Options&>(*o).lr(lr->item<double>());
    const std::int64_t done = steps_of(parameter);
    double rms = 0;
    if (const Tensor p = parameter.detach().cpu(); p.numel())
      engine::with_arithmetic(p.scalar_type(), [&](auto zero) {
        engine::operands shapes;
        std::vector<double> sums(cpu::units_of(p.numel()));
        rms = cpu::root_mean_square<decltype(zero), Weights>(engine::level_from_environment(),
                                                             shapes.in_logical_order(p), p.numel(),
                                                             sums.data(), engine::unit_loop{});
      });
    return Rule::rate(static_cast<const Options&>(*o), done + 1, rms);
  }

  /// The kernel for a parameter of so many elements on a device; null where this program has none.
  static const engine::device_kernel* kernel_for([[maybe_unused]] const Options& o,
                                                 [[maybe_unused]] at::ScalarType type,
                                                 [[maybe_unused]] std::int64_t elements) {
    const engine::device_kernel* result = nullptr;
#ifdef LEANOPT_WITH_CUDA
    engine::with_arithmetic(type, [&](auto zero) {
      using T = decltype(zero);
      using shorter = typename Rule::template formula<false>;
      using longer = typename Rule::template formula<true>;
      const auto choose = [&](auto formula, auto format) {
        result = &engine::compiled_list<Rule, Options, decltype(formula), decltype(format), Weights,
                                        T>::kernel;
      };
      const bool is_long = Rule::is_long(o);
      is_long ? choose(longer{}, formats::full{}) : choose(shorter{}, formats::full{});
      if constexpr (Format::compressed)
        if (elements >= o.min_compressed_elements())
          choose(std::conditional_t<Rule::elementwise, shorter, longer>{}, Format{});
    });
#endif
    return result;
  }

 protected:
  std::unique_ptr<OptimizerOptions> convert(const OptimizerOptions& given,
                                            std::size_t group) const override {
    if (is_own(given)) return given.clone();
    if constexpr (!std::is_same_v<Stock, OptimizerOptions>)
      if (typeid(given) == typeid(Stock)) {  // not our other classes, which derive from it too
        auto out = std::make_unique<Options>(static_cast<const Options&>(*defaults_));
        static_cast<Stock&>(*out) = static_cast<const Stock&>(given);
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
    if (!is_own(given)) o.forget();
    o.inherit(static_cast<const Options&>(*defaults_));
    o.check(group_name(group), Format::compressed);
    return out;
  }
  void assign(OptimizerParamGroup& group, std::unique_ptr<OptimizerOptions> o) override {
    if (!group.has_options())
      group.set_options(std::move(o));
    else if (is_own(group.options()))  // assigned in place: references to them stay valid
      static_cast<Options&>(group.options()) = static_cast<Options&>(*o);
    else
      static_cast<Stock&>(group.options()) = static_cast<const Stock&>(*o);
  }
  bool is_own(const OptimizerOptions& o) const override {
    return dynamic_cast<const Options*>(&o) != nullptr;
  }
  void check_options(const OptimizerOptions& o, const std::string& where) const override {
    static_cast<const Options&>(o).check(where, Format::compressed);
  }
  std::uint64_t differences_of(const OptimizerOptions& a,
                               const OptimizerOptions& b) const override {
    return differences(static_cast<const Options&>(a), static_cast<const Options&>(b));
  }
  detail::storage storage_of(const OptimizerOptions& given) const override {
    const auto& o = static_cast<const Options&>(given);
    detail::storage result;
    if constexpr (Format::compressed) result.min_elements = o.min_compressed_elements();
    if constexpr (Format::random || Weights::random) result.seed = std::uint64_t(o.seed());
    result.bad_gradients = o.nonfinite();
    return result;
  }
  std::unique_ptr<OptimizerParamState> new_state() const override {
    auto s = std::make_unique<State>();
    if constexpr (std::is_same_v<State, ParamState>) s->counter_bytes(Format::compressed ? 8 : 4);
    return s;
  }
  std::string python_key(const std::string& name, std::size_t group) const override {
    if constexpr (!Rule::elementwise) {
      const auto o = options_in(group);
      for (const slot_spec& s : what_.slots)
        if (name == s.name) return Rule::python_key(static_cast<const Options&>(*o), s.name);
    }
    return name;
  }
  std::int64_t host_scratch_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& of_thread : scratch_)
      bytes += std::int64_t(of_thread.capacity() * sizeof(double));
    return bytes;
  }
  void build(detail::plan& x) override {
    const detail::storage o = storage_of(*x.options);
    x.seed = o.seed;
    x.skips_elements = o.bad_gradients == nonfinite::skip_element;
    x.job.work = cpu::matrix_step(x.p->sizes().data(), std::size_t(x.p->dim()));
    if constexpr (Rule::elementwise)
      build_elements(x);
    else
      build_tensor(x);
    if (!x.p->is_cpu())
      x.kernel =
          kernel_for(static_cast<const Options&>(*x.options), x.p->scalar_type(), x.p->numel());
  }
  void run(const std::vector<detail::plan*>& plans) override {
    if constexpr (Rule::elementwise)
      step_elements(plans);
    else
      step_tensors(plans);
  }

 private:
  static constexpr slot_spec rms_slot{"RMS", values::non_negative, extent::one};

  static detail::description describe() {
    using detail::codec;
    detail::description d{{Rule::name, Format::name, Weights::name, ""}, {}, {}, {}};
    using residual = typename Weights::residual;
    if constexpr (!std::is_void_v<residual>)
      d.residual = sizeof(residual) == 1 ? at::kChar : at::kShort;
    d.takes_float16 = Weights::takes_float16;
    d.widen = cpu::read<float, Weights>;
    if constexpr (!std::is_void_v<StockState>) d.who.stock_option = "betas";
    d.kind = detail::kind_of<State>;
    if constexpr (Rule::elementwise) {
      using all = typename Rule::template formula<!Format::compressed>;
      d.slots = {all::slots, all::slots + all::slot_count};
      d.compressed = codec::of<typename Rule::template formula<false>, Format>();
      d.takes_complex = !Format::compressed;
      d.squares_in_float = Format::compressed;
    } else {
      d.slots = {std::begin(Rule::moments), std::end(Rule::moments)};
      d.slots.push_back(rms_slot);
      d.compressed = codec::of<typename Rule::template formula<true>, Format>();
    }
    return d;
  }

  void build_elements(detail::plan& x) {
    const auto& o = static_cast<const Options&>(*x.options);
    auto moments = what_.slots;
    moments.resize(Rule::is_long(o) ? 3 : 2);
    cpu::tensor_step& t = x.job.work;
    const auto type = x.p->scalar_type();
    if (x.p->is_complex()) t.elements *= 2;
    if (recode(x, moments)) {
      point_to_codes(x, moments, t);
      t.p = x.shapes.in_logical_order(*x.p);
      t.g = x.shapes.in_logical_order(*x.g);
      t.p.residual = point_to_residual(x, get(*x.state, moments[0].name));
      x.function = engine::elementwise_function<Rule, Format, Weights>(type, false);
      return;
    }
    for (std::size_t k = 0; k < moments.size(); ++k)  // all in the order of the first
      t.slots[k] = settle(x, moments[k], k ? get(*x.state, moments[0].name) : *x.p);
    const Tensor order = get(*x.state, what_.slots[0].name);
    t.p = x.shapes.in_order_of(order, *x.p);
    t.g = x.shapes.in_order_of(order, *x.g);
    t.p.residual = point_to_residual(x, order);
    x.function = engine::elementwise_function<Rule, formats::full, Weights>(type, Rule::is_long(o));
  }

  /// What the tensors of a step need beside their memory. Prepared are options, a step and a type,
  /// which neighbours share.
  void prepare(const std::vector<detail::plan*>& plans) {
    using key = std::tuple<const OptimizerOptions*, std::int64_t, double, bool>;
    key last{};
    std::size_t used = 0;
    for (detail::plan* x : plans) {
      engine::tensor_job& job = x->job;
      job.step = steps(*x->state) + 1;
      if (const key mine{x->options, job.step, job.epsilon, is_double(*x)}; mine != last) {
        const auto& o = static_cast<const Options&>(*x->options);
        if (used == prepared_.size()) prepared_.emplace_back();
        auto& [single, twofold] = prepared_[used++];
        is_double(*x) ? prepare<double>(o, job, twofold) : prepare<float>(o, job, single);
        last = mine;
      }
      const auto& [single, twofold] = prepared_[used - 1];
      job.coeffs = is_double(*x) ? static_cast<const void*>(&twofold) : &single;
      point_to_gradient(*x);
      if constexpr (needs_key) job.work.key = key_of(*x->state, job.step, x->seed);
    }
  }
  template <class T>
  static void prepare(const Options& o, const engine::tensor_job& job,
                      typename Rule::template prepared<T>& result) {
    if constexpr (Rule::elementwise)
      result = Rule::template prepare<T>(o, job.step);
    else
      result = Rule::template prepare<T>(o, job.step, job.epsilon);
  }
  static bool is_double(const detail::plan& x) { return x.job.work.p.type == number::float64; }

  void step_elements(const std::vector<detail::plan*>& plans) {
    prepare(plans);
    elements_.clear();
    for (const detail::plan* x : plans)
      if (x->job.work.elements) elements_.add(x->job.work, x->job.coeffs, x->function);
    elements_.run(engine::level_from_environment());
  }

  /// A slot in full precision, in the order of the strides of `order`.
  void* settle(const detail::plan& x, const slot_spec& one, const Tensor& order) const {
    const Tensor held = get(*x.state, one.name), ready = detail::settled(held, order);
    if (!ready.is_same(held)) set(*x.state, one.name, ready);
    return ready.data_ptr();
  }

  void build_tensor(detail::plan& x) {
    const auto& o = static_cast<const Options&>(*x.options);
    auto& s = static_cast<ParamState&>(*x.state);
    const Tensor& p = *x.p;
    const auto& [exp_avg, row, column, variance] = Rule::moments;
    if (Rule::keeps_rms(o)) s.counter_bytes(8);
    engine::tensor_job& job = x.job;
    job.epsilon = engine::epsilon_of(p.scalar_type());
    if (p.numel() == 0) return;
    cpu::matrix_step& t = job.work;
    if (p.dim() > 1) {
      t.row = hold(s, row, p);
      t.column = hold(s, column, p);
    } else {
      t.variance = hold(s, variance, p);
    }
    job.options = x.options;
    job.first_moment = Rule::is_long(o);
    bool codes = false;
    if (job.first_moment) {
      codes = recode(x, {exp_avg});
      if (codes)
        point_to_codes(x, {exp_avg}, t);
      else
        t.slots[0] = hold(s, exp_avg, p);
    }
    if (Rule::keeps_rms(o)) job.rms = hold(s, rms_slot, p);
    t.p = x.shapes.in_logical_order(p);
    t.g = x.shapes.in_logical_order(*x.g);
    if (has_residuals())  // in logical order, whatever the parameter's strides
      t.p.residual = point_to_residual(x, at::empty(p.sizes(), p.options().device(at::kMeta)));
    if (codes)
      engine::set_function<Rule, Format, Weights, Options>(job, p.scalar_type());
    else
      engine::set_function<Rule, formats::full, Weights, Options>(job, p.scalar_type());
  }

  void step_tensors(const std::vector<detail::plan*>& plans) {
    prepare(plans);
    tensors_.clear();
    for (const detail::plan* x : plans)
      if (x->job.work.elements) tensors_.add(x->job);
    tensors_.run(engine::level_from_environment(), scratch_);
  }
  /// A slot in full precision, in logical order: where the passes of a tensor rule find it.
  static void* hold(ParamState& s, const slot_spec& one, const Tensor& p) {
    const auto wanted = p.options().dtype(detail::full_type(p));
    Tensor x = s.tensor(one.name);
    if (!x.defined())
      x = at::zeros(detail::slot_sizes(one, p), wanted);
    else if (x.scalar_type() != detail::full_type(p) || !x.is_contiguous() ||
             x.device() != p.device() || x.is_inference())
      x = x.to(wanted).contiguous().clone();
    s.tensor(one.name, x);
    return x.data_ptr();
  }

  static constexpr bool needs_key = Format::random || Weights::random;

  // Of elementwise rules and of tensor rules: lists that keep their memory from step to step.
  std::deque<
      std::pair<typename Rule::template prepared<float>, typename Rule::template prepared<double>>>
      prepared_;  // which stay where they are when there are more
  engine::elementwise_work elements_;
  engine::tensor_work tensors_;
  engine::scratch_memory scratch_;
};

}  // namespace leanopt
