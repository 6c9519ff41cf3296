#include "bench/training/contestants.hpp"

#include <leanopt/leanopt.hpp>

#include <utility>

namespace training {
namespace {

namespace formats = leanopt::formats;
using leanopt::weights::plain, leanopt::weights::split24, leanopt::weights::split32;

constexpr double lr = 1e-3;

/// All tensors are compressed: those of nets this small would mostly stay below the threshold.
template <class Optimizer, class Format, class Weights>
make_optimizer maker(typename Optimizer::Options options) {
  if constexpr (Format::compressed) options.min_compressed_elements(0);
  return [options](std::vector<torch::Tensor> parameters, std::int64_t seed) {
    auto seeded = options;
    if constexpr (Format::random || Weights::random) seeded.seed(seed);
    return std::make_unique<Optimizer>(std::move(parameters), std::move(seeded));
  };
}

template <class Format = formats::full, class Weights = plain>
make_optimizer adamw() {
  using optimizer = leanopt::basic_adamw<Format, Weights>;
  return maker<optimizer, Format, Weights>(typename optimizer::Options(lr));
}

template <class Format = formats::full, class Weights = plain>
make_optimizer adafactor() {
  using optimizer = leanopt::basic_adafactor<Format, Weights>;
  auto options = optimizer::Options::hugging_face();
  options.lr(lr).relative_step(false).scale_parameter(false).beta1(0.9);
  return maker<optimizer, Format, Weights>(std::move(options));
}

}  // namespace

std::vector<contestant> contestants() {
  const auto low = weights::bfloat16;
  return {
      {"adamw", "adamw", adamw()},
      {"adamw/perturbed", "adamw", adamw(), weights::perturbed},
      {"adamw/log8", "adamw", adamw<formats::log8>()},
      {"adamw/dynamic8", "adamw", adamw<formats::dynamic8>()},
      {"adamw/bfloat16", "adamw", adamw<formats::bfloat16_stochastic>()},
      {"adamw on bfloat16", "adamw", adamw(), low, /*judged=*/false},
      {"adafactor", "adafactor", adafactor()},
      {"adafactor/perturbed", "adafactor", adafactor(), weights::perturbed},
      {"adafactor/log8", "adafactor", adafactor<formats::log8>()},
      {"adafactor/split32", "adafactor", adafactor<formats::full, split32>(), low},
      {"adafactor/log8+split24", "adafactor", adafactor<formats::log8, split24>(), low},
      {"adafactor on bfloat16", "adafactor", adafactor(), low, /*judged=*/false},
  };
}

}  // namespace training
