// Plain weights: the parameter is all there is. float32 and float64 as they are; bfloat16 and
// float16 are widened for the step and rounded to the nearest after it.
#pragma once

#include <leanopt/core/number.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt::weights {

struct plain {
  static constexpr const char* name = "plain";

  /// `Bits` is bfloat16_bits or float16_bits.
  template <class Bits, class V>
  LEANOPT_HD static V read(const ints<V>& x) {
    return Bits::template widen<V>(x);
  }
  template <class Bits, class V>
  LEANOPT_HD static ints<V> write(const V& x) {
    return Bits::template narrow<V>(x);
  }
};

}  // namespace leanopt::weights
LEANOPT_EXACT_END
