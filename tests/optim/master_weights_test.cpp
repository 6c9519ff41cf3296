// Weights that are more than their bfloat16 parameter: rounded stochastically, or with residual
// bits in the state. They move where rounding to the nearest stands still, the 32-bit ones exactly
// as float32 does; the bits belong to a weight, and go when somebody else writes it.
#include "tests/optim/support.hpp"

#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace front_test;
namespace formats = leanopt::formats;
namespace weights = leanopt::weights;
using leanopt::master_weight;

/// A class with some weights, and the same with plain ones; `options` are for either.
template <class Format, class Weights>
struct adamw_with {
  using optimizer = leanopt::basic_adamw<Format, Weights>;
  using plain = leanopt::basic_adamw<Format>;
  static std::string name() { return std::string("adamw_") + Format::name + '_' + Weights::name; }
  template <class Class = optimizer>
  static auto options(double lr) {
    return typename Class::Options(lr);
  }
};
template <class Format, class Weights>
struct adafactor_with {
  using optimizer = leanopt::basic_adafactor<Format, Weights>;
  using plain = leanopt::basic_adafactor<Format>;
  static std::string name() {
    return std::string("adafactor_") + Format::name + '_' + Weights::name;
  }
  template <class Class = optimizer>
  static auto options(double lr) {
    auto o = typename Class::Options(lr);
    if constexpr (Format::compressed)
      o.relative_step(false);
    else
      o.eps({1e-7, 1e-3});  // its default depends on the parameter's type
    return o;
  }
};
struct names {
  template <class Form>
  static std::string GetName(int) {
    return Form::name();
  }
};

using adamw_stochastic = adamw_with<formats::full, weights::stochastic>;
using adamw_split24 = adamw_with<formats::full, weights::split24>;
using adamw_split32 = adamw_with<formats::full, weights::split32>;
using adamw8bit_split24 = adamw_with<formats::log8, weights::split24>;
using adamw8bit_split32 = adamw_with<formats::log8, weights::split32>;
using adafactor_split32 = adafactor_with<formats::full, weights::split32>;
using adafactor8bit_split24 = adafactor_with<formats::log8, weights::split24>;

template <class Form>
class every_weight : public ::testing::Test {};
using all_forms =
    ::testing::Types<adamw_stochastic, adamw_split24, adamw_split32, adamw8bit_split24,
                     adamw8bit_split32, adafactor_split32, adafactor8bit_split24>;
TYPED_TEST_SUITE(every_weight, all_forms, names);

template <class Form>
class residual : public ::testing::Test {};
using residual_forms =
    ::testing::Types<adamw_split24, adamw_split32, adamw8bit_split24, adamw8bit_split32,
                     adafactor_split32, adafactor8bit_split24>;
TYPED_TEST_SUITE(residual, residual_forms, names);

template <class Form>
class lossless : public ::testing::Test {};
using lossless_forms = ::testing::Types<adamw_split32, adamw8bit_split32, adafactor_split32>;
TYPED_TEST_SUITE(lossless, lossless_forms, names);

template <class Form>
typename Form::optimizer make(const std::vector<Tensor>& params, double lr = 0x1p-10) {
  return typename Form::optimizer(params, Form::options(lr).weight_decay(0.125));
}
template <class Form>
typename Form::plain make_plain(const std::vector<Tensor>& params, double lr = 0x1p-10) {
  using plain = typename Form::plain;
  return plain(params, Form::template options<plain>(lr).weight_decay(0.125));
}

constexpr auto bf16 = torch::kBFloat16;
Tensor wide(const Tensor& p) { return p.detach().to(torch::kFloat32); }
std::vector<Tensor> wide_leaves(const std::vector<Tensor>& params) {
  std::vector<Tensor> result;
  for (const Tensor& p : params) result.push_back(leaf(wide(p)));
  return result;
}
/// Large enough for codes, small, in column-major and in channels_last order, with gaps, a scalar.
std::vector<Tensor> make_parameters() {
  return {leaf({70, 65}, bf16),
          leaf({300}, bf16, 1),
          leaf(pattern({90, 61}, bf16, 2).t()),
          leaf(pattern({16, 8, 7, 7}, bf16, 3).contiguous(torch::MemoryFormat::ChannelsLast)),
          pattern({60, 160}, bf16, 4).slice(1, 0, 160, 2).detach().set_requires_grad(true),
          leaf({}, bf16, 5)};
}
/// bfloat16 gradients for parameters of any type, so that all see the same.
void train(Optimizer& optimizer, const std::vector<Tensor>& params, int first, int last) {
  for (int i = first; i < last; ++i) {
    for (std::size_t k = 0; k < params.size(); ++k)
      params[k].mutable_grad() = pattern(params[k].sizes(), bf16, 100 * (i + 1) + std::int64_t(k))
                                     .to(params[k].scalar_type());
    optimizer.step();
  }
}
bool has_bits(const Optimizer& optimizer, const Tensor& p) {
  return !same_bits(master_weight(optimizer, p), wide(p));
}

// Small steps

/// How far weights of 0.1 come under a constant gradient, on average.
template <class Class>
double moved(Class optimizer, const Tensor& p, int steps) {
  const double start = p.detach().to(torch::kFloat64).mean().template item<double>();
  p.mutable_grad() = torch::ones_like(p).detach();
  for (int i = 0; i < steps; ++i) optimizer.step();
  return master_weight(optimizer, p).to(torch::kFloat64).mean().template item<double>() - start;
}
Tensor tenths(torch::Dtype type) { return leaf(torch::full({4096}, 0.1, bf16).to(type)); }

/// Rates at which a bfloat16 weight of 0.1 would have to move by 1/49, 1/490 and 1/4900 of its
/// spacing, until all have moved by 0.01.
TEST(small_steps, move_weights_as_float32_does) {
  for (const auto& [lr, steps] :
       {std::pair{1e-5, 1000}, std::pair{1e-6, 10'000}, std::pair{1e-7, 100'000}}) {
    SCOPED_TRACE(lr);
    const auto move = [rate = lr, n = steps](auto form, torch::Dtype type) {
      using Class = typename decltype(form)::type;
      const Tensor p = tenths(type);
      return moved(Class({p}, typename Class::Options(rate).weight_decay(0)), p, n);
    };
    const double expected = move(std::common_type<leanopt::AdamW>(), torch::kFloat32);
    EXPECT_LT(expected, -0.009);
    const double allowed = tolerance::mean_move * std::abs(expected);
    using stochastic = adamw_stochastic::optimizer;
    using split24 = adamw_split24::optimizer;
    using split32 = adamw_split32::optimizer;
    EXPECT_NEAR(move(std::common_type<stochastic>(), bf16), expected, allowed);
    EXPECT_NEAR(move(std::common_type<split24>(), bf16), expected, allowed);
    if (steps > 10'000) continue;
    EXPECT_EQ(move(std::common_type<split32>(), bf16), expected);
    EXPECT_EQ(move(std::common_type<leanopt::AdamW>(), bf16), 0);
    EXPECT_EQ(move(std::common_type<leanopt::AdamW8bit>(), bf16), 0);
  }
}
TEST(small_steps, move_nothing_in_the_stock_class) {
  const Tensor p = tenths(bf16);
  EXPECT_EQ(moved(stock::AdamW({p}, stock::AdamWOptions(1e-5).weight_decay(0)), p, 1000), 0);
}

// Exactly float32

template <class Split, class Plain>
void expect_equal_runs(Split& o, const std::vector<Tensor>& params, Plain& plain,
                       const std::vector<Tensor>& twins) {
  train(o, params, 0, 1000);
  train(plain, twins, 0, 1000);
  for (std::size_t i = 0; i < params.size(); ++i) {
    SCOPED_TRACE(i);
    const Tensor weight = master_weight(o, params[i]);
    EXPECT_TRUE(has_bits(o, params[i]));
    EXPECT_TRUE(same_bits(weight, twins[i].detach()));
    // What the model computes with is no farther from it than any other bfloat16 number.
    EXPECT_TRUE(all_of((wide(params[i]) - weight).abs() <= (wide(weight.to(bf16)) - weight).abs()));
    auto state = state_tensors(o, params[i]);
    EXPECT_EQ(state.back().first, "residual");
    state.pop_back();
    const auto expected = state_tensors(plain, twins[i]);
    ASSERT_EQ(state.size(), expected.size());
    for (std::size_t k = 0; k < state.size(); ++k) {
      EXPECT_EQ(state[k].first, expected[k].first);
      EXPECT_TRUE(same_bits(state[k].second, expected[k].second)) << state[k].first;
    }
  }
}
TYPED_TEST(lossless, equals_the_float32_run_bit_for_bit) {
  const auto params = make_parameters(), twins = wide_leaves(params);
  auto o = make<TypeParam>(params);
  auto plain = make_plain<TypeParam>(twins);
  expect_equal_runs(o, params, plain, twins);
}
TEST(lossless_amsgrad, equals_the_float32_run_bit_for_bit) {
  const auto params = make_parameters(), twins = wide_leaves(params);
  adamw_split32::optimizer o(params, adamw_split32::options(0x1p-10).amsgrad(true));
  leanopt::AdamW plain(twins, leanopt::AdamWOptions(0x1p-10).amsgrad(true));
  expect_equal_runs(o, params, plain, twins);
}

TYPED_TEST(lossless, changes_rows_as_float32_does) {
  const Tensor p = leaf({90, 60}, bf16), twin = leaf(wide(p));
  auto o = make<TypeParam>({p});
  auto plain = make_plain<TypeParam>({twin});
  train(o, {p}, 0, 3);
  train(plain, {twin}, 0, 3);
  const Tensor kept = torch::arange(0, 90, 1).slice(0, 3, 88, 1);
  const Tensor more = pattern({7, 60}, bf16, 9);
  for (Optimizer* each : {static_cast<Optimizer*>(&o), static_cast<Optimizer*>(&plain)}) {
    const Tensor x = each == &o ? p : twin;
    leanopt::keep_rows(*each, x, kept);
    leanopt::append_rows(*each, x, more.to(x.scalar_type()));
  }
  EXPECT_EQ(p.size(0), 92);
  EXPECT_TRUE(same_bits(master_weight(o, p), twin.detach()));
  train(o, {p}, 3, 6);
  train(plain, {twin}, 3, 6);
  EXPECT_TRUE(same_bits(master_weight(o, p), twin.detach()));
}

// Foreign writes

using write = void (*)(const Tensor& p, const Tensor& value);
void in_place(const Tensor& p, const Tensor& value) {
  const torch::NoGradGuard no_grad;
  const_cast<Tensor&>(p).copy_(value);
}
void by_set_data(const Tensor& p, const Tensor& value) { p.set_data(value.clone()); }

TYPED_TEST(residual, goes_when_the_weight_is_written) {
  for (const write how : {&in_place, &by_set_data})
    for (const bool is_new : {true, false}) {
      SCOPED_TRACE(how == &in_place ? "in place" : "set_data");
      const Tensor p = leaf({70, 65}, bf16), other = leaf({300}, bf16, 1);
      auto o = make<TypeParam>({p, other});
      train(o, {p, other}, 0, 3);
      ASSERT_TRUE(has_bits(o, p));
      ASSERT_TRUE(has_bits(o, other));
      const Tensor untouched = master_weight(o, other);
      const Tensor value = is_new ? pattern({70, 65}, bf16, 5) : p.detach().clone();
      how(p, value);
      EXPECT_TRUE(same_bits(master_weight(o, p), wide(value)));
      EXPECT_TRUE(same_bits(master_weight(o, other), untouched));
      train(o, {p, other}, 3, 4);
      EXPECT_TRUE(has_bits(o, p));
    }
}

TYPED_TEST(lossless, goes_on_from_a_written_weight) {
  for (const write how : {&in_place, &by_set_data}) {
    const auto params = make_parameters(), twins = wide_leaves(params);
    auto o = make<TypeParam>(params);
    auto plain = make_plain<TypeParam>(twins);
    train(o, params, 0, 3);
    train(plain, twins, 0, 3);
    for (const std::size_t i : {0, 3}) {
      const Tensor value = torch::empty_like(params[i]).copy_(pattern(params[i].sizes(), bf16, 5));
      how(params[i], value);
      in_place(twins[i], wide(value));
    }
    train(o, params, 3, 6);
    train(plain, twins, 3, 6);
    for (std::size_t i = 0; i < params.size(); ++i)
      EXPECT_TRUE(same_bits(master_weight(o, params[i]), twins[i].detach())) << i;
  }
}

/// What programs do between steps without writing a weight.
TYPED_TEST(residual, stays_when_the_weight_is_only_read) {
  const Tensor p = leaf({70, 65}, bf16);
  auto o = make<TypeParam>({p});
  train(o, {p}, 0, 3);
  const Tensor before = master_weight(o, p);
  (p.to(torch::kFloat32).sum() * 2).backward();
  o.zero_grad();
  p.set_requires_grad(false);
  p.set_requires_grad(true);
  typename TypeParam::optimizer moved(std::move(o));
  EXPECT_TRUE(same_bits(master_weight(moved, p), before));
  EXPECT_FALSE(same_bits(before, wide(p)));
}

// Archives

struct net : torch::nn::Module {
  torch::nn::Linear first{70, 65}, second{65, 8};
  net() {
    register_module("first", first);
    register_module("second", second);
    to(bf16);
  }
};
template <class Thing>
std::string saved(const Thing& thing) {
  torch::serialize::OutputArchive archive;
  thing.save(archive);
  std::stringstream stream;
  archive.save_to(stream);
  return stream.str();
}
template <class Thing>
void load(Thing& thing, const std::string& bytes) {
  std::stringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  thing.load(archive);
}

TYPED_TEST(every_weight, resumes_bit_for_bit_whatever_is_loaded_first) {
  net model;
  auto o = make<TypeParam>(model.parameters());
  train(o, model.parameters(), 0, 3);
  const std::string model_bytes = saved(model), optimizer_bytes = saved(o);
  std::vector<Tensor> at_save;
  for (const Tensor& p : model.parameters()) at_save.push_back(master_weight(o, p));
  train(o, model.parameters(), 3, 6);
  const snapshot expected(o, model.parameters());

  for (const bool model_first : {true, false})
    for (const bool in_place_copy : {true, false}) {
      SCOPED_TRACE(testing::Message() << "model first " << model_first);
      net fresh;
      auto resumed = make<TypeParam>(fresh.parameters(), 0.5);
      const auto load_model = [&] {
        if (!in_place_copy) return load(fresh, model_bytes);
        net source;
        load(source, model_bytes);
        for (std::size_t i = 0; i < 4; ++i)
          in_place(fresh.parameters()[i], source.parameters()[i].detach());
      };
      if (model_first) load_model();
      load(resumed, optimizer_bytes);
      if (!model_first) load_model();
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(same_bits(master_weight(resumed, fresh.parameters()[i]), at_save[i])) << i;
      train(resumed, fresh.parameters(), 3, 6);
      EXPECT_TRUE(snapshot(resumed, fresh.parameters()) == expected);
    }
}

TYPED_TEST(residual, survives_being_saved_again_before_a_step) {
  const Tensor p = leaf({70, 65}, bf16);
  auto o = make<TypeParam>({p});
  train(o, {p}, 0, 3);
  const Tensor expected = master_weight(o, p), copy = leaf(p);
  auto between = make<TypeParam>({copy}), last = make<TypeParam>({copy});
  load(between, saved(o));
  load(last, saved(between));
  EXPECT_TRUE(same_bits(master_weight(last, copy), expected));
  load(last, saved(o));  // once more
  train(o, {p}, 3, 4);
  train(last, {copy}, 3, 4);
  EXPECT_TRUE(snapshot(last, {copy}) == snapshot(o, {p}));
}

TYPED_TEST(residual, is_not_given_to_another_weight_by_an_archive) {
  const Tensor p = leaf({70, 65}, bf16), other = leaf({300}, bf16, 1);
  auto o = make<TypeParam>({p, other});
  train(o, {p, other}, 0, 3);
  const std::string archive = saved(o);
  const Tensor untouched = master_weight(o, other), value = p.detach().clone();
  value[69][64] += 1;
  in_place(p, value);
  load(o, archive);
  EXPECT_TRUE(same_bits(master_weight(o, p), wide(value)));
  EXPECT_TRUE(same_bits(master_weight(o, other), untouched));
  train(o, {p, other}, 3, 4);
  EXPECT_TRUE(has_bits(o, p));
}

TYPED_TEST(residual, is_saved_as_gone_when_the_weight_was_written) {
  const Tensor p = leaf({70, 65}, bf16);
  auto o = make<TypeParam>({p});
  train(o, {p}, 0, 3);
  in_place(p, pattern({70, 65}, bf16, 5));
  const Tensor copy = leaf(p);
  auto resumed = make<TypeParam>({copy});
  load(resumed, saved(o));
  train(o, {p}, 3, 5);
  train(resumed, {copy}, 3, 5);
  EXPECT_TRUE(snapshot(resumed, {copy}) == snapshot(o, {p}));
}

TYPED_TEST(every_weight, takes_archives_of_plain_weights) {
  const auto params = make_parameters();
  std::vector<Tensor> copies;
  for (const Tensor& p : params) copies.push_back(leaf(p));
  auto plain = make_plain<TypeParam>(params);
  train(plain, params, 0, 3);
  auto o = make<TypeParam>(copies, 0.5);
  load(o, saved(plain));
  for (std::size_t i = 0; i < params.size(); ++i) {
    in_place(copies[i], params[i].detach());
    EXPECT_TRUE(same_bits(master_weight(o, copies[i]), wide(copies[i])));
    const auto state = state_tensors(o, copies[i]), expected = state_tensors(plain, params[i]);
    ASSERT_EQ(state.size(), expected.size());
    EXPECT_EQ(steps_of(o, copies[i]), 3);
    for (const char* slot : {"exp_avg", "exp_avg_sq", "row_var", "col_var", "variance"})
      EXPECT_TRUE(
          same_bits(leanopt::slot(o, copies[i], slot), leanopt::slot(plain, params[i], slot)))
          << slot;
  }
  // The next step is the same but for how it is written.
  train(plain, params, 3, 4);
  train(o, copies, 3, 4);
  for (std::size_t i = 0; i < params.size(); ++i)
    EXPECT_TRUE(
        all_of((wide(copies[i]) - wide(params[i])).abs() <= 0x1p-7 * wide(params[i]).abs()));
}

TYPED_TEST(residual, is_refused_by_weights_of_another_kind) {
  const Tensor p = leaf({70, 65}, bf16);
  auto o = make<TypeParam>({p});
  train(o, {p}, 0, 1);
  const std::string archive = saved(o);
  auto plain = make_plain<TypeParam>({p});
  EXPECT_TRUE(refuses([&] { load(plain, archive); }, {"split", "plain"}));
  EXPECT_TRUE(plain.state().empty());
}

// Rows and parameters that change

TYPED_TEST(residual, follows_its_rows) {
  const Tensor p = leaf({90, 60}, bf16), other = leaf({300}, bf16, 1);
  auto o = make<TypeParam>({p, other});
  train(o, {p, other}, 0, 3);
  const Tensor untouched = master_weight(o, other), start = master_weight(o, p);
  const Tensor kept = torch::tensor({80, 3, 4, 17, 89}, torch::kLong);
  leanopt::keep_rows(o, p, kept);
  EXPECT_TRUE(same_bits(master_weight(o, p), start.index({kept})));
  const Tensor more = pattern({85, 60}, bf16, 9);
  leanopt::append_rows(o, p, more);
  const Tensor grown = torch::cat({start.index({kept}), wide(more)});
  EXPECT_TRUE(same_bits(master_weight(o, p), grown));
  leanopt::zero_rows(o, p, torch::tensor({1, 2}, torch::kLong));
  const Tensor zeroed =
      torch::cat({grown.slice(0, 0, 1), wide(p).slice(0, 1, 3), grown.slice(0, 3)});
  EXPECT_TRUE(same_bits(master_weight(o, p), zeroed));
  EXPECT_FALSE(same_bits(zeroed, grown));
  EXPECT_TRUE(same_bits(master_weight(o, other), untouched));
  train(o, {p, other}, 3, 4);
  EXPECT_TRUE(has_bits(o, p));
}

TYPED_TEST(residual, of_a_written_weight_follows_no_rows) {
  const Tensor p = leaf({90, 60}, bf16);
  auto o = make<TypeParam>({p});
  train(o, {p}, 0, 3);
  in_place(p, pattern({90, 60}, bf16, 5));
  leanopt::keep_rows(o, p, torch::arange(3, 80));
  EXPECT_TRUE(same_bits(master_weight(o, p), wide(p)));
}

TYPED_TEST(residual, is_not_inherited_by_another_parameter) {
  const Tensor p = leaf({70, 65}, bf16), fresh = leaf({70, 65}, bf16, 5);
  auto o = make<TypeParam>({p});
  train(o, {p}, 0, 3);
  leanopt::replace_parameter(o, p, fresh);
  EXPECT_TRUE(same_bits(master_weight(o, fresh), wide(fresh)));
  train(o, {fresh}, 3, 4);
  EXPECT_EQ(steps_of(o, fresh), 4);
  EXPECT_TRUE(has_bits(o, fresh));
}

// Types

TYPED_TEST(every_weight, refuses_float16_by_name) {
  const Tensor half = leaf({70, 65}, torch::kFloat16), p = leaf({70, 65}, bf16);
  const std::vector<std::string> words = {"parameter 1 of group 0", "Half", "BFloat16"};
  EXPECT_TRUE(refuses([&] { make<TypeParam>({p, half}); }, words));
  // A module that is converted while it trains
  const Tensor later = leaf({70, 65}, bf16, 1);
  auto o = make<TypeParam>({p, later});
  train(o, {p, later}, 0, 1);
  const snapshot before(o, {p});
  later.set_data(later.detach().to(torch::kFloat16));
  EXPECT_TRUE(refuses([&] { train(o, {p, later}, 1, 2); }, words));
  EXPECT_TRUE(snapshot(o, {p}) == before);
}

TYPED_TEST(every_weight, steps_wider_parameters_as_plain_weights_do) {
  const std::vector<Tensor> params = {leaf({70, 65}), leaf({300}, torch::kFloat64, 1),
                                      leaf({70, 65}, bf16, 2)};
  const std::vector<Tensor> twins = {leaf(params[0]), leaf(params[1])};
  auto o = make<TypeParam>(params);
  auto plain = make_plain<TypeParam>(twins);
  train(o, params, 0, 5);
  train(plain, twins, 0, 5);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(same_bits(params[i].detach(), twins[i].detach())) << i;
    EXPECT_TRUE(same_bits(master_weight(o, params[i]), twins[i].detach())) << i;
    for (const auto& [name, t] : state_tensors(o, params[i])) EXPECT_NE(name, "residual");
  }
  EXPECT_EQ(steps_of(o, params[2]), 5);
}

template <class Form>
Tensor weight_of_seed(std::int64_t seed) {
  const Tensor p = leaf({70, 65}, bf16);
  typename Form::optimizer o({p}, Form::options(0x1p-10).seed(seed));
  train(o, {p}, 0, 3);
  return master_weight(o, p);
}
TEST(seed, decides_the_random_bits_of_weights) {
  EXPECT_TRUE(same_bits(weight_of_seed<adamw_stochastic>(1), weight_of_seed<adamw_stochastic>(1)));
  EXPECT_FALSE(same_bits(weight_of_seed<adamw_stochastic>(1), weight_of_seed<adamw_stochastic>(2)));
  EXPECT_TRUE(same_bits(weight_of_seed<adamw_split24>(1), weight_of_seed<adamw_split24>(1)));
  EXPECT_FALSE(same_bits(weight_of_seed<adamw_split24>(1), weight_of_seed<adamw_split24>(2)));
}

}  // namespace
