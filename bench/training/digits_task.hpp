// The nets of the digits example. Losses are over the whole training and test set, as in
// tests/training.
#pragma once

#include "bench/training/task.hpp"
#include "examples/digits/data.hpp"
#include "examples/digits/epoch.hpp"
#include "examples/digits/metrics.hpp"
#include "examples/digits/nets.hpp"
#include "tests/support/tolerance.hpp"

#include <memory>
#include <string>
#include <utility>

namespace training {

/// A net that computes in bfloat16 between float32 images and float32 logits, so that the epochs of
/// the example train it unchanged.
class bfloat16_net : public digits::net {
 public:
  explicit bfloat16_net(std::shared_ptr<digits::net> inner)
      : inner_(register_module("inner", std::move(inner))) {}
  torch::Tensor forward(const torch::Tensor& images) override {
    return inner_->forward(images.to(torch::kBFloat16)).to(torch::kFloat32);
  }

 private:
  std::shared_ptr<digits::net> inner_;
};

class digits_task : public task {
 public:
  /// `steps` is rounded up to whole epochs.
  digits_task(std::string net, const std::string& path, std::int64_t steps)
      : net_(std::move(net)), data_(digits::load_digits(path)) {
    const std::int64_t each = digits::steps_per_epoch(data_.training);
    epochs_ = (steps + each - 1) / each;
  }

  std::string name() const override { return net_; }
  std::string description() const override {
    return net_ + " on digits, " + std::to_string(digits::make_net(net_, 1)->parameter_count()) +
           " parameters, " + std::to_string(epochs_) + " epochs of " +
           std::to_string(digits::steps_per_epoch(data_.training)) + " steps, batches of " +
           std::to_string(digits::batch_size);
  }
  double short_tolerance() const override {
    return net_ == "mlp" ? tolerance::short_training_mlp : tolerance::short_training_cnn;
  }
  outcome run(const contestant& who, std::int64_t seed) const override {
    std::shared_ptr<digits::net> net = digits::make_net(net_, seed);
    prepare(*net, who, seed);
    if (who.weights == weights::bfloat16) net = std::make_shared<bfloat16_net>(net);
    const auto optimizer = who.make(net->parameters(), seed);
    const double start = digits::evaluate(*net, data_.training).loss;
    for (std::int64_t epoch = 1; epoch <= epochs_; ++epoch)
      digits::train_epoch(*net, *optimizer, data_.training, seed, epoch);
    return {start, digits::evaluate(*net, data_.training).loss,
            digits::evaluate(*net, data_.test).loss};
  }

 private:
  std::string net_;
  digits::data_set data_;
  std::int64_t epochs_;
};

}  // namespace training
