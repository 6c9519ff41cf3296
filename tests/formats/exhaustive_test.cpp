// Every float through the encoders. For a format, a scale and random bits the floats fall into
// stretches of one code each, found by bisection; then every float of a stretch is encoded and has
// to have its code. Codes that ascend from stretch to stretch make the encoder monotone, and where
// the stretches end shows what it rounds to. Covered are
//   bfloat16: all floats, NaN included;
//   dynamic8: all that a block of maximum 1, and of one more maximum, can hold, and both signs;
//   log8: all that a block can hold, for four bases of each width and kind of slot; and the scales
//   of all maxima that a block can have.

#include <leanopt/engine/cpu.hpp>
#include <leanopt/formats/bfloat16.hpp>
#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adam.hpp>

#include "tests/formats/bitsandbytes.hpp"
#include "tests/formats/support.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using format_runs::level;
using format_runs::values;
using leanopt::has_tables;
using leanopt::scalar;
using leanopt::formats::bfloat16_stochastic;
using leanopt::formats::dynamic8;
using leanopt::formats::dynamic8_strict;
using leanopt::formats::log8;

std::uint32_t bits(float x) { return patterns::cast<std::uint32_t>(x); }
float real(std::uint32_t x) { return patterns::cast<float>(x); }
constexpr std::uint32_t sign = 0x80000000u, infinity = 0x7f800000u;

#ifdef __OPTIMIZE__
#define LEANOPT_NEEDS_OPTIMIZATION()
#else
#define LEANOPT_NEEDS_OPTIMIZATION() \
  GTEST_SKIP() << "1e11 numbers are too many for a program that is not optimized"
#endif

// ---- all floats of a stretch --------------------------------------------------------------------

LEANOPT_EXACT_BEGIN
/// Whether the floats with the bits `first` to `last` have one code.
template <class Format, values Range>
struct have_one_code {
  template <int Width>
  LEANOPT_INLINE static bool run(const typename Format::scale& scale, std::uint32_t first,
                                 std::uint32_t last, std::uint32_t random, std::uint32_t code) {
    using leanopt::max;
    using leanopt::min;
    using leanopt::reduce_max;
    using leanopt::reduce_min;
    using V = leanopt::cpu::detail::lanes_of<Width, float>;
    using L = leanopt::lane_traits<V>;
    using I = leanopt::ints<V>;
    using S = scalar<float>;
    constexpr int N = L::count, shift = 8 * Format::code_byte;
    const auto s = scale;
    constexpr bool packs = Width == leanopt::cpu::detail::permuting || Format::template packs<V>;
    constexpr std::size_t together = packs ? 4 * N : N;
    struct constant {
      I bits;
      LEANOPT_INLINE I next() const { return bits; }
    };
    const I random_bits(random);
    I x = L::iota() + I(first), low(code), high(code);
    const auto add = [&](const I& c) LEANOPT_LAMBDA {
      low = min(low, c);
      high = max(high, c);
    };
    std::uint64_t left = std::uint64_t(last) - first + 1;
    for (; left >= together; left -= together) {
      if constexpr (packs) {
        V values[4];
        for (V& one : values) {
          one = V(leanopt::real(x));
          x = x + I(std::uint32_t(N));
        }
        typename L::packed codes;
        constant draw{random_bits};
        Format::template encode<Range, V>(s, values, draw, codes);
        std::uint8_t bytes[together];
        L::store_packed(bytes, codes);
        for (std::size_t i = 0; i < together; i += N) add(L::load_bytes(bytes + i));
      } else {
        add(Format::template encode<Range, V>(s, V(leanopt::real(x)), random_bits) >> shift);
        x = x + I(std::uint32_t(N));
      }
    }
    bool same = reduce_min(low) == code && reduce_max(high) == code;
    for (; left; --left) {
      const S one = leanopt::real(last - std::uint32_t(left - 1));
      same &= Format::template encode<Range, S>(s, one, random) >> shift == code;
    }
    return same;
  }
};
LEANOPT_EXACT_END

/// Checks for both cores; the first failure of each thread is reported.
class work_list {
 public:
  using check = std::function<std::string()>;  ///< what is wrong, or nothing

  void add(check one) { all_.push_back(std::move(one)); }
  void run() const {
    std::atomic<std::size_t> next{0};
    std::mutex guard;
    const auto work = [&] {
      for (std::size_t i; (i = next++) < all_.size();) {
        const std::string wrong = all_[i]();
        if (wrong.empty()) continue;
        const std::lock_guard<std::mutex> lock(guard);
        ADD_FAILURE() << wrong;
        next = all_.size();
      }
    };
    std::thread other(work);
    work();
    other.join();
  }

 private:
  std::vector<check> all_;
};

struct stretch {
  std::uint32_t first, last;  ///< the bits of floats
  std::uint32_t code;
};

/// The widest level, and where bytes are permuted for a format also the one that does not.
template <class Format>
std::vector<level> levels_of() {
  const level best = levels::all_here().back();
  if (best < level::avx512vbmi) return {best};
  return has_tables<Format> ? std::vector{level::avx512, best} : std::vector{level::avx512};
}

/// The stretches of the floats `first` to `last`, in their order if the codes have one. That every
/// float of a stretch has its code is left to `work`.
template <class Format, values Range>
std::vector<stretch> stretches(const typename Format::scale& s, std::uint32_t first,
                               std::uint32_t last, std::uint32_t random, work_list& work) {
  const auto code = [&](std::uint32_t x) {
    return Format::template encode<Range, scalar<float>>(s, scalar<float>(real(x)), random) >>
           8 * Format::code_byte;
  };
  std::vector<stretch> result;
  for (std::uint64_t x = first; x <= last;) {
    stretch one{std::uint32_t(x), std::uint32_t(x), code(std::uint32_t(x))};
    for (std::uint32_t end = last; one.last < end;) {
      const std::uint32_t middle = one.last + (end - one.last + 1) / 2;
      if (code(middle) == one.code)
        one.last = middle;
      else
        end = middle - 1;
    }
    result.push_back(one);
    constexpr std::uint32_t piece = 1u << 24;
    for (std::uint64_t from = one.first; from <= one.last; from += piece) {
      const auto to = std::uint32_t(std::min<std::uint64_t>(one.last, from + piece - 1));
      for (const level l : levels_of<Format>())
        work.add([=] {
          const leanopt::cpu::float_environment guard;
          using kernel = have_one_code<Format, Range>;
          constexpr level widest = has_tables<Format> ? level::avx512vbmi : level::avx512;
          const bool same = leanopt::cpu::detail::launch<kernel, widest>(l, s, std::uint32_t(from),
                                                                         to, random, one.code);
          return same ? std::string()
                      : std::string(Format::name) + ": not all floats from " +
                            std::to_string(real(std::uint32_t(from))) + " to " +
                            std::to_string(real(to)) + " have code " + std::to_string(one.code);
        });
    }
    x = std::uint64_t(one.last) + 1;
  }
  return result;
}

// ---- bfloat16 -----------------------------------------------------------------------------------

/// The code by definition, of what is not NaN.
std::uint32_t code_of(float x, std::uint32_t random, bool is_random) {
  if (!is_random) return bits(format_runs::nearest_bfloat16(x)) >> 16;
  const std::uint32_t upper = bits(x) >> 16, lower = bits(x) & 0xffffu;
  const bool up = lower + (random >> 16) > 0xffffu && (upper & 0x7fffu) != 0x7f7fu;
  return upper + up;
}

template <class Format>
void check_bfloat16(std::uint32_t random, work_list& work) {
  for (const std::uint32_t s : {0u, sign}) {
    const auto numbers = stretches<Format, values::any>({}, s, s | infinity, random, work);
    ASSERT_EQ(numbers.front().first, s);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const stretch& one = numbers[i];
      ASSERT_TRUE(i == 0 || one.code == numbers[i - 1].code + 1) << one.code;
      for (const std::uint32_t x : {one.first, one.last})
        ASSERT_EQ(one.code, code_of(real(x), random, Format::random)) << std::hex << x;
    }
    const auto nan =
        stretches<Format, values::any>({}, s | (infinity + 1), s | 0x7fffffffu, random, work);
    ASSERT_EQ(nan.size(), 1u);
    ASSERT_TRUE(std::isnan(real(nan[0].code << 16)));
  }
}
TEST(ExhaustiveBfloat16, EveryFloatHasTheCodeOfTheDefinition) {
  LEANOPT_NEEDS_OPTIMIZATION();
  work_list work;
  check_bfloat16<leanopt::formats::bfloat16>(0, work);
  for (const std::uint32_t random : {0u, 0x80000000u, 0xbadc0ffeu, 0xffffffffu})
    check_bfloat16<bfloat16_stochastic>(random, work);
  work.run();
}

// ---- dynamic8 -----------------------------------------------------------------------------------

/// All floats of a block with this maximum, whose reciprocal is a normal number, and these not
/// below `smallest`.
template <class Format, values Range>
void check_dynamic8(float largest, float smallest, work_list& work) {
  constexpr bool is_signed = Range == values::any;
  const bitsandbytes::book& book = bitsandbytes::book_of(is_signed);
  const auto s = format_runs::scale_of<Format, Range>({largest}, smallest);
  const auto expected = [&](std::uint32_t x) {
    const float scaled = real(x) * (1 / largest);
    const int code = is_signed ? bitsandbytes::step_code(book, scaled)
                               : bitsandbytes::nearest_code(book, scaled);
    const bool is_raised = std::is_same_v<Format, dynamic8> && !is_signed && x > 0;
    return std::uint32_t(is_raised ? std::max(code, 1) : code);
  };
  for (const std::uint32_t sign_bit : {0u, sign}) {
    if (!is_signed && sign_bit) continue;
    const auto all =
        stretches<Format, Range>(s, sign_bit | bits(smallest), sign_bit | bits(largest), 0, work);
    const std::size_t missing = smallest > 0 ? 1 : 0;  // the code of zero
    ASSERT_EQ(all.size(), (is_signed ? 129u - (sign_bit ? 1 : 0) : 256u) - missing);
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(all[i].code, expected(all[i].first)) << real(all[i].first);
      ASSERT_EQ(all[i].code, expected(all[i].last)) << real(all[i].last);
      ASSERT_TRUE(i == 0 ||
                  (sign_bit ? all[i].code < all[i - 1].code : all[i].code > all[i - 1].code));
    }
  }
}
TEST(ExhaustiveDynamic8, EveryFloatHasTheCodeOfTheStepKernel) {
  LEANOPT_NEEDS_OPTIMIZATION();
  work_list work;
  for (const float largest : {1.0f, 1.7e-5f})
    for (const float smallest : {0.0f, largest * 0x1.00001p-21f}) {  // both ways of encode()
      check_dynamic8<dynamic8, values::any>(largest, smallest, work);
      check_dynamic8<dynamic8, values::non_negative>(largest, smallest, work);
      check_dynamic8<dynamic8_strict, values::any>(largest, smallest, work);
      check_dynamic8<dynamic8_strict, values::non_negative>(largest, smallest, work);
    }
  work.run();
}

// ---- log8 ---------------------------------------------------------------------------------------

/// The largest float whose code is at most `top` with any random bits.
template <values Range>
std::uint32_t largest_held(const log8::scale& s, std::uint32_t top) {
  std::uint32_t low = 0, high = 0x7effffffu;
  while (low < high) {
    const std::uint32_t middle = low + (high - low + 1) / 2;
    const auto code =
        log8::encode<Range, scalar<float>>(s, scalar<float>(real(middle)), 0xffffffffu);
    if (code <= top)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/// A code changes where the share of the gap below a number and the random bits make a whole gap.
template <values Range>
void check_log8(int M, std::uint32_t base, std::uint32_t random, work_list& work) {
  constexpr std::uint32_t top = Range == values::any ? 127 : 255;
  const int shift = 23 - M;
  const log8::scale s{base << shift, shift};
  const double down = 1 - std::ldexp(double(random >> (32 - shift)), -shift);
  const std::uint32_t last = largest_held<Range>(s, top);
  const auto value = [&](std::uint32_t code) {
    return double(format_runs::decode<log8, Range>(s, code));
  };
  for (const std::uint32_t sign_bit : {0u, sign}) {
    if (Range == values::non_negative && sign_bit) continue;
    const std::uint32_t sign_of_code = sign_bit >> 24;
    const auto all = stretches<log8, Range>(s, sign_bit, sign_bit | last, random, work);
    ASSERT_GE(all.size(), top - 1u);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto code = std::uint32_t(i);
      ASSERT_EQ(all[i].code, code | sign_of_code);
      if (i + 1 == all.size()) continue;
      if (Range == values::non_negative && code == 0) {  // for zero alone
        ASSERT_EQ(all[0].last, 0u);
        continue;
      }
      const double gap = value(code + 1) - value(code), slack = tolerance::threshold_of_gap * gap;
      ASSERT_LE(std::abs(double(real(all[i].last))), value(code) + down * gap + slack) << code;
      ASSERT_GE(std::abs(double(real(all[i + 1].first))), value(code) + down * gap - slack) << code;
      ASSERT_LT(std::abs(double(real(all[i].last))), value(code + 1));
      ASSERT_GT(std::abs(double(real(all[i + 1].first))), value(code));
    }
  }
}
TEST(ExhaustiveLog8, EveryFloatOfABlockHasTheCodeOfANeighbour) {
  LEANOPT_NEEDS_OPTIMIZATION();
  work_list work;
  for (int M = 3; M <= 5; ++M) {
    const std::uint32_t lowest = 1u << M, highest = (0x7f000000u >> (23 - M)) - 255;
    for (const std::uint32_t base : {lowest, lowest * 60 + 5, lowest * 120 + 3, highest})
      for (const std::uint32_t random : {0x80000000u, 0x3243f6a8u}) {
        check_log8<values::any>(M, base, random, work);
        check_log8<values::non_negative>(M, base, random, work);
      }
  }
  work.run();
}

/// The scales of the block maxima `first` to `last`: they hold the maximum whatever the random bits
/// and leave no more than two codes unused, unless they are the smallest of all.
std::string check_scales(std::uint32_t first, std::uint32_t last) {
  using range = log8::range<scalar<float>>;
  for (std::uint32_t x = first; x <= last; ++x)
    for (const std::uint32_t spread : {(15u << 23) + 1, 15u << 23, 7u << 23}) {  // M = 3, 4, 5
      range r[2];
      r[0].largest = x;
      r[1].largest = std::max(x, spread + 1);
      r[1].smallest = r[1].largest - spread - 1;  // as range.add keeps it
      log8::scale s[2];
      log8::fit<leanopt::rules::adam_formula<false>>(r, s);
      const auto ends = [&](auto range_of_slot, int k, std::uint32_t top) {
        constexpr values signs = range_of_slot();
        const scalar<float> value = real(r[k].largest);
        const auto high = log8::encode<signs, scalar<float>>(s[k], value, 0xffffffffu),
                   low = log8::encode<signs, scalar<float>>(s[k], value, 0);
        return high <= top && (low + 2 >= top || s[k].base == 0x800000u);
      };
      if (!ends(std::integral_constant<values, values::any>{}, 0, 127) ||
          !ends(std::integral_constant<values, values::non_negative>{}, 1, 255))
        return "the maximum with the bits " + std::to_string(x) + " does not fit its scale";
    }
  return {};
}
TEST(ExhaustiveLog8, EveryMaximumFitsItsScale) {
  LEANOPT_NEEDS_OPTIMIZATION();
  work_list work;
  constexpr std::uint32_t end = 0x7f000000u, piece = 1u << 22;
  for (std::uint32_t first = 0; first < end; first += piece)
    work.add([=] { return check_scales(first, std::min(first + piece, end) - 1); });
  work.run();
}

}  // namespace
