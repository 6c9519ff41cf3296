// The classes with parameters in a device's memory, where steps are the CUDA engine's: they leave
// the bits that they leave on the CPU, whoever counts the steps, and wait for nothing. One text for
// the emulator's device and for real ones: see place.hpp. Include it in one source of a program.
#pragma once

#include <leanopt/leanopt.hpp>
#include <leanopt/memory/footprint.hpp>

#include "tests/engine/cuda/place.hpp"
#include "tests/engine/cuda/twins.hpp"

#include <gtest/gtest.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using leanopt::Tensor;
using place::copy_on, place::same_bits;
using twins::difference, twins::parameters, twins::with_each;

Tensor scalar(double x, at::ScalarType type = at::kFloat) {
  return copy_on(place::device(), at::full({}, x, at::TensorOptions(type)));
}

TEST(OnADevice, StepsLeaveTheBitsOfTheCpu) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    parameters x(place::device());
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

/// Steps that the host counts, and then a device.
template <class Optimizer>
void check_steps_of(const std::vector<Tensor>& all, const typename Optimizer::Options& o,
                    bool float_gradients = false) {
  std::vector<Tensor> on_host, on_device;
  for (const Tensor& t : all) {
    on_host.push_back(t.clone().requires_grad_());
    on_device.push_back(copy_on(place::device(), t).requires_grad_());
  }
  Optimizer here(on_host, o), there(on_device, o);
  torch::manual_seed(5);
  for (int step = 1; step <= 4; ++step) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Tensor g =
          torch::randn_like(all[i], float_gradients ? at::kFloat : all[i].scalar_type());
      on_host[i].mutable_grad() = g;
      on_device[i].mutable_grad() = copy_on(place::device(), g);
    }
    if (step > 2) there.set_step_scalars({{}, scalar(0), {}});
    here.step();
    there.step();
  }
  leanopt::settle_steps(there);
  EXPECT_EQ(difference(here, there), "") << here.what().who.text() << all[0].scalar_type();
}
TEST(OnADevice, OddShapesAndTypes) {
  using namespace leanopt;  // NOLINT: a list of names
  torch::manual_seed(4);
  const std::vector<Tensor> odd = {torch::randn({}),          torch::randn({1}),
                                   torch::randn({3, 300, 5}), torch::randn({0}),
                                   torch::randn({2, 1, 700}), torch::randn({3, 0, 2}),
                                   torch::randn({300, 1})};
  const auto small = [](auto o) { return o.min_compressed_elements(100); };
  for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    std::vector<Tensor> all;
    for (const Tensor& t : odd) all.push_back(t.to(type));
    for (const bool float_gradients : {false, true}) {
      if (float_gradients && type == at::kDouble) continue;
      check_steps_of<AdamW>(all, {}, float_gradients);
      check_steps_of<AdamW8bit>(all, small(AdamW8bitOptions()), float_gradients);
      check_steps_of<Adafactor>(all, {}, float_gradients);
    }
  }
  check_steps_of<AdamW>({torch::zeros({0}), torch::zeros({0, 3})}, {});
  check_steps_of<AdamW>(
      {torch::randn({30, 20}, at::kComplexFloat), torch::randn({11}, at::kComplexDouble),
       torch::randn({7, 5}, at::kComplexFloat).t()},
      AdamWOptions().amsgrad(true));
}

TEST(OnADevice, LaterStepsAllocateNothingAndWaitForNothing) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    parameters x(place::device());
    optimizer there(x.there, kind.options);
    x.set_gradients(1);
    there.step();
    const std::int64_t allocations = place::allocations_of([&] {
      for (int step = 0; step < 3; ++step) there.step();
    });
    EXPECT_EQ(allocations, 0) << there.what().who.text();
  });
}

TEST(OnADevice, PredictedMemoryIsMeasured) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    auto o = kind.options;
    o.nonfinite(leanopt::nonfinite::skip_element);
    parameters x(place::device());
    x.here.erase(x.here.begin() + 3);  // the one that is not in row-major order
    x.there.erase(x.there.begin() + 3);
    optimizer here(x.here, o), there(x.there, o);
    for (auto* list : {&x.here, &x.there})
      for (Tensor& p : *list) p.mutable_grad() = at::ones_like(p);
    here.step();
    there.step();
    const leanopt::footprint measured = leanopt::measure(there),
                             predicted = leanopt::predict<optimizer>(x.there, o);
    EXPECT_EQ(predicted.scratch, measured.scratch) << there.what().who.text();
    EXPECT_EQ(predicted.total(), measured.total()) << there.what().who.text();
    EXPECT_GT(measured.scratch, 0);
    EXPECT_EQ(leanopt::compute_optimizer_size(here).elements,
              leanopt::compute_optimizer_size(there).elements);
  });
}

TEST(OnADevice, ScalarsAreReadThereAndStepsCountedThere) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    parameters x(place::device());
    optimizer here(x.here, kind.options), there(x.there, kind.options);
    x.set_gradients(1);
    here.step();
    there.step();
    for (int step = 2; step <= 7; ++step) {
      x.set_gradients(step);
      const double found = step == 3 || step == 4, inv = 1.0 / step, clip = 0.3;
      here.set_step_scalars({at::full({}, inv), at::full({}, found), at::full({}, clip)});
      there.set_step_scalars({scalar(inv), scalar(found), scalar(clip)});
      here.step();
      place::allocations_of([&] { there.step(); });  // waits for nothing
    }
    EXPECT_EQ(there.steps_of(x.there[0]), 5);
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
    x.set_gradients(8);  // and the host counts again
    here.step();
    there.step();
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
  });
}

TEST(OnADevice, ScalarsOfTheHostAreNoReasonToWait) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    parameters x(place::device());
    optimizer here(x.here, kind.options), there(x.there, kind.options);
    for (int step = 1; step <= 3; ++step) {
      x.set_gradients(step);
      for (optimizer* o : {&here, &there})
        o->set_step_scalars({at::full({}, 0.3), at::full({}, step == 2 ? 1.0 : 0.0),
                             at::full({}, 0.7, at::kDouble)});
      here.step();
      if (step == 1)
        there.step();
      else
        place::allocations_of([&] { there.step(); });
    }
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
  });
}

TEST(OnADevice, ACapturedStepReplayedIsSoManySteps) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    auto o = kind.options;
    o.lr(0.02);
    if constexpr (!decltype(kind)::is_elementwise)
      if (o.is_hugging_face()) o.relative_step(false);
    parameters x(place::device());
    optimizer here(x.here, o), there(x.there, o);
    const Tensor lr = scalar(o.lr(), at::kDouble);
    leanopt::set_lr(there, 0, lr);
    x.set_gradients(1);
    here.step();
    there.step();
    const std::function<void()> replay = place::capture([&] { there.step(); });
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
      replay();
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

TEST(OnADevice, ACapturedStepReadsItsScalars) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    parameters x(place::device());
    optimizer here(x.here, kind.options), there(x.there, kind.options);
    x.set_gradients(1);
    here.step();
    there.set_step_scalars({{}, scalar(0), {}});  // from now on the device counts
    there.step();
    const Tensor inv = scalar(1, at::kDouble), found = scalar(0), clip = scalar(1, at::kDouble);
    there.set_step_scalars({inv, found, clip});
    const std::function<void()> replay = place::capture([&] { there.step(); });
    for (int step = 2; step <= 5; ++step) {
      inv.fill_(1.0 / step);
      found.fill_(step == 3);
      clip.fill_(0.3);
      here.set_step_scalars({inv.cpu(), found.cpu(), clip.cpu()});
      here.step();
      replay();
    }
    leanopt::settle_steps(there);
    EXPECT_EQ(difference(here, there), "") << here.what().who.text();
  });
}

// ---- what a program does between steps ----------------------------------------------------------

using leanopt::AdamW8bit;
using leanopt::AdamW8bitOptions;

struct pair_of_optimizers {
  parameters x;
  AdamW8bit here, there;
  explicit pair_of_optimizers(const AdamW8bitOptions& o = AdamW8bitOptions(1e-2))
      : x(place::device(), /*wide=*/false), here(x.here, o), there(x.there, o) {}
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
  std::int64_t allocations = 0;
  for (int turn = 1; turn <= 8; ++turn) {
    both.x.set_gradients(turn);
    for (auto* list : {&both.x.here, &both.x.there})
      for (std::size_t i = 0; i < list->size(); ++i)
        if (i % 2 == std::size_t(turn) % 2) (*list)[i].mutable_grad() = Tensor();
    both.here.step();
    both.there.set_step_scalars({{}, none, {}});
    if (turn <= 2)
      both.there.step();
    else
      allocations += place::allocations_of([&] { both.there.step(); });
  }
  EXPECT_EQ(allocations, 0);
  both.counted_step(9);  // of all: what the two have counted is needed
  leanopt::settle_steps(both.there);
  EXPECT_EQ(difference(both.here, both.there), "");
}
TEST(BetweenSteps, ListsOfTheSameTensorsAreKept) {
  pair_of_optimizers both;
  std::int64_t bytes = 0;
  for (int turn = 1; turn <= 8; ++turn) {
    both.x.set_gradients(turn);
    for (auto* list : {&both.x.here, &both.x.there})
      if (turn % 2 == 0) (*list)[0].mutable_grad() = Tensor();
    both.here.step();
    both.there.set_step_scalars({{}, scalar(0), {}});
    both.there.step();
    if (turn == 4) bytes = both.there.scratch_bytes();
  }
  EXPECT_EQ(both.there.scratch_bytes(), bytes);
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
TEST(BetweenSteps, OptionsOfLibTorchKeepTheList) {
  pair_of_optimizers both;
  for (auto* o : {&both.here, &both.there}) {
    auto& groups = o->param_groups();
    const Tensor last = groups[0].params().back();
    groups[0].params().pop_back();
    groups.emplace_back(std::vector<Tensor>{last});
    for (auto& g : groups) g.set_options(std::make_unique<torch::optim::AdamWOptions>(0.1));
  }
  both.step(1);
  both.step(2);
  both.x.set_gradients(3);
  both.here.step();
  EXPECT_EQ(place::allocations_of([&] { both.there.step(); }), 0);
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
TEST(BetweenSteps, AFreshStateStartsAnew) {
  parameters x(place::device(), /*wide=*/false);
  leanopt::AdamW here(x.here), there(x.there);
  for (int step = 1; step <= 3; ++step) {
    x.set_gradients(step);
    if (step == 3)
      for (auto* o : {&here, &there})
        for (auto& [key, state] : o->state()) {
          state.reset();  // so that the next one may get its address
          state = std::make_unique<leanopt::AdamW::State>();
        }
    if (step < 3) there.set_step_scalars({{}, scalar(0), {}});
    here.step();
    there.step();
  }
  EXPECT_EQ(difference(here, there), "");
}
TEST(BetweenSteps, AnOrdinalMayChange) {
  using optimizer = leanopt::basic_adamw<leanopt::formats::bfloat16_stochastic>;
  parameters x(place::device(), /*wide=*/false);
  optimizer here(x.here), there(x.there);
  for (int step = 1; step <= 2; ++step) {
    x.set_gradients(step);
    for (auto* o : {&here, &there}) {
      o->step();
      auto& state = *o->state().at(o->param_groups()[0].params()[0].unsafeGetTensorImpl());
      static_cast<leanopt::ParamState&>(state).ordinal(70);
    }
  }
  EXPECT_EQ(difference(here, there), "");
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
  const auto each = [&](auto f) {
    f(both.here, both.x.here);
    f(both.there, both.x.there);
  };
  each([](AdamW8bit& o, const std::vector<Tensor>& p) {
    leanopt::set_slot(o, p[2], "exp_avg", leanopt::slot(o, p[2], "exp_avg") * 2);
    leanopt::keep_rows(o, p[2], at::arange(60));
    leanopt::append_rows(o, p[0], at::ones({300}));
    leanopt::zero_rows(o, p[0], at::arange(10, 700));
    const Tensor fresh = p[4].detach().clone().requires_grad_();
    leanopt::replace_parameter(o, p[4], fresh);
    EXPECT_EQ(o.param_groups()[0].params()[4].unsafeGetTensorImpl(), fresh.unsafeGetTensorImpl());
    EXPECT_EQ(leanopt::master_weight(o, p[5]).device(), p[5].device());
  });
  EXPECT_EQ(difference(both.here, both.there), "");
  EXPECT_TRUE(same_bits(leanopt::slot(both.here, both.x.here[2], "exp_avg_sq"),
                        leanopt::slot(both.there, both.x.there[2], "exp_avg_sq")));
}
TEST(BetweenSteps, WhatADeviceCountedMovesToAnotherTensor) {
  pair_of_optimizers both;
  both.counted_step(1);
  both.counted_step(2);
  const auto replace = [](AdamW8bit& o, std::vector<Tensor>& list) {
    const Tensor old = list[2];
    list[2] = copy_on(old.device(), old.detach()).requires_grad_();
    leanopt::replace_parameter(o, old, list[2]);
  };
  replace(both.here, both.x.here);
  replace(both.there, both.x.there);
  EXPECT_EQ(both.there.steps_of(both.x.there[2]), 2);
  both.step(3);
  EXPECT_EQ(difference(both.here, both.there), "");
}
TEST(BetweenSteps, SlotsAreRoundedByTheCountOfTheDevice) {
  using optimizer = leanopt::basic_adamw<leanopt::formats::bfloat16_stochastic>;
  parameters x(place::device(), /*wide=*/false);
  optimizer here(x.here), there(x.there);
  x.set_gradients(1);
  here.step();
  there.set_step_scalars({{}, scalar(0), {}});
  there.step();
  for (auto* o : {&here, &there}) {
    const Tensor& p = o->param_groups()[0].params()[0];
    leanopt::set_slot(*o, p, "exp_avg", at::full_like(p, 0.1f));
  }
  leanopt::settle_steps(there);
  EXPECT_EQ(difference(here, there), "");
}
TEST(BetweenSteps, TheRateOfTheNextStepIsTheOneThatItReads) {
  parameters x(place::device(), /*wide=*/false);
  leanopt::Adafactor here(x.here, leanopt::AdafactorOptions(0.25)), there(x.there);
  leanopt::set_lr(there, 0, scalar(0.25, at::kDouble));
  EXPECT_EQ(here.effective_lr(x.here[0]), there.effective_lr(x.there[0]));
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

TEST(NotFinite, ListsThatGoAreNotWaitedFor) {
  using optimizer = leanopt::basic_adamw<leanopt::formats::dynamic8>;
  const Tensor bad = at::full({8}, std::numeric_limits<float>::infinity());
  std::vector<Tensor> many;  // with a list each, of more than 4 MiB together
  for (int i = 0; i < 200; ++i)
    many.push_back(copy_on(place::device(), at::ones({8})).requires_grad_());
  optimizer there(many, optimizer::Options(1e-2).min_compressed_elements(1).nonfinite(
                            leanopt::nonfinite::skip_element));
  for (int i = 0; i < 400; ++i) {
    Tensor& p = many[i % 200];
    p.mutable_grad() = copy_on(place::device(), bad);
    if (i == 0)
      there.step();
    else
      place::allocations_of([&] { there.step(); });
    p.mutable_grad() = Tensor();
  }
  EXPECT_LT(there.scratch_bytes(), 5 << 20);
  EXPECT_EQ(there.skipped_elements(), 400 * 8);
}

// ---- several places -----------------------------------------------------------------------------

TEST(Places, OneOptimizerStepsTheCpuAndSeveralDevices) {
  parameters x(place::device());
  std::vector<Tensor> mixed;
  for (std::size_t i = 0; i < x.here.size(); ++i) {
    const auto index = c10::DeviceIndex((i % 3 - 1) % std::size_t(place::devices()));
    const at::Device where = i % 3 == 0 ? at::kCPU : at::Device(place::device().type(), index);
    mixed.push_back(copy_on(where, x.here[i].detach()).requires_grad_());
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
  EXPECT_EQ(c10::impl::VirtualGuardImpl(place::device().type()).getDevice(), place::device());
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
  EXPECT_TRUE(
      says(error_of([&] { place::capture([&] { both.there.step(); }); }), "before the capture"));
  EXPECT_EQ(both.there.steps_of(both.x.there[0]), 0);
  both.here.step();
  both.there.step();
  both.x.there[0].mutable_grad() = Tensor();
  EXPECT_TRUE(
      says(error_of([&] { place::capture([&] { both.there.step(); }); }), "before the capture"));
  EXPECT_EQ(difference(both.here, both.there), "");

  AdamW8bit skipping(both.x.there, AdamW8bitOptions().nonfinite(leanopt::nonfinite::skip_step));
  EXPECT_TRUE(says(error_of([&] { place::capture([&] { skipping.step(); }); }), "skip_step"));
  both.there.set_step_scalars({at::ones({}), {}, {}});
  EXPECT_TRUE(says(error_of([&] { place::capture([&] { both.there.step(); }); }), "scalar"));
  std::vector<Tensor> mixed = {both.x.here[0], both.x.there[2]};
  AdamW8bit of_both(mixed);
  of_both.step();
  EXPECT_TRUE(says(error_of([&] { place::capture([&] { of_both.step(); }); }), "CPU"));
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
  both.x.set_gradients(1);
  both.there.param_groups()[0].params().push_back(both.x.here[0]);
  EXPECT_TRUE(says(error_of([&] { both.there.step(); }), "set_lr"));
  both.there.param_groups()[0].params().pop_back();
  leanopt::set_lr(both.there, 0, good);
  leanopt::set_lr(both.there, 0, {});
  both.step(1);
  EXPECT_EQ(difference(both.here, both.there), "");
}

TEST(Refused, AGradientOnAnotherDevice) {
  pair_of_optimizers both;
  both.step(1);
  both.x.set_gradients(2);
  const at::Device last(place::device().type(), c10::DeviceIndex(place::devices() - 1));
  if (last == place::device()) GTEST_SKIP() << "there is one device";
  Tensor& g = both.x.there[0].mutable_grad();
  g = copy_on(last, g);
  EXPECT_TRUE(says(error_of([&] { both.there.step(); }), "its gradient"));
}
// ---- codes alone --------------------------------------------------------------------------------

template <class Format>
void check_codes(Format format) {
  torch::manual_seed(3);
  for (const auto range : {leanopt::values::any, leanopt::values::non_negative}) {
    Tensor x = torch::randn({3, 700});
    if (range == leanopt::values::non_negative) x = x.square();
    const auto here = leanopt::quantize_blockwise(x, format, range, 7);
    const auto there = leanopt::quantize_blockwise(copy_on(place::device(), x), format, range, 7);
    EXPECT_EQ(there.codes.device(), place::device());
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
