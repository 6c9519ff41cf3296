// bfloat16 weights rounded stochastically after the step: they move at rates at which rounding to
// the nearest stands still, on average as float32 does, at the price of noise of a unit in the last
// place. float32 and float64 parameters are stepped as they are.
#pragma once

#include <leanopt/core/number.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt::weights {

struct stochastic {
  static constexpr const char* name = "stochastic";
  static constexpr bool random = true, takes_float16 = false;
  using residual = void;

  template <class Bits, class V>
  LEANOPT_HD static V read(const ints<V>& word, const ints<V>&) {
    return bfloat16_bits::widen<V>(word);
  }
  template <class Bits, class V>
  LEANOPT_HD static ints<V> write(const V& x, const ints<V>& random_bits, ints<V>&) {
    return dither(x, random_bits, 16) >> 16;
  }
};

}  // namespace leanopt::weights
LEANOPT_EXACT_END
