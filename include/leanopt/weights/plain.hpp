// Plain weights: the parameter is all there is. float32 and float64 as they are; bfloat16 and
// float16 are widened for the step and rounded to the nearest after it, so that a step below half a
// unit in the last place is lost.
#pragma once

#include <leanopt/core/number.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt::weights {

struct plain {
  static constexpr const char* name = "plain";
  static constexpr bool random = false, takes_float16 = true;
  using residual = void;

  /// `Bits` is bfloat16_bits or float16_bits.
  template <class Bits, class V>
  LEANOPT_HD static V read(const ints<V>& word, const ints<V>&) {
    return Bits::template widen<V>(word);
  }
  template <class Bits, class V>
  LEANOPT_HD static ints<V> write(const V& x, const ints<V>&, ints<V>&) {
    return Bits::template narrow<V>(x);
  }
};

}  // namespace leanopt::weights
LEANOPT_EXACT_END
