// Split weights against what they promise: 16 residual bits keep every float32 number, 8 one of the
// two numbers of 24 bits around it, in the mean itself; the parameter alone is the pair rounded to
// the nearest bfloat16.

#include <leanopt/engine/cpu.hpp>
#include <leanopt/weights/split.hpp>

#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// Lanes are passed inside always-inlined kernels only, so the ABI that g++ warns about never
// exists.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace {

using leanopt::if_above;
using leanopt::ints;
using leanopt::lane_traits;
using leanopt::real;
using leanopt::reduce_max;
using leanopt::scalar;
using leanopt::cpu::level;
using leanopt::cpu::detail::lanes_of;
using leanopt::weights::split24;
using leanopt::weights::split32;

constexpr std::uint32_t sign = 0x80000000u, infinity = 0x7f800000u, canonical_nan = 0x7fc00000u;
bool is_nan(std::uint32_t x) { return (x & ~sign) > infinity; }

/// Residual bits as memory keeps them: the lowest `Bits`, extended with their sign.
template <int Bits, class I>
LEANOPT_HD I stored(const I& rest) {
  const I low = rest & I((1u << Bits) - 1);
  return low - ((low & I(1u << (Bits - 1))) << 1);
}
constexpr int bits_of(split24) { return 8; }
constexpr int bits_of(split32) { return 16; }

struct pair {
  std::uint32_t word, rest;
};
template <class Weights>
pair write(std::uint32_t x, std::uint32_t random = 0) {
  pair result{};
  result.word = Weights::template write<leanopt::bfloat16_bits, scalar<float>>(
      scalar<float>(real(x)), random, result.rest);
  result.rest = stored<bits_of(Weights())>(result.rest);
  return result;
}
template <class Weights>
std::uint32_t read(const pair& p) {
  return bits(Weights::template read<leanopt::bfloat16_bits, scalar<float>>(p.word, p.rest));
}

// ---- 32 bits ------------------------------------------------------------------------------------

/// Writes and reads the numbers whose bits are first, first + 1, ...; returns whether one of them
/// changed or has a parameter that is not it rounded to the nearest, halves away from 0.
struct every_number {
  template <int Width>
  LEANOPT_INLINE static bool run(std::uint32_t first, std::uint32_t count) {
    using V = lanes_of<Width, float>;
    using I = ints<V>;
    I x = lane_traits<V>::iota() + I(first), wrong(0u);
    for (std::uint32_t i = 0; i < count; i += lane_traits<V>::count) {
      I rest(0u);
      const I word = split32::write<leanopt::bfloat16_bits, V>(V(real(x)), I(0u), rest);
      const I back = bits(split32::read<leanopt::bfloat16_bits, V>(word, stored<16>(rest)));
      const I magnitude = x & I(~sign);
      const I expected = if_above(magnitude, I(infinity), I(canonical_nan), x);
      const I rounded = (expected + I(0x8000u)) >> 16;
      wrong = wrong | (back - expected) | (word - rounded);
      x = x + I(std::uint32_t(lane_traits<V>::count));
    }
    return reduce_max(wrong) != 0;
  }
};
bool is_wrong(level l, std::uint32_t first, std::uint32_t count) {
  return leanopt::cpu::detail::launch<every_number, level::avx512>(l, first, count);
}

TEST(Split32, KeepsEveryNumber) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr std::uint32_t step = 61;  // an instrumented program would take minutes for all
#else
  constexpr std::uint32_t step = 1;
#endif
  constexpr std::uint32_t at_once = 1u << 16;
  for (std::uint32_t upper = 0; upper < 1u << 16; upper += step) {
    const std::uint32_t first = upper << 16;
    if (!is_wrong(leanopt::cpu::best_level(), first, at_once)) continue;
    for (std::uint32_t x = first; x < first + at_once; ++x)
      ASSERT_EQ(read<split32>(write<split32>(x)), is_nan(x) ? canonical_nan : x) << std::hex << x;
    FAIL() << std::hex << first << ": a parameter is not the nearest, or only lanes fail";
  }
}
TEST(Split32, KeepsNumbersAtEveryLevel) {
  for (const level l : levels::all_here())
    for (std::uint32_t upper = 0; upper < 1u << 16; upper += 255)
      ASSERT_FALSE(is_wrong(l, upper << 16, 1u << 14)) << std::hex << upper;
}
TEST(Split32, TheReferenceKnowsTheLandmarks) {  // what is compared with must be right by itself
  EXPECT_EQ(write<split32>(0x3f808000u).word, 0x3f81u);  // halves away from 0
  EXPECT_EQ(write<split32>(0xbf808000u).word, 0xbf81u);
  EXPECT_EQ(write<split32>(0x3f807fffu).word, 0x3f80u);
  EXPECT_EQ(std::int32_t(write<split32>(0x3f808000u).rest), -0x8000);
  EXPECT_EQ(write<split32>(infinity).word, 0x7f80u);
  EXPECT_EQ(read<split32>(write<split32>(infinity | sign)), infinity | sign);
  EXPECT_EQ(read<split32>(write<split32>(sign)), sign);
  // The largest numbers are nearer to bfloat16's infinity, and still themselves.
  EXPECT_EQ(write<split32>(0x7f7fffffu).word, 0x7f80u);
  EXPECT_EQ(read<split32>(write<split32>(0x7f7fffffu)), 0x7f7fffffu);
  EXPECT_EQ(read<split32>(write<split32>(0x7f800001u)), canonical_nan);
  EXPECT_EQ(read<split32>(write<split32>(0xffffffffu)), canonical_nan);
}

// ---- 24 bits ------------------------------------------------------------------------------------

/// For one number x and all 256 random values: the sum of what is read back, in units of x's last
/// place above x cut to 24 bits, and whether anything but x's two neighbours came, or a parameter
/// that is not the nearest.
struct sums_of_24 {
  template <int Width>
  LEANOPT_INLINE static void run(std::uint32_t x, std::uint32_t* sum, bool* one_is_wrong) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    using I = ints<V>;
    const std::uint32_t below = x & ~0xffu;
    // What lies below the random values' eight bits has no say.
    I random = (L::iota() << 24) | I(0x00c0ffeeu), total(0u), wrong(0u);
    for (int r = 0; r < 256; r += L::count) {
      I rest(0u);
      const I word = split24::write<leanopt::bfloat16_bits, V>(V(real(I(x))), random, rest);
      const I back = bits(split24::read<leanopt::bfloat16_bits, V>(word, stored<8>(rest)));
      const I above = back - I(below);
      total = total + above;
      wrong = wrong | if_above(above, I(0x100u), above, above & I(0xffu)) |
              (word - ((back + I(0x8000u)) >> 16));
      random = random + (I(std::uint32_t(L::count)) << 24);
    }
    float lanes[L::count];
    L::store(lanes, V(real(total)));
    *sum = 0;
    for (const float one : lanes) *sum += leanopt::bits(one);
    *one_is_wrong = reduce_max(wrong) != 0;
  }
};

/// Every sign and exponent, with many mantissas.
template <class F>
void each_finite(F f) {
  patterns::source random(24);
  for (std::uint32_t upper = 0; upper < 512; ++upper) {
    if ((upper & 0xff) == 0xff) continue;
    for (const std::uint32_t low : {0u, 1u, 0x7fu, 0x80u, 0x81u, 0xffu, 0x100u, 0x7fffu, 0x8000u,
                                    0x8001u, 0xff7fu, 0xff80u, 0x7fff00u, 0x7fff80u, 0x7fffffu})
      f(upper << 23 | low);
    for (int i = 0; i < 64; ++i) f(upper << 23 | (std::uint32_t(random.word()) & 0x7fffffu));
  }
}

TEST(Split24, IsOneOfTheTwoNeighboursAndRightInTheMean) {
  for (const level l : levels::all_here())
    each_finite([&](std::uint32_t x) {
      std::uint32_t sum;
      bool wrong;
      leanopt::cpu::detail::launch<sums_of_24, level::avx512>(l, x, &sum, &wrong);
      ASSERT_FALSE(wrong) << std::hex << x;
      // Neighbours are 256 units of x's last place apart, of which their mean is to have x's rest.
      // There is none above the largest.
      const bool is_largest = (x & ~sign) >= 0x7f7fff00u;
      if (is_largest)
        ASSERT_LE(sum, 256 * (x & 0xffu)) << std::hex << x;
      else
        ASSERT_EQ(sum, 256 * (x & 0xffu)) << std::hex << x;
    });
}
TEST(Split24, KeepsWhatHas24BitsAndWhatIsNotFinite) {
  for (const std::uint32_t random : {0u, 0x80000000u, 0xffffffffu}) {
    each_finite([&](std::uint32_t x) {
      const std::uint32_t short_x = x & ~0xffu;
      ASSERT_EQ(read<split24>(write<split24>(short_x, random)), short_x);
    });
    EXPECT_EQ(read<split24>(write<split24>(infinity, random)), infinity);
    EXPECT_EQ(read<split24>(write<split24>(infinity | sign, random)), infinity | sign);
    for (const std::uint32_t x : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
      EXPECT_TRUE(is_nan(read<split24>(write<split24>(x, random)))) << std::hex << x;
  }
}
TEST(Split24, StaysFinite) {  // in the pair: the parameter alone is rounded to the nearest
  for (std::uint32_t random = 0; random < 256; ++random)
    for (std::uint32_t x = 0x7f7fff00u; x < infinity; ++x)
      for (const std::uint32_t s : {0u, sign}) {
        const pair p = write<split24>(x | s, random << 24);
        ASSERT_LT(read<split24>(p) & ~sign, infinity);
        ASSERT_EQ(p.word, (0x7f80u | s >> 16));
      }
}
TEST(Split24, HasARelativeErrorOfItsLastBit) {
  double worst = 0, worst_of_nearest = 0;
  each_finite([&](std::uint32_t x) {
    if ((x & ~sign) < 0x00800000u) return;  // subnormal numbers have fewer bits
    const double exact = real(x);
    double nearest = std::numeric_limits<double>::infinity();
    for (std::uint32_t random = 0; random < 256; ++random) {
      const double y = real(read<split24>(write<split24>(x, random << 24)));
      const double error = std::abs(y / exact - 1);
      worst = std::max(worst, error);
      nearest = std::min(nearest, error);
    }
    worst_of_nearest = std::max(worst_of_nearest, nearest);
  });
  EXPECT_LT(worst, tolerance::split24_error);
  EXPECT_GT(worst, tolerance::split24_error / 2);
  EXPECT_LE(worst_of_nearest, tolerance::split24_error / 2);
}

// ---- parameters that somebody else wrote --------------------------------------------------------

/// Residual bits that are left behind a parameter which was set to something else.
template <class Weights>
void check_stale() {
  constexpr int bits = bits_of(Weights());
  const int half = 1 << (bits - 1);
  for (int rest = -half; rest < half; ++rest) {
    const auto extended = std::uint32_t(rest);
    for (const std::uint32_t zero : {0u, 0x8000u}) {
      const std::uint32_t x = read<Weights>({zero, extended});
      ASSERT_EQ(x & sign, zero << 16);
      if (rest <= 0)
        ASSERT_EQ(x & ~sign, 0u) << rest;  // below zero there is no NaN, but zero
      else
        ASSERT_EQ(x & ~sign, extended << (16 - bits)) << "a subnormal number of its own right";
    }
    // Elsewhere the weight is within half a unit in the last place of the new parameter.
    for (const std::uint32_t word : {1u, 0x3f80u, 0xbf80u, 0x7f7fu}) {
      const auto distance =
          std::int64_t(read<Weights>({word, extended})) - (std::int64_t(word) << 16);
      ASSERT_LE(std::abs(distance), 0x8000) << word;
    }
  }
}
TEST(Split, StaleResidualsNeverMakeNaN) {
  check_stale<split24>();
  check_stale<split32>();
}

}  // namespace
