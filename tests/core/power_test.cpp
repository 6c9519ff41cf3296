// Powers: near the true ones, of which long double has 11 bits more, and exact where they can be.

#include <leanopt/core/power.hpp>

#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

using leanopt::power;
using leanopt::real_power;

/// How far x is from the exact number, in units of its last place.
double error_of(double x, long double exact) {
  const int exponent = std::max(std::ilogb(x), -1022);  // of 0 and what is not normal, too
  return double(std::abs((long double)x - exact) / std::ldexp(1.0L, exponent - 52));
}

TEST(Power, IsThatOfRepeatedProducts) {
  EXPECT_EQ(power(0.9, 0), 1);
  EXPECT_EQ(power(0.9, 1), 0.9);
  EXPECT_EQ(power(2, 1000), 0x1p1000);
  EXPECT_EQ(power(0, 3), 0);
  for (const double x : {0.9, 0.999, 0.99999})
    for (const std::int64_t n : {2, 3, 7, 100, 12345, 1000000})
      EXPECT_LE(error_of(power(x, n), std::pow((long double)x, (long double)n)), 1)
          << x << "^" << n;
}

TEST(RealPower, OfStepsIsTheNearestButForHardCases) {
  patterns::source random(1);
  double worst = 0;
  const auto check = [&](std::int64_t step, double exponent) {
    const long double exact = std::pow((long double)step, (long double)exponent);
    worst = std::max(worst, error_of(real_power(double(step), exponent), exact));
  };
  for (std::int64_t step = 1; step < 20000; ++step)
    for (const double exponent : {-0.8, -0.5, -1.5, -0.3}) check(step, exponent);
  for (int i = 0; i < 200000; ++i)
    check(1 + random.below(0x7fffffff), -1.5 * random.below(1 << 30) * 0x1p-30);
  EXPECT_LT(worst, 0.502);
}
TEST(RealPower, OfAnyNumberIsTheNearestButForHardCases) {
  patterns::source random(2);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const double x =
        std::ldexp(1 + random.below(1 << 30) * 0x1p-30, int(random.below(2000)) - 1000);
    const double y = (random.below(1 << 30) * 0x1p-30 - 0.5) * 2000 / (1 + std::abs(std::log2(x)));
    const long double exact = std::pow((long double)x, (long double)y);
    worst = std::max(worst, error_of(real_power(x, y), exact));
  }
  EXPECT_LT(worst, 0.51);
}
TEST(RealPower, IsExactAtTheEnds) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const double y : {0.0, 1.0, -0.8, 1e300, infinity, -infinity})
    EXPECT_EQ(real_power(1, y), 1);
  for (const double x : {0x1p-1022, 0.3, 7.0, 1e300}) {
    EXPECT_EQ(real_power(x, 0), 1);
    EXPECT_EQ(real_power(x, std::numeric_limits<double>::min()), 1);
    EXPECT_EQ(real_power(x, 1), x);
  }
  EXPECT_EQ(real_power(2, -1.0), 0.5);
  EXPECT_EQ(real_power(4, -1.5), 0.125);
  EXPECT_EQ(real_power(2, -1074), 0x1p-1074);
  EXPECT_EQ(real_power(2, 1023), 0x1p1023);
  for (const double y : {-infinity, -1e300, -1e5}) EXPECT_EQ(real_power(2, y), 0);
  for (const double y : {infinity, 1e300, 1e5}) EXPECT_EQ(real_power(2, y), infinity);
  EXPECT_EQ(real_power(0.5, infinity), 0);
  EXPECT_TRUE(std::isnan(real_power(2, std::numeric_limits<double>::quiet_NaN())));
}

}  // namespace
