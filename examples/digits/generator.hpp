// The integer generator behind every random choice of the digits runs: start values and batch
// order. It is a pure function of (seed, stream, index), so the same run can be started in
// any language and its losses compared number by number; std::mt19937 and torch::randn would tie
// a run to one library and one version of it.
#pragma once

#include <leanopt/core/random.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace digits {

// Word `index` of a stream: SplitMix64 over a counter. Seed and stream share one word with the
// index, which is why `check_seed` and `check_epoch` bound them: beyond those bounds two runs would
// share numbers.
inline std::uint64_t draw(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return leanopt::mix(((seed << 40) + (stream << 32) + index) * 0x9E3779B97F4A7C15ULL);
}

// Uniform in [-2^exponent, 2^exponent). 24 bits are what a float holds exactly.
inline float uniform(std::uint64_t bits, int exponent) {
  const auto centred = static_cast<std::int64_t>(bits >> 40) - (std::int64_t{1} << 23);
  return std::ldexp(static_cast<float>(centred), exponent - 23);
}

// Each run seed owns 16 seeds of the generator: one per parameter, and the last for the order.
inline constexpr std::uint64_t seeds_per_run = 16;
inline constexpr std::uint64_t order_seed = seeds_per_run - 1;
inline constexpr std::int64_t largest_run_seed = (std::int64_t{1} << 20) - 1;
inline constexpr std::int64_t most_epochs = 255;

inline std::uint64_t check_seed(std::int64_t run_seed) {
  if (run_seed < 0 || run_seed > largest_run_seed) {
    throw std::invalid_argument("the seed of a run must lie between 0 and 1048575");
  }
  return static_cast<std::uint64_t>(run_seed);
}

inline std::uint64_t check_epoch(std::int64_t epoch) {
  if (epoch < 1 || epoch > most_epochs) {
    throw std::invalid_argument("epochs are counted from 1 to 255");
  }
  return static_cast<std::uint64_t>(epoch);
}

// Start values of parameter number `ordinal` of a net.
inline std::vector<float> start_values(std::int64_t run_seed, std::uint64_t ordinal, int exponent,
                                       std::int64_t count) {
  if (ordinal >= order_seed) throw std::invalid_argument("a net has at most 15 parameters here");
  const std::uint64_t seed = check_seed(run_seed) * seeds_per_run + ordinal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = uniform(draw(seed, 0, i), exponent);
  return values;
}

// Sorting by random words shuffles in a way that needs no agreement about a shuffle algorithm.
inline std::vector<std::int64_t> epoch_order(std::int64_t run_seed, std::int64_t epoch,
                                             std::int64_t samples) {
  const std::uint64_t seed = check_seed(run_seed) * seeds_per_run + order_seed;
  const std::uint64_t stream = check_epoch(epoch);
  std::vector<std::int64_t> order(static_cast<std::size_t>(samples));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [=](std::int64_t a, std::int64_t b) {
    return draw(seed, stream, static_cast<std::uint64_t>(a)) <
           draw(seed, stream, static_cast<std::uint64_t>(b));
  });
  return order;
}

}  // namespace digits
