// torch::save and torch::load: a resumed run equals the uninterrupted one bit for bit, in every
// class and form; LibTorch's classes read ours and ours read theirs; an archive that does not fit
// changes nothing.
#include "tests/optim/support.hpp"

#include <c10/util/tempfile.h>

#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
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

std::string saved(const Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::stringstream stream;
  archive.save_to(stream);
  return stream.str();
}
void load(Optimizer& optimizer, const std::string& bytes) {
  std::stringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

/// Options of which no field that a run depends on has the constructor's value.
template <class Form>
auto unusual_options() {
  auto o = Form::options(0.0625).weight_decay(0.125);
  if constexpr (std::is_same_v<Form, adafactor>)
    o.beta2_decay(-0.5).d(2).eps({1e-6, 1e-2});
  else if constexpr (std::is_same_v<Form, hugging_face_adafactor> ||
                     std::is_same_v<Form, adafactor8bit>)
    o.decay_rate(-0.5).clip_threshold(2).beta1(0.75).scale_parameter(false);
  else
    o.betas({0.75, 0.875}).eps(1e-4);
  return o;
}

/// Parameters small and large, so that the compressed classes have codes and full precision both.
std::vector<Tensor> make_parameters() {
  return {leaf({70, 60}), leaf({7}, torch::kFloat32, 1), leaf({20, 4, 60}, torch::kFloat32, 2),
          leaf({4500}, torch::kBFloat16, 3)};
}
std::vector<Tensor> copies_of(const std::vector<Tensor>& params) {
  std::vector<Tensor> result;
  for (const Tensor& p : params) result.push_back(leaf(p));
  return result;
}
/// The first two in one group, the others in another with a rate of its own.
template <class Form>
std::unique_ptr<typename Form::optimizer> make_optimizer(
    const std::vector<Tensor>& p, const typename Form::options_type& options) {
  auto second = options;
  second.lr(options.lr() / 2);
  return std::make_unique<typename Form::optimizer>(
      groups{group({p[0], p[1]}, options), group({p[2], p[3]}, second)}, options);
}
void train(Optimizer& optimizer, const std::vector<Tensor>& params, int first, int last) {
  for (int i = first; i < last; ++i) {
    set_gradients(params, i);
    optimizer.step();
  }
}

// Round trips

TYPED_TEST(every, a_resumed_run_equals_the_uninterrupted_one) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  train(*o, params, 0, 3);
  const std::string archive = saved(*o);
  const auto resumed_params = copies_of(params);
  train(*o, params, 3, 6);

  const auto resumed = make_optimizer<TypeParam>(resumed_params, TypeParam::options(0.5));
  load(*resumed, archive);
  train(*resumed, resumed_params, 3, 6);
  EXPECT_TRUE(snapshot(*resumed, resumed_params) == snapshot(*o, params));
  using O = typename TypeParam::options_type;
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_EQ(options_at<O>(*resumed, i), options_at<O>(*o, i)) << "group " << i;
}

TYPED_TEST(every, a_run_that_is_set_back_repeats_itself) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  train(*o, params, 0, 2);
  const std::string archive = saved(*o);
  const auto start = copies_of(params);
  // Parameters that join later draw their random bits as they did the first time.
  const auto go_on = [&] {
    const auto first = copies_of(start);
    const Tensor joins = leaf({70, 60}, torch::kFloat32, 9);
    auto list = params;
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < params.size(); ++i) list[i].copy_(first[i]);
    }
    o->param_groups()[1].params().push_back(joins);
    list.push_back(joins);
    train(*o, list, 2, 4);
    o->param_groups()[1].params().pop_back();
    return snapshot(*o, list);
  };
  const snapshot once = go_on();
  load(*o, archive);
  const snapshot again = go_on();
  EXPECT_TRUE(again == once);
}

TYPED_TEST(every, before_the_first_step_there_is_nothing_to_lose) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  const std::string archive = saved(*o);
  const auto other_params = copies_of(params);
  const auto other = make_optimizer<TypeParam>(other_params, TypeParam::options(0.5));
  train(*other, other_params, 0, 1);
  load(*other, archive);
  EXPECT_TRUE(other->state().empty());
  EXPECT_EQ(options_at<typename TypeParam::options_type>(*other, 0), unusual_options<TypeParam>());
  train(*other, other_params, 0, 2);
  EXPECT_EQ(steps_of(*other, other_params[0]), 2);
}

TYPED_TEST(every, loading_again_and_again_grows_nothing) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  train(*o, params, 0, 1);
  const std::string archive = saved(*o);
  const auto size = leanopt::compute_optimizer_size(*o);
  const snapshot before(*o, params);
  for (int i = 0; i < 10; ++i) load(*o, archive);
  EXPECT_EQ(o->state().size(), params.size());
  EXPECT_EQ(leanopt::compute_optimizer_size(*o).elements, size.elements);
  EXPECT_TRUE(snapshot(*o, params) == before);
  EXPECT_EQ(saved(*o).size(), archive.size());
}

TYPED_TEST(every, loaded_state_is_its_own) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  train(*o, params, 0, 1);
  const std::string archive = saved(*o);
  const auto first_params = copies_of(params), second_params = copies_of(params);
  const auto first = make_optimizer<TypeParam>(first_params, TypeParam::options(0.5));
  const auto second = make_optimizer<TypeParam>(second_params, TypeParam::options(0.5));
  std::stringstream stream(archive);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  first->load(in);
  second->load(in);  // both from the same archive in memory
  const snapshot before(*second, second_params);
  train(*first, first_params, 1, 3);
  EXPECT_TRUE(snapshot(*second, second_params) == before);
}

TYPED_TEST(every, references_to_options_stay_valid) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, TypeParam::options(0.25));
  const std::string archive = saved(*o);
  const auto other = make_optimizer<TypeParam>(copies_of(params), TypeParam::options(0.5));
  OptimizerOptions& held = other->param_groups()[0].options();
  load(*other, archive);
  EXPECT_EQ(&held, &other->param_groups()[0].options());
  EXPECT_EQ(held.get_lr(), 0.25);
}

TYPED_TEST(every, through_files_and_streams_and_one_archive_for_all) {
  const auto params = make_parameters();
  const auto o = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  train(*o, params, 0, 2);
  const snapshot expected(*o, params);
  const auto expect_same = [&](auto read) {
    const auto copies = copies_of(params);
    const auto other = make_optimizer<TypeParam>(copies, TypeParam::options(0.5));
    read(*other);
    EXPECT_TRUE(snapshot(*other, copies) == expected);
  };
  const c10::TempFile file = c10::make_tempfile("leanopt-archive-");
  torch::save(*o, file.name);
  expect_same([&](auto& other) { torch::load(other, file.name); });
  expect_same([&](auto& other) { torch::load(other, file.name, torch::Device(torch::kCPU)); });
  std::stringstream stream;
  torch::save(*o, stream);
  expect_same([&](auto& other) { torch::load(other, stream); });

  torch::nn::Linear layer(2, 3);
  torch::serialize::OutputArchive out, model, optimizer;
  layer->save(model);
  o->save(optimizer);
  out.write("epoch", torch::tensor(7));
  out.write("model", model);
  out.write("optimizer", optimizer);
  out.save_to(file.name);
  torch::serialize::InputArchive in, part;
  in.load_from(file.name);
  in.read("optimizer", part);
  expect_same([&](auto& other) { other.load(part); });
}

TYPED_TEST(every, the_options_written_are_those_in_use) {
  using O = typename TypeParam::options_type;
  const auto params = make_parameters();
  typename TypeParam::optimizer o({params[0]}, TypeParam::options(0.25).weight_decay(0.5));
  o.param_groups().push_back(group({params[1]}, TypeParam::options(0.75)));  // as written
  o.param_groups().push_back(group({params[2]}));                            // the defaults
  const std::string archive = saved(o);
  typename TypeParam::optimizer other(
      groups{group({params[0]}), group({params[1]}), group({params[2]})},
      TypeParam::options(0.125));
  load(other, archive);
  EXPECT_EQ(options_at<O>(other, 0), TypeParam::options(0.25).weight_decay(0.5));
  EXPECT_EQ(options_at<O>(other, 1), TypeParam::options(0.75));
  EXPECT_EQ(options_at<O>(other, 2), TypeParam::options(0.25).weight_decay(0.5));
}

TYPED_TEST(every, state_goes_on_at_another_precision) {
  Tensor narrow = leaf({70, 60}), wide = leaf(narrow.to(torch::kFloat64));
  typename TypeParam::optimizer a({narrow}, TypeParam::options(0.0625)),
      b({wide}, TypeParam::options(0.0625));
  set_gradients({narrow});
  a.step();
  load(b, saved(a));
  set_gradients({wide}, 1);
  b.step();
  EXPECT_EQ(steps_of(b, wide), 2);
  for (const auto& [name, t] : state_tensors(b, wide))
    if (torch::isFloatingType(t.scalar_type()) && name != "RMS") {
      EXPECT_EQ(t.scalar_type(), torch::kFloat64) << name;
    }
}

TEST(adafactor, unset_options_stay_unset) {
  using O = leanopt::AdafactorOptions;
  Tensor p = leaf({3, 2});
  const O forms[] = {O(0.25), O::hugging_face(), O::hugging_face().warmup_init(true),
                     O::hugging_face().beta1(0.5), O(0.25).eps({1e-7, 1e-3})};
  for (const O& written : forms) {
    leanopt::Adafactor a({p}, written),
        b({p}, written.is_hugging_face() ? O(0.125) : O::hugging_face());
    load(b, saved(a));
    EXPECT_EQ(options_at<O>(b, 0), written) << written;
    EXPECT_EQ(options_at<O>(b, 0).given("lr"), written.given("lr")) << written;
    set_gradients({p});
    b.step();  // relative steps must not look like a rate that was set
  }
}

// LibTorch's archives

template <class Form>
using stock_of = std::conditional_t<std::is_same_v<Form, adam> || std::is_same_v<Form, adam8bit>,
                                    stock::Adam, stock::AdamW>;

TYPED_TEST(full_adam, archives_go_from_stock_to_ours_and_back) {
  using Stock = stock_of<TypeParam>;
  using StockOptions = leanopt::options_of<Stock>;
  using State = typename TypeParam::optimizer::State;
  for (const bool amsgrad : {false, true}) {
    Tensor a = leaf({5, 3}), frozen = leaf({2});
    Stock theirs(groups{group({frozen}), group({a})},
                 StockOptions(1e-2).betas({0.75, 0.875}).weight_decay(0.25).amsgrad(amsgrad));
    const auto step = [](Optimizer& o, const Tensor& p, int i) {
      set_gradients({p}, i);
      o.step();
    };
    for (int i = 0; i < 3; ++i) step(theirs, a, i);

    Tensor b = leaf(a), frozen_b = leaf(frozen);
    typename TypeParam::optimizer ours(groups{group({frozen_b}), group({b})},
                                       TypeParam::options(0.5));
    load(ours, saved(theirs));
    EXPECT_EQ(
        static_cast<const StockOptions&>(options_at<typename TypeParam::options_type>(ours, 1)),
        options_at<StockOptions>(theirs, 1));
    EXPECT_FALSE(has_state(ours, frozen_b));
    EXPECT_TRUE(state_at<State>(ours, b) == state_at<State>(theirs, a));
    for (int i = 3; i < 6; ++i) step(theirs, a, i), step(ours, b, i);
    EXPECT_TRUE(agrees(b, a, adam_tolerance(torch::kFloat32)));

    Tensor c = leaf(b), frozen_c = leaf(frozen);
    Stock again(groups{group({frozen_c}), group({c})}, StockOptions(0.5));
    load(again, saved(ours));
    EXPECT_TRUE(state_at<State>(again, c) == state_at<State>(ours, b));
    EXPECT_EQ(options_at<StockOptions>(again, 1), options_at<StockOptions>(theirs, 1));
    for (int i = 6; i < 9; ++i) step(again, c, i), step(ours, b, i);
    EXPECT_TRUE(agrees(b, c, adam_tolerance(torch::kFloat32)));
  }
}

TYPED_TEST(full_adam, the_stock_helper_reads_and_writes_ours) {
  using State = typename TypeParam::optimizer::State;
  using StockOptions = leanopt::options_of<stock_of<TypeParam>>;
  Tensor a = leaf({3}), b = leaf({3}), c = leaf({2});
  typename TypeParam::optimizer x({a}, TypeParam::options(0.25)), y({b}, TypeParam::options(0.5));
  set_gradients({a});
  x.step();
  torch::serialize::OutputArchive out(std::make_shared<torch::jit::CompilationUnit>());
  stock::serialize<State, StockOptions>(out, x);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  stock::serialize<State, StockOptions>(in, y);
  EXPECT_EQ(y.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(steps_of(y, b), 1);
  y.add_parameters({c});
  set_gradients({b, c});
  y.step();
  EXPECT_EQ(y.state().size(), 2u);
}

template <class Form>
class compressed_adam : public ::testing::Test {};
using adam_codes = ::testing::Types<adam8bit, adamw8bit>;
TYPED_TEST_SUITE(compressed_adam, adam_codes, form_names);

TYPED_TEST(compressed_adam, takes_the_state_of_the_stock_class) {
  using Stock = stock_of<TypeParam>;
  using StockOptions = leanopt::options_of<Stock>;
  std::vector<Tensor> a{leaf({70, 60}), leaf({70, 60}, torch::kFloat32, 1), leaf({7})};
  Stock theirs(a, StockOptions(1e-2).betas({0.75, 0.875}));
  train(theirs, a, 0, 3);
  const auto b = copies_of(a);
  typename TypeParam::optimizer ours(b, TypeParam::options(0.5).min_compressed_elements(100));
  load(ours, saved(theirs));
  EXPECT_EQ(options_at<typename TypeParam::options_type>(ours, 0).min_compressed_elements(), 100);
  for (const Tensor& p : b) EXPECT_EQ(steps_of(ours, p), 3);

  // Encoding costs each moment at most a code's width; the next step shows it, times the rate.
  train(theirs, a, 3, 4);
  train(ours, b, 3, 4);
  EXPECT_TRUE(is_compressed(ours, b[0]));
  EXPECT_FALSE(is_compressed(ours, b[2]));
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_LE(largest(a[i] - b[i]), 1e-2) << i;
  EXPECT_TRUE(agrees(b[2], a[2], adam_tolerance(torch::kFloat32)));

  // Each parameter draws random bits of its own.
  std::set<std::int64_t> ordinals;
  for (const Tensor& p : b) ordinals.insert(state_at<leanopt::ParamState>(ours, p).ordinal());
  EXPECT_EQ(ordinals.size(), b.size());
}

TEST(compression, takes_the_state_of_full_precision) {
  const auto params = make_parameters();
  const auto switch_class = [&](auto from, auto to) {
    using From = decltype(from);
    using To = decltype(to);
    const auto full_params = copies_of(params);
    const auto full = make_optimizer<From>(full_params, unusual_options<From>());
    train(*full, full_params, 0, 2);
    const auto small_params = copies_of(full_params);
    const auto small = make_optimizer<To>(small_params, To::options(0.5));
    load(*small, saved(*full));
    EXPECT_EQ(small->param_groups()[0].options().get_lr(), 0.0625);
    train(*small, small_params, 2, 3);
    EXPECT_EQ(steps_of(*small, small_params[0]), 3);
    EXPECT_TRUE(is_compressed(*small, small_params[0]));
    EXPECT_FALSE(is_compressed(*small, small_params[1]));
    EXPECT_LT(leanopt::compute_optimizer_size(*small).megabytes,
              leanopt::compute_optimizer_size(*full).megabytes);
  };
  switch_class(adam(), adam8bit());
  switch_class(adamw(), adamw8bit());
  switch_class(hugging_face_adafactor(), adafactor8bit());
}

/// LibTorch 1.13 named states by addresses in hexadecimal, which LibTorch 2 reads all as 0.
TEST(old_archives, of_libtorch_1_13_load) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  torch::serialize::OutputArchive out(unit), states(unit), list(unit), options(unit), params(unit);
  const char* keys[] = {"0x55d0c0ffee00", "0x55d0c0ffee80"};
  for (int i = 0; i < 2; ++i) {
    torch::serialize::OutputArchive one(unit);
    stock::AdamWParamState s;
    s.step(7 + i).exp_avg(torch::full({3 + i}, 0.5)).exp_avg_sq(torch::ones({3 + i}));
    s.serialize(one);
    states.write(keys[i], one);
    params.write("params/" + std::to_string(i), torch::IValue(keys[i]));
  }
  params.write("params/size", torch::tensor(std::int64_t(2)));
  stock::AdamWOptions(0.125).serialize(options);
  params.write("options", options);
  list.write("param_groups/size", torch::tensor(std::int64_t(1)));
  list.write("param_groups/0", params);
  out.write("pytorch_version", torch::IValue("1.5.0"));
  out.write("state", states);
  out.write("param_groups", list);
  std::stringstream stream;
  out.save_to(stream);

  Tensor a = leaf({3}), b = leaf({4});
  leanopt::AdamW o({a, b}, 0.5);
  load(o, stream.str());
  EXPECT_EQ(steps_of(o, a), 7);
  EXPECT_EQ(steps_of(o, b), 8);
  EXPECT_EQ(o.param_groups()[0].options().get_lr(), 0.125);
  set_gradients({a, b});
  o.step();
  EXPECT_EQ(steps_of(o, b), 9);
}

// Refused archives

TYPED_TEST(every, an_archive_that_does_not_fit_changes_nothing) {
  using Class = typename TypeParam::optimizer;
  const auto params = make_parameters();
  const auto held = make_optimizer<TypeParam>(params, unusual_options<TypeParam>());
  train(*held, params, 0, 2);
  auto& o = *held;
  using O = typename TypeParam::options_type;
  const auto refused = [&](const std::string& archive, const std::vector<std::string>& parts) {
    const snapshot before(o, params);
    const O first = options_at<O>(o, 0), second = options_at<O>(o, 1);
    EXPECT_TRUE(refuses([&] { load(o, archive); }, parts));
    EXPECT_TRUE(snapshot(o, params) == before);
    EXPECT_EQ(options_at<O>(o, 0), first);
    EXPECT_EQ(options_at<O>(o, 1), second);
  };
  const auto options = TypeParam::options(0.5);
  const auto written = [&](const groups& list) {
    Class other(list, options);
    std::vector<Tensor> all;
    for (const auto& g : list)
      for (const Tensor& p : g.params()) all.push_back(p);
    set_gradients(all);
    other.step();
    return saved(other);
  };
  Tensor a = leaf({70, 60}), b = leaf({7}), c = leaf({20, 4, 60}),
         d = leaf({4500}, torch::kBFloat16);
  refused(written({group({a, b, c, d})}), {"1 parameter groups", "the optimizer 2"});
  refused(written({group({a, b}), group({c})}), {"1 parameters in group 1", "the optimizer 2"});
  refused(written({group({a, b}), group({c, leaf({4501})})}),
          {"parameter 1 of group 1", "[4501]", "[4500]"});
  refused(written({group({b, a}), group({c, d})}), {"parameter 0 of group 0"});

  stock::SGD sgd(groups{group({a, b}), group({c, d})}, stock::SGDOptions(0.1).momentum(0.5));
  set_gradients({a, b, c, d});
  sgd.step();
  refused(saved(sgd), {"of another optimizer than"});

  torch::nn::Linear layer(2, 3);
  std::stringstream module;
  torch::save(layer, module);
  refused(module.str(), {"no archive of an optimizer"});

  const std::string good = saved(o);
  refused(good.substr(0, good.size() / 2), {""});
  refused("", {""});
}

TEST(refused, archives_of_other_rules_and_narrower_formats) {
  Tensor p = leaf({70, 60});
  const auto archive_of = [&](auto form) {
    using Form = decltype(form);
    typename Form::optimizer o({p}, Form::options(0.25));
    set_gradients({p});
    o.step();
    return saved(o);
  };
  const auto refused = [&](auto form, const std::string& archive,
                           const std::vector<std::string>& parts) {
    using Form = decltype(form);
    typename Form::optimizer o({p}, Form::options(0.5));
    EXPECT_TRUE(refuses([&] { load(o, archive); }, parts));
    EXPECT_TRUE(o.state().empty());
    EXPECT_EQ(o.param_groups()[0].options().get_lr(), 0.5);
  };
  refused(adamw(), archive_of(adam()), {"written by adam ", "this optimizer is adamw "});
  refused(adam(), archive_of(adamw()), {"written by adamw ", "this optimizer is adam "});
  refused(adamw(), archive_of(adafactor()), {"written by adafactor ", "this optimizer is adamw "});
  refused(adamw(), archive_of(adamw8bit()), {"log8", "full"});
  refused(adafactor(), archive_of(adafactor8bit()), {"log8", "full"});
  refused(adamw8bit(), archive_of(adam8bit()), {"written by adam "});
  refused(adafactor8bit(), archive_of(adafactor()), {"compressed", "beta1"});

  stock::AdamW amsgrad({p}, stock::AdamWOptions(0.25).amsgrad(true));
  set_gradients({p});
  amsgrad.step();
  refused(adamw8bit(), saved(amsgrad), {"group 0", "amsgrad"});

  stock::AdamW out_of_range({p}, stock::AdamWOptions(0.25));
  out_of_range.param_groups()[0].options().set_lr(-1);
  refused(adamw(), saved(out_of_range), {"group 0", "lr=-1"});
}

TYPED_TEST(compressed, codes_that_lack_a_part_are_refused) {
  using Class = typename TypeParam::optimizer;
  Tensor p = leaf({70, 60});
  Class o({p}, TypeParam::options(0.25));
  set_gradients({p});
  o.step();
  const std::string good = saved(o);
  auto& s = state_at<leanopt::ParamState>(o, p);
  const Tensor header = s.tensor("exp_avg.header"), codes = s.tensor("exp_avg");
  const auto refused = [&](const std::vector<std::string>& parts) {
    Class other({p}, TypeParam::options(0.5));
    EXPECT_TRUE(refuses([&] { load(other, saved(o)); }, parts));
    EXPECT_TRUE(other.state().empty());
    EXPECT_TRUE(refuses([&] { o.step(); }, parts));
  };
  s.tensor("exp_avg.header", {});
  refused({"parameter 0 of group 0", "exp_avg", "headers"});
  s.tensor("exp_avg.header", header.slice(0, 1).clone());
  refused({"parameter 0 of group 0", "exp_avg.header"});
  s.tensor("exp_avg.header", header);
  s.tensor("exp_avg", codes.to(torch::kInt));
  refused({"parameter 0 of group 0", "exp_avg", "Int"});
  s.tensor("exp_avg", codes);
  s.tensor("momentum", torch::zeros({70, 60}));
  refused({"parameter 0 of group 0", "momentum"});
  s.tensor("momentum", {});
  EXPECT_EQ(saved(o).size(), good.size());
  o.step();
}

TYPED_TEST(every, after_loading_addresses_are_held_again) {
  Tensor p = leaf({3});
  typename TypeParam::optimizer o({p}, TypeParam::options(0.25));
  set_gradients({p});
  o.step();
  load(o, saved(o));
  o.step();
  void* const old = p.unsafeGetTensorImpl();
  o.param_groups()[0].params().clear();
  p = Tensor();
  for (int i = 0; i < 10; ++i) EXPECT_NE(leaf({3}).unsafeGetTensorImpl(), old);
  o.step();
  EXPECT_TRUE(o.state().empty());
}

}  // namespace
