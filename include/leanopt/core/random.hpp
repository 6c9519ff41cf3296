// Random bits as a pure function of (seed, step, ordinal of the parameter, stream, element), so
// that replicas agree and a resumed run is bit-equal. One strong hash per block, one add per
// element (a rotated lattice): each element's draw is exactly uniform and independent from step to
// step.
#pragma once

#include <leanopt/core/lane.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt {

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits.
LEANOPT_HD std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

/// What the draws of one step have in common, and those of one parameter in it.
LEANOPT_HD std::uint64_t random_step_key(std::uint64_t seed, std::uint64_t step) {
  return mix(mix(seed) + step);
}
LEANOPT_HD std::uint64_t random_key(std::uint64_t step_key, std::uint64_t ordinal) {
  return mix(step_key + ordinal);
}
LEANOPT_HD std::uint64_t random_key(std::uint64_t seed, std::uint64_t step, std::uint64_t ordinal) {
  return random_key(random_step_key(seed, step), ordinal);
}

/// The stream of the weight; streams 0, 1, 2 belong to the slots.
constexpr int weight_stream = 3;

/// The word that starts a stream of a block. Streams 2k and 2k + 1 share a hash.
LEANOPT_HD std::uint32_t random_word(std::uint64_t key, std::uint64_t block, int stream) {
  const std::uint64_t z = mix(stream < 2 ? key + block : ~(key + block));
  return std::uint32_t(stream % 2 ? z >> 32 : z);
}

/// One stream of a block, from its element `first` on: next() gives 32 random bits per lane.
template <class V>
struct lattice {
  static constexpr std::uint32_t golden = 0x9E3779B9u;  // 2^32 over the golden ratio
  ints<V> state;
  LEANOPT_HD explicit lattice(std::uint32_t word = 0, std::uint32_t first = 0)
      : state(lane_traits<V>::iota() * ints<V>(golden) + ints<V>(word + first * golden)) {}
  LEANOPT_HD ints<V> next() {
    const ints<V> now = state;
    state = state + ints<V>(std::uint32_t(lane_traits<V>::count) * golden);
    return now;
  }
};

}  // namespace leanopt
LEANOPT_EXACT_END
