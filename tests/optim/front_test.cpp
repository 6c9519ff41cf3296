// Options and groups, the lists of parameters and their identity, and the promises of a step: what
// LibTorch's base class leaves to its users, tried on every class and form.
#include <leanopt/train/param_groups.hpp>

#include "tests/optim/support.hpp"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>
#include <tuple>

namespace {

using namespace front_test;

template <class Form>
class every : public ::testing::Test {};
TYPED_TEST_SUITE(every, every_form, form_names);

// Options of groups

/// The forms whose options begin unset: 8-bit Adafactor must be told to leave its relative steps.
using plain_forms = ::testing::Types<adam, adamw, adafactor, adam8bit, adamw8bit>;
template <class Form>
class group_options : public ::testing::Test {};
TYPED_TEST_SUITE(group_options, plain_forms, form_names);

TYPED_TEST(group_options, set_fields_win_and_unset_ones_inherit) {
  using O = typename TypeParam::options_type;
  const O untouched;
  const O defaults = O(0.125).weight_decay(0.25);
  // Set, although to the values that an untouched object has.
  const O as_untouched = O(untouched.lr()).weight_decay(untouched.weight_decay());
  const Tensor p[] = {leaf({2}), leaf({2}), leaf({2}), leaf({2}), leaf({2}), leaf({2}), leaf({2})};

  typename TypeParam::optimizer o(
      groups{group({p[0]}, O(0.5)), group({p[1]}, O().weight_decay(0.75)),
             group({p[2]}, as_untouched)},
      defaults);
  EXPECT_EQ(options_at<O>(o, 0), O(0.5).weight_decay(0.25));
  EXPECT_EQ(options_at<O>(o, 1), O(0.125).weight_decay(0.75));
  EXPECT_EQ(options_at<O>(o, 2), as_untouched);

  o.add_param_group(group({p[3]}, as_untouched));
  EXPECT_EQ(options_at<O>(o, 3), as_untouched);
  Optimizer& base = o;
  leanopt::add_param_group(base, group({p[4]}, O(0.5)));
  EXPECT_EQ(options_at<O>(o, 4), O(0.5).weight_decay(0.25));
  o.add_param_group(std::vector<Tensor>{p[5]});
  EXPECT_EQ(options_at<O>(o, 5), defaults);

  o.param_groups().push_back(group({p[6]}, O(0.5)));  // pushed by hand: used as written
  set_gradients({std::begin(p), std::end(p)});
  o.step();
  EXPECT_EQ(options_at<O>(o, 6), O(0.5).weight_decay(untouched.weight_decay()));
}

TYPED_TEST(group_options, complete_groups_stay_complete_in_another_optimizer) {
  using O = typename TypeParam::options_type;
  const O untouched;
  Tensor a = leaf({2}), b = leaf({2});
  typename TypeParam::optimizer o(groups{group({a}, O(untouched.lr())), group({b})},
                                  O(0.125).weight_decay(0.25));
  typename TypeParam::optimizer copy(o.param_groups(), O(9).weight_decay(8));
  EXPECT_EQ(options_at<O>(copy, 0), O(untouched.lr()).weight_decay(0.25));
  EXPECT_EQ(options_at<O>(copy, 1), O(0.125).weight_decay(0.25));
}

TYPED_TEST(group_options, defaults_changed_later_move_no_group) {
  using O = typename TypeParam::options_type;
  Tensor a = leaf({2}), b = leaf({2});
  typename TypeParam::optimizer o({a}, O(0.125));
  dynamic_cast<O&>(o.defaults()).lr(0.5);
  EXPECT_EQ(options_at<O>(o, 0).lr(), 0.125);
  o.add_param_group(std::vector<Tensor>{b});
  EXPECT_EQ(options_at<O>(o, 1).lr(), 0.5);
}

TYPED_TEST(group_options, a_group_pushed_without_options_gets_the_defaults) {
  using O = typename TypeParam::options_type;
  Tensor a = leaf({2}), b = leaf({2});
  typename TypeParam::optimizer o({a}, O(0.125));
  o.param_groups().push_back(group({b}));
  set_gradients({a, b});
  o.step();
  EXPECT_EQ(options_at<O>(o, 1), O(0.125));
}

// LibTorch's functions are not virtual, so through its base class they do what they do in that
// version; whoever holds an Optimizer& calls leanopt::add_param_group, tested above.
template <class Adam, class Options>
std::tuple<double, double> added_through_the_base(const Options& given) {
  Tensor a = leaf({2}), b = leaf({2});
  Adam o({a}, Options(0.125).weight_decay(0.25));
  static_cast<Optimizer&>(o).add_param_group(group({b}, given));
  const auto& options = options_at<Options>(o, 1);
  return {options.lr(), options.weight_decay()};
}

TEST(base_class, adds_groups_as_for_its_own_classes) {
  for (const double lr : {0.5, 1e-3})
    for (const double decay : {0.75, 1e-2}) {
      EXPECT_EQ(
          (added_through_the_base<leanopt::AdamW>(leanopt::AdamWOptions(lr).weight_decay(decay))),
          (added_through_the_base<stock::AdamW>(stock::AdamWOptions(lr).weight_decay(decay))))
          << lr << ' ' << decay;
      EXPECT_EQ((added_through_the_base<leanopt::AdamW8bit>(
                    leanopt::AdamW8bitOptions(lr).weight_decay(decay))),
                (added_through_the_base<stock::AdamW>(stock::AdamWOptions(lr).weight_decay(decay))))
          << lr << ' ' << decay;
    }
}

TEST(base_class, is_no_reason_to_lose_a_rate) {
  Tensor a = leaf({2}), b = leaf({2});
  leanopt::Adafactor o({a}, leanopt::AdafactorOptions(0.125));
  leanopt::add_param_group(o, group({b}, leanopt::AdafactorOptions(0.5).d(2)));
  EXPECT_EQ(options_at<leanopt::AdafactorOptions>(o, 1), leanopt::AdafactorOptions(0.5).d(2));
  stock::AdamW theirs({a}, 0.5);
  leanopt::add_param_group(theirs, group({b}, stock::AdamWOptions(0.25)));
  EXPECT_EQ(options_at<stock::AdamWOptions>(theirs, 1).lr(), 0.25);
}

TEST(options, a_default_rate_of_zero_leaves_groups_their_own) {
  Tensor a = leaf({2}), b = leaf({2});
  using O = leanopt::AdamOptions;
  leanopt::Adam o(groups{group({a}, O(1e-3)), group({b}, O(1.6e-4))}, O(0).eps(1e-15));
  EXPECT_EQ(options_at<O>(o, 0).lr(), 1e-3);
  EXPECT_EQ(options_at<O>(o, 1).lr(), 1.6e-4);
  EXPECT_EQ(options_at<O>(o, 0).eps(), 1e-15);
}

TEST(options, fields_of_the_format_are_group_options) {
  using O = leanopt::AdamW8bitOptions;
  Tensor a = leaf({300}), b = leaf({300});
  leanopt::AdamW8bit o(groups{group({a}, O().min_compressed_elements(64)), group({b}, O(0.5))},
                       O(0.125).min_compressed_elements(512).seed(7));
  EXPECT_EQ(options_at<O>(o, 0), O(0.125).min_compressed_elements(64).seed(7));
  EXPECT_EQ(options_at<O>(o, 1), O(0.5).min_compressed_elements(512).seed(7));
  set_gradients({a, b});
  o.step();
  EXPECT_EQ(state_at<leanopt::ParamState>(o, a).tensor("exp_avg").scalar_type(), torch::kUInt8);
  EXPECT_EQ(state_at<leanopt::ParamState>(o, b).tensor("exp_avg").scalar_type(), torch::kFloat32);
}

TEST(options, a_value_assigned_through_a_getter_or_the_stock_class_is_set) {
  using O = leanopt::AdamWOptions;
  O given;
  given.betas() = {0.5, 0.75};
  static_cast<stock::AdamWOptions&>(given).eps(1e-3);
  EXPECT_EQ(given.lr(), 1e-3);  // reading through the same getter sets nothing
  leanopt::AdamW o(groups{group({leaf({2})}, given)}, O(0.125).eps(1e-4));
  EXPECT_EQ(options_at<O>(o, 0), O(0.125).betas({0.5, 0.75}).eps(1e-3));
}

TEST(options, of_the_stock_class_are_taken) {
  using O = leanopt::AdamWOptions;
  Tensor a = leaf({2}), b = leaf({2}), c = leaf({2});
  leanopt::AdamW o(groups{group({a}, stock::AdamWOptions(0.5))},
                   stock::AdamWOptions(0.125).weight_decay(0.25));
  EXPECT_EQ(options_at<O>(o, 0), O(0.5).weight_decay(0.25));
  o.add_param_group(group({b}, stock::AdamWOptions().weight_decay(0.75)));
  EXPECT_EQ(options_at<O>(o, 1), O(0.125).weight_decay(0.75));

  // Pushed by hand they are read where they stand, so a reference to them stays of use.
  o.param_groups().push_back(group({c}, stock::AdamWOptions(0).weight_decay(0)));
  auto& live = options_at<stock::AdamWOptions>(o, 2);
  const Tensor before = c.detach().clone();
  set_gradients({a, b, c});
  o.step();
  EXPECT_TRUE(c.equal(before));
  live.lr(0.5);
  o.step();
  EXPECT_FALSE(c.equal(before));
  live.betas({2.0, 0.9});
  EXPECT_TRUE(refuses([&] { o.step(); }, {"group 2", "betas"}));
}

TEST(options, of_another_class_are_refused_by_group) {
  Tensor a = leaf({2}), b = leaf({2});
  leanopt::AdamW o({a}, 0.125);
  EXPECT_TRUE(refuses([&] { o.add_param_group(group({b}, stock::SGDOptions(0.1))); },
                      {"group 1", "SGDOptions"}));
  EXPECT_TRUE(refuses([&] { o.add_param_group(group({b}, stock::AdamOptions(0.1))); },
                      {"group 1", "AdamOptions"}));
  EXPECT_TRUE(
      refuses([&] { o.add_param_group(group({b}, leanopt::AdamOptions(0.1))); }, {"group 1"}));
  EXPECT_TRUE(
      refuses([&] { o.add_param_group(group({b}, leanopt::AdafactorOptions(0.1))); }, {"group 1"}));
  EXPECT_EQ(o.param_groups().size(), 1u);
  EXPECT_TRUE(refuses([&] { leanopt::AdamW(groups{group({b}, stock::AdamOptions(0.1))}); },
                      {"group 0", "AdamOptions"}));

  o.param_groups().push_back(group({b}, stock::SGDOptions(0.1)));
  set_gradients({a, b});
  const snapshot before(o, {a, b});
  EXPECT_TRUE(refuses([&] { o.step(); }, {"group 1", "SGDOptions"}));
  EXPECT_TRUE(snapshot(o, {a, b}) == before);
}

TEST(options, of_another_format_keep_what_both_have) {
  Tensor a = leaf({2}), b = leaf({2});
  leanopt::AdamW8bit o({a}, leanopt::AdamW8bitOptions(0.125).min_compressed_elements(7));
  o.add_param_group(group({b}, stock::AdamWOptions(0.5)));
  EXPECT_EQ(options_at<leanopt::AdamW8bitOptions>(o, 1),
            leanopt::AdamW8bitOptions(0.5).min_compressed_elements(7));
}

TEST(options, begin_as_in_the_stock_classes) {
  const leanopt::AdamWOptions ours;
  const stock::AdamWOptions theirs;
  EXPECT_TRUE(static_cast<const stock::AdamWOptions&>(ours) == theirs);
  EXPECT_TRUE(static_cast<const stock::AdamOptions&>(leanopt::AdamOptions()) ==
              stock::AdamOptions());
  EXPECT_TRUE(static_cast<const stock::AdamWOptions&>(leanopt::AdamW8bitOptions()) == theirs);
  EXPECT_FALSE(ours.maximize());
  EXPECT_EQ(leanopt::AdamW8bitOptions().min_compressed_elements(), 4096);
  EXPECT_EQ(leanopt::AdamW8bitOptions().seed(), 0);
}

TEST(options, have_setters_that_return_the_class_named) {
  using O = leanopt::AdamWOptions;
  using O8 = leanopt::Adam8bitOptions;
  static_assert(std::is_same_v<decltype(O(1e-3).betas({0.9, 0.99}).weight_decay(0.1)), O&>);
  static_assert(
      std::is_same_v<decltype(O8(1).lr(1).min_compressed_elements(3).eps(1).seed(2)), O8&>);
  static_assert(std::is_base_of_v<stock::AdamWOptions, O>);
  static_assert(std::is_convertible_v<stock::AdamWOptions, O>);
  static_assert(std::is_convertible_v<O, stock::AdamWOptions>);
  static_assert(std::is_convertible_v<double, O>);
  static_assert(!std::is_convertible_v<stock::AdamOptions, O>);
  static_assert(!std::is_convertible_v<stock::SGDOptions, leanopt::AdafactorOptions>);
  const O converted = stock::AdamWOptions(0.5).eps(1e-3);
  EXPECT_EQ(converted, O(0.5).eps(1e-3));
  EXPECT_NE(converted, O(0.5));
}

TEST(options, are_named_by_the_optimizer) {
  const auto same = [](auto a, auto b) { return std::is_same_v<decltype(a), decltype(b)>; };
  EXPECT_TRUE(same(leanopt::options_of<leanopt::AdamW>(), leanopt::AdamWOptions()));
  EXPECT_TRUE(same(leanopt::options_of<leanopt::Adafactor8bit>(), leanopt::Adafactor8bitOptions()));
  EXPECT_TRUE(same(leanopt::options_of<stock::Adam>(), stock::AdamOptions()));
  EXPECT_TRUE(same(leanopt::options_of<stock::AdamW>(), stock::AdamWOptions()));
  EXPECT_TRUE(same(leanopt::options_of<stock::SGD>(0.1), stock::SGDOptions(0.1)));
  EXPECT_TRUE(same(leanopt::options_of<stock::RMSprop>(), stock::RMSpropOptions()));
  EXPECT_TRUE(same(leanopt::options_of<stock::Adagrad>(), stock::AdagradOptions()));
  EXPECT_TRUE(same(leanopt::options_of<stock::LBFGS>(), stock::LBFGSOptions()));
}

TEST(options, are_printed_field_by_field) {
  std::ostringstream adamw_text, adafactor_text;
  adamw_text << leanopt::AdamWOptions(0.5).maximize(true);
  EXPECT_EQ(adamw_text.str(),
            "lr=0.5 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.01 amsgrad=0 maximize=1 "
            "nonfinite=propagate");
  adafactor_text << leanopt::AdafactorOptions(0.5);
  for (const char* part :
       {"lr=0.5", "eps=(unset, 0.001)", "beta1=unset", "beta2_decay=-0.8", "d=1"})
    EXPECT_NE(adafactor_text.str().find(part), std::string::npos) << part;
}

TYPED_TEST(every, copies_options_as_the_class_they_are) {
  using O = typename TypeParam::options_type;
  typename TypeParam::optimizer o({leaf({2})}, TypeParam::options(0.125));
  const std::unique_ptr<OptimizerOptions> copy = o.defaults().clone();
  ASSERT_NE(dynamic_cast<O*>(copy.get()), nullptr);
  EXPECT_EQ(dynamic_cast<O&>(*copy), TypeParam::options(0.125));
  EXPECT_EQ(copy->get_lr(), 0.125);
  copy->set_lr(0.5);
  EXPECT_EQ(dynamic_cast<O&>(*copy).lr(), 0.5);
}

struct bad_option {
  const char* field;
  leanopt::AdamWOptions options;
};
TEST(options, out_of_range_are_refused_by_name_and_value) {
  using O = leanopt::AdamWOptions;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const bad_option table[] = {{"lr=-1", O(-1)},
                              {"lr=nan", O(nan)},
                              {"lr=inf", O(std::numeric_limits<double>::infinity())},
                              {"betas=(1, 0.9)", O().betas({1.0, 0.9})},
                              {"betas=(0.9, -0.5)", O().betas({0.9, -0.5})},
                              {"eps=-1", O().eps(-1)},
                              {"weight_decay=-0.5", O().weight_decay(-0.5)}};
  for (const bad_option& bad : table) {
    Tensor a = leaf({2}), b = leaf({2});
    EXPECT_TRUE(refuses([&] { leanopt::AdamW({a}, bad.options); }, {"defaults", bad.field}));
    leanopt::AdamW o({a}, 0.125);
    EXPECT_TRUE(
        refuses([&] { o.add_param_group(group({b}, bad.options)); }, {"group 1", bad.field}));
    EXPECT_EQ(o.param_groups().size(), 1u);
    options_at<O>(o, 0) = bad.options;  // or later, by hand: the step refuses
    set_gradients({a});
    const snapshot before(o, {a});
    EXPECT_TRUE(refuses([&] { o.step(); }, {"group 0", bad.field}));
    EXPECT_TRUE(snapshot(o, {a}) == before);
  }
  EXPECT_TRUE(
      refuses([] { leanopt::Adam8bit({leaf({2})}, leanopt::Adam8bitOptions().amsgrad(true)); },
              {"amsgrad", "full precision"}));
  EXPECT_TRUE(refuses(
      [] {
        leanopt::AdamW8bit({leaf({2})}, leanopt::AdamW8bitOptions().min_compressed_elements(-1));
      },
      {"min_compressed_elements=-1"}));
}

// Adafactor's two forms

struct contradiction {
  leanopt::AdafactorOptions options;
  std::vector<std::string> names;
};
TEST(adafactor_options, that_contradict_each_other_are_refused_by_both_names) {
  using O = leanopt::AdafactorOptions;
  const auto hf = [] { return O::hugging_face(); };
  const contradiction table[] = {
      {hf().lr(1e-3), {"lr", "relative_step"}},
      {hf().relative_step(false), {"lr", "relative_step"}},
      {hf().lr(1e-3).relative_step(false).warmup_init(true), {"warmup_init", "relative_step"}},
      {hf().d(2), {"d and maximize", "clip_threshold"}},
      {hf().beta2_decay(-0.5), {"beta2_decay", "decay_rate"}},
      {hf().maximize(true), {"maximize", "Hugging"}},
      {O().clip_threshold(2), {"clip_threshold", "hugging_face()"}},
      {O().decay_rate(-0.5), {"decay_rate", "hugging_face()"}},
      {O().beta1(0.9), {"beta1", "hugging_face()"}},
      {O().scale_parameter(false), {"scale_parameter", "hugging_face()"}},
      {O().relative_step(false), {"relative_step", "hugging_face()"}},
      {O().warmup_init(true), {"warmup_init", "hugging_face()"}},
  };
  for (const contradiction& c : table) {
    std::ostringstream shown;
    shown << c.options;
    EXPECT_TRUE(refuses([&] { leanopt::Adafactor({leaf({2})}, c.options); }, c.names))
        << shown.str();
  }
  EXPECT_TRUE(refuses(
      [] {
        leanopt::Adafactor8bit({leaf({2})}, leanopt::Adafactor8bitOptions().beta1(std::nullopt));
      },
      {"compressed", "beta1"}));
}

TEST(adafactor_options, may_be_set_in_any_order) {
  using O = leanopt::AdafactorOptions;
  Tensor a = leaf({2, 3});
  leanopt::Adafactor o({a}, O::hugging_face().lr(1e-3).scale_parameter(false).relative_step(false));
  EXPECT_EQ(options_at<O>(o, 0).lr(), 1e-3);
  leanopt::Adafactor relative({a}, O::hugging_face().warmup_init(true));
  EXPECT_TRUE(std::isfinite(options_at<O>(relative, 0).get_lr()));
}

TEST(adafactor_options, a_rate_set_on_relative_steps_is_refused_by_the_step) {
  Tensor a = leaf({2, 3});
  leanopt::Adafactor o({a}, leanopt::AdafactorOptions::hugging_face());
  EXPECT_EQ(o.param_groups()[0].options().get_lr(), 1e-2);
  stock::StepLR schedule(o, 1, 0.5);
  schedule.step();
  set_gradients({a});
  const snapshot before(o, {a});
  EXPECT_TRUE(refuses([&] { o.step(); }, {"lr", "relative_step"}));
  EXPECT_TRUE(snapshot(o, {a}) == before);
}

TEST(adafactor_options, of_either_form_are_kept_in_groups) {
  using O = leanopt::AdafactorOptions;
  Tensor a = leaf({2, 3}), b = leaf({2, 3}), c = leaf({2, 3});
  const O fixed = O::hugging_face().lr(0.5).relative_step(false);
  leanopt::Adafactor o(groups{group({a}, fixed), group({b}, O(0.25))}, O(0.125).weight_decay(0.5));
  EXPECT_TRUE(options_at<O>(o, 0).is_hugging_face());
  EXPECT_EQ(options_at<O>(o, 0).weight_decay(), 0.5);
  EXPECT_FALSE(options_at<O>(o, 1).is_hugging_face());

  // A group without a form of its own has that of the defaults.
  leanopt::Adafactor mixed(groups{group({c}, O().weight_decay(0.25))}, O::hugging_face());
  EXPECT_TRUE(options_at<O>(mixed, 0).is_hugging_face());
  EXPECT_EQ(options_at<O>(mixed, 0).weight_decay(), 0.25);
  EXPECT_TRUE(refuses([&] { leanopt::Adafactor(groups{group({c}, O().d(2))}, O::hugging_face()); },
                      {"group 0", "d and maximize", "Hugging"}));
  set_gradients({a, b, c});
  o.step();
  mixed.step();
  EXPECT_EQ(state_at<leanopt::ParamState>(o, a).tensor("RMS").numel(), 1);
  EXPECT_FALSE(state_at<leanopt::ParamState>(o, b).tensor("RMS").defined());
}

TEST(adafactor_options, tell_the_rate_of_the_next_step) {
  using O = leanopt::AdafactorOptions;
  Tensor a = torch::full({4, 2}, 3.0, torch::requires_grad()),
         b = torch::zeros({5}, torch::requires_grad());
  leanopt::Adafactor plain({a, b}, O(0.5));
  EXPECT_DOUBLE_EQ(plain.effective_lr(a), 3 * 0.5);     // the RMS of a, and lr below 1/sqrt(1)
  EXPECT_DOUBLE_EQ(plain.effective_lr(b), 1e-3 * 0.5);  // eps2 instead of an RMS of 0
  set_gradients({b});
  for (int i = 0; i < 15; ++i) plain.step();
  EXPECT_DOUBLE_EQ(plain.effective_lr(a), 3 * 0.5);
  leanopt::Adafactor fixed({a},
                           O::hugging_face().lr(0.5).relative_step(false).scale_parameter(false));
  EXPECT_EQ(fixed.effective_lr(a), 0.5);
  leanopt::Adafactor relative({a}, O::hugging_face().warmup_init(true));
  EXPECT_DOUBLE_EQ(relative.effective_lr(a), 3 * 1e-6);
  set_gradients({a});
  for (int i = 0; i < 3; ++i) {
    relative.step();
    torch::NoGradGuard no_grad;
    a.fill_(3);
  }
  EXPECT_DOUBLE_EQ(relative.effective_lr(a), 3 * 4e-6);
  EXPECT_TRUE(refuses([&] { relative.effective_lr(b); }, {"no parameter of the optimizer"}));
}

// The lists of parameters

TYPED_TEST(every, follows_lists_that_change) {
  Tensor a = leaf({3, 2}), b = leaf({4}), c = leaf({2, 2}), d = leaf({5});
  typename TypeParam::optimizer o(std::vector<Tensor>{}, TypeParam::options(0.125));
  o.step();
  o.param_groups()[0].params().push_back(a);
  o.param_groups().push_back(group({b}, TypeParam::options(0.125)));
  const auto moves = [&](const std::vector<Tensor>& expected) {
    const std::vector<Tensor> all{a, b, c, d};
    std::vector<Tensor> before;
    for (const Tensor& p : all) before.push_back(p.detach().clone());
    set_gradients(all);
    o.step();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool wanted = std::any_of(expected.begin(), expected.end(),
                                      [&](const Tensor& e) { return e.is_same(all[i]); });
      EXPECT_EQ(!all[i].equal(before[i]), wanted) << "parameter " << i;
    }
  };
  moves({a, b});
  o.param_groups()[1].params()[0] = c;
  moves({a, c});
  o.param_groups()[0].params() = {b, d};
  moves({b, c, d});
  groups rest{o.param_groups()[1]};
  o.param_groups().swap(rest);
  moves({c});
}

TYPED_TEST(every, a_parameter_at_a_reused_address_starts_anew) {
  typename TypeParam::optimizer o({leaf({3}), leaf({3}, torch::kFloat32, 1)},
                                  TypeParam::options(0.125));
  auto& params = o.param_groups()[0].params();
  for (int i = 0; i < 100; ++i) {
    set_gradients(params);
    o.step();
    void* const old = params[1].unsafeGetTensorImpl();
    params[1] = Tensor();
    params[1] = leaf({3});
    EXPECT_NE(params[1].unsafeGetTensorImpl(), old);
    set_gradients(params);
    o.step();
    ASSERT_EQ(steps_of(o, params[1]), 1) << "replacement " << i;
    ASSERT_EQ(o.state().size(), 2u) << "the state of a dead parameter was kept";
  }
}

TYPED_TEST(every, keeps_no_data_of_dead_parameters_alive) {
  Tensor a = leaf({1000}), b = leaf({3});
  typename TypeParam::optimizer o({a, b}, TypeParam::options(0.125));
  set_gradients({a, b});
  o.step();
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(a.storage().getWeakStorageImpl());
  EXPECT_EQ(a.use_count(), 2u);
  o.param_groups()[0].params() = {b};
  a = Tensor();
  EXPECT_TRUE(storage.expired());
  o.step();
  EXPECT_EQ(o.state().size(), 1u);
}

TYPED_TEST(every, keeps_the_state_of_a_parameter_that_comes_back) {
  Tensor a = leaf({3}), b = leaf({4});
  typename TypeParam::optimizer o({a, b}, TypeParam::options(0.125));
  set_gradients({a, b});
  o.step();
  o.param_groups()[0].params().pop_back();
  o.step();
  o.param_groups()[0].params().push_back(b);
  o.step();
  EXPECT_EQ(steps_of(o, b), 2);
  EXPECT_EQ(steps_of(o, a), 3);
}

TYPED_TEST(every, refuses_duplicates_naming_both_places) {
  using Class = typename TypeParam::optimizer;
  Tensor a = leaf({2}), b = leaf({3});
  const auto o = TypeParam::options(0.125);
  const std::string first = "parameter 0 of group 0", hint = "leanopt::unique_parameters";
  EXPECT_TRUE(refuses([&] { Class({a, b, a}, o); }, {first, "parameter 2 of group 0", hint}));
  EXPECT_TRUE(refuses(
      [&] {
        Class(groups{group({a}), group({b, a})}, o);
      },
      {first, "parameter 1 of group 1", hint}));
  Class held({a}, o);
  set_gradients({a, b});
  held.step();
  const snapshot before(held, {a, b});
  EXPECT_TRUE(refuses(
      [&] {
        held.add_param_group(group({b, a}));
      },
      {first, "parameter 1 of group 1"}));
  EXPECT_TRUE(refuses(
      [&] {
        leanopt::add_param_group(held, group({b, b}));
      },
      {"parameter 0 of group 1", "parameter 1 of group 1"}));
  EXPECT_EQ(held.param_groups().size(), 1u);
  held.param_groups()[0].params().push_back(a);
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_TRUE(refuses([&] { held.step(); }, {first, "parameter 1 of group 0"}));
  held.param_groups()[0].params().pop_back();
  held.param_groups().push_back(group({b, a}, o));
  EXPECT_TRUE(refuses([&] { held.step(); }, {first, "parameter 1 of group 1"}));
  EXPECT_TRUE(snapshot(held, {a, b}) == before);
}

struct tied_net : torch::nn::Module {
  tied_net() {
    weight = register_parameter("encoder", leaf({2, 3}));
    register_parameter("decoder", weight);
  }
  Tensor weight;
};
TEST(lists, a_tied_parameter_is_given_once) {
  tied_net net;
  ASSERT_EQ(net.parameters().size(), 2u);
  EXPECT_TRUE(refuses([&] { leanopt::AdamW(net.parameters(), 0.125); },
                      {"parameter 0 of group 0", "parameter 1 of group 0", "unique_parameters"}));
  leanopt::AdamW o(leanopt::unique_parameters(net), 0.125);
  set_gradients({net.weight});
  o.step();
  EXPECT_EQ(o.state().size(), 1u);
}

/// A tensor without elements on a device that need not be there.
Tensor on_device(at::DeviceType type, c10::DispatchKey key) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, {type, 0}), nullptr,
                    false);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(none), c10::DispatchKeySet(key),
                                                  caffe2::TypeMeta::Make<float>());
}
TEST(lists, a_parameter_on_a_device_is_told_what_steps_it) {
  const Tensor cuda = on_device(at::kCUDA, c10::DispatchKey::CUDA);
  EXPECT_TRUE(refuses([&] { leanopt::AdamW({cuda}, 0.125); },
                      {"parameter 0 of group 0", "cuda:0", "leanopt::cuda"}));
  EXPECT_TRUE(refuses([&] { leanopt::quantize_blockwise(cuda, leanopt::formats::log8{}); },
                      {"leanopt::cuda"}));
  EXPECT_TRUE(refuses([&] { leanopt::AdamW({on_device(at::kXPU, c10::DispatchKey::XPU)}, 0.125); },
                      {"parameter 0 of group 0", "xpu:0", "on CUDA devices"}));
}

TYPED_TEST(every, refuses_parameters_that_share_memory) {
  using Class = typename TypeParam::optimizer;
  const auto o = TypeParam::options(0.125);
  const auto view = [](const Tensor& t) { return t.detach().set_requires_grad(true); };
  const Tensor flat = pattern({24});
  const Tensor matrix = flat.view({4, 6});
  const std::string first = "parameter 0 of group 0", second = "parameter 1 of group 0";
  EXPECT_TRUE(refuses([&] { Class({view(flat), view(matrix)}, o); }, {first, second, "overlap"}));
  EXPECT_TRUE(refuses(
      [&] {
        Class({view(flat.slice(0, 0, 9)), view(flat.slice(0, 8, 20))}, o);
      },
      {first, second, "overlap"}));
  EXPECT_TRUE(refuses(
      [&] {
        Class({view(matrix), view(matrix.slice(1, 0, 6, 2))}, o);
      },
      {first, second, "overlap"}));
  EXPECT_TRUE(refuses(
      [&] {
        Class({view(matrix.slice(1, 0, 4)), view(matrix.slice(1, 3, 6))}, o);
      },
      {first, second, "overlap"}));
  EXPECT_TRUE(refuses(
      [&] {
        Class({view(pattern({1, 3}).expand({4, 3}))}, o);
      },
      {first, "share memory"}));
  EXPECT_TRUE(refuses(
      [&] {
        Class({view(flat.as_strided({4, 3}, {2, 1}))}, o);
      },
      {first, "share memory"}));

  // Neighbours in one buffer, interleaved or side by side, share nothing.
  const std::vector<Tensor> apart{view(flat.slice(0, 0, 12)), view(flat.slice(0, 12, 24))};
  const std::vector<Tensor> columns{view(matrix.slice(1, 0, 6, 2)), view(matrix.slice(1, 1, 6, 2))};
  for (const auto& params : {apart, columns}) {
    Class held(params, o);
    set_gradients(params);
    held.step();
    EXPECT_EQ(held.state().size(), 2u);
  }
}

TYPED_TEST(every, refuses_unfit_parameters_by_place) {
  using Class = typename TypeParam::optimizer;
  const auto o = TypeParam::options(0.125);
  Tensor a = leaf({2});
  const std::string second = "parameter 1 of group 0";
  EXPECT_TRUE(refuses([&] { Class({a, Tensor()}, o); }, {second, "undefined"}));
  EXPECT_TRUE(refuses([&] { Class({a, a * 2}, o); }, {second, "leaf"}));
  EXPECT_TRUE(refuses([&] { Class({a, torch::ones({2}, torch::kLong)}, o); }, {second, "Long"}));
  EXPECT_TRUE(refuses([&] { Class({a, torch::eye(2).to_sparse()}, o); }, {second, "Sparse"}));
  EXPECT_TRUE(refuses([&] { Class({a, torch::empty({2}, torch::kMeta)}, o); }, {second, "meta"}));
  Class held({a}, o);
  held.param_groups()[0].params().push_back(Tensor());
  set_gradients({a});
  const snapshot before(held, {a});
  EXPECT_TRUE(refuses([&] { held.step(); }, {second, "undefined"}));
  EXPECT_TRUE(snapshot(held, {a}) == before);
}

TYPED_TEST(every, may_be_empty) {
  typename TypeParam::optimizer none(std::vector<Tensor>{}, TypeParam::options(0.125));
  none.step();
  typename TypeParam::optimizer no_groups(groups{}, TypeParam::options(0.125));
  no_groups.step();
  EXPECT_TRUE(none.state().empty());
  EXPECT_TRUE(no_groups.param_groups().empty());
}

template <class Class>
void expect_move_assignment(Class into, Class& from, const Tensor& p) {
  static_assert(std::is_move_assignable_v<Class> == std::is_move_assignable_v<stock::AdamW>,
                "neither can in LibTorch 2.6");
  if constexpr (std::is_move_assignable_v<Class>) {
    into = std::move(from);
    into.step();
    EXPECT_EQ(steps_of(into, p), 3);
  }
}

TYPED_TEST(every, moves_as_the_stock_classes_do) {
  using Class = typename TypeParam::optimizer;
  Tensor a = leaf({3});
  const auto held = std::make_unique<Class>(Class({a}, TypeParam::options(0.125)));
  set_gradients({a});
  held->step();
  Class moved(std::move(*held));
  moved.step();
  EXPECT_EQ(steps_of(moved, a), 2);
  held->step();  // what was moved from holds nothing
  EXPECT_TRUE(held->state().empty());
  expect_move_assignment(Class({leaf({2})}, TypeParam::options(0.5)), moved, a);
}

TYPED_TEST(every, counts_what_it_skips_wherever_it_moved) {
  using Class = typename TypeParam::optimizer;
  Tensor a = leaf({3});
  auto o = TypeParam::options(0.125);
  o.nonfinite(leanopt::nonfinite::skip_element);
  Class first({a}, o);
  set_gradients({a});
  first.step();
  Class moved(std::move(first));
  a.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  moved.step();
  EXPECT_EQ(moved.skipped_elements(), 1);
  EXPECT_EQ(first.skipped_elements(), 0);
}

// The step

TYPED_TEST(every, a_step_that_throws_has_changed_nothing) {
  Tensor a = leaf({70, 60}), b = leaf({4, 2}), c = leaf({3});  // a is large enough to be compressed
  typename TypeParam::optimizer o({a, b, c}, TypeParam::options(0.125));
  set_gradients({a, b, c});
  o.step();
  set_gradients({a, b, c}, 1);
  const auto throws = [&](const std::vector<std::string>& parts) {
    const snapshot before(o, {a, b, c});
    EXPECT_TRUE(refuses([&] { o.step(); }, parts));
    EXPECT_TRUE(snapshot(o, {a, b, c}) == before);
  };
  const Tensor good = c.grad();
  b.mutable_grad() =
      torch::sparse_coo_tensor(torch::zeros({1, 1}, torch::kLong), torch::ones({1, 2}), {4, 2});
  throws({"parameter 1 of group 0", "parse"});
  set_gradients({b}, 1);
  c.mutable_grad() = torch::ones({4});
  throws({"parameter 2 of group 0", "[3]", "[4]"});
  c.mutable_grad() = good;
  o.param_groups()[0].params().push_back(leaf({2}) * 2);
  throws({"parameter 3 of group 0", "leaf"});
  o.param_groups()[0].params().pop_back();
  o.param_groups()[0].options().set_lr(-1);
  throws({"group 0", "lr=-1"});
  o.param_groups()[0].options().set_lr(0.125);
  auto held = std::move(o.state().at(c.unsafeGetTensorImpl()));
  o.state()[c.unsafeGetTensorImpl()] = std::make_unique<stock::SGDParamState>();
  {
    const snapshot before(o, {a, b});
    EXPECT_TRUE(refuses([&] { o.step(); }, {"parameter 2 of group 0", "SGDParamState"}));
    EXPECT_TRUE(snapshot(o, {a, b}) == before);
  }
  o.state()[c.unsafeGetTensorImpl()] = std::move(held);
  o.step();
  EXPECT_EQ(steps_of(o, a), 2);
}

TYPED_TEST(every, an_undefined_gradient_means_no_update_no_decay_no_count) {
  Tensor used = leaf({3}), skipped = leaf({4});
  typename TypeParam::optimizer o({skipped, used}, TypeParam::options(0.125).weight_decay(0.5));
  set_gradients({used});
  const Tensor before = skipped.detach().clone();
  o.step();
  EXPECT_TRUE(skipped.equal(before));
  EXPECT_FALSE(has_state(o, skipped));
  set_gradients({skipped});
  o.step();
  const snapshot after_two(o, {skipped});
  skipped.mutable_grad() = Tensor();
  o.step();
  EXPECT_TRUE(snapshot(o, {skipped}) == after_two);
}

TYPED_TEST(every, a_gradient_of_zeros_is_a_step) {
  Tensor a = leaf({3});
  typename TypeParam::optimizer o({a}, TypeParam::options(0.125).weight_decay(0.5));
  set_gradients({a});
  o.step();
  a.mutable_grad().zero_();
  const Tensor before = a.detach().clone();
  o.step();
  EXPECT_FALSE(a.equal(before));
  EXPECT_EQ(steps_of(o, a), 2);
}

TYPED_TEST(every, closures_run_with_gradients_on_and_give_their_loss) {
  Tensor a = leaf({3});
  typename TypeParam::optimizer o({a}, TypeParam::options(0.125));
  Optimizer& base = o;
  const torch::NoGradGuard outside;
  const Tensor before = a.detach().clone();
  const Tensor loss = base.step([&] {
    base.zero_grad();
    EXPECT_TRUE(torch::GradMode::is_enabled());
    Tensor l = a.square().sum();
    l.backward();
    return l;
  });
  EXPECT_TRUE(loss.requires_grad());
  EXPECT_TRUE(loss.detach().equal(before.square().sum()));
  EXPECT_FALSE(a.equal(before));
  EXPECT_FALSE(torch::GradMode::is_enabled());
  EXPECT_FALSE(base.step().defined());
  EXPECT_TRUE(refuses([&] { base.step([]() -> Tensor { throw std::runtime_error("no loss"); }); },
                      {"no loss"}));
  EXPECT_EQ(steps_of(o, a), 2);
}

TYPED_TEST(every, a_first_step_in_inference_mode_serves_later_ones) {
  Tensor a = leaf({3, 2}), b = leaf({70, 60});
  typename TypeParam::optimizer o({a, b}, TypeParam::options(0.125));
  set_gradients({a, b});
  {
    const c10::InferenceMode on;
    o.step();
  }
  set_gradients({a, b}, 1);
  o.step();
  for (const Tensor& p : {a, b})
    for (const auto& [name, t] : state_tensors(o, p)) EXPECT_FALSE(t.is_inference()) << name;
  a.square().sum().backward();
  EXPECT_EQ(steps_of(o, b), 2);
}

TYPED_TEST(every, autograd_notices_a_step_between_forward_and_backward) {
  Tensor a = leaf({3, 2});
  typename TypeParam::optimizer o({a}, TypeParam::options(0.125));
  const Tensor loss = a.square().sum();
  loss.backward({}, /*retain_graph=*/true);
  o.step();
  EXPECT_TRUE(refuses([&] { loss.backward(); }, {"modified by an inplace operation"}));

  std::vector<std::uint32_t> versions{std::uint32_t(a._version())};
  for (const auto& [name, t] : state_tensors(o, a))
    if (name != "step") versions.push_back(std::uint32_t(t._version()));
  o.step();
  std::size_t k = 0;
  EXPECT_GT(std::uint32_t(a._version()), versions[k++]);
  for (const auto& [name, t] : state_tensors(o, a))
    if (name != "step") {
      EXPECT_GT(std::uint32_t(t._version()), versions[k++]) << name;
    }
}

TYPED_TEST(every, long_runs_leave_no_graph_and_grow_nothing) {
  Tensor a = leaf({3, 2}), b = leaf({70, 60});
  typename TypeParam::optimizer o({a, b}, TypeParam::options(1e-3).weight_decay(0.1));
  std::optional<std::int64_t> elements;
  for (int i = 0; i < 100; ++i) {
    o.step([&] {
      o.zero_grad();
      Tensor loss = a.square().sum() + b.square().mean();
      loss.backward();
      return loss;
    });
    const std::int64_t now = leanopt::compute_optimizer_size(o).elements;
    ASSERT_EQ(now, elements.value_or(now)) << "step " << i;
    elements = now;
  }
  EXPECT_EQ(o.state().size(), 2u);
  for (const Tensor& p : {a, b}) {
    EXPECT_TRUE(p.is_leaf());
    EXPECT_FALSE(p.grad_fn());
    for (const auto& [name, t] : state_tensors(o, p)) {
      EXPECT_FALSE(t.requires_grad()) << name;
      EXPECT_FALSE(t.grad_fn()) << name;
    }
  }
}

TYPED_TEST(every, schedules_set_the_rate_of_the_next_step) {
  Tensor a = leaf({3}), b = leaf({4});
  typename TypeParam::optimizer o({a}, TypeParam::options(0.5));
  stock::StepLR steps(o, 1, 0.5);
  steps.step();  // LibTorch counts the construction as epoch 0
  steps.step();
  EXPECT_EQ(o.param_groups()[0].options().get_lr(), 0.25);
  o.add_param_group(group({b}, TypeParam::options(0.5)));
  steps.step();
  EXPECT_EQ(o.param_groups()[0].options().get_lr(), 0.125);
  EXPECT_EQ(o.param_groups()[1].options().get_lr(), 0.25);
  stock::ReduceLROnPlateauScheduler plateau(o, stock::ReduceLROnPlateauScheduler::min, 0.5f, 0);
  for (int i = 0; i < 2; ++i) plateau.step(1.0f);
  EXPECT_EQ(o.param_groups()[0].options().get_lr(), 0.0625);
  o.param_groups()[0].options().set_lr(0);
  set_gradients({a, b});
  const Tensor before_a = a.detach().clone(), before_b = b.detach().clone();
  o.step();
  EXPECT_TRUE(a.equal(before_a));
  EXPECT_FALSE(b.equal(before_b));
}

TYPED_TEST(every, two_on_two_threads_equal_the_serial_run) {
  const auto run = [](std::int64_t salt) {
    Tensor a = leaf({70, 60}, torch::kFloat32, salt), b = leaf({9}, torch::kFloat32, salt);
    typename TypeParam::optimizer o({a, b}, TypeParam::options(1e-2));
    for (int i = 0; i < 20; ++i) {
      set_gradients({a, b}, i + salt);
      o.step();
    }
    return snapshot(o, {a, b});
  };
  const snapshot serial[] = {run(1), run(2)};
  std::optional<snapshot> parallel[2];
  std::thread first([&] { parallel[0].emplace(run(1)); });
  std::thread second([&] { parallel[1].emplace(run(2)); });
  first.join();
  second.join();
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(*parallel[i] == serial[i]) << i;
}

TYPED_TEST(every, the_default_type_does_not_matter) {
  const auto run = [](torch::Dtype default_type) {
    Tensor a = leaf({70, 60}), b = leaf({3, 2});
    typename TypeParam::optimizer o({a, b}, TypeParam::options(1e-2));
    set_gradients({a, b});
    const auto before = torch::get_default_dtype();
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(default_type));
    o.step();
    o.step();
    torch::set_default_dtype(before);
    return snapshot(o, {a, b});
  };
  const snapshot expected = run(torch::kFloat32);
  for (const auto type : {torch::kFloat64, torch::kFloat16, torch::kBFloat16})
    EXPECT_TRUE(run(type) == expected) << type;
}

TEST(casts, reach_stock_types_but_for_the_optimizer_itself) {
  Tensor a = leaf({3});
  leanopt::AdamW o({a}, 0.125);
  set_gradients({a});
  o.step();
  EXPECT_NE(dynamic_cast<stock::AdamWOptions*>(&o.defaults()), nullptr);
  EXPECT_NE(dynamic_cast<stock::AdamWOptions*>(&o.param_groups()[0].options()), nullptr);
  EXPECT_NE(dynamic_cast<stock::AdamWParamState*>(o.state().at(a.unsafeGetTensorImpl()).get()),
            nullptr);
  static_assert(!std::is_base_of_v<stock::AdamW, leanopt::AdamW>);
}

// State put in by hand

template <class Form>
class hand_made_state : public ::testing::Test {};
TYPED_TEST_SUITE(hand_made_state, every_adam, form_names);

TYPED_TEST(hand_made_state, is_taken_or_refused_before_anything_changes) {
  using State = typename TypeParam::optimizer::State;
  Tensor a = leaf({3, 2}), b = leaf({4});
  typename TypeParam::optimizer o({b, a}, TypeParam::options(0.125));
  auto* const key = a.unsafeGetTensorImpl();
  const auto put = [&](std::int64_t step, const Tensor& exp_avg, const Tensor& exp_avg_sq) {
    auto s = std::make_unique<State>();
    s->step(step).exp_avg(exp_avg).exp_avg_sq(exp_avg_sq);
    o.state()[key] = std::move(s);
  };
  set_gradients({a, b});
  const snapshot before(o, {b});
  put(3, torch::zeros({4}), torch::zeros({3, 2}));
  EXPECT_TRUE(refuses([&] { o.step(); }, {"exp_avg", "parameter 1 of group 0", "[4]", "[3, 2]"}));
  put(3, torch::zeros({3, 2}), torch::zeros({3, 2}, torch::kLong));
  EXPECT_TRUE(refuses([&] { o.step(); }, {"exp_avg_sq", "parameter 1 of group 0", "Long"}));
  o.state()[key] = std::make_unique<leanopt::ParamState>();
  EXPECT_TRUE(refuses([&] { o.step(); }, {"parameter 1 of group 0", "ParamState"}));
  EXPECT_TRUE(snapshot(o, {b}) == before);

  o.state()[key] = nullptr;
  o.step();
  EXPECT_EQ(state_at<State>(o, a).step(), 1);

  // In another order of strides, and in another type: it counts by its logical values.
  const Tensor m = pattern({3, 2}, torch::kFloat32, 7),
               v = pattern({3, 2}, torch::kFloat32, 8).abs();
  Tensor values[2];
  const Tensor start = a.detach().clone();
  for (const bool odd : {false, true}) {
    {
      const torch::NoGradGuard no_grad;
      a.copy_(start);
    }
    put(3, odd ? m.t().contiguous().t() : m.clone(), odd ? v.to(torch::kFloat64) : v.clone());
    o.step();
    values[odd] = a.detach().clone();
    EXPECT_EQ(state_at<State>(o, a).step(), 4);
    EXPECT_EQ(state_at<State>(o, a).exp_avg_sq().scalar_type(), torch::kFloat32);
  }
  EXPECT_TRUE(values[0].equal(values[1]));
}

// The environment

TEST(environment_death, an_unknown_capability_is_refused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the variable is read once per process
  for (const char* value : {"avx1024", "AVX2", "sse"})
    EXPECT_EXIT(
        {
          setenv("ATEN_CPU_CAPABILITY", value, 1);
          const bool refused =
              bool(refuses([] { leanopt::AdamW({leaf({2})}); },
                           {"ATEN_CPU_CAPABILITY", value, "default, avx2 or avx512"}));
          std::exit(refused ? 0 : 1);
        },
        ::testing::ExitedWithCode(0), "");
}

}  // namespace
