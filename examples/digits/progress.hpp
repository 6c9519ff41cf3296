// The progress line of a training run. On a terminal it is redrawn in place while an epoch runs;
// in a file or a pipe only the finished line of each epoch appears, so that logs stay readable.
#pragma once

#include "examples/digits/metrics.hpp"
#include "examples/text.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unistd.h>

namespace digits {

class progress_line {
 public:
  progress_line(std::int64_t epochs, std::int64_t steps) : epochs_(epochs), steps_(steps) {}

  void after_step(std::int64_t epoch, std::int64_t step, const torch::Tensor& loss) {
    if (step == steps_) last_loss_ = loss.item<double>();
    if (!on_terminal_) return;
    // Redrawing after every step would cost more time than a step of these nets.
    const auto now = clock::now();
    if (now - drawn_ < std::chrono::milliseconds(100)) return;
    drawn_ = now;
    std::printf("\r%s", line(epoch, step, loss.item<double>()).c_str());
    std::fflush(stdout);
  }

  void after_epoch(std::int64_t epoch, double milliseconds_per_step, const scores& evaluation) {
    std::printf("%s%s  %.2f ms/step  eval_loss %.4f  eval_accuracy %.4f  eval_f1 %.4f\n",
                on_terminal_ ? "\r" : "", line(epoch, steps_, last_loss_).c_str(),
                milliseconds_per_step, evaluation.loss, evaluation.accuracy, evaluation.f1);
    std::fflush(stdout);
  }

 private:
  using clock = std::chrono::steady_clock;

  std::string line(std::int64_t epoch, std::int64_t step, double loss) const {
    const std::string of_epochs = std::to_string(epochs_);
    const std::string of_steps = std::to_string(steps_);
    const auto filled = static_cast<std::size_t>(bar_width * step / steps_);
    const std::string bar = std::string(filled, '=') + std::string(bar_width - filled, ' ');
    return "  epoch " + padded(epoch, of_epochs.size()) + "/" + of_epochs + " [" + bar + "] " +
           padded(step, of_steps.size()) + "/" + of_steps + "  loss " + text::fixed(loss, 4);
  }

  static std::string padded(std::int64_t value, std::size_t width) {
    const std::string digits = std::to_string(value);
    return std::string(width > digits.size() ? width - digits.size() : 0, ' ') + digits;
  }

  static constexpr std::int64_t bar_width = 12;

  std::int64_t epochs_;
  std::int64_t steps_;
  double last_loss_ = 0;
  bool on_terminal_ = isatty(STDOUT_FILENO) != 0;
  clock::time_point drawn_ = clock::now();
};

}  // namespace digits
