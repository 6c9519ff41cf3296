// bfloat16 against its definition: the nearest number with ties to even, or one of the two around
// a value with probabilities that make its mean; second moments that stay positive; infinities and
// NaN as they are. All floats are tried in exhaustive_test.cpp.

#include <leanopt/formats/bfloat16.hpp>

#include "tests/formats/support.hpp"
#include "tests/support/levels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using format_runs::level;
using format_runs::values;
using leanopt::formats::bfloat16;
using leanopt::formats::bfloat16_stochastic;

std::uint32_t bits(float x) { return patterns::cast<std::uint32_t>(x); }
float real(std::uint32_t x) { return patterns::cast<float>(x); }

template <class Format, values Range>
std::uint32_t encode(float x, std::uint32_t random = 0) {
  return format_runs::encode<Format, Range>({}, x, random);
}
template <class Format>
float stored(float x, std::uint32_t random = 0) {
  return format_runs::decode<Format, values::any>({}, encode<Format, values::any>(x, random));
}

/// Floats around those that have few bits: every upper half with the lower halves that matter.
template <class F>
void each_float(F f) {
  for (std::uint32_t upper = 0; upper < 0x10000u; ++upper)
    for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      if (!testing::Test::HasFatalFailure()) f(real(upper << 16 | lower));
}

TEST(Bfloat16Code, IsTheUpperHalfOfAFloat) {
  for (std::uint32_t code = 0; code < 0x10000u; ++code) {
    const float expected = real(code << 16);
    ASSERT_EQ(bits(format_runs::decode<bfloat16, values::any>({}, code)), bits(expected));
    ASSERT_EQ(bits(format_runs::decode<bfloat16_stochastic, values::any>({}, code)),
              bits(expected));
  }
}

TEST(Bfloat16Code, IsTheNearestWithTiesToEven) {
  each_float([](float x) {
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(stored<bfloat16>(x))) << std::hex << bits(x);
    } else {
      ASSERT_EQ(bits(stored<bfloat16>(x)), bits(format_runs::nearest_bfloat16(x))) << x;
    }
  });
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(stored<bfloat16>(0x1.ffp127f), infinity);  // as IEEE rounds, half a unit above the top
  EXPECT_EQ(stored<bfloat16>(-0x1.ffp127f), -infinity);
  EXPECT_EQ(stored<bfloat16>(0x1.fefffep127f), 0x1.fep127f);
}

/// The number below for all random bits but as many as the lower half counts: exactly the mean.
TEST(Bfloat16StochasticCode, IsANeighbourWithTheProbabilityOfTheMean) {
  patterns::source random(1);
  for (const std::uint32_t upper :
       {0u, 1u, 0x007fu, 0x0080u, 0x3f80u, 0x3fffu, 0x7f00u, 0xbf80u, 0x8000u, 0xff00u})
    for (const std::uint32_t lower : {0u, 1u, random.below(0x10000u), 0x8000u, 0xffffu}) {
      const float x = real(upper << 16 | lower);
      std::uint32_t ups = 0;
      for (std::uint32_t word = 0; word < 0x10000u; ++word) {
        const std::uint32_t noise = std::uint32_t(random.below(0x10000u));  // too low to matter
        const auto code = encode<bfloat16_stochastic, values::any>(x, word << 16 | noise);
        ASSERT_TRUE(code == upper || code == upper + 1) << x;
        ups += code == upper + 1;
      }
      ASSERT_EQ(ups, lower) << x;
    }
}

TEST(Bfloat16StochasticCode, KeepsWhatIsFiniteFinite) {
  for (const std::uint32_t word : {0u, 0x80000000u, 0xffffffffu})
    each_float([&](float x) {
      const float result = stored<bfloat16_stochastic>(x, word);
      ASSERT_EQ(std::isnan(result), std::isnan(x)) << std::hex << bits(x);
      ASSERT_EQ(std::isinf(result), std::isinf(x)) << x;
      ASSERT_EQ(std::signbit(result), std::signbit(x)) << x;
    });
  EXPECT_EQ(stored<bfloat16_stochastic>(0x1.fffffep127f, 0xffffffffu), 0x1.fep127f);
}

template <class Format>
void expect_positive_second_moments() {
  each_float([](float x) {
    if (std::signbit(x) || std::isnan(x)) return;
    for (const std::uint32_t word : {0u, 0x80000000u, 0xffffffffu}) {
      const auto code = encode<Format, values::non_negative>(x, word);
      const auto usual = encode<Format, values::any>(x, word);
      ASSERT_EQ(code, x > 0 ? std::max(usual, 1u) : 0) << x;
    }
  });
}
TEST(Bfloat16Code, OfAPositiveSecondMomentIsNotZero) {
  expect_positive_second_moments<bfloat16>();
  expect_positive_second_moments<bfloat16_stochastic>();
}

/// Of a block only the element itself can tell what is not finite, and a short one is like another.
template <class Format>
void expect_independent_values() {
  patterns::source random(2);
  const std::vector<float> x = random.numbers<float>(300, patterns::kind::non_finite);
  for (const level l : levels::all_here()) {
    const auto e = format_runs::encode<Format, values::any>(l, x, 7);
    for (std::size_t i = 0; i < x.size(); ++i) {
      leanopt::lattice<leanopt::scalar<float>> draw(leanopt::random_word(7, i / 256, 0),
                                                    std::uint32_t(i % 256));
      ASSERT_EQ(e.codes[i], (encode<Format, values::any>(x[i], draw.next()))) << i;
    }
  }
}
TEST(Bfloat16Block, IsOfIndependentValues) {
  expect_independent_values<bfloat16>();
  expect_independent_values<bfloat16_stochastic>();
}

}  // namespace
