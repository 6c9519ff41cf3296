// What a program may do to parameters and state by hand between two steps: it works, or it is
// refused with a message before anything changes.

#include "tests/optim/support.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace front_test {
namespace {

using leanopt::ParamState;

void step_with(Optimizer& optimizer, const std::vector<Tensor>& params, std::int64_t round = 0) {
  set_gradients(params, round);
  optimizer.step();
}

TEST(set_slot, refuses_a_factor_that_a_vector_cannot_have) {
  const Tensor p = leaf({5});
  leanopt::Adafactor optimizer({p}, 1e-2);
  EXPECT_TRUE(refuses([&] { leanopt::set_slot(optimizer, p, "col_var", torch::ones({5})); },
                      {"no slot col_var"}));
  step_with(optimizer, {p});
  state_at<ParamState>(optimizer, p).tensor("row_var", torch::ones({5}));
  set_gradients({p});
  EXPECT_TRUE(refuses([&] { optimizer.step(); }, {"row_var"}));
}

TEST(set_slot, refuses_negative_second_moments) {
  const Tensor p = leaf({80, 60});
  leanopt::AdamW8bit optimizer({p}, 1e-2);
  step_with(optimizer, {p});
  const Tensor before = leanopt::slot(optimizer, p, "exp_avg_sq");
  EXPECT_TRUE(refuses(
      [&] {
        leanopt::set_slot(optimizer, p, "exp_avg_sq", torch::full({80, 60}, -1.0));
      },
      {"negative"}));
  EXPECT_TRUE(torch::equal(leanopt::slot(optimizer, p, "exp_avg_sq"), before));
  leanopt::set_slot(optimizer, p, "exp_avg_sq", torch::full({80, 60}, -0.0));
  EXPECT_TRUE(all_of(leanopt::slot(optimizer, p, "exp_avg_sq").eq(0)));
}

// A full-precision archive may hold anything; one bad value must not reach its block.
TEST(compression, keeps_a_negative_second_moment_to_itself) {
  const Tensor p = leaf({4096});
  leanopt::AdamW8bit optimizer({p}, leanopt::AdamW8bitOptions(1e-2).min_compressed_elements(8192));
  step_with(optimizer, {p});
  ParamState& s = state_at<ParamState>(optimizer, p);
  const Tensor moments = torch::full({4096}, 0.25);
  moments[7] = -0.5;
  s.tensor("exp_avg_sq", moments);
  options_at<leanopt::AdamW8bitOptions>(optimizer, 0).min_compressed_elements(1);
  step_with(optimizer, {p});
  ASSERT_TRUE(is_compressed(optimizer, p));
  const Tensor second = leanopt::slot(optimizer, p, "exp_avg_sq");
  EXPECT_TRUE(all_of(second.gt(0.2).logical_and(second.lt(0.3)))) << second.min() << second.max();
}

TEST(state, refuses_a_negative_step_count) {
  const Tensor p = leaf({5});
  leanopt::AdamW optimizer({p}, 1e-2);
  step_with(optimizer, {p});
  state_at<stock::AdamWParamState>(optimizer, p).step(-5);
  const Tensor before = p.detach().clone();
  set_gradients({p});
  EXPECT_TRUE(refuses([&] { optimizer.step(); }, {"step -5"}));
  EXPECT_TRUE(torch::equal(p, before));
}

TEST(state, refuses_codes_that_are_not_contiguous) {
  const Tensor p = leaf({64, 64});
  leanopt::AdamW8bit optimizer({p}, 1e-2);
  step_with(optimizer, {p});
  ParamState& s = state_at<ParamState>(optimizer, p);
  s.tensor("exp_avg", s.tensor("exp_avg").t());
  set_gradients({p});
  EXPECT_TRUE(refuses([&] { optimizer.step(); }, {"contiguous codes"}));
}

// The slots of one parameter are walked together, whatever order each was made in.
TEST(state, of_a_parameter_with_gaps_may_stand_in_any_order) {
  const auto with_gaps = [] {
    return torch::zeros({6, 10}).slice(1, 0, 10, 2).copy_(pattern({6, 5})).detach();
  };
  const Tensor p = with_gaps().set_requires_grad(true), q = leaf(pattern({6, 5}));
  leanopt::AdamW a({p}, 1e-2), b({q}, 1e-2);
  for (int round = 0; round < 3; ++round) {
    step_with(a, {p}, round);
    step_with(b, {q}, round);
    auto& s = state_at<stock::AdamWParamState>(a, p);
    s.exp_avg_sq(s.exp_avg_sq().t().contiguous().t());
  }
  EXPECT_TRUE(same_bits(p.contiguous(), q));
}

TEST(set_data, that_ties_two_parameters_is_refused) {
  const Tensor p = leaf({4}), q = leaf({4});
  leanopt::AdamW optimizer({p, q}, 1e-2);
  step_with(optimizer, {p, q});
  Tensor(q).set_data(p.detach());
  set_gradients({p, q});
  EXPECT_TRUE(refuses([&] { optimizer.step(); }, {"overlap"}));
}
TEST(set_data, that_expands_a_parameter_is_refused) {
  const Tensor p = leaf({4});
  leanopt::AdamW optimizer({p}, 1e-2);
  step_with(optimizer, {p});
  Tensor(p).set_data(torch::ones({1}).expand({4}));
  p.mutable_grad() = torch::ones({4});
  EXPECT_TRUE(refuses([&] { optimizer.step(); }, {"share memory"}));
}

TEST(set_data, that_moves_a_parameter_onto_another_in_one_storage_is_refused) {
  const Tensor flat = torch::ones({20});
  const Tensor p = leaf({10}), q = leaf({10});
  Tensor(p).set_data(flat.narrow(0, 0, 10));
  Tensor(q).set_data(flat.narrow(0, 10, 10));
  leanopt::AdamW optimizer({p, q}, 1e-2);
  step_with(optimizer, {p, q});
  Tensor(q).set_data(flat.narrow(0, 5, 10));
  set_gradients({p, q});
  EXPECT_TRUE(refuses([&] { optimizer.step(); }, {"overlap"}));
}

TEST(set_slot, before_the_first_step_belongs_to_that_parameter_alone) {
  leanopt::AdamW optimizer(std::vector<Tensor>{}, 1e-2);
  for (int round = 0; round < 50; ++round) {
    Tensor p = leaf({3});
    optimizer.param_groups()[0].params() = {p};
    leanopt::set_slot(optimizer, p, "exp_avg", torch::ones({3}));
    optimizer.param_groups()[0].params().clear();
    p = Tensor();
    const Tensor q = leaf({3}), before = q.detach().clone();
    optimizer.param_groups()[0].params() = {q};
    options_at<leanopt::AdamWOptions>(optimizer, 0).weight_decay(0);
    q.mutable_grad() = torch::zeros({3});
    optimizer.step();
    ASSERT_TRUE(torch::equal(q, before)) << round;
    optimizer.param_groups()[0].params().clear();
  }
}

TEST(replace_parameter, undoes_itself_where_the_new_one_is_unfit) {
  const Tensor p = leaf({4});
  leanopt::AdamW optimizer({p}, 1e-2);
  step_with(optimizer, {p});
  EXPECT_TRUE(refuses([&] { leanopt::replace_parameter(optimizer, p, leaf({4}) * 2); }, {"leaf"}));
  EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(p));
  EXPECT_TRUE(has_state(optimizer, p));
}

TEST(archive_of_another_class, is_refused_by_name) {
  const Tensor p = leaf({4});
  stock::RMSprop theirs({p}, 1e-2);
  step_with(theirs, {p});
  std::stringstream stream;
  torch::save(theirs, stream);
  const std::string text = stream.str();
  leanopt::AdamW adamw({p}, 1e-2);
  leanopt::Adafactor adafactor({p}, 1e-2);
  const auto load = [&](Optimizer& optimizer) {
    std::istringstream in(text);
    torch::serialize::InputArchive archive;
    archive.load_from(in);
    optimizer.load(archive);
  };
  EXPECT_TRUE(refuses([&] { load(adamw); }, {"betas", "another optimizer than adamw"}));
  EXPECT_TRUE(refuses([&] { load(adafactor); }, {"not written by leanopt"}));
}

TEST(flushed_denormals, change_no_coefficient) {
  const Tensor p = leaf({4}), q = leaf({4});
  for (const Tensor& x : {p, q}) x.mutable_grad() = torch::zeros({4});
  leanopt::AdamW a({p}, leanopt::AdamWOptions(1e-2).eps(1e-40)),
      b({q}, leanopt::AdamWOptions(1e-2).eps(1e-40));
  a.step();
  at::globalContext().setFlushDenormal(true);
  b.step();
  EXPECT_TRUE(
      refuses([&] { leanopt::Adafactor x({q}, leanopt::AdafactorOptions().beta2_decay(0.5)); },
              {"beta2_decay"}));
  leanopt::Adafactor constant({q}, leanopt::AdafactorOptions().beta2_decay(0));
  at::globalContext().setFlushDenormal(false);
  EXPECT_TRUE(same_bits(p.detach(), q.detach()));
}

TEST(replace_parameter, refuses_strangers) {
  const Tensor p = leaf({4}), stranger = leaf({4}), fresh = leaf({4});
  leanopt::AdamW ours({p}, 1e-2);
  stock::AdamW theirs({p}, 1e-2);
  for (Optimizer* o : {static_cast<Optimizer*>(&ours), static_cast<Optimizer*>(&theirs)}) {
    EXPECT_TRUE(refuses([&] { leanopt::replace_parameter(*o, stranger, fresh); },
                        {"no parameter of the optimizer"}));
    EXPECT_TRUE(refuses([&] { leanopt::keep_rows(*o, stranger, torch::arange(2)); },
                        {"no parameter of the optimizer"}));
    EXPECT_TRUE(refuses([&] { leanopt::append_rows(*o, p, torch::ones({2, 2})); }, {"do not fit"}));
  }
}

// A program may keep its gradients wider than its parameters: nothing of them is rounded away.
TEST(gradient, of_a_wider_type_is_read_as_it_is) {
  const Tensor wide = leaf({300}), half = leaf(pattern({300}).to(torch::kBFloat16));
  leanopt::AdamW a({wide}, 1e-2), b({half}, 1e-2);
  const Tensor g = pattern({300}, torch::kFloat32, 9) * 1.001;
  wide.mutable_grad() = g;
  half.mutable_grad() = g;
  a.step();
  b.step();
  EXPECT_TRUE(same_bits(leanopt::slot(a, wide, "exp_avg"), leanopt::slot(b, half, "exp_avg")));
}

TEST(slot, reads_and_sets_that_of_the_stock_classes) {
  const Tensor p = leaf({4});
  stock::Adam optimizer({p}, 1e-2);
  EXPECT_FALSE(leanopt::slot(optimizer, p, "exp_avg").defined());
  step_with(optimizer, {p});
  leanopt::set_slot(optimizer, p, "exp_avg", torch::full({4}, 0.5));
  EXPECT_TRUE(all_of(leanopt::slot(optimizer, p, "exp_avg").eq(0.5)));
}

}  // namespace
}  // namespace front_test
