// What all tasks share: what a run reports, and how a module becomes the one a contestant trains.
#pragma once

#include "bench/training/contestants.hpp"
#include "examples/digits/generator.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace training {

struct outcome {
  double start;       ///< training loss before the first step
  double training;    ///< at the end
  double validation;  ///< at the end, on what was not trained on
};

class task {
 public:
  virtual ~task() = default;
  virtual std::string name() const = 0;
  /// What is trained on what, for the head of a report.
  virtual std::string description() const = 0;
  /// How far a run may be from its float32 run after 50 steps, in parts of what that one fell by.
  virtual double short_tolerance() const = 0;
  /// The same seed means the same start values and the same batches, whoever trains. May be called
  /// from several threads at once.
  virtual outcome run(const contestant& who, std::int64_t seed) const = 0;
};

/// Streams of the generator: one per parameter of a net, and one for each other use.
constexpr std::uint64_t batch_stream = 254, perturbation_stream = 255;

/// The first numbers of a stream, uniform in [-2^exponent, 2^exponent).
inline torch::Tensor draw_tensor(std::int64_t seed, std::uint64_t stream, int exponent,
                                 torch::IntArrayRef sizes) {
  const torch::Tensor values = torch::empty(sizes, torch::kFloat32);
  auto* first = values.data_ptr<float>();
  for (std::int64_t i = 0; i < values.numel(); ++i)
    first[i] = digits::uniform(
        digits::draw(digits::check_seed(seed), stream, static_cast<std::uint64_t>(i)), exponent);
  return values;
}

/// Start values off by up to 1e-4 of themselves: how far apart two float32 runs end that nobody
/// would tell apart.
inline void perturb(torch::nn::Module& net, std::int64_t seed) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& p : net.parameters())
    p.mul_(1 + 1e-4 * draw_tensor(seed, perturbation_stream, 0, p.sizes()));
}

inline void prepare(torch::nn::Module& net, const contestant& who, std::int64_t seed) {
  if (who.weights == weights::perturbed) perturb(net, seed);
  if (who.weights == weights::bfloat16) net.to(torch::kBFloat16);
}

}  // namespace training
