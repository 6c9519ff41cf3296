// The helpers of the training loop: accumulation of gradients, their norm, loss scales, schedules.
// The cases D27 to D31 are behaviours that training loops have got wrong.

#include <leanopt/leanopt.hpp>
#include <leanopt/train/accumulate.hpp>
#include <leanopt/train/autocast.hpp>
#include <leanopt/train/clip.hpp>
#include <leanopt/train/scaler.hpp>
#include <leanopt/train/schedule.hpp>

#include "tests/cases/kinds.hpp"

#include <gtest/gtest.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using cases::expect_words;
using cases::is_finite;
using cases::message_of;
using cases::numbers;
using cases::same_bits;
using leanopt::accumulator;
using leanopt::accumulator_options;
using torch::Tensor;
using torch::optim::SGD;

constexpr double infinity = std::numeric_limits<double>::infinity();

Tensor zeros(std::int64_t n = 1, torch::Dtype type = torch::kFloat64) {
  return torch::zeros({n}, type).requires_grad_();
}

/// A loss with the gradient `g` in every element of `p`.
Tensor with_gradient(const Tensor& p, double g) { return (p * g).sum(); }

/// The gradient that a step of SGD with rate 1 took from 0.
double stepped_by(const Tensor& p) { return -p[0].item<double>(); }

/// The gradient that AdamW saw in its first step.
double seen_by(leanopt::AdamW& optimizer, const Tensor& p) {
  return leanopt::slot(optimizer, p, "exp_avg")[0].item<double>() / (1 - 0.9);
}

/// The window's gradient of one micro-batch after another, taken by an optimizer of LibTorch's and
/// by one of ours.
template <class Run>
void expect_window_gradient(double expected, std::int64_t micro_batches, Run run) {
  for (const auto type : {torch::kFloat64, torch::kFloat32}) {
    const double relative = type == torch::kFloat64 ? tolerance::case_f64 : tolerance::case_f32;
    const Tensor p = zeros(1, type), q = zeros(1, type);
    SGD stock({p}, 1.0);
    accumulator a(stock, micro_batches);
    run(a, p);
    EXPECT_TRUE(a.is_complete());
    a.step();
    EXPECT_TRUE(a.stepped());
    EXPECT_NEAR(stepped_by(p), expected, relative * expected);

    leanopt::AdamW ours({q}, 1e-3);
    accumulator b(ours, micro_batches);
    run(b, q);
    b.step();
    EXPECT_NEAR(seen_by(ours, q), expected, relative * expected);
  }
}

// D27: gradients of means over items. Known wrong: the mean of the means, 3 for the first.

TEST(D27, token_weighted_accumulation) {
  const auto items = [](std::int64_t first, std::int64_t second) {
    return [=](accumulator& a, const Tensor& p) {
      a.backward_items(with_gradient(p, 1), first);
      a.backward_items(with_gradient(p, 5), second);
    };
  };
  expect_window_gradient(2, 2, items(3, 1));
  expect_window_gradient(3, 2, items(2, 2));
  expect_window_gradient(3, 2, [](accumulator& a, const Tensor& p) {
    a.backward(with_gradient(p, 1));
    a.backward(with_gradient(p, 5));
  });
}

// D28: a last window that is short. Known wrong: divided by what was planned, or never stepped.

TEST(D28, last_partial_window) {
  expect_window_gradient(1, 4, [](accumulator& a, const Tensor& p) {
    a.backward(with_gradient(p, 1));
    a.backward(with_gradient(p, 1), /*is_last=*/true);
  });
  expect_window_gradient(1, 4, [](accumulator& a, const Tensor& p) {
    a.backward(with_gradient(p, 1));
    a.backward(with_gradient(p, 1));
    EXPECT_FALSE(a.is_complete());
    a.finish();
  });
  expect_window_gradient(2.5, 4, [](accumulator& a, const Tensor& p) {
    a.backward_items(with_gradient(p, 1), 2);
    a.backward_items(with_gradient(p, 3), 6);
    a.finish();
  });
}

TEST(D28, nine_samples_in_batches_of_two_are_three_updates) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  accumulator a(optimizer, 2);
  int updates = 0;
  const Tensor samples = torch::ones({9}, torch::kFloat64);
  const auto batches = samples.split(2);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    a.backward((batches[i] * p).mean(), i + 1 == batches.size());
    updates += a.update();
  }
  EXPECT_EQ(updates, 3);
  EXPECT_EQ(leanopt::updates_per_epoch(std::int64_t(batches.size()), 2), 3);
  EXPECT_EQ(stepped_by(p), 3);
}

// D29: when it steps, and when the schedule does. Known wrong: a schedule that moves with every
// micro-batch.

std::string steps_of_two_epochs(bool flush) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  accumulator a(optimizer, 2);
  std::string result;
  for (int epoch = 0; epoch < 2; ++epoch)
    for (int i = 0; i < 3; ++i) {
      a.backward(with_gradient(p, 1), flush && i == 2);
      a.step();
      result += a.stepped() ? 'T' : 'F';
      a.zero_grad();
    }
  return result;
}

TEST(D29, when_it_steps) {
  EXPECT_EQ(steps_of_two_epochs(true), "FTTFTT");
  EXPECT_EQ(steps_of_two_epochs(false), "FTFTFT");
}

TEST(D29, when_the_schedule_does) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  leanopt::LambdaLR scheduler(optimizer, leanopt::constant_schedule());
  accumulator a(optimizer, 4);
  for (int i = 0; i < 8; ++i) {
    a.backward(with_gradient(p, 1));
    a.step();
    a.step(scheduler);
    a.zero_grad();
  }
  EXPECT_EQ(scheduler.last_step(), 2);
  EXPECT_EQ(stepped_by(p), 2);
}

TEST(D29, a_window_of_none_is_refused) {
  SGD optimizer({zeros()}, 1.0);
  expect_words(message_of([&] { accumulator(optimizer, 0); }), {"micro_batches", "0"});
}

// D30: windows without items. Known wrong: 0/0.

TEST(D30, a_window_without_items) {
  const Tensor p = zeros();
  leanopt::AdamW optimizer({p}, 1e-3);
  leanopt::LambdaLR scheduler(optimizer, leanopt::linear_schedule(0, 10));
  accumulator a(optimizer, 2);
  for (int i = 0; i < 2; ++i) a.backward_items(with_gradient(p, NAN), 0);
  EXPECT_FALSE(a.update(scheduler));
  EXPECT_FALSE(a.stepped());
  EXPECT_EQ(stepped_by(p), 0);
  EXPECT_FALSE(p.grad().defined());
  EXPECT_EQ(scheduler.last_step(), 0);
  EXPECT_EQ(optimizer.state().size(), 0u);

  a.backward_items(with_gradient(p, NAN), 0);  // beside others it has no weight
  a.backward_items(with_gradient(p, 2), 3);
  EXPECT_TRUE(a.update(scheduler));
  EXPECT_NEAR(seen_by(optimizer, p), 2, 2 * tolerance::case_f64);
  EXPECT_EQ(scheduler.last_step(), 1);
}

// D31: norms in half precision and of huge numbers. Known wrong: gradients of 0, or of NaN.

void set_gradient(const Tensor& p, const std::vector<double>& values) {
  p.mutable_grad() = torch::tensor(values, torch::kFloat64).to(p.scalar_type());
}

TEST(D31, clipping_half_precision_and_huge_norms) {
  const Tensor half = zeros(1, torch::kFloat16), huge = zeros(2, torch::kFloat32);
  set_gradient(half, {300});
  EXPECT_EQ(leanopt::clip_grad_norm_({half}, 1).item<double>(), 300);
  EXPECT_EQ(numbers(half.grad()), std::vector<double>{1});
  // A coefficient of 2^-25, which float16 has not.
  const Tensor many = zeros(1 << 20, torch::kFloat16);
  many.mutable_grad() = torch::full_like(many, 32768).detach();
  leanopt::clip_grad_norm_({many}, 1);
  EXPECT_TRUE(many.grad().eq(0x1p-10).all().item<bool>());
  set_gradient(huge, {1e20, 1});
  leanopt::clip_grad_norm_({huge}, 1);
  cases::expect_values(huge.grad(), {1, 1e-20}, tolerance::case_f32);
}

TEST(D31, clipping_what_is_not_finite_changes_nothing) {
  for (const double bad : {infinity, -infinity, double(NAN)}) {
    const Tensor p = zeros(2, torch::kFloat32), q = zeros(2, torch::kFloat32);
    for (const Tensor& t : {p, q}) set_gradient(t, {bad, 1});
    const Tensor before = p.grad().clone();
    EXPECT_FALSE(is_finite(leanopt::clip_grad_norm_({p}, 1)));
    EXPECT_TRUE(same_bits(p.grad(), before));
    SGD stock({p}, 1.0);
    leanopt::AdamW ours({q}, 1e-3);
    for (torch::optim::Optimizer* optimizer :
         {(torch::optim::Optimizer*)&stock, (torch::optim::Optimizer*)&ours}) {
      leanopt::step_scalars s;
      EXPECT_FALSE(is_finite(leanopt::clip_grad_norm(*optimizer, 1, s)));
      EXPECT_EQ(s.found_inf.item<double>(), 1);
      leanopt::step_with(*optimizer, s);
    }
    for (const Tensor& t : {p, q}) {
      EXPECT_TRUE(same_bits(t.grad(), before));
      EXPECT_EQ(numbers(t), (std::vector<double>{0, 0}));
    }
    EXPECT_EQ(ours.state().size(), 0u);
  }
}

TEST(D31, steps_with_the_scalars_of_clipping) {
  for (const auto type : {torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64}) {
    const Tensor p = zeros(2, type), q = zeros(2, type);
    for (const Tensor& t : {p, q}) set_gradient(t, {300, 400});
    SGD stock({p}, 1.0);
    leanopt::AdamW ours({q}, 1e-3);
    leanopt::step_scalars s;
    EXPECT_EQ(leanopt::clip_grad_norm(stock, 100, s).item<double>(), 500);
    leanopt::step_with(stock, s);
    EXPECT_EQ(numbers(p), (std::vector<double>{-60, -80})) << type;
    s = {};
    leanopt::clip_grad_norm(ours, 100, s);
    leanopt::step_with(ours, s);
    EXPECT_NEAR(seen_by(ours, q), 60, 60 * tolerance::case_f32) << type;
    EXPECT_EQ(numbers(q.grad()), (std::vector<double>{300, 400}));
  }
}

// The global norm

TEST(global_norm, of_a_long_tensor) {
  const Tensor t = torch::full({20'000'000}, 1e-3f);
  const double expected = double(1e-3f) * std::sqrt(2e7);
  EXPECT_NEAR(leanopt::global_norm({t}).item<double>(), expected, 1e-9 * expected);
}

TEST(global_norm, of_tensors_of_every_kind) {
  const Tensor matrix = torch::arange(12, torch::kFloat32).reshape({3, 4});
  const Tensor complex = torch::complex(torch::full({1}, 3.0), torch::full({1}, 4.0));
  const auto norm = [](const std::vector<Tensor>& tensors) {
    return leanopt::global_norm(tensors).item<double>();
  };
  EXPECT_EQ(norm({}), 0);
  EXPECT_EQ(norm({Tensor(), torch::empty({0, 3})}), 0);
  EXPECT_EQ(norm({Tensor(), torch::full({1}, 3.0)}), 3);
  EXPECT_NEAR(norm({matrix}), std::sqrt(506.0), 1e-12);
  EXPECT_NEAR(norm({matrix.t()}), std::sqrt(506.0), 1e-12);
  EXPECT_NEAR(norm({matrix.slice(1, 0, 4, 2)}), std::sqrt(220.0), 1e-12);
  EXPECT_EQ(norm({complex, torch::full({1}, 12.0, torch::kBFloat16)}), 13);
  EXPECT_EQ(norm({complex.conj()}), 5);
  EXPECT_EQ(norm({torch::full({1}, 3e-30f), torch::full({1}, 4e-30f)}),
            std::hypot(double(3e-30f), double(4e-30f)));
}

TEST(clip_grad_norm, leaves_small_gradients_alone) {
  const Tensor p = zeros(2, torch::kFloat32);
  set_gradient(p, {0.3, 0.4});
  const Tensor before = p.grad().clone();
  EXPECT_NEAR(leanopt::clip_grad_norm_({p, zeros()}, 1).item<double>(), 0.5, 1e-7);
  EXPECT_TRUE(same_bits(p.grad(), before));
  set_gradient(p, {0, 0});
  leanopt::clip_grad_norm_({p}, 1);
  EXPECT_EQ(numbers(p.grad()), (std::vector<double>{0, 0}));
  for (const double bad : {0.0, -1.0, double(NAN)})
    expect_words(message_of([&] { leanopt::clip_grad_norm_({p}, bad); }), {"max_norm"});
}

TEST(clip_grad_norm, of_gradients_that_autograd_leaves_conjugated) {
  const Tensor p = torch::ones({1}, torch::kComplexFloat).requires_grad_();
  p.conj().backward(torch::full({1}, c10::complex<float>(3, 4), torch::kComplexFloat));
  ASSERT_TRUE(p.grad().is_conj());
  EXPECT_EQ(leanopt::has_nonfinite({p.grad()}).item<double>(), 0);
  EXPECT_EQ(leanopt::clip_grad_norm_({p}, 0.5).item<double>(), 5);
  EXPECT_TRUE(
      torch::allclose(p.grad().resolve_conj(), torch::full({1}, c10::complex<float>(0.3f, -0.4f))));
}

TEST(clip_grad_norm, in_double_precision_where_one_gradient_is) {
  const Tensor p = zeros(1, torch::kFloat32), q = zeros();
  for (const Tensor& t : {p, q}) set_gradient(t, {3});
  leanopt::AdamW optimizer({p, q}, 1e-3);
  leanopt::step_scalars s;
  leanopt::clip_grad_norm(optimizer, 1, s);
  leanopt::step_with(optimizer, s);
  EXPECT_NEAR(seen_by(optimizer, q), std::sqrt(0.5), tolerance::case_f64);
}

TEST(clip_grad_norm, refuses_sparse_gradients_by_name) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  SGD optimizer(embedding->parameters(), 1.0);
  embedding->forward(torch::tensor({1})).sum().backward();
  leanopt::step_scalars s;
  expect_words(message_of([&] { leanopt::clip_grad_norm(optimizer, 1, s); }),
               {"parameter 0 of group 0", "dense"});
  expect_words(message_of([&] {
                 leanopt::clip_grad_norm_({zeros(), embedding->weight}, 1);
               }),
               {"clip_grad_norm_", "parameter 1", "dense"});
}

/// Counts the numbers that the host reads from tensors, for which it waits on a device.
class reads {
 public:
  reads() {
    count = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
          count += std::string(f.name()) == "aten::_local_scalar_dense";
          return nullptr;
        }));
  }
  ~reads() { at::removeCallback(handle_); }
  static inline thread_local int count = 0;

 private:
  at::CallbackHandle handle_;
};

TEST(loop, reads_nothing_from_the_device_before_the_step) {
  const Tensor p = zeros(2, torch::kFloat32);
  leanopt::AdamW optimizer({p}, 1e-3);
  leanopt::GradScaler scaler;
  const reads counted;
  scaler.scale(with_gradient(p, 3)).backward();
  leanopt::step_scalars s = scaler.check(optimizer);
  leanopt::clip_grad_norm(optimizer, 1, s);
  scaler.unscale_(optimizer);
  leanopt::clip_grad_norm_({p}, 1);
  scaler.update();
  EXPECT_EQ(reads::count, 0);
  leanopt::clip_grad_norm_({p}, 1).item<double>();
  EXPECT_EQ(reads::count, 1);  // it does count
}

// Accumulation

/// The gradients of a net's parameters before the step, from 64 samples in `parts`.
std::vector<Tensor> gradients_in(std::int64_t parts, torch::Dtype type) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::GELU(), torch::nn::Linear(16, 4));
  net->to(type);
  const Tensor x = torch::randn({64, 8}, type), y = torch::randint(4, {64});
  leanopt::AdamW optimizer(net->parameters(), 1e-3);
  accumulator a(optimizer, parts);
  for (std::int64_t i = 0; i < parts; ++i)
    a.backward(torch::cross_entropy_loss(net->forward(x.chunk(parts)[i]), y.chunk(parts)[i]));
  std::vector<Tensor> gradients;
  for (const Tensor& p : net->parameters()) gradients.push_back(p.grad().clone());
  a.step();
  EXPECT_EQ(optimizer.steps_of(net->parameters()[0]), 1);
  return gradients;
}

TEST(accumulator, over_four_equals_one_batch_of_four_times_the_size) {
  for (const auto type : {torch::kFloat64, torch::kFloat32}) {
    const auto one = gradients_in(1, type), four = gradients_in(4, type);
    // Sums of 64 terms in another order, and as many behind each term: 128 roundings of the
    // largest.
    const double unit = type == torch::kFloat64 ? 0x1p-53 : 0x1p-24;
    for (std::size_t i = 0; i < one.size(); ++i)
      EXPECT_LE((one[i] - four[i]).abs().max().item<double>(),
                128 * unit * one[i].abs().max().item<double>());
  }
}

TEST(accumulator, over_four_is_exact_where_sums_are) {
  // Small integers: no order of the sums rounds.
  const Tensor x = torch::arange(64, torch::kFloat32).remainder(7).reshape({16, 4});
  std::vector<Tensor> results;
  for (const std::int64_t parts : {1, 4}) {
    const Tensor w = torch::ones({4}).requires_grad_();
    leanopt::AdamW8bit optimizer({w}, leanopt::AdamW8bitOptions(1e-2).min_compressed_elements(1));
    accumulator a(optimizer, parts);
    for (const Tensor& batch : x.chunk(parts)) a.backward(batch.matmul(w).square().mean());
    EXPECT_TRUE(a.update());
    results.push_back(w);
  }
  EXPECT_TRUE(same_bits(results[0], results[1]));
}

TEST(accumulator, clips_the_gradient_of_the_window) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  accumulator a(optimizer, accumulator_options(2).max_norm(10));
  a.backward(with_gradient(p, 30));
  a.backward(with_gradient(p, -24));
  EXPECT_TRUE(a.update());
  EXPECT_EQ(stepped_by(p), 3);
}

TEST(accumulator, clips_after_dividing_by_what_was_seen) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  accumulator a(optimizer, accumulator_options(4).max_norm(10));
  a.backward(with_gradient(p, 30), true);  // 7.5 as it lies there
  a.update();
  EXPECT_NEAR(stepped_by(p), 10, 10 * tolerance::case_f32);
}

TEST(accumulator, leaves_out_a_step_that_is_not_finite) {
  const auto run = [](torch::optim::Optimizer& optimizer, const Tensor& p, auto options,
                      leanopt::GradScaler* scaler) {
    leanopt::LambdaLR scheduler(optimizer, leanopt::linear_schedule(0, 10));
    accumulator a(optimizer, options, scaler);
    a.backward(with_gradient(p, 1));
    a.backward(with_gradient(p, infinity));
    EXPECT_FALSE(a.update(scheduler));
    EXPECT_EQ(stepped_by(p), 0);
    EXPECT_FALSE(p.grad().defined());
    EXPECT_EQ(optimizer.state().size(), 0u);
    EXPECT_EQ(scheduler.last_step(), 0);
    for (int i = 0; i < 2; ++i) a.backward(with_gradient(p, 0.5));
    EXPECT_TRUE(a.update(scheduler));
    EXPECT_NE(stepped_by(p), 0);
    EXPECT_EQ(scheduler.last_step(), 1);
  };
  for (const auto& options :
       {accumulator_options(2).skip_nonfinite(true), accumulator_options(2).max_norm(1)}) {
    const Tensor p = zeros(), q = zeros();
    SGD stock({p}, 1.0);
    run(stock, p, options, nullptr);
    leanopt::AdamW ours({q}, 1e-3);
    run(ours, q, options, nullptr);
  }
  const Tensor p = zeros();
  leanopt::AdamW ours({p}, 1e-3);
  leanopt::GradScaler scaler;
  run(ours, p, accumulator_options(2), &scaler);
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(accumulator, adds_half_precision_in_float32) {
  for (const auto type : {torch::kBFloat16, torch::kFloat16}) {
    // Beside 1 the others are half a unit in the last place at most.
    const double small = type == torch::kBFloat16 ? 0x1p-8 : 0x1p-11;
    const auto run = [&](torch::optim::Optimizer& optimizer, const Tensor& p, bool wide) {
      accumulator a(optimizer, accumulator_options(4).in_float32(wide));
      for (const double g : {1.0, small, small, small}) a.backward(with_gradient(p, g));
      a.step();
    };
    const Tensor p = zeros(1, type), q = zeros(1, type), r = zeros(1, type);
    leanopt::AdamW wide({p}, 1e-3), narrow({q}, 1e-3);
    run(wide, p, true);
    run(narrow, q, false);
    EXPECT_NEAR(seen_by(wide, p), (1 + 3 * small) / 4, tolerance::case_f32);
    EXPECT_NEAR(seen_by(narrow, q), 0.25, tolerance::case_f32);
    SGD stock({r}, 1.0);
    run(stock, r, true);
    EXPECT_EQ(stepped_by(r), (1 + 4 * small) / 4) << "the sum, rounded once";
  }
}

TEST(accumulator, works_with_a_scaler) {
  const Tensor p = zeros(1, torch::kFloat32);
  SGD optimizer({p}, 1.0);
  leanopt::GradScaler scaler(leanopt::GradScalerOptions().init_scale(1024).growth_interval(1));
  accumulator a(optimizer, accumulator_options(4).max_norm(100), &scaler);
  a.backward(with_gradient(p, 3));
  EXPECT_EQ(p.grad()[0].item<double>(), 1024 * 3.0 / 4);
  a.backward(with_gradient(p, 5), true);
  EXPECT_EQ(scaler.get_scale(), 1024);  // it must not change within a window
  EXPECT_TRUE(a.update());
  EXPECT_EQ(stepped_by(p), 4);
  EXPECT_EQ(scaler.get_scale(), 2048);
}

TEST(accumulator, tells_the_loss_of_the_window) {
  const Tensor p = torch::ones({1}, torch::kFloat64).requires_grad_();
  SGD optimizer({p}, 0.0);
  accumulator a(optimizer, 4);
  EXPECT_FALSE(a.loss().defined());
  a.backward_items(with_gradient(p, 1), 3);
  a.backward_items(with_gradient(p, 5), 1, true);
  EXPECT_EQ(a.loss().item<double>(), 2);
  a.update();
  a.backward(with_gradient(p, 1));
  a.backward(with_gradient(p, 5), true);
  EXPECT_EQ(a.loss().item<double>(), 3);
}

TEST(accumulator, a_parameter_without_a_gradient_in_the_window_is_not_stepped) {
  const Tensor p = zeros(), unused = torch::ones({1}).requires_grad_();
  leanopt::AdamW optimizer({p, unused}, leanopt::AdamWOptions(0.1).weight_decay(0.5));
  accumulator a(optimizer, 2);
  for (int i = 0; i < 4; ++i) {
    a.backward(with_gradient(p, 1));
    a.update();
  }
  EXPECT_EQ(unused.item<double>(), 1);
  EXPECT_EQ(optimizer.steps_of(unused), 0);
  EXPECT_EQ(optimizer.steps_of(p), 2);
}

TEST(accumulator, a_window_is_stepped_and_cleared_once) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  accumulator a(optimizer, 2);
  a.finish();  // nothing to finish
  a.step();
  EXPECT_FALSE(a.stepped());
  a.backward(with_gradient(p, 1));
  a.zero_grad();  // the window is open: nothing is lost
  EXPECT_EQ(a.count(), 1);
  a.backward(with_gradient(p, 1));
  expect_words(message_of([&] { a.zero_grad(); }), {"step", "discard"});
  expect_words(message_of([&] { a.backward(with_gradient(p, 1)); }), {"complete", "step"});
  a.step();
  a.step();
  EXPECT_EQ(stepped_by(p), 1);
  expect_words(message_of([&] { a.backward(with_gradient(p, 1)); }), {"zero_grad"});
  a.zero_grad();
  a.backward_items(with_gradient(p, 1), 1);
  expect_words(message_of([&] { a.backward(with_gradient(p, 1)); }), {"backward_items"});
  expect_words(message_of([&] { a.backward_items(with_gradient(p, 1), -1); }), {"items"});
  EXPECT_EQ(a.discard(), 1);
  EXPECT_FALSE(p.grad().defined());
}

TEST(accumulator, a_backward_that_failed_spoils_the_window) {
  const Tensor p = zeros();
  SGD optimizer({p}, 1.0);
  accumulator a(optimizer, 2);
  a.backward(with_gradient(p, 1));
  message_of([&] { a.backward(torch::ones({})); });  // of no graph
  EXPECT_EQ(a.count(), 1);
  expect_words(message_of([&] { a.backward(with_gradient(p, 1)); }), {"failed", "discard"});
  expect_words(message_of([&] { a.finish(); }), {"failed", "discard"});
  EXPECT_EQ(a.discard(), 1);
  // The items of one that failed would weigh, though its gradient is not there.
  message_of([&] { a.backward_items(Tensor(), 6); });
  expect_words(message_of([&] { a.backward_items(with_gradient(p, 1), 2); }), {"discard"});
  a.zero_grad();
  for (int i = 0; i < 2; ++i) a.backward(with_gradient(p, 1));
  EXPECT_TRUE(a.update());
  EXPECT_EQ(stepped_by(p), 1);
}

TEST(accumulator, a_step_that_failed_is_tried_again_only_where_gradients_are_as_they_were) {
  struct failing : SGD {
    using SGD::SGD;
    Tensor step(LossClosure = nullptr) override { throw std::runtime_error("failing"); }
  };
  const Tensor p = zeros(), q = zeros();
  failing stock({p}, 1.0);
  accumulator a(stock, 4);
  a.backward(with_gradient(p, 1), true);
  EXPECT_THROW(a.step(), std::runtime_error);
  expect_words(message_of([&] { a.step(); }), {"failed", "discard"});
  EXPECT_EQ(a.discard(), 1);

  leanopt::AdamW ours({q}, 1e-3);
  accumulator b(ours, 4);
  b.backward(with_gradient(q, 1), true);
  auto& options = ours.param_groups()[0].options();
  options.set_lr(-1);
  EXPECT_THROW(b.step(), c10::Error);
  options.set_lr(1e-3);
  EXPECT_TRUE(b.update());
  EXPECT_NEAR(seen_by(ours, q), 1, tolerance::case_f64);
}

TEST(accumulator, refuses_a_scale_that_changed_within_the_window) {
  const Tensor p = zeros(), q = zeros();
  SGD first({p}, 1.0), second({q}, 1.0);
  leanopt::GradScaler scaler(leanopt::GradScalerOptions().growth_interval(1));
  accumulator a(first, 1, &scaler), b(second, 2, &scaler);
  b.backward(with_gradient(q, 1));
  a.backward(with_gradient(p, 1));
  a.update();
  b.backward(with_gradient(q, 1));
  expect_words(message_of([&] { b.update(); }), {"scaler", "within this window", "discard"});
  EXPECT_EQ(stepped_by(q), 0);
  b.discard();
  for (int i = 0; i < 2; ++i) b.backward(with_gradient(q, 1));
  EXPECT_TRUE(b.update());
  EXPECT_EQ(stepped_by(q), 1);
}

// GradScaler and autocast

TEST(GradScaler, grows_and_backs_off) {
  const Tensor p = zeros(1, torch::kFloat32);
  SGD optimizer({p}, 1.0);
  leanopt::GradScaler scaler(leanopt::GradScalerOptions().init_scale(8).growth_interval(2));
  EXPECT_EQ(scaler.get_scale(), 8);
  std::vector<double> scales;
  for (const double g : {1.0, 1.0, infinity, 1.0, double(NAN), 1.0, 1.0}) {
    const Tensor before = p.detach().clone();
    optimizer.zero_grad();
    scaler.scale(with_gradient(p, g)).backward();
    scaler.step(optimizer);
    EXPECT_EQ(scaler.stepped(optimizer), std::isfinite(g));
    EXPECT_EQ(p[0].item<double>(), before[0].item<double>() - (std::isfinite(g) ? 1 : 0));
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 16, 8, 8, 4, 4, 8}));
}

TEST(GradScaler, keeps_a_scale_whose_inverse_float32_has) {
  for (const bool grow : {false, true}) {
    const Tensor p = zeros(1, torch::kFloat32);
    SGD optimizer({p}, 1.0);
    leanopt::GradScaler scaler(leanopt::GradScalerOptions().growth_interval(1));
    scaler.scale(torch::ones({}));
    for (int i = 0; i < 200; ++i) {
      set_gradient(p, {grow ? 0 : infinity});
      scaler.step(optimizer);
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), grow ? 0x1p126 : 0x1p-126);
    optimizer.zero_grad();
    scaler.scale(with_gradient(p, 1)).backward();
    scaler.step(optimizer);
    EXPECT_EQ(stepped_by(p), 1);
  }
}

TEST(GradScaler, leaves_out_the_step_of_the_optimizer_concerned) {
  const Tensor p = zeros(1, torch::kFloat32), q = zeros(1, torch::kFloat32);
  SGD good({p}, 1.0);
  leanopt::AdamW bad({q}, 1e-3);
  leanopt::GradScaler scaler;
  scaler.scale(with_gradient(p, 1) + with_gradient(q, infinity)).backward();
  scaler.step(good);
  scaler.step(bad);
  EXPECT_TRUE(scaler.stepped(good));
  EXPECT_FALSE(scaler.stepped(bad));
  scaler.update();
  EXPECT_EQ(stepped_by(p), 1);
  EXPECT_EQ(stepped_by(q), 0);
  EXPECT_EQ(bad.state().size(), 0u);
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, saves_gradients_that_float16_has_not) {
  const double small = 0x1p-26;  // float16 ends at 2^-24
  const Tensor p = zeros(1, torch::kFloat16), q = zeros(1, torch::kFloat16);
  leanopt::AdamW plain({p}, 1e-3), scaled({q}, 1e-3);
  leanopt::GradScaler scaler;
  const auto loss = [&](const Tensor& t) { return (t.to(torch::kFloat32) * small).sum(); };
  loss(p).backward();
  plain.step();
  scaler.scale(loss(q)).backward();
  scaler.step(scaled);
  EXPECT_EQ(seen_by(plain, p), 0);
  EXPECT_NEAR(seen_by(scaled, q), small, tolerance::case_f32 * small);
}

TEST(GradScaler, clips_unscaled_gradients) {
  for (const bool rewrite : {false, true}) {
    const Tensor p = zeros(2, torch::kFloat32);
    SGD optimizer({p}, 1.0);
    leanopt::GradScaler scaler;
    scaler.scale((p * torch::tensor({3.0f, 4.0f})).sum()).backward();
    if (rewrite) {
      scaler.unscale_(optimizer);
      EXPECT_EQ(numbers(p.grad()), (std::vector<double>{3, 4}));
    }
    leanopt::step_scalars s = scaler.check(optimizer);
    EXPECT_EQ(leanopt::clip_grad_norm(optimizer, 2.5, s).item<double>(), 5);
    scaler.step(optimizer, s);
    EXPECT_EQ(numbers(p), (std::vector<double>{-1.5, -2}));
  }
}

TEST(GradScaler, refuses_calls_out_of_order) {
  const Tensor p = zeros(1, torch::kFloat32);
  SGD optimizer({p}, 1.0);
  leanopt::GradScaler scaler;
  expect_words(message_of([&] { scaler.step(optimizer); }), {"scaled", "backward"});
  expect_words(message_of([&] { scaler.update(); }), {"update"});
  scaler.scale(with_gradient(p, 1)).backward();
  expect_words(message_of([&] { scaler.step(optimizer, {}); }), {"check"});
  scaler.unscale_(optimizer);
  expect_words(message_of([&] { scaler.unscale_(optimizer); }), {"unscale_"});
  scaler.step(optimizer);
  expect_words(message_of([&] { scaler.step(optimizer); }), {"update"});
  expect_words(message_of([&] {
                 std::stringstream file;
                 torch::save(scaler, file);
               }),
               {"update"});
  EXPECT_EQ(stepped_by(p), 1);
  const auto expect_refused = [](const leanopt::GradScalerOptions& options, const char* name) {
    expect_words(message_of([&] { leanopt::GradScaler s(options); }), {"GradScaler", name});
  };
  for (const double scale : {0.0, 0x1p-127, 0x1p127, infinity})
    expect_refused(leanopt::GradScalerOptions().init_scale(scale), "init_scale");
  expect_refused(leanopt::GradScalerOptions().growth_factor(1), "growth_factor");
  expect_refused(leanopt::GradScalerOptions().backoff_factor(1), "backoff_factor");
  expect_refused(leanopt::GradScalerOptions().growth_interval(0), "growth_interval");
}

TEST(GradScaler, is_saved_and_loaded) {
  const Tensor p = zeros(1, torch::kFloat32);
  SGD optimizer({p}, 1.0);
  const auto step = [&](leanopt::GradScaler& scaler) {
    scaler.scale(with_gradient(p, 1)).backward();
    scaler.step(optimizer);
    scaler.update();
    return scaler.get_scale();
  };
  leanopt::GradScaler first(leanopt::GradScalerOptions().init_scale(8).growth_interval(3));
  step(first);
  step(first);
  std::stringstream file;
  torch::save(first, file);
  leanopt::GradScaler second;
  torch::load(second, file);
  EXPECT_EQ(second.get_scale(), 8);
  EXPECT_EQ(step(second), 16);  // the third step without overflow
  std::stringstream fresh;
  torch::save(leanopt::GradScaler(leanopt::GradScalerOptions().init_scale(4)), fresh);
  torch::load(second, fresh);
  EXPECT_EQ(step(second), 4);

  torch::serialize::OutputArchive wrong;
  wrong.write("scale", torch::IValue(8.0));
  wrong.write("growth_tracker", torch::IValue(std::int64_t(3)));
  wrong.write("growth_factor", torch::IValue(2.0));
  wrong.write("backoff_factor", torch::IValue(0.5));
  wrong.write("growth_interval", torch::IValue(std::int64_t(3)));
  std::stringstream bad;
  wrong.save_to(bad);
  torch::serialize::InputArchive archive;
  archive.load_from(bad);
  expect_words(message_of([&] { second.load(archive); }), {"growth_tracker", "3"});
  EXPECT_EQ(step(second), 4);
}

TEST(autocast_guard, runs_products_in_bfloat16) {
  const auto type = [](const Tensor& t) { return t.scalar_type(); };
  const Tensor a = torch::ones({2, 2}), w = torch::ones({2, 2}).requires_grad_();
  EXPECT_EQ(type(a.mm(w)), torch::kFloat32);
  Tensor loss;
  {
    const leanopt::autocast_guard outer(torch::kCPU);
    EXPECT_EQ(type(a.mm(w)), torch::kBFloat16);
    {
      const leanopt::autocast_guard inner(torch::kCPU, torch::kFloat16);
      EXPECT_EQ(type(a.mm(w)), torch::kFloat16);
      const leanopt::autocast_guard none(torch::kCPU, torch::kBFloat16, /*enabled=*/false);
      EXPECT_EQ(type(a.mm(w)), torch::kFloat32);
    }
    EXPECT_EQ(type(a.mm(w)), torch::kBFloat16);
    EXPECT_THROW(
        {
          const leanopt::autocast_guard inner(torch::kCPU, torch::kFloat16);
          throw std::runtime_error("");
        },
        std::runtime_error);
    loss = a.mm(w).sum();
  }
  EXPECT_EQ(type(a.mm(w)), torch::kFloat32);
  loss.backward();
  EXPECT_EQ(type(w.grad()), torch::kFloat32);
  expect_words(message_of([] { leanopt::autocast_guard g(torch::kCPU, torch::kFloat64); }),
               {"BFloat16"});
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
}

TEST(autocast_guard, forgets_the_casts_of_weights_at_its_end) {
  const Tensor a = torch::ones({2, 2}), w = torch::ones({2, 2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 1.0);
  const auto output = [&] {
    const leanopt::autocast_guard guard(torch::kCPU);
    return a.mm(w);
  };
  output().sum().backward();
  optimizer.step();
  EXPECT_EQ(output()[0][0].item<double>(), -2);
}

// Schedules

/// The rates of ten steps from the rate 10, as Hugging Face's tests list them, to two decimals or
/// three.
std::vector<double> ten_rates(const leanopt::schedule& schedule) {
  const Tensor p = zeros();
  SGD optimizer({p}, 10.0);
  leanopt::LambdaLR scheduler(optimizer, schedule);
  std::vector<double> rates;
  for (int i = 0; i < 10; ++i) {
    rates.push_back(scheduler.get_last_lr().at(0));
    scheduler.step();
  }
  return rates;
}

void expect_rates(const leanopt::schedule& schedule, const std::vector<double>& expected) {
  const std::vector<double> rates = ten_rates(schedule);
  for (std::size_t i = 0; i < 10; ++i) EXPECT_NEAR(rates[i], expected[i], 1e-2) << "step " << i;
}

TEST(schedule, gives_the_rates_of_hugging_face) {
  expect_rates(leanopt::constant_schedule(), {10, 10, 10, 10, 10, 10, 10, 10, 10, 10});
  expect_rates(leanopt::constant_schedule(4), {0, 2.5, 5, 7.5, 10, 10, 10, 10, 10, 10});
  expect_rates(leanopt::linear_schedule(2, 10), {0, 5, 10, 8.75, 7.5, 6.25, 5, 3.75, 2.5, 1.25});
  expect_rates(leanopt::cosine_schedule(2, 10), {0, 5, 10, 9.61, 8.53, 6.91, 5, 3.08, 1.46, 0.38});
  expect_rates(leanopt::polynomial_schedule(2, 10, 2, 1e-8),
               {0, 5, 10, 7.656, 5.625, 3.906, 2.5, 1.406, 0.625, 0.156});
  expect_rates(leanopt::inverse_sqrt_schedule(2),
               {0, 5, 10, 8.165, 7.071, 6.325, 5.774, 5.345, 5, 4.714});
}

TEST(schedule, ends_and_edges) {
  EXPECT_EQ(leanopt::linear_schedule(0, 10)(0), 1);
  EXPECT_EQ(leanopt::linear_schedule(2, 10)(10), 0);
  EXPECT_EQ(leanopt::linear_schedule(2, 10)(1000), 0);
  EXPECT_EQ(leanopt::linear_schedule(3, 3)(3), 1);
  EXPECT_EQ(leanopt::polynomial_schedule(0, 4, 2, 0.5)(1000), 0.5);
  EXPECT_NEAR(leanopt::cosine_schedule(0, 10)(10), 0, 1e-15);
  EXPECT_NEAR(leanopt::cosine_schedule(0, 10, 1)(10), 1, 1e-15);
  EXPECT_NEAR(leanopt::inverse_sqrt_schedule(0)(30000), 0.5, 1e-15);
  EXPECT_NEAR(leanopt::inverse_sqrt_schedule(4, 100)(304), 0.5, 1e-15);
}

TEST(schedule, refuses_what_is_out_of_range) {
  expect_words(message_of([] { leanopt::linear_schedule(5, 4); }), {"linear_schedule", "5", "4"});
  expect_words(message_of([] { leanopt::constant_schedule(-1); }), {"constant_schedule"});
  expect_words(message_of([] { leanopt::cosine_schedule(0, 4, 0); }), {"cycles"});
  expect_words(message_of([] { leanopt::polynomial_schedule(0, 4, 0); }), {"power"});
  expect_words(message_of([] { leanopt::polynomial_schedule(0, 4, 1, 2); }), {"end"});
  expect_words(message_of([] { leanopt::inverse_sqrt_schedule(0, -1); }), {"timescale"});
  expect_words(message_of([] { leanopt::linear_schedule(0, 4)(-1); }), {"schedule", "negative"});
  SGD optimizer({zeros()}, 1.0);
  expect_words(message_of([&] { leanopt::LambdaLR s(optimizer, nullptr); }), {"LambdaLR"});
  expect_words(
      message_of([&] { leanopt::LambdaLR s(optimizer, [](std::int64_t) { return NAN; }); }),
      {"LambdaLR", "finite"});
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1);
}

TEST(LambdaLR, has_the_timing_of_python_where_StepLR_is_late) {
  const auto rates = [](auto make) {
    SGD optimizer({zeros()}, 1.0);
    auto scheduler = make(optimizer);
    std::vector<double> result;
    for (int i = 0; i < 4; ++i) {
      scheduler.step();
      result.push_back(optimizer.param_groups()[0].options().get_lr());
    }
    return result;
  };
  const auto libtorch = rates([](auto& o) { return torch::optim::StepLR(o, 2, 0.5); });
  const auto ours = rates([](auto& o) {
    return leanopt::LambdaLR(o, [](std::int64_t step) { return std::pow(0.5, double(step / 2)); });
  });
  EXPECT_EQ(ours, (std::vector<double>{1, 0.5, 0.5, 0.25}));  // Python's StepLR
  EXPECT_EQ(libtorch, (std::vector<double>{1, 1, 0.5, 0.5}));
}

TEST(LambdaLR, takes_groups_that_come_later) {
  leanopt::AdamW optimizer({zeros()}, leanopt::AdamWOptions(1.0));
  leanopt::LambdaLR scheduler(optimizer, leanopt::linear_schedule(0, 4));
  scheduler.step();
  optimizer.add_param_group({{zeros()}, std::make_unique<leanopt::AdamWOptions>(8.0)});
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.75, 8}));
  std::stringstream file;
  torch::save(scheduler, file);
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.5, 4}));
  torch::load(scheduler, file);
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.75, 6}));
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.5, 4}));
}

TEST(LambdaLR, is_saved_and_loaded) {
  SGD first({zeros()}, 1.0), second({zeros()}, 7.0);
  const auto schedule = leanopt::cosine_schedule(2, 10);
  leanopt::LambdaLR saved(first, schedule), loaded(second, schedule);
  for (int i = 0; i < 5; ++i) saved.step();
  std::stringstream file;
  torch::save(saved, file);
  torch::load(loaded, file);
  EXPECT_EQ(loaded.last_step(), 5);
  EXPECT_EQ(loaded.get_last_lr(), saved.get_last_lr());
  saved.step();
  loaded.step();
  EXPECT_EQ(loaded.get_last_lr(), saved.get_last_lr());

  SGD wider({zeros()}, 1.0);
  wider.add_param_group(std::vector<Tensor>{zeros()});
  leanopt::LambdaLR other(wider, schedule);
  const auto before = other.get_last_lr();
  std::stringstream again;
  torch::save(saved, again);
  expect_words(message_of([&] { torch::load(other, again); }), {"LambdaLR", "1 groups", "2"});
  EXPECT_EQ(other.last_step(), 0);
  EXPECT_EQ(other.get_last_lr(), before);

  leanopt::LambdaLR failing(second, [](std::int64_t step) { return step == 6 ? NAN : 1; });
  std::stringstream last;
  torch::save(saved, last);
  expect_words(message_of([&] { torch::load(failing, last); }), {"LambdaLR", "step 6"});
  EXPECT_EQ(failing.last_step(), 0);
}

}  // namespace
