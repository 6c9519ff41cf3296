// Prediction of the next character of an English text, of which the last tenth is held out.
#pragma once

#include "bench/training/task.hpp"
#include "bench/training/transformer.hpp"
#include "tests/support/tolerance.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace training {

class text_task : public task {
 public:
  static constexpr std::int64_t batch = 32;

  text_task(const std::string& path, std::int64_t steps) : steps_(steps) {
    const torch::Tensor all = load(path);
    const std::int64_t kept = all.size(0) / 10 * 9;
    training_ = all.slice(0, 0, kept);
    // Windows side by side, of which each also holds the character after its last.
    validation_ = all.slice(0, kept).unfold(0, size_.context + 1, size_.context);
  }

  std::string name() const override { return "text"; }
  std::string description() const override {
    std::int64_t parameters = 0;
    for (const torch::Tensor& p : transformer(size_, 1).parameters()) parameters += p.numel();
    return "transformer on characters, " + std::to_string(parameters) + " parameters, " +
           std::to_string(size_.layers) + " layers of width " + std::to_string(size_.width) + ", " +
           std::to_string(size_.heads) + " heads, context " + std::to_string(size_.context) + ", " +
           std::to_string(steps_) + " steps, batches of " + std::to_string(batch);
  }
  double short_tolerance() const override { return tolerance::short_training_text; }
  /// The training loss at the end is the mean of the last twelfth of the steps.
  outcome run(const contestant& who, std::int64_t seed) const override {
    transformer net(size_, seed);
    prepare(net, who, seed);
    const auto optimizer = who.make(net.parameters(), seed);
    const std::int64_t averaged = std::max<std::int64_t>(1, steps_ / 12);
    outcome result{};
    for (std::int64_t step = 0; step < steps_; ++step) {
      optimizer->zero_grad();
      const torch::Tensor loss = loss_of(net, windows(seed, step));
      loss.backward();
      optimizer->step();
      if (step == 0) result.start = loss.item<double>();
      if (step >= steps_ - averaged) result.training += loss.item<double>() / double(averaged);
    }
    const torch::NoGradGuard no_grad;
    result.validation = loss_of(net, validation_).item<double>();
    return result;
  }

 private:
  /// The text as numbers of its characters, in the order of their codes.
  torch::Tensor load(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot open the text at '" + path + "'");
    for (std::string line; line != "===";)  // source and licence
      if (!std::getline(file, line)) throw std::runtime_error(path + " has no line of ===");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    std::map<char, std::int64_t> numbers;
    for (const char c : text) numbers[c] = 0;
    for (auto& [c, number] : numbers) number = size_.characters++;
    std::vector<std::int64_t> all;
    for (const char c : text) all.push_back(numbers[c]);
    return torch::tensor(all, torch::kInt64);
  }
  /// The batch of a step.
  torch::Tensor windows(std::int64_t seed, std::int64_t step) const {
    std::vector<torch::Tensor> all;
    const auto starts = static_cast<std::uint64_t>(training_.size(0) - size_.context);
    for (std::int64_t i = step * batch; i < (step + 1) * batch; ++i) {
      const auto start = static_cast<std::int64_t>(
          digits::draw(digits::check_seed(seed), batch_stream, static_cast<std::uint64_t>(i)) %
          starts);
      all.push_back(training_.slice(0, start, start + size_.context + 1));
    }
    return torch::stack(all);
  }
  /// Mean cross entropy in nats per character.
  static torch::Tensor loss_of(transformer& net, const torch::Tensor& windows) {
    const std::int64_t context = windows.size(1) - 1;
    const torch::Tensor logits = net.forward(windows.slice(1, 0, context));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                                windows.slice(1, 1).reshape({-1}));
  }

  transformer_size size_{0};
  std::int64_t steps_;
  torch::Tensor training_, validation_;
};

}  // namespace training
