// The classes with parameters in a device's memory, where steps are the CUDA engine's: they leave
// the bits that they leave on the CPU, whoever counts the steps, and wait for nothing.

#include "tests/support/emulator/backend.hpp"
// The backend comes before the engine.
#include <leanopt/engine/cuda.cuh>
#include <leanopt/leanopt.hpp>
#include <leanopt/memory/footprint.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace leanopt::cuda {
stream current_stream(int device) {
  EXPECT_EQ(emulator::backend().current, device) << "work without a guard";
  return nullptr;
}
}  // namespace leanopt::cuda

namespace {

using emulator::backend;
using leanopt::Tensor;

/// A copy on the device, of the same strides.
Tensor there(const Tensor& t) {
  Tensor x = at::empty_strided(t.sizes(), t.strides(), t.options().device(emulator::device));
  x.copy_(t);
  return x;
}
Tensor scalar(double x, at::ScalarType type = at::kFloat) {
  return there(at::full({}, x, at::TensorOptions(type)));
}
/// What a program has at a time: tensors of several kinds, in the order in which it steps them.
std::vector<Tensor> numbers(bool wide, std::uint64_t seed) {
  torch::manual_seed(seed);
  std::vector<Tensor> all = {torch::randn({5000}),     torch::randn({7}),
                             torch::randn({70, 90}),   torch::randn({90, 61}).t(),
                             torch::randn({2, 3, 40}), torch::randn({0, 4})};
  if (wide) all.push_back(torch::randn({66, 64}, at::kDouble));
  all.push_back(torch::randn({64, 80}).to(at::kBFloat16));
  return all;
}
/// The same on the CPU and on the device.
struct twins {
  std::vector<Tensor> here, there;
  explicit twins(bool wide = true) {
    for (const Tensor& t : numbers(wide, 1)) {
      here.push_back(t.clone().requires_grad_());
      there.push_back(::there(t).requires_grad_());
    }
  }
  void set_gradients(std::uint64_t seed) {
    const auto g = numbers(here.size() == 8, 100 + seed);
    for (std::size_t i = 0; i < g.size(); ++i) {
      here[i].mutable_grad() = g[i] * 0.1;
      there[i].mutable_grad() = ::there(here[i].grad());
    }
  }
};
bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}
template <class State>
std::string difference_of_states(const State& a, const State& b) {
  std::string result;
  if (a.step() != b.step()) result += "step ";
  leanopt::detail::each_tensor(a, [&](const std::string& name, const Tensor& t) {
    const Tensor other = leanopt::detail::get_slot(b, name);
    if (!other.defined() || !same_bits(t, other)) result += name + " ";
  });
  return result;
}
/// What differs, as text. States that a device counts must be settled.
template <class Optimizer>
std::string difference(const Optimizer& a, const Optimizer& b) {
  std::string result;
  using State = typename Optimizer::State;
  for (std::size_t g = 0; g < a.param_groups().size(); ++g) {
    const auto &here = a.param_groups()[g].params(), &there = b.param_groups()[g].params();
    for (std::size_t i = 0; i < here.size(); ++i) {
      std::string of_one = same_bits(here[i], there[i]) ? "" : "numbers ";
      const auto x = a.state().find(here[i].unsafeGetTensorImpl());
      const auto y = b.state().find(there[i].unsafeGetTensorImpl());
      if ((x == a.state().end()) != (y == b.state().end()))
        of_one += "state ";
      else if (x != a.state().end())
        of_one += difference_of_states(static_cast<const State&>(*x->second),
                                       static_cast<const State&>(*y->second));
      if (!of_one.empty()) result += std::to_string(i) + ": " + of_one;
    }
  }
  return result;
}

template <class Options, class = void>
constexpr bool has_betas = false;
template <class Options>
constexpr bool has_betas<Options, std::void_t<decltype(std::declval<Options>().betas())>> = true;

template <class Optimizer>
struct named {
  using type = Optimizer;
  static constexpr bool is_elementwise = has_betas<typename Optimizer::Options>;
  typename Optimizer::Options options;
};
/// f(optimizer's type, options) for the classes and some of what can be made of their parts.
template <class F>
void with_each(F f) {
  using namespace leanopt;  // NOLINT: a list of names
  f(named<AdamW>{AdamWOptions(1e-2).weight_decay(0.1)});
  f(named<AdamW>{AdamWOptions(1e-2).amsgrad(true)});
  f(named<AdamW8bit>{AdamW8bitOptions(1e-2).weight_decay(0.1)});
  f(named<basic_adamw<formats::dynamic8>>{basic_adamw<formats::dynamic8>::Options(1e-2)});
  f(named<basic_adamw<formats::log8, weights::split24>>{
      basic_adamw<formats::log8, weights::split24>::Options(1e-2)});
  f(named<Adafactor>{AdafactorOptions()});
  f(named<Adafactor>{AdafactorOptions::hugging_face()});
  f(named<Adafactor8bit>{Adafactor8bitOptions()});
}

TEST(OnADevice, StepsLeaveTheBitsOfTheCpu) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    twins x;
    optimizer here(x.here, kind.options), there(x.there, kind.options);
    for (int step = 1; step <= 4; ++step) {
      x.set_gradients(step);
      if (step == 3) {  // one without a gradient falls behind
        x.here[2].mutable_grad() = Tensor();
        x.there[2].mutable_grad() = Tensor();
      }
      here.step();
      there.step();
      ASSERT_EQ(difference(here, there), "") << here.what().who.text() << ", step " << step;
    }
  });
}

TEST(OnADevice, LaterStepsAllocateNothingWaitForNothingAndLaunchLittle) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    twins x;
    optimizer there(x.there, kind.options);
    x.set_gradients(1);
    there.step();
    const auto allocations = backend().allocations, transfers = backend().transfers;
    const int launches = emulator::here().launches;
    for (int step = 0; step < 3; ++step) there.step();
    EXPECT_EQ(backend().allocations, allocations) << there.what().who.text();
    EXPECT_EQ(backend().transfers, transfers) << there.what().who.text();
    // A list each of float32 and float64, and of what is too small to be compressed; what a step
    // sends, and the step: one launch, or four.
    const bool elementwise = there.what().who.rule != "adafactor";
    EXPECT_LE(emulator::here().launches - launches, 3 * 4 * (elementwise ? 2 : 5));
  });
}

TEST(OnADevice, ScalarsAreReadThereAndStepsCountedThere) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    twins x;
    optimizer here(x.here, kind.options), there(x.there, kind.options);
    x.set_gradients(1);
    here.step();
    there.step();
    const auto transfers = backend().transfers;
    for (int step = 2; step <= 7; ++step) {
      x.set_gradients(step);
      const double found = step == 3 || step == 4, inv = 1.0 / step, clip = 0.3;
      here.set_step_scalars({at::full({}, inv), at::full({}, found), at::full({}, clip)});
      there.set_step_scalars({scalar(inv), scalar(found), scalar(clip)});
      here.step();
      there.step();
    }
    EXPECT_EQ(backend().transfers, transfers);
    EXPECT_EQ(there.steps_of(x.there[0]), 5);
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
    x.set_gradients(8);  // and the host counts again
    here.step();
    there.step();
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
  });
}

/// Records what f launches.
std::vector<std::function<void()>> capture(const std::function<void()>& f) {
  std::vector<std::function<void()>> graph;
  emulator::here().graph = &graph;
  try {
    f();
  } catch (...) {
    emulator::here().graph = nullptr;
    throw;
  }
  emulator::here().graph = nullptr;
  return graph;
}

TEST(OnADevice, ACapturedStepReplayedIsSoManySteps) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    auto o = kind.options;
    o.lr(0.02);
    if constexpr (!decltype(kind)::is_elementwise)
      if (o.is_hugging_face()) o.relative_step(false);
    twins x;
    optimizer here(x.here, o), there(x.there, o);
    const Tensor lr = scalar(o.lr(), at::kDouble);
    leanopt::set_lr(there, 0, lr);
    x.set_gradients(1);
    here.step();
    there.step();
    const auto graph = capture([&] { there.step(); });
    for (int step = 2; step <= 6; ++step) {
      const double rate = 0.01 / step;
      lr.fill_(rate);
      static_cast<typename optimizer::Options&>(here.param_groups()[0].options()).lr(rate);
      std::vector<Tensor> gradients;
      for (const Tensor& p : x.there) gradients.push_back(p.grad());
      x.set_gradients(step);
      for (std::size_t i = 0; i < gradients.size(); ++i) {  // the graph knows their places
        gradients[i].copy_(x.here[i].grad());
        x.there[i].mutable_grad() = gradients[i];
      }
      here.step();
      for (const auto& launch : graph) launch();
    }
    leanopt::settle_steps(there);
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();

    x.set_gradients(7);  // a step that is not captured goes on from there
    here.step();
    there.step();
    leanopt::settle_steps(there);
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
  });
}

// ---- what a program does between steps ----------------------------------------------------------

using leanopt::AdamW8bit;
using leanopt::AdamW8bitOptions;

struct pair_of_optimizers {
  twins x;
  AdamW8bit here, there;
  explicit pair_of_optimizers(const AdamW8bitOptions& o = AdamW8bitOptions(1e-2))
      : x(false), here(x.here, o), there(x.there, o) {}
  void step(std::uint64_t seed) {
    x.set_gradients(seed);
    here.step();
    there.step();
  }
  /// A step that only the device knows of.
  void counted_step(std::uint64_t seed, bool counts = true) {
    x.set_gradients(seed);
    if (counts) here.step();
    there.set_step_scalars({{}, scalar(!counts), {}});
    there.step();
  }
};

TEST(BetweenSteps, WhatADeviceCountedSurvivesAChangeOfTheList) {
  pair_of_optimizers both;
  both.counted_step(1);
  both.counted_step(2, false);
  both.counted_step(3);
  for (auto* list : {&both.x.here, &both.x.there}) (*list)[0].mutable_grad() = Tensor();
  both.here.step();
  both.there.step();
  EXPECT_EQ(difference(both.here, both.there), "");
  both.counted_step(4);
  for (auto* o : {&both.here, &both.there}) {  // one goes
    auto& list = o->param_groups()[0].params();
    list.erase(list.begin() + 2);
  }
  both.step(5);
  EXPECT_EQ(difference(both.here, both.there), "");
}
TEST(BetweenSteps, ListsThatTakeTurnsAreKept) {
  pair_of_optimizers both;
  const Tensor none = scalar(0);
  int allocations = 0, transfers = 0;
  for (int turn = 1; turn <= 8; ++turn) {
    both.x.set_gradients(turn);
    for (auto* list : {&both.x.here, &both.x.there})
      for (std::size_t i = 0; i < list->size(); ++i)
        if (i % 2 == std::size_t(turn) % 2) (*list)[i].mutable_grad() = Tensor();
    both.here.step();
    both.there.set_step_scalars({{}, none, {}});
    const auto before = backend();
    both.there.step();
    if (turn <= 2) continue;
    allocations += backend().allocations - before.allocations;
    transfers += backend().transfers - before.transfers;
  }
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(transfers, 0);
  both.counted_step(9);  // of all: what the two have counted is needed
  leanopt::settle_steps(both.there);
  EXPECT_EQ(difference(both.here, both.there), "");
}
TEST(BetweenSteps, OptionsMayChange) {
  pair_of_optimizers both;
  both.counted_step(1);
  for (auto* o : {&both.here, &both.there}) {
    auto& options = static_cast<AdamW8bitOptions&>(o->param_groups()[0].options());
    options.betas({0.8, 0.99}).lr(0.5).min_compressed_elements(100);
  }
  both.step(2);
  both.counted_step(3);
  leanopt::settle_steps(both.there);
  EXPECT_EQ(difference(both.here, both.there), "");
}
TEST(BetweenSteps, ACountSetByHandWins) {
  pair_of_optimizers both;
  both.counted_step(1);
  for (auto* o : {&both.here, &both.there})
    for (auto& [key, state] : o->state()) static_cast<leanopt::ParamState&>(*state).step(40);
  both.counted_step(2);
  EXPECT_EQ(both.there.steps_of(both.x.there[0]), 41);
  EXPECT_EQ(difference(both.here, both.there), "");
}
TEST(BetweenSteps, AnArchiveGoesFromOneToTheOther) {
  pair_of_optimizers both;
  both.counted_step(1);
  both.counted_step(2, false);
  both.counted_step(3);
  for (const bool from_device : {true, false}) {
    std::stringstream file;
    torch::save(from_device ? both.there : both.here, file);
    torch::load(from_device ? both.here : both.there, file);
    both.step(4);
    EXPECT_EQ(difference(both.here, both.there), "") << from_device;
  }
}
TEST(BetweenSteps, SlotsAndRowsAreReadAndWrittenThere) {
  pair_of_optimizers both;
  both.counted_step(1);
  leanopt::settle_steps(both.there);
  const auto each = [&](auto f) {
    f(both.here, both.x.here);
    f(both.there, both.x.there);
  };
  each([](AdamW8bit& o, const std::vector<Tensor>& p) {
    leanopt::set_slot(o, p[2], "exp_avg", leanopt::slot(o, p[2], "exp_avg") * 2);
    leanopt::keep_rows(o, p[2], at::arange(60));
    leanopt::append_rows(o, p[0], at::ones({300}));
    leanopt::zero_rows(o, p[0], at::arange(10, 700));
    EXPECT_EQ(leanopt::master_weight(o, p[5]).device(), p[5].device());
  });
  EXPECT_EQ(difference(both.here, both.there), "");
  EXPECT_TRUE(same_bits(leanopt::slot(both.here, both.x.here[2], "exp_avg_sq"),
                        leanopt::slot(both.there, both.x.there[2], "exp_avg_sq")));
}
TEST(OnADevice, PredictedMemoryIsMeasured) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    twins x;
    x.here.erase(x.here.begin() + 3);  // the one that is not in row-major order
    x.there.erase(x.there.begin() + 3);
    optimizer here(x.here, kind.options), there(x.there, kind.options);
    for (auto* list : {&x.here, &x.there})
      for (Tensor& p : *list) p.mutable_grad() = at::ones_like(p);
    here.step();
    there.step();
    const leanopt::footprint measured = leanopt::measure(there),
                             predicted = leanopt::predict<optimizer>(x.there, kind.options);
    EXPECT_EQ(predicted.scratch, measured.scratch) << there.what().who.text();
    EXPECT_EQ(predicted.total(), measured.total()) << there.what().who.text();
    EXPECT_GT(measured.scratch, 0);
    EXPECT_EQ(leanopt::compute_optimizer_size(here).elements,
              leanopt::compute_optimizer_size(there).elements);
  });
}

// ---- gradients that are not finite --------------------------------------------------------------

TEST(NotFinite, ElementsAndStepsAreLeftOutAsOnTheCpu) {
  for (const auto what : {leanopt::nonfinite::skip_element, leanopt::nonfinite::skip_step}) {
    pair_of_optimizers both(AdamW8bitOptions(1e-2).nonfinite(what));
    for (int step = 1; step <= 4; ++step) {
      both.x.set_gradients(step);
      if (step % 2 == 0)
        for (auto* list : {&both.x.here, &both.x.there}) {
          (*list)[2].mutable_grad()[3][4] = std::numeric_limits<float>::infinity();
          (*list)[0].mutable_grad()[4999] = 0x1p100f;
        }
      both.here.step();
      both.there.step();
    }
    EXPECT_EQ(difference(both.here, both.there), "");
    EXPECT_EQ(both.here.skipped_elements(), both.there.skipped_elements());
    EXPECT_EQ(both.here.skipped_steps(), both.there.skipped_steps());
    EXPECT_GT(both.there.skipped_elements() + both.there.skipped_steps(), 0);
  }
}

// ---- several places -----------------------------------------------------------------------------

TEST(Places, OneOptimizerStepsTheCpuAndTwoDevices) {
  twins x;
  std::vector<Tensor> mixed;
  for (std::size_t i = 0; i < x.here.size(); ++i) {
    const at::Device where = i % 3 == 0
                                 ? at::Device(at::kCPU)
                                 : at::Device(emulator::device.type(), c10::DeviceIndex(i % 3 - 1));
    mixed.push_back(at::empty_strided(x.here[i].sizes(), x.here[i].strides(),
                                      x.here[i].options().device(where).requires_grad(false))
                        .copy_(x.here[i].detach())
                        .requires_grad_());
  }
  leanopt::AdamW here(x.here), there(mixed);
  for (int step = 1; step <= 3; ++step) {
    x.set_gradients(step);
    for (std::size_t i = 0; i < mixed.size(); ++i)
      mixed[i].mutable_grad() = x.here[i].grad().to(mixed[i].device());
    for (auto* o : {&here, &there})
      o->set_step_scalars({at::full({}, 0.5), at::full({}, float(step == 2)), {}});
    here.step();
    there.step();
  }
  EXPECT_EQ(emulator::backend().current, 0);
  EXPECT_EQ(difference(here, there), "");
}

// ---- what cannot be done ------------------------------------------------------------------------

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "";
}
bool says(const std::string& text, const char* what) {
  return text.find(what) != std::string::npos;
}

TEST(Refused, ACaptureThatWouldReplaySomethingElse) {
  pair_of_optimizers both;
  both.x.set_gradients(1);
  EXPECT_TRUE(says(error_of([&] { capture([&] { both.there.step(); }); }), "before the capture"));
  EXPECT_EQ(both.there.steps_of(both.x.there[0]), 0);
  both.here.step();
  both.there.step();
  both.x.there[0].mutable_grad() = Tensor();
  EXPECT_TRUE(says(error_of([&] { capture([&] { both.there.step(); }); }), "before the capture"));
  EXPECT_EQ(difference(both.here, both.there), "");

  AdamW8bit skipping(both.x.there, AdamW8bitOptions().nonfinite(leanopt::nonfinite::skip_step));
  EXPECT_TRUE(says(error_of([&] { capture([&] { skipping.step(); }); }), "skip_step"));
  std::vector<Tensor> mixed = {both.x.here[0], both.x.there[2]};
  AdamW8bit of_both(mixed);
  of_both.step();
  EXPECT_TRUE(says(error_of([&] { capture([&] { of_both.step(); }); }), "CPU"));
}
TEST(Refused, ARateThatIsNotWhereTheParametersAre) {
  pair_of_optimizers both;
  const Tensor good = scalar(0.1, at::kDouble);
  EXPECT_TRUE(says(error_of([&] { leanopt::set_lr(both.there, 1, good); }), "group 1"));
  EXPECT_TRUE(says(error_of([&] { leanopt::set_lr(both.there, 0, scalar(0.1)); }), "float64"));
  EXPECT_TRUE(says(error_of([&] { leanopt::set_lr(both.here, 0, good); }), "same device"));
  torch::optim::AdamW stock(both.x.here);
  EXPECT_TRUE(says(error_of([&] { leanopt::set_lr(stock, 0, good); }), "leanopt's"));
  leanopt::set_lr(both.there, 0, good);
  leanopt::set_lr(both.there, 0, {});
  both.step(1);
  EXPECT_EQ(difference(both.here, both.there), "");
}

// ---- codes alone --------------------------------------------------------------------------------

template <class Format>
void check_codes(Format format) {
  torch::manual_seed(3);
  for (const auto range : {leanopt::values::any, leanopt::values::non_negative}) {
    Tensor x = torch::randn({3, 700});
    if (range == leanopt::values::non_negative) x = x.square();
    const auto here = leanopt::quantize_blockwise(x, format, range, 7);
    const auto there = leanopt::quantize_blockwise(::there(x), format, range, 7);
    EXPECT_EQ(there.codes.device(), emulator::device);
    EXPECT_TRUE(same_bits(here.codes, there.codes)) << Format::name;
    EXPECT_TRUE(!here.headers.defined() || same_bits(here.headers, there.headers)) << Format::name;
    EXPECT_TRUE(
        same_bits(leanopt::dequantize_blockwise(here), leanopt::dequantize_blockwise(there)));
  }
}
TEST(Codes, AreThoseOfTheCpu) {
  check_codes(leanopt::formats::log8{});
  check_codes(leanopt::formats::dynamic8{});
  check_codes(leanopt::formats::bfloat16{});
}

}  // namespace
