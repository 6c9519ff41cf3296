// dynamic8: bitsandbytes' block-wise 8-bit format: the index of the nearest value in a code book of
// 256, times the largest magnitude of the block, which is its float32 header. The books
// (create_dynamic_map) have seven decades below 1, each of twice as many equal cells as the one
// before, of which the middles are the values; one book has signs. A value half-way between two
// goes to the even code; what is negative never becomes zero (bitsandbytes' blockwise Adam kernel).
// Differences: a positive second moment becomes the code above zero at least, where bitsandbytes
// stores zero and the next step explodes; `dynamic8_strict` has the peer's codes there. Values are
// scaled by the reciprocal of the header, as the peer's quantizer does and not as its step kernel,
// whose fast division may give the neighbour of a code. -0 is zero. An element that is not finite
// is kept from its neighbours as in log8.
// Rounding is to the nearest, so a moving average stalls where its change is below half a cell, and
// small values next to large ones are off by up to 70 %: for training prefer log8.
#pragma once

#include <leanopt/core/lane.hpp>
#include <leanopt/core/slot.hpp>

#include <cstdint>

LEANOPT_EXACT_BEGIN
namespace leanopt::formats {

/// A code book, and the way from a number in [0, 1] to its code in one look: a threshold between
/// two codes shares the upper 16 bits of a float with no other. So there is an entry per such upper
/// half, and the upper half of its sum with a float is the code: the entry takes the float's upper
/// half away, puts in the code of the smallest number with this half, and below it what lets the
/// lower half carry into the next code from the threshold on.
struct dynamic_book {
  static constexpr std::uint32_t first_key = 0x3380, last_key = 0x3f80;  // 2^-24 and 1
  std::uint32_t value[256];                                              ///< the bits of floats
  std::uint32_t search[last_key - first_key + 1];
  static constexpr std::uint32_t small = 0x35000000;  ///< 2^-21, of the code above that of zero

  explicit dynamic_book(bool is_signed) {
    int at = is_signed ? 127 : 0;  // the code of zero; its negative mirror image is below
    const int zero = at;
    value[at] = 0;
    int cells = is_signed ? 1 : 2;
    for (const float decade : {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f}) {
      for (int k = 0; k < cells; ++k)
        value[++at] = bits(number(decade) * middle(edge(k, cells), edge(k + 1, cells)));
      cells *= 2;
    }
    value[255] = bits(1.0f);
    for (int c = 0; c < zero; ++c) value[c] = value[254 - c] | 0x80000000u;
    std::uint32_t code = std::uint32_t(zero);
    for (std::uint32_t key = first_key; key <= last_key; ++key) {
      const std::uint32_t low = key << 16;
      while (code < 255 && threshold(int(code)) < low) ++code;
      const bool inside = code < 255 && threshold(int(code)) <= (low | 0xffff);
      const std::uint32_t rest = inside ? threshold(int(code)) & 0xffff : 0xffff;
      search[key - first_key] = (code << 16 | (0xffff - rest)) - low;
    }
  }

  /// The largest number, as bits, that still has code c and not c + 1.
  std::uint32_t threshold(int c) const {
    return bits(middle(real(value[c]), real(value[c + 1]))) - std::uint32_t(c % 2);
  }

 private:
  using number = scalar<float>;
  /// Edge k of `cells` equal cells from 0.1 to 1, as torch.linspace gives it.
  static number edge(int k, int cells) {
    const float first = 0.1f, step = (1 - first) / float(cells);
    return k < (cells + 1) / 2 ? float(double(first) + double(step) * k)
                               : float(1 - double(step) * (cells - k));
  }
  static number middle(const number& a, const number& b) { return (a + b) * number(0.5f); }
};

/// The same for 64 numbers at a time where bytes can be permuted: the code is computed, or the one
/// below it, and the threshold between them looked up.
template <bool Signed>
struct dynamic_planes {
  byte_planes<256> value;
  byte_planes<Signed ? 128 : 256> threshold;  ///< of a magnitude, at its code % the size
  /// code = slope * x + start, rounded down; by the place of the decade of x.
  float slope[16], start[16];

  // Not inlined where the tables are used.
  [[gnu::noinline]] explicit dynamic_planes(const dynamic_book& book)
      : value([&](int i) { return book.value[i]; }), threshold([&](int i) {
          return i == 255 ? ~0u : book.threshold(Signed && i < 127 ? i + 128 : i);
        }) {
    double first = Signed ? 128 : 1, cells = Signed ? 1 : 2, decade = 1e-6;
    for (int d = 0; d < 7; first += cells, cells *= 2, decade *= 10, ++d)
      for (int place = d == 0 ? -8 : d; place <= (d == 6 ? 7 : d); ++place) {
        slope[place & 15] = float(cells / (0.9 * decade));
        start[place & 15] = float(first - cells / 9 - 0.5);
      }
  }

#if LEANOPT_PERMUTES_BYTES
  /// The bits of a float are about its logarithm, so they tell the place of its decade. Where that
  /// changes, near a power of ten, both decades give one of the two codes. A little less than
  /// log2(10) = 3.32 octaves to a decade makes that so for all seven, as the test of all numbers
  /// proves.
  template <class V>
  LEANOPT_INLINE ints<V> code_or_one_below(const ints<V>& key) const {
    using L = lane_traits<V>;
    constexpr float octaves = 3.2957f;
    const ints<V> place =
        bits(fma(L::to_numbers(key), V(1 / (octaves * 0x1p23f)), V(0x1.8p23f - 32)));
    return L::to_ints(fma(V(real(key)), L::pick(slope, place), L::pick(start, place)));
  }
#endif
};

/// @cost 1 + 4/Block bytes per value: with two slots 2.0313 B/param at 256; and once for
/// all optimizers of a format 30 KiB of tables, of which the code books are 2 and a device has 26.
template <int Block, bool Strict>
struct dynamic8_blocks {
  static constexpr const char* name = Strict ? (Block == 256   ? "dynamic8/strict"
                                                : Block == 128 ? "dynamic8/strict/128"
                                                               : "dynamic8/strict/64")
                                             : (Block == 256   ? "dynamic8"
                                                : Block == 128 ? "dynamic8/128"
                                                               : "dynamic8/64");
  static_assert(Block == 64 || Block == 128 || Block == 256,
                "leanopt: dynamic8 has blocks of 64 to 256");
  static constexpr int block = Block;
  static constexpr bool compressed = true, random = false;
  template <class T>
  using stored = std::uint8_t;
  template <values>
  using code = std::uint8_t;
  template <values Range>
  static constexpr std::uint8_t zero = Range == values::any ? 127 : 0;
  using header = float;
  static constexpr std::uint32_t large = 0x7f800000;  ///< Inf: what a block cannot hold, as bits

  struct books {
    dynamic_book with_sign{true}, without{false};
    LEANOPT_INLINE static const books& shared() {
      static const host_books all;
      return all;
    }
    template <values Range>
    LEANOPT_HD const dynamic_book& of() const {
      return Range == values::any ? with_sign : without;
    }
  };
  /// The shared books with what is looked up on the CPU alone.
  struct host_books : books {
    dynamic_planes<true> planes_with_sign{this->with_sign};
    dynamic_planes<false> planes_without{this->without};
  };
  static constexpr std::int64_t table_elements = 2 * 256;

  /// x / absmax is (x * up) * inverse: `up` keeps the reciprocal of a very small or very large
  /// header a normal number.
  struct scale {
    float absmax, up, inverse;
    float least;  ///< of the block's magnitudes times `inverse`, if up is 1; or 0, if not known
    const books* tables;
  };
  /// `tables` are the shared books, where the lanes can read them.
  LEANOPT_HD static scale open(header absmax, const books* tables) {
    const float up = up_of(absmax);
    return {absmax, up, reciprocal(absmax, up), 0, tables};
  }
  LEANOPT_INLINE static scale open(header absmax) { return open(absmax, &books::shared()); }
  LEANOPT_HD static header close(const scale& s) { return s.absmax; }

  template <values Range, class V>
  LEANOPT_HD static V decode(const scale& s, const ints<V>& code) {
    const auto* book = s.tables->template of<Range>().value;
    return real(lane_traits<V>::look_up(book, code)) * V(s.absmax);
  }

  static constexpr int code_byte = 2;  ///< of what encode() gives; nothing stands above
  /// The code of x. @pre |x| is in the range that `fit` was given.
  template <values Range, class V>
  LEANOPT_HD static ints<V> encode(const scale& s, const V& x, const ints<V>&) {
    using I = ints<V>;
    const I key = key_of<Range>(s, x);
    const auto* search = s.tables->template of<Range>().search;
    const I entry = lane_traits<V>::look_up(search, (key >> 16) - I(dynamic_book::first_key));
    return signed_code<Range, 8 * code_byte>(x, entry + key);
  }

  template <class>
  static constexpr bool packs = false;  ///< whether bytes are encoded together below VBMI
#if LEANOPT_PERMUTES_BYTES
  // Both for 64 numbers at a time.
  template <values Range, class V>
  LEANOPT_INLINE static void decode(const scale& s, const typename lane_traits<V>::packed& code,
                                    V (&x)[4]) {
    ints<V> value[4];
    lane_traits<V>::look_up_packed(planes_of<Range>(s).value, code, value);
    LEANOPT_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = V(real(value[i])) * V(s.absmax);
  }
  template <values Range, class V, class Draw>
  LEANOPT_INLINE static void encode(const scale& s, const V (&x)[4], const Draw&,
                                    typename lane_traits<V>::packed& packed) {
    using L = lane_traits<V>;
    const auto& book = planes_of<Range>(s);
    ints<V> key[4], code[4], threshold[4];
    LEANOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      key[i] = key_of<Range>(s, x[i]);
      code[i] = book.template code_or_one_below<V>(key[i]);
    }
    L::look_up_packed(book.threshold, L::pack(code), threshold);
    LEANOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      code[i] = if_above(key[i], threshold[i], code[i] + ints<V>(1u), code[i]);
      code[i] = signed_code<Range, 0>(x[i], code[i]);
    }
    packed = L::pack(code);
  }
#endif

  /// Bit patterns of the largest and of the smallest magnitude.
  template <class V>
  struct range {
    ints<V> largest, smallest;
    LEANOPT_HD range() : range(ints<V>(0u), ints<V>(~0u)) {}
    LEANOPT_HD range(const ints<V>& large, const ints<V>& small)
        : largest(large), smallest(small) {}
    template <values Range>
    LEANOPT_HD void add(const V& x) {
      const ints<V> size = Range == values::any ? bits(x) & ints<V>(~sign) : bits(x);
      largest = max(largest, size);
      smallest = min(smallest, size);
    }
    LEANOPT_HD range<scalar<float>> reduced() const {
      return {reduce_max(largest), reduce_min(smallest)};
    }
  };
  template <class Formula>
  LEANOPT_INLINE static void fit(const range<scalar<float>> (&r)[Formula::slot_count],
                                 scale (&s)[Formula::slot_count]) {
    fit<Formula>(r, s, &books::shared());
  }
  template <class Formula>
  LEANOPT_HD static void fit(const range<scalar<float>> (&r)[Formula::slot_count],
                             scale (&s)[Formula::slot_count], const books* tables) {
    each<Formula::slot_count>([&](auto k) LEANOPT_LAMBDA { s[k] = fit_slot(r[k], tables); });
  }

 private:
  static constexpr std::uint32_t sign = 0x80000000u;

  /// The bits of the scaled magnitude, of at least what has the code of zero or the one above.
  template <values Range, class V>
  LEANOPT_HD static ints<V> key_of(const scale& s, const V& x) {
    using I = ints<V>;
    using book = dynamic_book;
    const V size = Range == values::any ? abs(x) : x;
    if (lane_traits<V>::everywhere(s.least >= real(book::small))) return bits(size * V(s.inverse));
    // What may have the code of zero: zero, of what has a sign all that is not negative.
    constexpr std::uint32_t last = Range == values::any ? sign : Strict ? ~0u : 0;
    const I least = if_above(bits(x), I(last), I(book::small), I(book::first_key << 16));
    return max(bits((size * V(s.up)) * V(s.inverse)), least);
  }
  /// The code of x from that of its magnitude, both with `Low` bits below.
  template <values Range, int Low, class V>
  LEANOPT_HD static ints<V> signed_code(const V& x, const ints<V>& code) {
    using I = ints<V>;
    const I last_negative((255u << Low) - 1);
    if constexpr (Range == values::non_negative) return code;
    return if_above(bits(x), I(~sign), last_negative - min(code, last_negative), code);
  }
  template <values Range>
  LEANOPT_INLINE static const auto& planes_of(const scale& s) {
    const auto& all = static_cast<const host_books&>(*s.tables);
    if constexpr (Range == values::any)
      return all.planes_with_sign;
    else
      return all.planes_without;
  }

  LEANOPT_HD static float up_of(float absmax) {
    return absmax < 0x1p-100f ? 0x1p100f : !Strict && absmax > 0x1p100f ? 0x1p-100f : 1;
  }
  LEANOPT_HD static float reciprocal(float absmax, float up) {
    using number = scalar<float>;
    return absmax == 0 ? 0 : divide(number(1), number(absmax) * number(up)).v;
  }
  LEANOPT_HD static scale fit_slot(const range<scalar<float>>& r, const books* tables) {
    float absmax = real(r.largest), up = 1, inverse, least = 0;
    if (absmax >= 0x1p-100f && absmax <= 0x1p100f) {
      inverse = divide(scalar<float>(1), scalar<float>(absmax)).v;
      least = (scalar<float>(real(r.smallest)) * scalar<float>(inverse)).v;
    } else {  // the smallest code of a smaller header would be zero as a float
      if (!Strict && absmax > 0 && absmax < 0x1p-126f) absmax = 0x1p-126f;
      up = up_of(absmax);
      inverse = reciprocal(absmax, up);
    }
    return {absmax, up, inverse, least, tables};
  }
};
using dynamic8 = dynamic8_blocks<256, false>;
using dynamic8_strict = dynamic8_blocks<256, true>;

}  // namespace leanopt::formats
LEANOPT_EXACT_END
