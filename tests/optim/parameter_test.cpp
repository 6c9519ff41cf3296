// Parameters of every type and layout, each against the run of the same numbers that needs no
// special care: half precision against float32, complex numbers against pairs of reals, strides
// against contiguous tensors. And slots and rows, by which programs edit parameters and state.
#include "tests/optim/support.hpp"

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace front_test;

template <class Form>
class every : public ::testing::Test {};
TYPED_TEST_SUITE(every, every_form, form_names);
template <class Form>
class full_adam : public ::testing::Test {};
TYPED_TEST_SUITE(full_adam, every_adam, form_names);
template <class Form>
class compressed : public ::testing::Test {};
TYPED_TEST_SUITE(compressed, every_compressed, form_names);

template <class Options, class = void>
struct has_format_options : std::false_type {};
template <class Options>
struct has_format_options<Options,
                          std::void_t<decltype(std::declval<Options>().min_compressed_elements())>>
    : std::true_type {};

/// Options under which everything has state of its own kind, small tensors included, and
/// Adafactor's first epsilon does not depend on the parameter's type.
template <class Form>
auto explicit_options(double lr) {
  auto o = Form::options(lr).weight_decay(0.1);
  if constexpr (std::is_same_v<Form, adafactor>) o.eps({1e-6, 1e-3});
  if constexpr (has_format_options<decltype(o)>::value) o.min_compressed_elements(1);
  return o;
}

/// Whether two parameters have the same state but for the order of strides.
::testing::AssertionResult same_state(const Optimizer& a, const Tensor& p, const Optimizer& b,
                                      const Tensor& q) {
  const auto x = state_tensors(a, p), y = state_tensors(b, q);
  if (x.size() != y.size() || x.empty())
    return ::testing::AssertionFailure() << x.size() << " tensors against " << y.size();
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i].first != y[i].first || !same_bits(x[i].second, y[i].second))
      return ::testing::AssertionFailure() << x[i].first << " against " << y[i].first;
  }
  return ::testing::AssertionSuccess();
}

// Types

TYPED_TEST(every, half_precision_is_the_float32_run_rounded_once_per_step) {
  for (const auto type : {torch::kBFloat16, torch::kFloat16}) {
    Tensor half = leaf({70, 60}, type), full = leaf(half.to(torch::kFloat32));
    const auto options = explicit_options<TypeParam>(1e-2);
    typename TypeParam::optimizer a({half}, options), b({full}, options);
    const Tensor start = half.detach().clone();
    for (int i = 0; i < 5; ++i) {
      half.mutable_grad() = pattern({70, 60}, type, i);
      full.mutable_grad() = half.grad().to(torch::kFloat32);
      a.step();
      b.step();
      ASSERT_TRUE(half.detach().equal(full.detach().to(type))) << type << ", step " << i;
      ASSERT_TRUE(same_state(a, half, b, full)) << type << ", step " << i;
      const torch::NoGradGuard no_grad;
      full.copy_(half);
    }
    EXPECT_FALSE(half.equal(start));
  }
}

TYPED_TEST(full_adam, complex_numbers_are_pairs_of_reals) {
  for (const auto type : {torch::kComplexFloat, torch::kComplexDouble})
    for (const bool amsgrad : {false, true}) {
      Tensor z = leaf({5, 4}, type), pair = leaf(torch::view_as_real(z.detach()));
      const auto options = explicit_options<TypeParam>(1e-2).amsgrad(amsgrad);
      typename TypeParam::optimizer a({z}, options), b({pair}, options);
      for (int i = 0; i < 4; ++i) {
        const Tensor g = pattern({5, 4}, type, 10 * i);
        z.mutable_grad() = i % 2 ? g : g.conj().resolve_conj().conj();  // a lazy conjugate too
        pair.mutable_grad() = torch::view_as_real(g);
        a.step();
        b.step();
        ASSERT_TRUE(torch::view_as_real(z.detach()).equal(pair.detach())) << type << ", step " << i;
      }
      using State = typename TypeParam::optimizer::State;
      const auto& s = state_at<State>(a, z);
      EXPECT_EQ(s.exp_avg().scalar_type(), type);
      EXPECT_TRUE(torch::view_as_real(s.exp_avg_sq()).equal(state_at<State>(b, pair).exp_avg_sq()));
    }
}

template <class Form>
class without_complex : public ::testing::Test {};
using real_forms =
    ::testing::Types<adafactor, hugging_face_adafactor, adam8bit, adamw8bit, adafactor8bit>;
TYPED_TEST_SUITE(without_complex, real_forms, form_names);
TYPED_TEST(without_complex, refuses_complex_numbers_by_place) {
  EXPECT_TRUE(refuses(
      [] {
        typename TypeParam::optimizer({leaf({2}), leaf({2}, torch::kComplexFloat)},
                                      TypeParam::options(0.125));
      },
      {"parameter 1 of group 0", "ComplexFloat", "Adam and AdamW in full precision"}));
}

TYPED_TEST(every, several_types_in_one_optimizer_are_independent) {
  const torch::Dtype types[] = {torch::kFloat32, torch::kBFloat16, torch::kFloat64,
                                torch::kFloat16};
  std::vector<Tensor> together, alone;
  for (const auto type : types) {
    together.push_back(leaf({6, 5}, type, 3));
    alone.push_back(leaf({6, 5}, type, 3));
  }
  const auto options = TypeParam::options(1e-2);
  typename TypeParam::optimizer all(together, options);
  std::vector<std::unique_ptr<typename TypeParam::optimizer>> singles;
  for (const Tensor& p : alone)
    singles.push_back(
        std::make_unique<typename TypeParam::optimizer>(std::vector<Tensor>{p}, options));
  for (int i = 0; i < 3; ++i) {
    for (const auto* list : {&together, &alone})
      for (const Tensor& p : *list) p.mutable_grad() = pattern({6, 5}, p.scalar_type(), i);
    all.step();
    for (const auto& single : singles) single->step();
  }
  for (std::size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(together[i].equal(alone[i])) << types[i];
    const auto expected = types[i] == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
    for (const auto& [name, t] : state_tensors(all, together[i]))
      if (name != "step" && name != "RMS") {
        EXPECT_EQ(t.scalar_type(), expected) << name;
      }
  }
}

/// The class in full precision of the same rule.
template <class Form>
using full_form = std::conditional_t<
    std::is_same_v<Form, adam8bit>, adam,
    std::conditional_t<std::is_same_v<Form, adamw8bit>, adamw, hugging_face_adafactor>>;

TYPED_TEST(compressed, the_first_step_is_that_of_full_precision) {
  for (const auto type : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
    Tensor p = leaf({70, 60}, type), q = leaf({70, 60}, type);
    typename full_form<TypeParam>::options_type options = full_form<TypeParam>::options(1e-2);
    if constexpr (std::is_same_v<TypeParam, adafactor8bit>) options.beta1(0.9);
    typename TypeParam::optimizer a({p}, TypeParam::options(1e-2));
    typename full_form<TypeParam>::optimizer b({q}, options);
    set_gradients({p});
    set_gradients({q});
    a.step();
    b.step();
    EXPECT_TRUE(p.equal(q)) << type;  // both states are zero before it, and zero is a code
    EXPECT_TRUE(is_compressed(a, p)) << type;
    EXPECT_FALSE(is_compressed(b, q)) << type;
    const Tensor moment = leanopt::slot(b, q, "exp_avg").to(torch::kFloat32);
    EXPECT_LE(largest(leanopt::slot(a, p, "exp_avg") - moment),
              tolerance::log8_of_largest * largest(moment))
        << type;
  }
}

// Signs and sizes

TYPED_TEST(every, maximize_is_the_run_with_negated_gradients) {
  using Form = TypeParam;
  if constexpr (!std::is_same_v<Form, hugging_face_adafactor> &&
                !std::is_same_v<Form, adafactor8bit>) {
    Tensor up = leaf({70, 60}), down = leaf({70, 60});
    typename Form::optimizer a({up}, Form::options(1e-2).weight_decay(0.1).maximize(true)),
        b({down}, Form::options(1e-2).weight_decay(0.1));
    for (int i = 0; i < 3; ++i) {
      up.mutable_grad() = pattern({70, 60}, torch::kFloat32, i);
      down.mutable_grad() = -up.grad();
      a.step();
      b.step();
      ASSERT_TRUE(up.equal(down)) << i;
    }
  } else {
    EXPECT_TRUE(
        refuses([] { typename Form::optimizer({leaf({2})}, Form::options(1e-2).maximize(true)); },
                {"maximize", "torch.optim's form"}));
  }
}

TYPED_TEST(full_adam, amsgrad_remembers_the_largest_second_moment) {
  using Stock = std::conditional_t<std::is_same_v<TypeParam, adam>, stock::Adam, stock::AdamW>;
  using StockOptions = leanopt::options_of<Stock>;
  using State = typename TypeParam::optimizer::State;
  for (const auto type : {torch::kFloat32, torch::kFloat64}) {
    Tensor p = leaf({7, 3}, type), q = leaf({7, 3}, type);
    typename TypeParam::optimizer ours({p}, TypeParam::options(1e-2).weight_decay(0).amsgrad(true));
    Stock theirs({q}, StockOptions(1e-2).weight_decay(0).amsgrad(true));
    for (int i = 0; i < 10; ++i) {
      p.mutable_grad() =
          pattern({7, 3}, type, i) * (i < 2 ? 1 : 0.01);  // so that the largest is old
      q.mutable_grad() = p.grad().clone();
      ours.step();
      theirs.step();
    }
    EXPECT_TRUE(agrees(p, q, adam_tolerance(type))) << type;
    const auto& s = state_at<State>(ours, p);
    EXPECT_TRUE(agrees(s.max_exp_avg_sq(), state_at<State>(theirs, q).max_exp_avg_sq(),
                       adam_tolerance(type)));
    EXPECT_TRUE(all_of(s.max_exp_avg_sq() > s.exp_avg_sq()));
  }
}

TYPED_TEST(every, tensors_without_elements_or_dimensions) {
  Tensor empty = leaf({0, 3}), scalar = leaf(at::IntArrayRef{}), one = leaf({1});
  const auto options = TypeParam::options(0.125);
  typename TypeParam::optimizer o({empty, scalar}, options), vector({one}, options);
  for (int i = 0; i < 3; ++i) {
    set_gradients({empty, scalar}, i);
    one.mutable_grad() = scalar.grad().reshape({1});
    o.step();
    vector.step();
  }
  EXPECT_TRUE(scalar.detach().reshape({1}).equal(one.detach()));
  EXPECT_FALSE(scalar.detach().equal(pattern({})));
  EXPECT_EQ(steps_of(o, empty), 3);
}

// Layouts

struct layout {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::function<Tensor(const Tensor&)> make;  ///< the same numbers in other places
};

Tensor every_second_column(const Tensor& t) {
  auto sizes = t.sizes().vec();
  sizes.back() *= 2;
  Tensor wide = torch::full(sizes, 99.0, t.options());
  Tensor view = wide.slice(-1, 0, sizes.back(), 2);
  return view.copy_(t);
}
std::vector<layout> layouts() {
  return {
      {"transposed", {70, 60}, [](const Tensor& t) { return t.t().contiguous().t(); }},
      {"channels last",
       {20, 16, 4, 5},
       [](const Tensor& t) { return t.contiguous(torch::MemoryFormat::ChannelsLast); }},
      {"permuted",
       {12, 8, 50},
       [](const Tensor& t) {
         return t.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
       }},
      {"gaps", {70, 60}, every_second_column},
      {"gaps in rows",
       {70, 60},
       [](const Tensor& t) { return every_second_column(t.t().contiguous()).t(); }},
      {"one row of a matrix",
       {4200},
       [](const Tensor& t) {
         return t.reshape({4200, 1}).expand({4200, 3}).contiguous().select(1, 1);
       }},
  };
}

TYPED_TEST(every, strides_change_no_bit_of_parameters_and_state) {
  for (const auto type : {torch::kFloat32, torch::kBFloat16, torch::kFloat64})
    for (const layout& l : layouts())
      for (const bool same_gradient : {false, true}) {
        Tensor plain = leaf(l.sizes, type);
        Tensor odd = l.make(plain.detach()).set_requires_grad(true);
        ASSERT_TRUE(odd.equal(plain)) << l.name;
        ASSERT_FALSE(odd.is_contiguous()) << l.name;
        const auto options = explicit_options<TypeParam>(1e-2);
        typename TypeParam::optimizer a({plain}, options), b({odd}, options);
        for (int i = 0; i < 3; ++i) {
          const Tensor g = pattern(l.sizes, type, i);
          plain.mutable_grad() = g;
          odd.mutable_grad() = same_gradient ? l.make(g) : g;
          a.step();
          b.step();
          ASSERT_TRUE(odd.equal(plain)) << l.name << ", " << type << ", step " << i;
          ASSERT_TRUE(same_state(a, plain, b, odd)) << l.name << ", " << type << ", step " << i;
        }
      }
}

TYPED_TEST(every, gaps_between_elements_are_not_written) {
  Tensor wide = torch::full({70, 120}, 99.0);
  Tensor odd = wide.slice(1, 0, 120, 2).copy_(pattern({70, 60})).detach().set_requires_grad(true);
  typename TypeParam::optimizer o({odd}, TypeParam::options(1e-2));
  set_gradients({odd});
  o.step();
  EXPECT_TRUE(all_of(wide.slice(1, 1, 120, 2) == 99.0));
  EXPECT_FALSE(wide.slice(1, 0, 120, 2).equal(pattern({70, 60})));
}

TYPED_TEST(every, gradients_of_any_strides_are_read_in_logical_order) {
  const std::function<Tensor(const Tensor&)> forms[] = {
      [](const Tensor& g) { return g.t().contiguous().t(); },
      every_second_column,
      [](const Tensor& g) { return g.flip(0).contiguous().flip(0); },
  };
  for (const auto& form : forms) {
    Tensor a = leaf({70, 60}), b = leaf({70, 60});
    const auto options = explicit_options<TypeParam>(1e-2);
    typename TypeParam::optimizer x({a}, options), y({b}, options);
    for (int i = 0; i < 2; ++i) {
      const Tensor g = pattern({70, 60}, torch::kFloat32, i);
      a.mutable_grad() = g;
      b.mutable_grad() = form(g);
      x.step();
      y.step();
    }
    EXPECT_TRUE(a.equal(b));
  }
  Tensor a = leaf({70, 60}), b = leaf({70, 60});  // expanded: one number for all
  typename TypeParam::optimizer x({a}, TypeParam::options(1e-2)), y({b}, TypeParam::options(1e-2));
  a.mutable_grad() = torch::full({1}, 0.5).expand({70, 60});
  b.mutable_grad() = torch::full({70, 60}, 0.5);
  x.step();
  y.step();
  EXPECT_TRUE(a.equal(b));
}

// A module that changes its type

TYPED_TEST(every, goes_on_when_a_module_changes_its_type) {
  torch::nn::Linear layer(torch::nn::LinearOptions(60, 70).bias(false));
  {
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(pattern({70, 60}));
  }
  typename TypeParam::optimizer o(layer->parameters(), TypeParam::options(1e-2));
  set_gradients({layer->weight});
  o.step();
  const snapshot narrow(o, {layer->weight});
  o.zero_grad();
  layer->to(torch::kFloat64);
  set_gradients({layer->weight}, 1);
  const Tensor before = layer->weight.detach().clone();
  o.step();
  EXPECT_FALSE(layer->weight.equal(before));
  EXPECT_EQ(steps_of(o, layer->weight), 2);
  for (const auto& [name, t] : state_tensors(o, layer->weight))
    if (torch::isFloatingType(t.scalar_type()) && name != "RMS") {
      EXPECT_EQ(t.scalar_type(), torch::kFloat64) << name;
    }
  o.zero_grad();
  layer->to(torch::kBFloat16);
  set_gradients({layer->weight}, 2);
  o.step();
  for (const auto& [name, t] : state_tensors(o, layer->weight)) {
    if (torch::isFloatingType(t.scalar_type())) {
      EXPECT_EQ(t.scalar_type(), torch::kFloat32) << name;
    }
    EXPECT_TRUE(all_of(t.to(torch::kFloat64).isfinite())) << name;
  }
}

TYPED_TEST(every, names_state_of_other_sizes) {
  Tensor p = leaf({70, 60});
  typename TypeParam::optimizer o({p}, TypeParam::options(1e-2));
  set_gradients({p});
  o.step();
  p.mutable_grad() = Tensor();
  p.set_data(pattern({71, 59}));
  set_gradients({p});
  const snapshot before(o, {p});
  EXPECT_TRUE(refuses([&] { o.step(); }, {"parameter 0 of group 0", "[71, 59]"}));
  EXPECT_TRUE(snapshot(o, {p}) == before);
}

// Slots

template <class Form>
std::vector<std::string> slots_of() {
  if (std::is_same_v<Form, adafactor>) return {"row_var", "col_var"};
  if (std::is_same_v<Form, hugging_face_adafactor> || std::is_same_v<Form, adafactor8bit>)
    return {"exp_avg", "row_var", "col_var"};
  return {"exp_avg", "exp_avg_sq"};
}

TYPED_TEST(every, slots_are_read_as_copies) {
  Tensor p = leaf({70, 60});
  typename TypeParam::optimizer o({p}, TypeParam::options(1e-2));
  EXPECT_FALSE(leanopt::slot(o, p, slots_of<TypeParam>()[0]).defined());
  set_gradients({p});
  o.step();
  const snapshot before(o, {p});
  for (const std::string& name : slots_of<TypeParam>()) {
    Tensor copy = leanopt::slot(o, p, name);
    ASSERT_TRUE(copy.defined()) << name;
    EXPECT_EQ(copy.scalar_type(), torch::kFloat32) << name;
    EXPECT_GT(largest(copy), 0) << name;
    copy.fill_(7);
  }
  EXPECT_TRUE(snapshot(o, {p}) == before);
  EXPECT_FALSE(leanopt::slot(o, p, "momentum").defined());
}

TYPED_TEST(every, slots_that_are_set_are_used) {
  Tensor p = leaf({70, 60}), q = leaf({70, 60});
  typename TypeParam::optimizer trained({p}, explicit_options<TypeParam>(1e-2)),
      fresh({q}, explicit_options<TypeParam>(1e-2));
  set_gradients({p});
  trained.step();
  const double code_step = is_compressed(trained, p) ? tolerance::log8_of_largest : 0;
  for (const std::string& name : slots_of<TypeParam>()) {
    const Tensor value = leanopt::slot(trained, p, name);
    leanopt::set_slot(fresh, q, name, value);  // before its first step
    const Tensor read = leanopt::slot(fresh, q, name);
    ASSERT_EQ(read.sizes(), value.sizes()) << name;
    const double step = name == slots_of<TypeParam>()[0] || name == "exp_avg_sq" ? code_step : 0;
    EXPECT_LE(largest(read - value), step * largest(value)) << name;
  }
  q.mutable_grad() = pattern({70, 60}, torch::kFloat32, 5);
  fresh.step();
  EXPECT_TRUE(refuses(
      [&] {
        leanopt::set_slot(fresh, q, "momentum", torch::zeros({70, 60}));
      },
      {"set_slot", "momentum"}));
  EXPECT_TRUE(
      refuses([&] { leanopt::set_slot(fresh, q, slots_of<TypeParam>()[0], torch::zeros({3})); },
              {"set_slot", "parameter 0 of group 0", "[3]"}));
  EXPECT_TRUE(refuses(
      [&] {
        leanopt::set_slot(fresh, p, slots_of<TypeParam>()[0], torch::zeros({70, 60}));
      },
      {"no parameter of the optimizer"}));
}

TYPED_TEST(full_adam, slots_set_by_hand_continue_another_run) {
  Tensor p = leaf({5, 3}), q = leaf({5, 3});
  typename TypeParam::optimizer a({p}, TypeParam::options(1e-2)), b({q}, TypeParam::options(1e-2));
  set_gradients({p, q});
  a.step();
  leanopt::set_slot(b, q, "exp_avg", leanopt::slot(a, p, "exp_avg"));
  leanopt::set_slot(b, q, "exp_avg_sq", leanopt::slot(a, p, "exp_avg_sq"));
  state_at<typename TypeParam::optimizer::State>(b, q).step(1);
  {
    const torch::NoGradGuard no_grad;
    q.copy_(p);
  }
  q.mutable_grad() = p.grad().clone();
  a.step();
  b.step();
  EXPECT_TRUE(p.equal(q));
}

// Rows

TYPED_TEST(every, rows_are_kept_appended_and_zeroed_with_their_state) {
  Tensor p = leaf({100, 64});
  const Tensor handle = p;  // a module's own
  const auto owned = std::make_unique<typename TypeParam::optimizer>(std::vector<Tensor>{p},
                                                                     TypeParam::options(0.125));
  Optimizer& o = *owned;
  set_gradients({p});
  o.step();
  const std::string with_rows = slots_of<TypeParam>()[0];
  const Tensor before = leanopt::slot(o, p, with_rows), values = p.detach().clone();
  auto* const key = p.unsafeGetTensorImpl();

  leanopt::keep_rows(o, p, torch::arange(100) >= 30);
  EXPECT_EQ(p.sizes(), (torch::IntArrayRef{70, 64}));
  EXPECT_TRUE(handle.equal(values.slice(0, 30)));
  EXPECT_EQ(p.unsafeGetTensorImpl(), key);
  EXPECT_TRUE(p.requires_grad());
  EXPECT_FALSE(p.grad().defined());
  // Each row operation encodes the whole tensor anew; full precision is exact.
  const double code_step = is_compressed(o, p) ? tolerance::log8_of_largest : 0;
  const auto near_before = [&](const Tensor& rows, const Tensor& expected) {
    return largest(rows - expected) <= 2 * code_step * largest(expected);
  };
  EXPECT_TRUE(near_before(leanopt::slot(o, p, with_rows), before.slice(0, 30)));

  leanopt::append_rows(o, p, torch::ones({5, 64}));
  ASSERT_EQ(p.size(0), 75);
  EXPECT_TRUE(p.detach().slice(0, 70).equal(torch::ones({5, 64})));
  EXPECT_EQ(largest(leanopt::slot(o, p, with_rows).slice(0, 70)), 0);
  EXPECT_TRUE(near_before(leanopt::slot(o, p, with_rows).slice(0, 0, 70), before.slice(0, 30)));

  const Tensor kept_values = p.detach().clone();
  leanopt::zero_rows(o, p, torch::tensor({0, 2}));
  EXPECT_TRUE(p.equal(kept_values));
  const Tensor zeroed = leanopt::slot(o, p, with_rows);
  EXPECT_EQ(largest(zeroed.index({torch::tensor({0, 2})})), 0);
  EXPECT_GT(largest(zeroed.select(0, 1)), 0);

  for (int i = 0; i < 2; ++i) {
    o.zero_grad();
    p.square().sum().backward();
    ASSERT_EQ(p.grad().size(0), 75);
    o.step();
  }
  EXPECT_EQ(steps_of(o, p), 3);
  leanopt::keep_rows(o, p, torch::arange(3));  // too few for codes
  set_gradients({p});
  o.step();
  EXPECT_TRUE(all_of(p.isfinite()));
}

TYPED_TEST(every, a_replaced_parameter_inherits_the_state) {
  Tensor p = leaf({70, 60}), fresh = leaf({70, 60}, torch::kFloat32, 3), other = leaf({3});
  typename TypeParam::optimizer o({other, p}, TypeParam::options(0.125));
  set_gradients({p, other});
  o.step();
  const auto state = state_tensors(o, p);
  leanopt::replace_parameter(o, o.param_groups()[0].params()[1], fresh);
  EXPECT_TRUE(o.param_groups()[0].params()[1].is_same(fresh));
  EXPECT_FALSE(has_state(o, p));
  const auto moved = state_tensors(o, fresh);
  ASSERT_EQ(moved.size(), state.size());
  for (std::size_t i = 0; i < state.size(); ++i)
    EXPECT_TRUE(moved[i].second.equal(state[i].second)) << state[i].first;
  set_gradients({fresh});
  o.step();
  EXPECT_EQ(steps_of(o, fresh), 2);
  EXPECT_TRUE(
      refuses([&] { leanopt::replace_parameter(o, fresh, leaf({3})); }, {"shapes", "differ"}));
  EXPECT_TRUE(
      refuses([&] { leanopt::replace_parameter(o, fresh, fresh); }, {"in the optimizer already"}));
}

template <class Class>
Tensor after_keeping_rows(bool by_hand) {
  using State = std::conditional_t<std::is_base_of_v<stock::Adam, Class> ||
                                       std::is_same_v<Class, leanopt::Adam>,
                                   stock::AdamParamState, stock::AdamWParamState>;
  Tensor p = leaf({6, 3});
  Class o({p}, 0.125);
  set_gradients({p});
  o.step();
  const Tensor keep = torch::tensor({4, 0, 2});
  if (by_hand) {
    auto s = std::make_unique<State>(state_at<State>(o, p));
    s->exp_avg(s->exp_avg().index({keep}));
    s->exp_avg_sq(s->exp_avg_sq().index({keep}));
    Tensor fewer = leaf(p.detach().index({keep}));
    o.param_groups()[0].params()[0] = fewer;
    o.state().clear();
    o.state()[fewer.unsafeGetTensorImpl()] = std::move(s);
    p = fewer;
  } else {
    leanopt::keep_rows(o, p, keep);
  }
  set_gradients({p}, 3);
  o.step();
  return p.detach();
}
TEST(rows, equal_the_edit_by_hand_on_the_stock_classes_too) {
  EXPECT_TRUE(
      after_keeping_rows<stock::AdamW>(false).equal(after_keeping_rows<stock::AdamW>(true)));
  EXPECT_TRUE(after_keeping_rows<stock::Adam>(false).equal(after_keeping_rows<stock::Adam>(true)));
  EXPECT_TRUE(
      after_keeping_rows<leanopt::AdamW>(false).equal(after_keeping_rows<leanopt::AdamW>(true)));
  EXPECT_TRUE(agrees(after_keeping_rows<leanopt::Adam>(false),
                     after_keeping_rows<stock::Adam>(true), adam_tolerance(torch::kFloat32)));
}

TEST(rows, are_a_question_for_known_optimizers_and_shapes) {
  Tensor scalar = leaf(at::IntArrayRef{}), p = leaf({4, 2});
  leanopt::AdamW o({scalar}, 0.125);
  EXPECT_TRUE(refuses([&] { leanopt::zero_rows(o, scalar, torch::tensor({0})); }, {"dimensions"}));
  stock::SGD foreign({p}, stock::SGDOptions(0.1).momentum(0.9));
  set_gradients({p});
  foreign.step();
  EXPECT_TRUE(
      refuses([&] { leanopt::keep_rows(foreign, p, torch::tensor({0})); }, {"SGD", "unknown"}));
  EXPECT_EQ(p.size(0), 4);
}

TYPED_TEST(every, rows_change_while_an_old_graph_lives) {
  Tensor p = leaf({6, 3}), loss;  // a loss outside the loop keeps the last graph
  typename TypeParam::optimizer o({p}, TypeParam::options(0.125));
  for (const std::int64_t rows : {6, 4, 3}) {
    loss = p.square().sum();
    loss.backward();
    ASSERT_EQ(p.grad().size(0), rows);
    o.step();
    leanopt::keep_rows(o, p, torch::arange(rows == 6 ? 4 : 3));
  }
  leanopt::append_rows(o, p, torch::ones({9, 3}));
  loss = p.square().sum();
  loss.backward();
  EXPECT_EQ(p.grad().size(0), 12);
  o.step();
}

TEST(rows, of_the_column_factor_are_those_of_a_batch) {
  using O = leanopt::AdafactorOptions;
  Tensor matrix = leaf({4, 3}), batch = leaf({4, 3, 2});
  leanopt::Adafactor o({matrix, batch}, O(0.125));
  set_gradients({matrix, batch});
  o.step();
  const Tensor matrix_columns = leanopt::slot(o, matrix, "col_var");
  leanopt::keep_rows(o, matrix, torch::tensor({1}));
  leanopt::keep_rows(o, batch, torch::tensor({2, 0}));
  EXPECT_TRUE(leanopt::slot(o, matrix, "col_var").equal(matrix_columns));
  EXPECT_EQ(leanopt::slot(o, matrix, "row_var").sizes(), (torch::IntArrayRef{1, 1}));
  EXPECT_EQ(leanopt::slot(o, batch, "row_var").sizes(), (torch::IntArrayRef{2, 3, 1}));
  EXPECT_EQ(leanopt::slot(o, batch, "col_var").sizes(), (torch::IntArrayRef{2, 1, 2}));
  set_gradients({matrix, batch}, 1);
  o.step();
}

}  // namespace
