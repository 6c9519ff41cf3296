// The numbers that parameters and gradients are made of, and how lanes read and write those of 16
// bits: widened exactly, narrowed to the nearest with ties to even.
#pragma once

#include <leanopt/core/lane.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt {

enum class number { float32, float64, bfloat16, float16 };

LEANOPT_HD constexpr std::size_t bytes_of(number n) {
  return n == number::float64 ? 8 : n == number::float32 ? 4 : 2;
}

/// The power of two from which on squares as numbers of type Square are not finite.
template <class Square, class T>
LEANOPT_HD constexpr T infinite_square_from() {
  return sizeof(Square) == 8 ? T(0x1p512) : T(0x1p64f);
}
/// Whether x, or its square as a number of type Square, is not finite.
template <class Square, class T>
LEANOPT_HD bool has_infinite_square(T x) {
  constexpr T limit = infinite_square_from<Square, T>();
  return !(x < limit && x > -limit);
}

/// The bits of x, ready for its lowest `dropped` bits to be cut off: rounded stochastically by the
/// same number of random ones. What is finite stays finite, and of NaN one pattern is left, which
/// the cut does not turn into an infinity.
template <class V>
LEANOPT_HD ints<V> dither(const V& x, const ints<V>& random, int dropped) {
  using I = ints<V>;
  const I sign = bits(x) & I(0x80000000u), magnitude = bits(x) & I(0x7fffffffu);
  const I finite = min(magnitude + (random >> (32 - dropped)), I(0x7f7fffffu));
  const I infinite = if_above(magnitude, I(0x7f800000u), I(0x7fc00000u), I(0x7f800000u));
  return sign | if_above(magnitude, I(0x7f7fffffu), infinite, finite);
}

struct bfloat16_bits {
  template <class V>
  LEANOPT_HD static V widen(const ints<V>& x) {
    return real(x << 16);
  }
  template <class V>
  LEANOPT_HD static ints<V> narrow(const V& value) {
    using I = ints<V>;
    const I x = bits(value), magnitude = x & I(0x7fffffffu);
    const I nearest = (x + I(0x7fffu) + ((x >> 16) & I(1u))) >> 16;
    return if_above(magnitude, I(0x7f800000u), I(0x7fc0u), nearest);  // NaN must not round to Inf
  }
};

struct float16_bits {
  template <class V>
  LEANOPT_HD static V widen(const ints<V>& x) {
    using I = ints<V>;
    const I shifted = (x & I(0x7fffu)) << 13;
    // 2^112 moves the exponent from bias 15 to 127, subnormals included; Inf and NaN stay apart
    const I finite = bits(V(real(shifted)) * V(0x1p112f));
    const I magnitude = if_above(shifted, I(0x0f7fffffu), shifted | I(0x7f800000u), finite);
    return real(magnitude | ((x & I(0x8000u)) << 16));
  }
  template <class V>
  LEANOPT_HD static ints<V> narrow(const V& value) {
    using I = ints<V>;
    const I x = bits(value), magnitude = x & I(0x7fffffffu);
    const I normal = (magnitude + I(0xc8000fffu) + ((magnitude >> 13) & I(1u))) >> 13;
    const I subnormal = bits(V(real(magnitude)) + V(0.5f)) - I(0x3f000000u);  // the add rounds
    I h = if_above(magnitude, I(0x387fffffu), normal, subnormal);
    h = if_above(magnitude, I(0x477fffffu), I(0x7c00u), h);  // 2^16 and more
    h = if_above(magnitude, I(0x7f800000u), I(0x7e00u), h);
    return h | ((x >> 16) & I(0x8000u));
  }
};

}  // namespace leanopt
LEANOPT_EXACT_END
