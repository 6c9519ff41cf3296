// Gradient release: the results of the ordinary step, the memory of a layer, and what is refused.

#include <leanopt/leanopt.hpp>
#include <leanopt/train/accumulate.hpp>
#include <leanopt/train/release.hpp>

#include "tests/cases/kinds.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace {

using cases::expect_words;
using cases::message_of;
using cases::same_bits;
using torch::Tensor;

constexpr int layers = 12, width = 256;
constexpr std::int64_t layer_bytes = (width * width + width) * 4;

torch::nn::Sequential make_model() {
  torch::set_num_threads(1);  // layers this small are not worth sharing
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::Tanh());
  }
  return model;
}

Tensor loss_of(torch::nn::Sequential& model, int step) {
  torch::manual_seed(100 + step);
  return model->forward(torch::randn({4, width})).square().mean();
}

constexpr int steps = 4;

/// The parameters after four steps, of which those from `begin` on release gradients.
template <class Optimizer, class Options>
std::vector<Tensor> train(const Options& options, int begin) {
  auto model = make_model();
  Optimizer optimizer(model->parameters(), options);
  std::optional<leanopt::gradient_release> releasing;
  for (int step = 0; step < steps; ++step) {
    if (step == begin) releasing.emplace(optimizer);
    loss_of(model, step).backward();
    for (const Tensor& p : model->parameters()) {
      EXPECT_EQ(p.grad().defined(), step < begin);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return model->parameters();
}

template <class Optimizer, class Options>
void expect_equal_bits(const Options& options, int begin = 0) {
  const auto ordinary = train<Optimizer>(options, steps);
  const auto released = train<Optimizer>(options, begin);
  for (std::size_t i = 0; i < ordinary.size(); ++i)
    ASSERT_TRUE(same_bits(ordinary[i], released[i])) << "parameter " << i;
}

TEST(gradient_release, gives_the_bits_of_the_ordinary_step) {
  expect_equal_bits<leanopt::AdamW>(leanopt::AdamWOptions(1e-3));
  expect_equal_bits<leanopt::AdamW8bit>(leanopt::AdamW8bitOptions(1e-3));
  expect_equal_bits<leanopt::Adafactor>(leanopt::AdafactorOptions());
  expect_equal_bits<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
  expect_equal_bits<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9));
}

/// The most memory on the CPU that was allocated at once since it began.
class memory_peak : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                         c10::Device) override {
    held_ += bytes;
    peak_ = std::max(peak_, held_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t held_ = 0, peak_ = 0;
};

/// The peak of what backward() allocates once the optimizer has its state: gradients, those of
/// activations (a few of 4 KiB) and what steps need.
std::int64_t peak_of_backward(bool release) {
  auto model = make_model();
  leanopt::AdamW8bit optimizer(model->parameters(), leanopt::AdamW8bitOptions(1e-3));
  std::optional<leanopt::gradient_release> releasing;
  if (release) releasing.emplace(optimizer);
  loss_of(model, 0).backward();
  optimizer.step();
  optimizer.zero_grad();
  const Tensor loss = loss_of(model, 1);
  const auto peak = std::make_shared<memory_peak>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
    loss.backward();
  }
  return peak->peak();
}

TEST(gradient_release, needs_the_memory_of_one_layer) {
  const std::int64_t ordinary = peak_of_backward(false), released = peak_of_backward(true);
  RecordProperty("layers_ordinary", std::to_string(double(ordinary) / layer_bytes));
  RecordProperty("layers_released", std::to_string(double(released) / layer_bytes));
  EXPECT_GE(ordinary, layers * layer_bytes);
  EXPECT_LE(released, layer_bytes * 3 / 2);
}

TEST(gradient_release, steps_a_tied_parameter_once) {
  const auto w = torch::full({2}, 3.0).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  const leanopt::gradient_release releasing(optimizer);
  (w * w).sum().backward();  // two paths, one gradient: 2 w
  EXPECT_TRUE(torch::equal(w, torch::zeros({2})));
}

TEST(gradient_release, ends_with_its_life) {
  const auto w = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  { const leanopt::gradient_release releasing(optimizer); }
  w.sum().backward();
  EXPECT_TRUE(w.grad().defined());
  EXPECT_TRUE(torch::equal(w, torch::ones({2})));
}

TEST(gradient_release, ends_with_its_life_also_for_what_is_frozen_then) {
  const auto w = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  {
    const leanopt::gradient_release releasing(optimizer);
    w.requires_grad_(false);
  }
  w.requires_grad_(true);
  w.sum().backward();
  EXPECT_TRUE(w.grad().defined());
  EXPECT_TRUE(torch::equal(w, torch::ones({2})));
}

TEST(gradient_release, loses_no_gradient_of_what_left_the_optimizer) {
  const auto w = torch::ones({2}).requires_grad_(), gone = torch::ones({3}).requires_grad_();
  torch::optim::SGD optimizer({w, gone}, 0.5);
  const leanopt::gradient_release releasing(optimizer);
  optimizer.param_groups()[0].params().pop_back();
  expect_words(message_of([&] { gone.sum().backward(); }), {"gradient_release", "[3]", "groups"});
  EXPECT_TRUE(gone.grad().defined());
  const torch::optim::SGD moved(std::move(optimizer));
  expect_words(message_of([&] { w.sum().backward(); }), {"gradient_release", "[2]", "moved"});
  EXPECT_TRUE(w.grad().defined());
}

TEST(gradient_release, refuses_graphs_that_need_the_weight_of_before) {
  const auto expect_refused = [](auto make) {
    const auto w = torch::ones({2}).requires_grad_(), x = torch::ones({2}).requires_grad_();
    auto optimizer = make(w);
    const leanopt::gradient_release releasing(optimizer);
    const Tensor later = x * w.detach();  // its gradient is the weight
    expect_words(message_of([&] { (w * 2 + later).sum().backward(); }), {"inplace"});
  };
  expect_refused([](const Tensor& w) { return torch::optim::SGD({w}, 0.5); });
  expect_refused([](const Tensor& w) { return leanopt::AdamW({w}, 0.5); });
}

TEST(gradient_release, leaves_frozen_parameters_alone) {
  const auto w = torch::ones({2}).requires_grad_(), frozen = torch::ones({2});
  leanopt::AdamW optimizer({w, frozen}, leanopt::AdamWOptions(0.5));
  const leanopt::gradient_release releasing(optimizer);
  (w * frozen).sum().backward();
  EXPECT_FALSE(torch::equal(w, torch::ones({2})));
  EXPECT_TRUE(torch::equal(frozen, torch::ones({2})));
}

TEST(gradient_release, is_refused_by_what_needs_all_gradients) {
  const auto w = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  leanopt::accumulator before(optimizer, 2);
  const leanopt::gradient_release releasing(optimizer);
  const std::vector<std::string> both{"parameter 0 of group 0", "gradient_release"};
  const auto expect = [&](const std::string& message, const char* name) {
    expect_words(message, both);
    expect_words(message, {name});
  };
  expect(message_of([&] { leanopt::accumulator(optimizer, 2); }), "gradient accumulation");
  expect(message_of([&] { before.backward(w.sum()); }), "gradient accumulation");
  leanopt::step_scalars scalars;
  expect(message_of([&] { leanopt::clip_grad_norm(optimizer, 1, scalars); }), "clip_grad_norm");
  leanopt::GradScaler scaler;
  scaler.scale(w.sum());
  expect(message_of([&] { scaler.step(optimizer); }), "GradScaler");
  expect_words(message_of([&] { leanopt::clip_grad_norm_({w}, 1); }),
               {"clip_grad_norm_", "gradient_release"});
  EXPECT_TRUE(torch::equal(w, torch::ones({2})));
}

TEST(gradient_release, refuses_scalars_that_one_parameter_would_use_up) {
  const auto w = torch::ones({2}).requires_grad_(), v = torch::ones({2}).requires_grad_();
  leanopt::AdamW optimizer({w, v}, 0.5);
  const leanopt::gradient_release releasing(optimizer);
  optimizer.set_step_scalars({torch::tensor(0.5f), {}, {}});
  expect_words(message_of([&] { (w + v).sum().backward(); }), {"set_step_scalars"});
  EXPECT_TRUE(torch::equal(w, torch::ones({2})) && torch::equal(v, torch::ones({2})));
}

TEST(gradient_release, refuses_gradients_and_hooks_that_are_there) {
  const auto w = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  w.sum().backward();
  expect_words(message_of([&] { leanopt::gradient_release r(optimizer); }),
               {"parameter 0 of group 0", "zero_grad"});
  optimizer.zero_grad();
  const leanopt::gradient_release first(optimizer);
  expect_words(message_of([&] { leanopt::gradient_release r(optimizer); }),
               {"parameter 0 of group 0", "hook"});
}

TEST(gradient_release, refuses_devices_with_threads_of_their_own) {
  const auto w = torch::ones({2}).requires_grad_();
  const auto other = torch::ones({2}, torch::kMeta).requires_grad_();
  torch::optim::SGD optimizer({w, other}, 0.5);
  expect_words(message_of([&] { leanopt::gradient_release r(optimizer); }),
               {"parameter 1 of group 0", "meta", "cpu"});
}

TEST(gradient_release, finds_parameters_that_were_added_later) {
  const auto w = torch::ones({2}).requires_grad_(), late = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  const leanopt::gradient_release releasing(optimizer);
  optimizer.add_param_group(std::vector<Tensor>{late});
  late.mutable_grad() = torch::ones({2});
  expect_words(message_of([&] { w.sum().backward(); }), {"parameter 0 of group 1", "later"});
}

TEST(gradient_release, refuses_a_graph_of_gradients) {
  const auto w = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({w}, 0.5);
  const leanopt::gradient_release releasing(optimizer);
  expect_words(message_of([&] {
                 w.square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
               }),
               {"create_graph"});
}

/// While it steps the first parameter, another thread runs backward() to the second.
class with_company : public torch::optim::Optimizer {
 public:
  explicit with_company(std::vector<Tensor> params)
      : Optimizer({torch::optim::OptimizerParamGroup(params)},
                  std::make_unique<torch::optim::SGDOptions>(0.5)) {}
  Tensor step(LossClosure = nullptr) override {
    std::thread([&] {
      message = message_of([&] { param_groups()[0].params()[1].sum().backward(); });
    }).join();
    return {};
  }
  std::string message;
};

TEST(gradient_release, refuses_two_backward_passes_at_once) {
  const auto a = torch::ones({2}).requires_grad_(), b = torch::ones({2}).requires_grad_();
  with_company optimizer({a, b});
  const leanopt::gradient_release releasing(optimizer);
  a.sum().backward();
  expect_words(optimizer.message, {"two backward passes"});
}

TEST(gradient_release, refuses_steps_that_look_at_all_gradients) {
  const auto w = torch::ones({2}).requires_grad_();
  leanopt::AdamW optimizer({w},
                           leanopt::AdamWOptions(0.5).nonfinite(leanopt::nonfinite::skip_step));
  expect_words(message_of([&] { leanopt::gradient_release r(optimizer); }),
               {"gradient_release", "group 0", "skip_step"});
  w.sum().backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST(gradient_release, makes_no_states_that_LibTorch_cannot_step) {
  const auto w = torch::ones({2}).requires_grad_();
  leanopt::AdamW optimizer({w}, 0.5);
  const leanopt::gradient_release releasing(optimizer);
  EXPECT_TRUE(optimizer.state().empty());
}

}  // namespace
