// A whole training run as a template over the optimizer. Swapping the optimizer is the template
// argument and its options, nothing else: LibTorch's own classes go through the same text.
#pragma once

#include <leanopt/leanopt.hpp>
#include <leanopt/memory/size.hpp>
#include <leanopt/train/param_groups.hpp>

#include "examples/digits/data.hpp"
#include "examples/digits/epoch.hpp"
#include "examples/digits/metrics.hpp"
#include "examples/digits/nets.hpp"
#include "examples/digits/progress.hpp"
#include "examples/text.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace digits {

struct run_plan {
  std::string net;
  std::int64_t epochs;
  std::int64_t seed;
};

struct run_result {
  std::string net;
  std::string optimizer;
  std::int64_t parameters;
  scores evaluation;
  leanopt::optimizer_size state;
  double milliseconds_per_step;
};

inline void print_heading(const std::string& title, const net& model,
                          const leanopt::optimizer_size& state) {
  std::printf("\n%s: %s parameters, optimizer state before the first step: %.0f MB, %s elements\n",
              title.c_str(), text::with_commas(model.parameter_count()).c_str(), state.megabytes,
              text::with_commas(state.elements).c_str());
}

template <class Optimizer>
run_result train(const std::string& name, const leanopt::options_of<Optimizer>& options,
                 const data_set& data, const run_plan& plan) {
  const std::shared_ptr<net> model = make_net(plan.net, plan.seed);
  model->to(data.training.images.device());
  // Biases and the scales of norms have nothing to gain from being pulled towards zero.
  Optimizer optimizer(leanopt::weight_decay_groups(*model, options), options);
  print_heading(plan.net + " with " + name, *model, leanopt::compute_optimizer_size(optimizer));

  const std::int64_t steps = steps_per_epoch(data.training);
  progress_line progress(plan.epochs, steps);
  std::vector<double> times;
  scores evaluation{};
  for (std::int64_t epoch = 1; epoch <= plan.epochs; ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    train_epoch(*model, optimizer, data.training, plan.seed, epoch,
                [&](std::int64_t step, const torch::Tensor& loss) {
                  progress.after_step(epoch, step, loss);
                });
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    times.push_back(elapsed.count() / static_cast<double>(steps));
    evaluation = evaluate(*model, data.test);
    progress.after_epoch(epoch, times.back(), evaluation);
  }

  // The median epoch: the first one of a program also pays for thread pools and page faults.
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return {plan.net,
          name,
          model->parameter_count(),
          evaluation,
          leanopt::compute_optimizer_size(optimizer),
          *middle};
}

}  // namespace digits
