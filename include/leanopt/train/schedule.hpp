// Learning rates as functions of the step: warm-up, then constant, linear, cosine, polynomial or
// inverse square root, as in Hugging Face's library, and the LibTorch scheduler that applies them
// with Python's timing.
#pragma once

#include <leanopt/config.hpp>

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

LEANOPT_EXACT_BEGIN
namespace leanopt {

/// What a group's rate is multiplied by in the optimizer's step number `step`, counted from 0.
using schedule = std::function<double(std::int64_t step)>;

namespace detail {

inline void check_steps(const char* name, std::int64_t warmup, std::int64_t total) {
  TORCH_CHECK(warmup >= 0 && total >= warmup, "leanopt: ", name, ": warmup is ", warmup,
              " and total ", total, "; steps must be 0 <= warmup <= total");
}

/// Rises from 0 in step 0 to 1 in step `warmup`; then `after`.
template <class After>
schedule warm_up(std::int64_t warmup, After after) {
  return [=](std::int64_t step) {
    TORCH_CHECK(step >= 0, "leanopt: schedule: step is ", step, "; it cannot be negative");
    return step < warmup ? double(step) / double(warmup) : after(step);
  };
}

/// The part of the steps from `warmup` to `total` that lies behind, 0 to 1.
inline double progress(std::int64_t step, std::int64_t warmup, std::int64_t total) {
  return std::min(1.0, double(step - warmup) / double(std::max<std::int64_t>(1, total - warmup)));
}

}  // namespace detail

/// The rate as it is, after `warmup` steps.
inline schedule constant_schedule(std::int64_t warmup = 0) {
  detail::check_steps("constant_schedule", warmup, std::max<std::int64_t>(warmup, 0));
  return detail::warm_up(warmup, [](std::int64_t) { return 1.0; });
}

/// Falls from 1 to `end` in step `total` as (1 - progress)^power.
inline schedule polynomial_schedule(std::int64_t warmup, std::int64_t total, double power,
                                    double end = 0) {
  detail::check_steps("polynomial_schedule", warmup, total);
  TORCH_CHECK(power > 0 && end >= 0 && end <= 1, "leanopt: polynomial_schedule: power is ", power,
              " and end ", end, "; power must be positive and end, a part of the rate, in [0, 1]");
  return detail::warm_up(warmup, [=](std::int64_t step) {
    return end + (1 - end) * std::pow(1 - detail::progress(step, warmup, total), power);
  });
}

/// Falls in a straight line, to 0 in step `total`.
inline schedule linear_schedule(std::int64_t warmup, std::int64_t total) {
  detail::check_steps("linear_schedule", warmup, total);
  return polynomial_schedule(warmup, total, 1);
}

/// Falls as a cosine: `cycles` waves up to step `total`, so by default half of one, to 0.
inline schedule cosine_schedule(std::int64_t warmup, std::int64_t total, double cycles = 0.5) {
  detail::check_steps("cosine_schedule", warmup, total);
  TORCH_CHECK(cycles > 0, "leanopt: cosine_schedule: cycles is ", cycles, "; it must be positive");
  constexpr double pi = 3.14159265358979323846;
  return detail::warm_up(warmup, [=](std::int64_t step) {
    return 0.5 * (1 + std::cos(2 * pi * cycles * detail::progress(step, warmup, total)));
  });
}

/// Falls as sqrt(timescale / t), where t is `timescale` in step `warmup`. A timescale of 0 means
/// `warmup`, or 10,000 without a warm-up.
inline schedule inverse_sqrt_schedule(std::int64_t warmup, std::int64_t timescale = 0) {
  detail::check_steps("inverse_sqrt_schedule", warmup, std::max<std::int64_t>(warmup, 0));
  TORCH_CHECK(timescale >= 0, "leanopt: inverse_sqrt_schedule: timescale is ", timescale,
              "; it must be positive, or 0 for the default");
  if (timescale == 0) timescale = warmup > 0 ? warmup : 10000;
  return detail::warm_up(warmup, [=](std::int64_t step) {
    return 1 / std::sqrt(double(step - warmup + timescale) / double(timescale));
  });
}

/// Sets the rate of each group to its rate at construction times `schedule(step)`, as Python's
/// LambdaLR: the constructor sets the rates of step 0, and the n-th call of step() those of step n,
/// so in the loop it follows the optimizer's step. (LibTorch's StepLR computes from the number of
/// earlier calls and so is one step behind Python's.) A group added later begins at its own rate
/// and is multiplied from the next step() or load() on. torch::save and torch::load keep its state.
/// The optimizer must outlive it.
class LambdaLR : public torch::optim::LRScheduler {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, schedule factor)
      : LRScheduler(optimizer), optimizer_(optimizer), factor_(std::move(factor)) {
    TORCH_CHECK(factor_, "leanopt: LambdaLR: the schedule is empty");
    base_ = bases();
    apply(rates(base_, 0));
  }

  /// The step whose rates are set: how often step() was called.
  std::int64_t last_step() const { return step_count_; }
  /// The present rates of all groups.
  std::vector<double> get_last_lr() const { return get_current_lrs(); }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("step", torch::IValue(last_step()));
    archive.write("base_lrs", torch::IValue(bases()));
  }
  /// Sets the rates too. @throws and changes nothing where the number of groups differs.
  void load(torch::serialize::InputArchive& archive) {
    torch::IValue step, base;
    archive.read("step", step);
    archive.read("base_lrs", base);
    auto rates_at_start = base.toDoubleVector();
    const std::size_t groups = optimizer_.param_groups().size();
    TORCH_CHECK(rates_at_start.size() == groups, "leanopt: LambdaLR: the archive is of ",
                rates_at_start.size(), " groups, the optimizer has ", groups);
    TORCH_CHECK(step.toInt() >= 0 && step.toInt() <= std::numeric_limits<unsigned>::max(),
                "leanopt: LambdaLR: the archive has step ", step.toInt(),
                "; it must be from 0 to 2^32 - 1");
    apply(rates(rates_at_start, step.toInt()));
    base_ = std::move(rates_at_start);
    step_count_ = static_cast<unsigned>(step.toInt());
  }

 private:
  std::vector<double> get_lrs() override {
    base_ = bases();
    return rates(base_, last_step() + 1);
  }

  /// The rates that are multiplied; of groups added since the last step, their own.
  std::vector<double> bases() const {
    const auto& groups = optimizer_.param_groups();
    std::vector<double> result = base_;
    result.resize(std::min(base_.size(), groups.size()));
    while (result.size() < groups.size())
      result.push_back(groups[result.size()].options().get_lr());
    return result;
  }
  std::vector<double> rates(std::vector<double> bases, std::int64_t step) const {
    const double factor = factor_(step);
    TORCH_CHECK(factor >= 0 && factor <= std::numeric_limits<double>::max(),
                "leanopt: LambdaLR: the schedule gives ", factor, " in step ", step,
                "; it must be finite and not negative");
    for (double& rate : bases) rate *= factor;
    return bases;
  }
  void apply(const std::vector<double>& rates) {
    for (std::size_t i = 0; i < rates.size(); ++i)
      optimizer_.param_groups()[i].options().set_lr(rates[i]);
  }

  torch::optim::Optimizer& optimizer_;
  schedule factor_;
  std::vector<double> base_;
};

inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const LambdaLR& scheduler) {
  scheduler.save(archive);
  return archive;
}
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  LambdaLR& scheduler) {
  scheduler.load(archive);
  return archive;
}

}  // namespace leanopt
LEANOPT_EXACT_END
