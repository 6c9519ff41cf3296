// Gradients that are not finite, and finite ones whose squares are not, through the classes. They
// are as visible as in LibTorch's classes, and in a compressed format they touch no other element,
// in their step or later. Where the options say so, an element or a step is left out.

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// A parameter and its optimizer's state after some steps.
struct outcome {
  Tensor p;
  std::map<std::string, Tensor> state;
};

constexpr std::int64_t elements = 5000, blocks = 20;
constexpr int steps = 40, bad_step = 3;

/// Runs a vector whose element `at` has no gradient, but `value` in one step. It starts as 0, so
/// that weight decay leaves it alone.
outcome run(const classes::subject& s, torch::ScalarType type, std::int64_t at, double value,
            int number_of_steps) {
  Tensor start = classes::made({elements}, type, 1);
  start[at] = 0;
  const Tensor p = classes::leaf(start);
  const auto optimizer = s.make({p});
  for (int step = 1; step <= number_of_steps; ++step) {
    Tensor g = classes::made({elements}, type, std::uint64_t(10 + step));
    g[at] = step == bad_step ? value : 0.0;
    p.mutable_grad() = g;
    optimizer->step();
  }
  outcome result{p.detach().clone(), {}};
  for (const auto& [name, t] : classes::state_of(*optimizer, p)) result.state[name] = t.clone();
  return result;
}

/// Whether two tensors have the same bits everywhere but at one element.
bool same_but_for(const Tensor& a, const Tensor& b, std::int64_t at) {
  Tensor x = a.clone(), y = b.clone();
  if (x.numel() == elements) {
    x[at] = 0;
    y[at] = 0;
  }
  return torch::equal(x, y);
}

std::string name_of(const testing::TestParamInfo<classes::subject>& info) {
  return info.param.name;
}

/// The classes of these names; there is no test without one.
std::vector<classes::subject> named(const std::vector<std::string>& names) {
  std::vector<classes::subject> result;
  for (const auto& s : classes::all())
    if (std::count(names.begin(), names.end(), s.name)) result.push_back(s);
  return result;
}

class Compressed : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Compressed,
                         testing::ValuesIn(named({"Adam8bit", "AdamW8bit", "AdamWDynamic8",
                                                  "AdamW8bitSplit24"})),
                         name_of);

/// One whose square overflows.
double huge(torch::ScalarType type) { return type == torch::kDouble ? 1e200 : 1e30; }

TEST_P(Compressed, ElementTouchesNoOther) {
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kDouble})
    for (const std::int64_t at : {0, 255, 256, 1000, 4998, 4999})
      for (const int number_of_steps : {bad_step, bad_step + 1, steps}) {
        const outcome clean = run(GetParam(), type, at, 0, number_of_steps);
        for (const double value : {double(inf), -double(inf), double(nan), huge(type), -1e30}) {
          SCOPED_TRACE(testing::Message() << torch::toString(type) << ", element " << at << " = "
                                          << value << ", " << number_of_steps << " steps");
          const outcome dirty = run(GetParam(), type, at, value, number_of_steps);
          ASSERT_EQ(clean.state.at("exp_avg.header").numel(), blocks);
          ASSERT_EQ(clean.state.at("exp_avg").scalar_type(), torch::kByte);
          EXPECT_TRUE(std::isfinite(clean.p[at].item<double>()));
          EXPECT_FALSE(std::isfinite(dirty.p[at].item<double>())) << "the element must be visible";
          EXPECT_TRUE(same_but_for(clean.p, dirty.p, at)) << "a neighbour's p changed";
          for (const auto& [name, t] : clean.state)
            EXPECT_TRUE(same_but_for(t, dirty.state.at(name), at)) << name;
        }
      }
}

/// Ordinary gradients before and after, so that the element has a history and a future.
TEST_P(Compressed, ElementLeavesTheOthersFinite) {
  for (const float value : {inf, nan, 1e30f}) {
    const Tensor p = classes::leaf(classes::made({elements}, torch::kFloat, 1));
    const auto optimizer = GetParam().make({p});
    for (int step = 1; step <= 30; ++step) {
      Tensor g = classes::made({elements}, torch::kFloat, std::uint64_t(10 + step));
      if (step == bad_step) g[77] = value;
      p.mutable_grad() = g;
      optimizer->step();
    }
    const std::int64_t lost = elements - torch::isfinite(p).sum().item<std::int64_t>();
    EXPECT_EQ(lost, 1) << value;
  }
}

/// Formats without blocks, and full precision with weights of every kind: nothing is repaired, so
/// what is not finite stays in its moment.
class Separate : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Separate,
                         testing::ValuesIn(named({"AdamWBfloat16", "AdamWBfloat16Stochastic",
                                                  "AdamWStochastic", "AdamWSplit24",
                                                  "AdamWSplit32"})),
                         name_of);

TEST_P(Separate, ElementTouchesNoOther) {
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kDouble})
    for (const std::int64_t at : {255, 4999}) {
      const outcome clean = run(GetParam(), type, at, 0, steps);
      for (const double value : {double(inf), double(nan), huge(type)}) {
        SCOPED_TRACE(testing::Message()
                     << torch::toString(type) << ", element " << at << " = " << value);
        const outcome dirty = run(GetParam(), type, at, value, steps);
        EXPECT_TRUE(same_but_for(clean.p, dirty.p, at)) << "a neighbour's p changed";
        for (const auto& [name, t] : clean.state)
          EXPECT_TRUE(same_but_for(t, dirty.state.at(name), at)) << name;
        EXPECT_FALSE(torch::isfinite(dirty.state.at("exp_avg_sq")[at]).item<bool>());
        if (!std::isfinite(value)) {
          EXPECT_FALSE(torch::isfinite(dirty.p[at]).item<bool>());
        }
      }
    }
}

/// Adafactor's sums join all elements by its very formula, so there a NaN is everywhere, as in
/// Python's.
class Joined : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Joined, testing::ValuesIn(named({"Adafactor", "Adafactor8bit"})),
                         name_of);

TEST_P(Joined, ElementIsVisibleEverywhere) {
  for (const double value : {double(inf), double(nan)}) {
    const outcome result = run(GetParam(), torch::kFloat, 77, value, bad_step);
    EXPECT_FALSE(torch::isfinite(result.p).any().item<bool>()) << value;
  }
}

class Full : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, Full, testing::ValuesIn(named({"Adam", "AdamW"})), name_of);

/// In full precision what is not finite stands where LibTorch's classes have it, in p and in both
/// moments.
TEST_P(Full, ElementIsAsVisibleAsInLibTorch) {
  for (const double value : {double(inf), -double(inf), double(nan), 1e30}) {
    const std::int64_t at = 1234;
    const outcome ours = run(GetParam(), torch::kFloat, at, value, steps);
    Tensor start = classes::made({elements}, torch::kFloat, 1);
    start[at] = 0;
    const Tensor p = classes::leaf(start);
    std::unique_ptr<torch::optim::Optimizer> theirs;
    if (GetParam().name == "Adam")
      theirs = std::make_unique<torch::optim::Adam>(
          std::vector<Tensor>{p}, torch::optim::AdamOptions(1e-2).weight_decay(0.1));
    else
      theirs = std::make_unique<torch::optim::AdamW>(
          std::vector<Tensor>{p}, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 1; step <= steps; ++step) {
      Tensor g = classes::made({elements}, torch::kFloat, std::uint64_t(10 + step));
      g[at] = step == bad_step ? value : 0.0;
      p.mutable_grad() = g;
      theirs->step();
    }
    // Inf in the first moment becomes NaN a step later in the one formula, m + w (g - m), and stays
    // Inf in the other, b m + w g.
    const auto agree = [&](const Tensor& a, const Tensor& b, const std::string& name) {
      EXPECT_TRUE(torch::equal(torch::isfinite(a), torch::isfinite(b))) << name << ", " << value;
    };
    EXPECT_TRUE(torch::equal(torch::isnan(ours.p), torch::isnan(p.detach()))) << value;
    agree(ours.p, p.detach(), "p");
    const auto expected = classes::state_of(*theirs, p);
    ASSERT_EQ(expected.size(), 2u);
    for (const auto& [name, t] : expected) agree(ours.state.at(name), t, name);
    EXPECT_FALSE(std::isfinite(ours.state.at("exp_avg_sq")[at].item<float>())) << value;
  }
}

// ---- nonfinite::skip_element --------------------------------------------------------------------

using leanopt::nonfinite;
using torch::optim::Optimizer;

constexpr torch::ScalarType types[] = {torch::kFloat, torch::kBFloat16, torch::kHalf,
                                       torch::kDouble};
/// Whether a class takes parameters of the type.
bool takes(const classes::subject& s, torch::ScalarType type) {
  return type != torch::kHalf || s.takes_float16;
}
/// What counts as not finite in a gradient of the type.
std::vector<double> bad_values(torch::ScalarType type) {
  std::vector<double> result = {inf, -inf, nan};
  if (type != torch::kHalf) result.insert(result.end(), {huge(type), -huge(type)});
  return result;
}

/// A parameter with its optimizer, and elements of it that a test has chosen.
class chosen_elements {
 public:
  Tensor p;
  std::unique_ptr<Optimizer> optimizer;

  chosen_elements(const classes::subject& s, nonfinite what, Tensor start)
      : p(classes::leaf(start)), optimizer(s.make({p}, what)) {
    for (const std::int64_t at : {0, 255, 256, 1000, int(p.numel()) - 1}) indices_.push_back(at);
  }
  /// A step in which the chosen ones have the gradient `value`.
  void step(int number, double value) {
    Tensor g = classes::made(p.sizes().vec(), p.scalar_type(), std::uint64_t(10 + number));
    for (const std::int64_t at : indices_) g.view(-1)[at] = value;
    p.mutable_grad() = g;
    optimizer->step();
  }
  std::int64_t count() const { return std::int64_t(indices_.size()); }
  /// What the optimizer keeps of the chosen ones, as numbers.
  std::map<std::string, Tensor> slots() {
    std::map<std::string, Tensor> result;
    for (const auto& [name, t] : classes::state_of(*optimizer, p))
      if (t.numel() == p.numel())
        result[name] = of(name == "residual" ? t : classes::slot_of(*optimizer, p, name));
    return result;
  }
  bool has_codes(const std::string& name) {
    for (const auto& [other, t] : classes::state_of(*optimizer, p))
      if (name == other) return t.scalar_type() == torch::kByte;
    return false;
  }
  Tensor of(const Tensor& t) const {
    return t.detach().contiguous().view(-1).index({torch::tensor(indices_)}).clone();
  }
  Tensor all_but(const Tensor& t) const {
    Tensor x = t.detach().contiguous().clone();
    if (x.numel() == p.numel()) x.view(-1).index_put_({torch::tensor(indices_)}, 0);
    return x;
  }

 private:
  std::vector<std::int64_t> indices_;
};

class SkipElement : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, SkipElement, testing::ValuesIn(classes::all()), name_of);

/// The others move as if the gradient had been 0 there.
TEST_P(SkipElement, LeavesItAsItIsAndNoOther) {
  constexpr double usual = 0x1p-5;  // neither the largest of a block nor the smallest
  for (const auto type : types) {
    if (!takes(GetParam(), type)) continue;
    for (const Tensor& start :
         {classes::made({elements}, type, 1), classes::made({90, 61}, type, 2).t()})
      for (const double value : bad_values(type)) {
        SCOPED_TRACE(testing::Message()
                     << torch::toString(type) << ' ' << start.sizes() << ' ' << value);
        chosen_elements x(GetParam(), nonfinite::skip_element, start.clone());
        chosen_elements clean(GetParam(), nonfinite::propagate, start.clone());
        for (int step = 1; step < bad_step; ++step) {
          x.step(step, usual);
          clean.step(step, usual);
        }
        const Tensor p_before = x.of(x.p);
        const auto before = x.slots();
        x.step(bad_step, value);
        clean.step(bad_step, 0);
        EXPECT_TRUE(torch::equal(x.all_but(x.p), clean.all_but(clean.p)));
        const auto state = classes::state_of(*x.optimizer, x.p);
        const auto expected = classes::state_of(*clean.optimizer, clean.p);
        ASSERT_EQ(state.size(), expected.size());
        for (std::size_t k = 0; k < state.size(); ++k)
          EXPECT_TRUE(torch::equal(x.all_but(state[k].second), x.all_but(expected[k].second)))
              << state[k].first;

        // Long enough for a first moment that is not kept to fade to a fiftieth.
        for (int step = bad_step + 1; step < steps; ++step) x.step(step, value);
        EXPECT_TRUE(torch::equal(x.of(x.p), p_before));
        const auto after = x.slots();
        EXPECT_EQ(after.size(), before.size());
        for (const auto& [name, t] : after) {
          SCOPED_TRACE(name);
          if (x.has_codes(name))  // rounded again in each step, for the header of the block then
            EXPECT_TRUE(((t / before.at(name)).log2().abs() <= 2).all().item<bool>()) << t;
          else
            EXPECT_TRUE(torch::equal(t, before.at(name)));
        }
        EXPECT_TRUE(torch::isfinite(x.p).all().item<bool>());
        EXPECT_EQ(classes::skipped_by(*x.optimizer).elements, (steps - bad_step) * x.count());
        EXPECT_EQ(classes::skipped_by(*x.optimizer).steps, 0);
        EXPECT_EQ(classes::steps_of(*x.optimizer, x.p), steps - 1);
      }
  }
}

TEST_P(SkipElement, ChangesNothingWhereAllIsFinite) {
  for (const auto type : types) {
    if (!takes(GetParam(), type)) continue;
    const auto run = [&](nonfinite what) {
      const std::vector<Tensor> parameters = classes::small_parameters(type);
      const auto optimizer = GetParam().make(parameters, what);
      for (int step = 1; step <= 3; ++step) {
        std::uint64_t seed = std::uint64_t(step) * 1000;
        for (const Tensor& p : parameters)
          p.mutable_grad() = classes::made(p.sizes().vec(), type, ++seed);
        optimizer->step();
      }
      EXPECT_EQ(classes::skipped_by(*optimizer).elements, 0);
      return classes::digest_of(*optimizer);
    };
    EXPECT_EQ(run(nonfinite::skip_element), run(nonfinite::propagate)) << torch::toString(type);
  }
}

/// A gradient counts as not finite from where its square overflows.
TEST_P(SkipElement, BeginsWhereTheSquareOverflows) {
  const auto skipped_at = [&](torch::ScalarType type, double value) {
    chosen_elements x(GetParam(), nonfinite::skip_element, classes::made({elements}, type, 1));
    x.step(1, value);
    x.step(2, -value);
    EXPECT_TRUE(torch::isfinite(x.p).all().item<bool>());
    return classes::skipped_by(*x.optimizer).elements / x.count();
  };
  EXPECT_EQ(skipped_at(torch::kFloat, 0x1p64), 2);
  EXPECT_EQ(skipped_at(torch::kFloat, 0x1.fffffep63), 0);
  EXPECT_EQ(skipped_at(torch::kBFloat16, 0x1p64), 2);
  EXPECT_EQ(skipped_at(torch::kBFloat16, 0x1.fep63), 0);
  EXPECT_EQ(skipped_at(torch::kDouble, 0x1p512), 2);
}

/// Codes hold float32 moments, of float64 parameters as well.
TEST_P(SkipElement, IsEnoughForFiniteParameters) {
  for (const auto type : types) {
    if (!takes(GetParam(), type)) continue;
    for (const double value : {double(inf), double(nan), 0x1p64, 0x1p100, 0x1p300}) {
      const bool beyond = type == torch::kHalf     ? std::isfinite(value)
                          : type != torch::kDouble ? value > 0x1p64 && value != inf
                                                   : false;
      if (beyond) continue;  // of the type's numbers
      chosen_elements x(GetParam(), nonfinite::skip_element, classes::made({elements}, type, 1));
      for (int step = 1; step <= 3; ++step) x.step(step, value);
      EXPECT_TRUE(torch::isfinite(x.p).all().item<bool>()) << torch::toString(type) << ' ' << value;
    }
  }
}

// ---- nonfinite::skip_step -----------------------------------------------------------------------

class SkipStep : public testing::TestWithParam<classes::subject> {};
INSTANTIATE_TEST_SUITE_P(Class, SkipStep, testing::ValuesIn(classes::all()), name_of);

/// Parameters of many shapes in two groups: the first three skip steps, the others propagate.
struct two_groups {
  std::vector<Tensor> parameters;
  std::unique_ptr<Optimizer> optimizer;

  two_groups(const classes::subject& s, torch::ScalarType type)
      : parameters(classes::small_parameters(type)) {
    using torch::optim::OptimizerParamGroup;
    const std::vector<Tensor> first(parameters.begin(), parameters.begin() + 3);
    const std::vector<Tensor> second(parameters.begin() + 3, parameters.end());
    optimizer = s.make_groups({OptimizerParamGroup(first, s.options(nonfinite::skip_step)),
                               OptimizerParamGroup(second, s.options(nonfinite::propagate))},
                              nonfinite::propagate);
  }
  void set_gradients(int step) {
    std::uint64_t seed = std::uint64_t(step) * 1000;
    for (const Tensor& p : parameters)
      p.mutable_grad() = classes::made(p.sizes().vec(), p.scalar_type(), ++seed);
  }
  void spoil(std::size_t parameter, double value) {
    parameters[parameter].mutable_grad().view(-1)[-1] = value;
  }
  /// All that a step may change but for the counters of what it skips.
  std::vector<std::uint64_t> everything() {
    std::vector<std::uint64_t> result = {classes::digest_of(*optimizer), optimizer->state().size()};
    for (const Tensor& p : parameters) {
      result.push_back(std::uint64_t(classes::steps_of(*optimizer, p)));
      result.push_back(p._version());
    }
    return result;
  }
};

TEST_P(SkipStep, ChangesNothingAtAll) {
  for (const auto type : types) {
    if (!takes(GetParam(), type)) continue;
    two_groups clean(GetParam(), type);
    for (int step = 1; step <= 4; ++step) {
      clean.set_gradients(step);
      clean.optimizer->step();
    }
    for (const double value : bad_values(type)) {
      if (value < 0 || (type != torch::kFloat && value == inf)) continue;  // one way to see them
      SCOPED_TRACE(testing::Message() << torch::toString(type) << ' ' << value);
      two_groups x(GetParam(), type);
      std::int64_t skipped = 0;
      for (int step = 1; step <= 4; ++step) {
        if (step % 2) {  // before the first step, and between others
          x.set_gradients(step);
          x.spoil(step == 1 ? 2 : 0, value);
          const auto before = x.everything();
          x.optimizer->step();
          EXPECT_EQ(x.everything(), before);
          EXPECT_EQ(classes::skipped_by(*x.optimizer).steps, ++skipped);
        }
        x.set_gradients(step);
        x.optimizer->step();
      }
      EXPECT_EQ(x.everything(), clean.everything());
      EXPECT_EQ(classes::skipped_by(*x.optimizer).elements, 0);
    }
  }
}

TEST_P(SkipStep, IsForGradientsOfItsGroup) {
  two_groups x(GetParam(), torch::kFloat);
  x.set_gradients(1);
  x.spoil(4, nan);
  x.optimizer->step();
  EXPECT_EQ(classes::skipped_by(*x.optimizer).steps, 0);
  for (const Tensor& p : x.parameters) EXPECT_EQ(classes::steps_of(*x.optimizer, p), 1);
  EXPECT_FALSE(torch::isfinite(x.parameters[4]).all().item<bool>());
  EXPECT_TRUE(torch::isfinite(x.parameters[0]).all().item<bool>());
}

TEST_P(SkipStep, IsKeptByArchives) {
  two_groups x(GetParam(), torch::kFloat);
  x.set_gradients(1);
  x.optimizer->step();
  x.spoil(0, inf);
  x.optimizer->step();
  torch::serialize::OutputArchive out;
  x.optimizer->save(out);
  std::stringstream bytes;
  out.save_to(bytes);

  std::vector<Tensor> copies;
  for (const Tensor& p : x.parameters)
    copies.push_back(classes::leaf(p.detach().clone(torch::MemoryFormat::Preserve)));
  using torch::optim::OptimizerParamGroup;
  const auto resumed =
      GetParam().make_groups({OptimizerParamGroup({copies[0], copies[1], copies[2]}),
                              OptimizerParamGroup({copies[3], copies[4], copies[5], copies[6]})},
                             nonfinite::propagate);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  resumed->load(in);
  EXPECT_EQ(classes::skipped_by(*resumed).steps, 0) << "counted since the optimizer was built";
  const auto step_both = [&](int step, double last) {
    x.set_gradients(step);
    x.parameters[0].mutable_grad().view(-1)[-1] = last;
    for (std::size_t i = 0; i < copies.size(); ++i)
      copies[i].mutable_grad() = x.parameters[i].grad();
    x.optimizer->step();
    resumed->step();
  };
  step_both(2, nan);
  step_both(3, 0.5);
  EXPECT_EQ(classes::skipped_by(*resumed).steps, 1);
  EXPECT_EQ(classes::steps_of(*resumed, copies[0]), 2);
  EXPECT_EQ(classes::digest_of(*resumed), classes::digest_of(*x.optimizer));
}

TEST_P(Full, ComplexGradientSkipsTheStep) {
  const auto complex = [](std::uint64_t seed) {
    return torch::complex(classes::made({elements}, torch::kFloat, seed),
                          classes::made({elements}, torch::kFloat, seed + 1));
  };
  const Tensor p = classes::leaf(complex(1)), before = p.detach().clone();
  const auto optimizer = GetParam().make({p}, nonfinite::skip_step);
  p.mutable_grad() = complex(3);
  torch::view_as_real(p.mutable_grad())[77][1] = nan;
  optimizer->step();
  EXPECT_TRUE(torch::equal(p, before));
  EXPECT_EQ(classes::skipped_by(*optimizer).steps, 1);
  EXPECT_EQ(classes::steps_of(*optimizer, p), 0);
  p.mutable_grad() = complex(3);
  optimizer->step();
  EXPECT_EQ(classes::steps_of(*optimizer, p), 1);
}

TEST_P(SkipStep, GivesTheLossAllTheSame) {
  two_groups x(GetParam(), torch::kFloat);
  const Tensor loss = x.optimizer->step([&] {
    x.set_gradients(1);
    x.spoil(0, nan);
    return torch::full({}, 3.0);
  });
  EXPECT_EQ(loss.item<double>(), 3);
  EXPECT_EQ(classes::skipped_by(*x.optimizer).steps, 1);
}

}  // namespace
