// Split weights: a bfloat16 parameter, rounded to the nearest for the model to compute with, and in
// the state the bits below it, as a signed difference in units of their own last place. 8 residual
// bits make weights of 24 bits, rounded stochastically; 16 make the float32 weight, nothing lost
// but the payload of NaN. float32 and float64 parameters are stepped as they are and have no
// residual.
#pragma once

#include <leanopt/core/number.hpp>

#include <cstdint>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::weights {

/// @cost Bits/8 bytes per bfloat16 parameter, beside its own 2.
template <int Bits>
struct split {
  static_assert(Bits == 8 || Bits == 16, "leanopt: split weights have 8 or 16 residual bits");
  static constexpr const char* name = Bits == 8 ? "split24" : "split32";
  static constexpr bool random = Bits == 8, takes_float16 = false;
  using residual = std::conditional_t<Bits == 8, std::int8_t, std::int16_t>;

  template <class, class V>
  LEANOPT_HD static V read(const ints<V>& word, const ints<V>& rest) {
    using I = ints<V>;
    const I sum = ((word & I(0x7fffu)) << Bits) + rest;
    // Below zero only where a weight was overwritten with zero behind our back.
    const I magnitude = if_above(sum, I(0x7fffffffu), I(0u), sum);
    return real((magnitude << (16 - Bits)) | ((word & I(0x8000u)) << 16));
  }
  template <class, class V>
  LEANOPT_HD static ints<V> write(const V& x, const ints<V>& random_bits, ints<V>& rest) {
    using I = ints<V>;
    const I kept = (Bits == 16 ? exact(x) : dither(x, random_bits, 8)) >> (16 - Bits);
    rest = kept & I((1u << Bits) - 1);
    return (kept + I(1u << (Bits - 1))) >> Bits;
  }

 private:
  /// The bits of x; of NaN those that rounding up does not carry into the sign.
  template <class V>
  LEANOPT_HD static ints<V> exact(const V& x) {
    using I = ints<V>;
    return if_above(bits(x) & I(0x7fffffffu), I(0x7f800000u), I(0x7fc00000u), bits(x));
  }
};
using split24 = split<8>;
using split32 = split<16>;

}  // namespace leanopt::weights
LEANOPT_EXACT_END
