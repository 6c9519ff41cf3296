// What training a model costs with each optimizer. Every figure is leanopt::predict's.
#pragma once

#include <leanopt/leanopt.hpp>
#include <leanopt/memory/footprint.hpp>

#include "examples/plan/model.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace plan {

using shapes = std::vector<leanopt::parameter_shape>;

/// An optimizer with one type of weights.
struct contender {
  std::string argument;  ///< of --optimizer
  std::string optimizer, weights;
  at::ScalarType type;
  std::function<leanopt::footprint(const shapes&)> predict;
};

struct row {
  contender what;
  at::ScalarType gradients;
  leanopt::footprint cost;
};

template <class Optimizer>
contender make(std::string argument, std::string name, at::ScalarType type,
               leanopt::options_of<Optimizer> options, const std::string& residual = "") {
  return {std::move(argument), std::move(name), (type == at::kFloat ? "fp32" : "bf16") + residual,
          type, [options](const shapes& s) { return leanopt::predict<Optimizer>(s, options); }};
}

/// In the order of the table. To plan with another optimizer, add a line.
inline std::vector<contender> contenders() {
  namespace stock = torch::optim;
  namespace formats = leanopt::formats;
  using split24 = leanopt::weights::split24;
  const double lr = 1e-3;
  const auto hugging_face = leanopt::AdafactorOptions::hugging_face();
  return {
      make<stock::AdamW>("torch-adamw", "torch::optim::AdamW", at::kFloat, lr),
      make<stock::AdamW>("torch-adamw", "torch::optim::AdamW", at::kBFloat16, lr),
      make<stock::SGD>("torch-sgd", "torch::optim::SGD, momentum", at::kFloat,
                       stock::SGDOptions(lr).momentum(0.9)),
      make<stock::Adagrad>("torch-adagrad", "torch::optim::Adagrad", at::kFloat, lr),
      make<stock::RMSprop>("torch-rmsprop", "torch::optim::RMSprop", at::kFloat, lr),
      make<leanopt::AdamW>("adamw", "AdamW", at::kFloat, lr),
      make<leanopt::basic_adamw<formats::dynamic8>>("adamw-dynamic8", "basic_adamw<dynamic8>",
                                                    at::kFloat, lr),
      make<leanopt::AdamW8bit>("adamw8bit", "AdamW8bit", at::kFloat, lr),
      make<leanopt::AdamW8bit>("adamw8bit", "AdamW8bit", at::kBFloat16, lr),
      make<leanopt::basic_adamw<formats::log8, split24>>(
          "adamw8bit-split24", "basic_adamw<log8, split24>", at::kBFloat16, lr, " + 8"),
      make<leanopt::Adafactor8bit>("adafactor8bit", "Adafactor8bit", at::kFloat, {}),
      make<leanopt::basic_adafactor<formats::log8, split24>>(
          "adafactor8bit-split24", "basic_adafactor<log8, split24>", at::kBFloat16, {}, " + 8"),
      make<leanopt::Adafactor>("adafactor", "Adafactor", at::kFloat, {}),
      make<leanopt::Adafactor>("adafactor-hf", "Adafactor, Hugging Face", at::kFloat, hugging_face),
  };
}

/// `gradients`: undefined for those of the weights' own type.
inline row plan_for(const contender& c, const model& m, at::ScalarType gradients) {
  if (gradients == at::ScalarType::Undefined) gradients = c.type;
  shapes all;
  for (const tensor& t : m.tensors()) all.push_back({t.sizes, c.type, t.name, gradients});
  return {c, gradients, c.predict(all)};
}

}  // namespace plan
