// log8: one byte per value and slot, one 16-bit header per block and slot; biased log-linear codes,
// no tables, no division.
//   value(c) = float(b + (c << s)) - float(b),  s = 23 - M;  float() is the bit cast, b the base.
// A slot of any sign has 7 bits and a sign, a non-negative one 8 bits. One mantissa width M in
// {3, 4, 5} per block, as small as the range of the non-negative slot needs (4 where a rule has
// none). Header: bits 0-13 the base shifted by s, bits 14-15 M - 3, in the header of every slot, so
// that each slot decodes alone. All-zero memory is the fresh state. Codes are rounded
// stochastically, because a moving average rounded to nearest stalls far from its true value; a
// positive second moment never becomes zero.
#pragma once

#include <leanopt/core/lane.hpp>
#include <leanopt/core/slot.hpp>

#include <cstdint>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::formats {

/// @cost 1 + 2/Block bytes per value: with two slots 2.0156 B/param at 256, 2.0625 at 64.
template <int Block>
struct log8_blocks {
  static constexpr const char* name = Block == 256 ? "log8" : Block == 128 ? "log8/128" : "log8/64";
  static_assert(Block == 64 || Block == 128 || Block == 256,
                "leanopt: log8 has blocks of 64 to 256");
  static constexpr int block = Block;
  static constexpr bool compressed = true, random = true;
  template <class T>
  using stored = std::uint8_t;
  using header = std::uint16_t;
  /// 2^127, whose sum with a base could overflow: what a block cannot hold, as bits.
  static constexpr std::uint32_t large = 0x7f000000;

  /// How to read and write the codes of one slot of one block.
  struct scale {
    std::uint32_t base;
    int shift;
  };
  LEANOPT_HD static scale open(header h) {
    const int shift = 20 - (h >> 14);
    return {std::uint32_t(h & 0x3fff) << shift, shift};
  }
  LEANOPT_HD static header close(const scale& s) {
    return header(s.base >> s.shift | std::uint32_t(20 - s.shift) << 14);
  }

  /// What a code is in memory: the engine extends it to 32 bits accordingly.
  template <values Range>
  using code = std::conditional_t<Range == values::any, std::int8_t, std::uint8_t>;
  template <values>
  static constexpr std::uint8_t zero = 0;  ///< the code of 0

  template <values Range, class V>
  LEANOPT_HD static V decode(const scale& s, const ints<V>& code) {
    using I = ints<V>;
    const I base(s.base), x = code << s.shift;
    if constexpr (Range == values::non_negative) {
      return real(x + base) - real(base);
    } else {  // both terms with the code's sign, because -x is exact
      const I magnitude = x & I(sign | 127u << s.shift);
      return real(magnitude + base) - real((x & I(sign)) | base);
    }
  }

  static constexpr int code_byte = 0;  ///< of what encode() gives; nothing stands above
  /// The code of x rounded with the bits of `random`. @pre |x| is in the range that `fit` was
  /// given.
  template <values Range, class V>
  LEANOPT_HD static ints<V> encode(const scale& s, const V& x, const ints<V>& random) {
    using I = ints<V>;
    const I magnitude = (with_base<Range>(s, x, random) - I(s.base)) >> s.shift;
    if constexpr (Range == values::non_negative)
      return max(magnitude, min(bits(x), I(1u)));
    else
      return magnitude | ((bits(x) >> 24) & I(128u));
  }
  /// Whether bytes are encoded together below VBMI, where bytes cannot be permuted.
  template <class V>
  static constexpr bool packs = lane_traits<V>::narrows;
  /// The codes of four registers, with the bits that draw.next() gives for each.
  template <values Range, class V, class Draw, class Packed>
  LEANOPT_INLINE static void encode(const scale& s, const V (&x)[4], Draw& draw, Packed& code) {
    using L = lane_traits<V>;
    ints<V> all[4];
    LEANOPT_UNROLL
    for (int i = 0; i < 4; ++i) all[i] = with_base<Range>(s, x[i], draw.next()) >> s.shift;
    const Packed magnitude = L::narrow(all, s.base >> s.shift);
    if constexpr (Range == values::non_negative)
      code = max(magnitude, L::ones(x));
    else
      code = magnitude | L::signs(x);
  }

  /// Bit patterns of the largest magnitude, and for a non-negative slot of the smallest positive
  /// value less one (so that zero wraps around and never is the smallest).
  template <class V>
  struct range {
    ints<V> largest, smallest;
    // written out: an implicit constructor would not be inlined into code for the instruction set
    LEANOPT_HD range() : range(ints<V>(0u), ints<V>(~0u)) {}
    LEANOPT_HD range(const ints<V>& large, const ints<V>& small)
        : largest(large), smallest(small) {}
    template <values Range>
    LEANOPT_HD void add(const V& x) {
      if constexpr (Range == values::any) {
        largest = max(largest, bits(x) & ints<V>(~sign));
      } else {
        largest = max(largest, bits(x));
        smallest = min(smallest, bits(x) - ints<V>(1u));
      }
    }
    LEANOPT_HD range<scalar<float>> reduced() const {
      return {reduce_max(largest), reduce_min(smallest)};
    }
  };

  /// The scales of a block from the ranges of its slots.
  template <class Formula>
  LEANOPT_HD static void fit(const range<scalar<float>> (&r)[Formula::slot_count],
                             scale (&s)[Formula::slot_count]) {
    int shift = 19;  // M = 4 where no non-negative slot chooses
    each<Formula::slot_count>([&](auto k) LEANOPT_LAMBDA {
      if constexpr (Formula::slots[k].range == values::non_negative) {
        const std::uint32_t spread = r[k].largest - (r[k].smallest + 1);
        shift = r[k].largest == 0 ? 20 : spread <= 7u << 23 ? 18 : spread <= 15u << 23 ? 19 : 20;
      }
    });
    each<Formula::slot_count>([&](auto k) LEANOPT_LAMBDA {
      constexpr int top = Formula::slots[k].range == values::any ? 127 : 255;
      s[k] = fit_slot(r[k].largest, top, shift);
    });
  }

 private:
  static constexpr std::uint32_t sign = 0x80000000u;

  /// |x| on the way to its code: the base is still in it, of whose units the lowest bits are parts.
  template <values Range, class V>
  LEANOPT_HD static ints<V> with_base(const scale& s, const V& x, const ints<V>& random) {
    const V base = real(ints<V>(s.base));
    const ints<V> dither = random >> (32 - s.shift);
    V magnitude = x;
    if constexpr (Range == values::any) magnitude = abs(x);
    return bits(magnitude + base) + dither;
  }

  /// The smallest base whose top code holds `largest` with the largest random addend. The first
  /// guess lacks the base that the sum will carry; 5 steps more than it are enough for every M.
  LEANOPT_HD static scale fit_slot(std::uint32_t largest, int top, int shift) {
    const int mask = (1 << shift) - 1, lowest = 0x800000 >> shift;
    int base = int((largest + mask) >> shift) - top;
    base = base < lowest ? lowest : base;
    const scalar<float> sum =
        scalar<float>(real(largest)) + scalar<float>(real(std::uint32_t(base + 5) << shift));
    base = int((bits(sum) + mask) >> shift) - top;
    return {std::uint32_t(base < lowest ? lowest : base) << shift, shift};
  }
};
using log8 = log8_blocks<256>;

}  // namespace leanopt::formats
LEANOPT_EXACT_END
