// bfloat16: the upper half of a float32 per value. Rounded to the nearest it is what torch.optim
// keeps for bfloat16 parameters, where a moving average whose change is below half a unit in the
// last place stalls far from its true value; rounded stochastically it reaches it. Either way a
// positive second moment never becomes zero, and what is not finite stays so, in its element alone.
#pragma once

#include <leanopt/core/number.hpp>
#include <leanopt/core/slot.hpp>

#include <cstdint>

LEANOPT_EXACT_BEGIN
namespace leanopt::formats {

enum class rounding { nearest, stochastic };

/// @cost 2 bytes per value.
template <rounding R>
struct bfloat16_values {
  static constexpr bool random = R == rounding::stochastic;
  static constexpr const char* name = random ? "bfloat16/stochastic" : "bfloat16";
  static constexpr int block = 256;
  static constexpr bool compressed = true;
  template <class T>
  using stored = std::uint16_t;
  template <values>
  using code = std::uint16_t;
  template <values>
  static constexpr std::uint16_t zero = 0;

  using header = void;  // values are independent of each other: no statistics, no repairs
  struct scale {};

  template <values Range, class V>
  LEANOPT_HD static V decode(const scale&, const ints<V>& code) {
    return bfloat16_bits::widen<V>(code);
  }
  static constexpr int code_byte = 0;
  template <class>
  static constexpr bool packs = false;  ///< as those of one byte do
  template <values Range, class V>
  LEANOPT_HD static ints<V> encode(const scale&, const V& x, const ints<V>& random_bits) {
    using I = ints<V>;
    I code;
    if constexpr (random)
      code = dither(x, random_bits, 16) >> 16;
    else
      code = bfloat16_bits::narrow<V>(x);
    if constexpr (Range == values::non_negative) code = max(code, min(bits(x), I(1u)));
    return code;
  }
};
using bfloat16 = bfloat16_values<rounding::nearest>;
using bfloat16_stochastic = bfloat16_values<rounding::stochastic>;

}  // namespace leanopt::formats
LEANOPT_EXACT_END
