// The refined roots and quotients are IEEE's: for every mantissa and both of the nearest seeds. The
// reciprocal is shown to be the nearest for every divisor, from which the quotient follows
// (Markstein 1990, theorem 8); numbers at the limits and random ones are tried as well.

#include "tests/support/emulator/cuda.hpp"
// The emulator comes before the engine.
#include <leanopt/engine/cuda/pack.cuh>

#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace {

using leanopt::bits;
using leanopt::real;
using leanopt::cuda::refined_quotient;
using leanopt::cuda::refined_root;

#if defined(__x86_64__) && !defined(__clang__)
#define WITH_FMA __attribute__((target("avx2,fma"), optimize("O2")))
#else
#define WITH_FMA
#endif

/// How many mantissas have a wrong root with seeds off by `error` floats.
WITH_FMA int wrong_roots(int error) {
  int wrong = 0;
  for (std::uint32_t x = 0x3f800000; x < 0x40800000; ++x) {  // two octaves: all mantissas
    const float number = real(x);
    const float seed = real(bits(float(1 / __builtin_sqrt(double(number)))) + std::uint32_t(error));
    wrong += bits(refined_root::refine(number, seed)) != bits(__builtin_sqrtf(number));
  }
  return wrong;
}
TEST(RefinedRoot, IsTheNearestForEveryMantissa) {
  EXPECT_EQ(wrong_roots(0), 0);
  EXPECT_EQ(wrong_roots(-1), 3) << "of 2^24, as with sqrt.rn";
  EXPECT_EQ(wrong_roots(1), 2);
}
TEST(RefinedRoot, KeepsItsRangeWithinWhichScalesAreExact) {
  for (const std::uint32_t x : {refined_root::least, refined_root::least + 1, refined_root::most,
                                refined_root::most - 1, 0x00000000u})
    EXPECT_EQ(bits(refined_root::of(real(x))), bits(std::sqrt(real(x)))) << x;
}

WITH_FMA int wrong_reciprocals(int error) {
  int wrong = 0;
  for (std::uint32_t x = 0x3f800000; x < 0x3fffffff; ++x) {  // Markstein leaves out all ones
    const float b = real(x), nearest = float(1 / double(b));
    const float seed = real(bits(nearest) + std::uint32_t(error));
    wrong += bits(refined_quotient::reciprocal(b, seed)) != bits(nearest);
  }
  return wrong;
}
TEST(RefinedQuotient, HasTheNearestReciprocalOfEveryMantissa) {
  EXPECT_EQ(wrong_reciprocals(0), 0);
  EXPECT_EQ(wrong_reciprocals(-1), 0);
  EXPECT_EQ(wrong_reciprocals(1), 31) << "of 2^23, whose seeds are off by more than a unit";
}
/// All dividends for some divisors, of which one is all ones.
WITH_FMA std::uint64_t wrong_quotients(float b, int error) {
  std::uint64_t wrong = 0;
  const float seed = real(bits(float(1 / double(b))) + std::uint32_t(error));
  for (std::uint32_t x = 0x3f800000; x < 0x40000000; ++x)
    wrong += bits(refined_quotient::refine(real(x), b, seed)) != bits(real(x) / b);
  return wrong;
}
TEST(RefinedQuotient, IsTheNearest) {
  patterns::source random(1);
  for (int i = 0; i < 8; ++i)
    for (int error = -1; error <= 1; ++error) {
      const auto mantissa = std::uint32_t(random.word() & 0x7fffff);
      EXPECT_EQ(wrong_quotients(real(0x3f800000u | mantissa), error), 0u) << mantissa;
    }
  const float all_ones = real(0x3fffffff);
  EXPECT_EQ(wrong_quotients(all_ones, 0), 0u);
  EXPECT_LE(wrong_quotients(all_ones, 1), 1u) << "a power of two, as with div.rn";
  EXPECT_LE(wrong_quotients(all_ones, -1), 1u);
}
WITH_FMA std::uint64_t wrong_random_quotients(int error) {
  patterns::source random(std::uint64_t(error) + 9);
  const auto between = [&](std::uint32_t least, std::uint32_t most) {
    return least + random.below(most - least + 1);
  };
  std::uint64_t wrong = 0;
  for (int i = 0; i < 4000000; ++i) {
    using steps = refined_quotient;
    const float b = real(between(steps::least, steps::most));
    const std::uint32_t sign = random.below(2) << 31;
    const std::uint32_t size = i % 64 ? between(steps::least_dividend, steps::most_dividend) : 0;
    const float a = real(size | sign);
    const float seed = real(bits(float(1 / double(b))) + std::uint32_t(error));
    wrong += bits(steps::refine(a, b, seed)) != bits(a / b);
  }
  return wrong;
}
TEST(RefinedQuotient, IsTheNearestInItsWholeRangeAndKeepsTheSignOfZero) {
  for (int error = -1; error <= 1; ++error) EXPECT_EQ(wrong_random_quotients(error), 0u) << error;
}

/// Outside of their ranges packs take IEEE's operations, one by one.
void roots_and_quotients(const float* a, const float* b, float* root, float* quotient) {
  using V = leanopt::cuda::pack<float, 8>;
  V x, y;
  for (int i = 0; i < 8; ++i) {
    x.v[i] = a[8 * threadIdx.x + unsigned(i)];
    y.v[i] = b[8 * threadIdx.x + unsigned(i)];
  }
  const V r = sqrt(x), q = divide(x, y);
  for (int i = 0; i < 8; ++i) {
    root[8 * threadIdx.x + unsigned(i)] = r.v[i];
    quotient[8 * threadIdx.x + unsigned(i)] = q.v[i];
  }
}
TEST(Pack, DividesAndTakesRootsOfAnyNumbers) {
  const std::uint32_t special[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff,
                                   0x00800000, 0x0d7fffff, 0x0d800000, 0x2b7fffff, 0x2b800000,
                                   0x49800000, 0x49800001, 0x5d800001, 0x7f7fffff, 0x7f800000,
                                   0xff800000, 0x7fc00000, 0x3f800000, 0xbf800000};
  patterns::source random(2);
  for (int turn = 0; turn < 200; ++turn) {
    emulator::here().seed_error = turn % 3 - 1;
    std::vector<float> a(256), b(256), root(256), quotient(256);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = random.positive<float>(patterns::kind::normal);
      b[i] = random.positive<float>(patterns::kind::normal);
      if (random.below(16) == 0) a[i] = real(special[random.below(std::size(special))]);
      if (random.below(32) == 0) b[i] = real(special[random.below(std::size(special))]);
    }
    cudaLaunchConfig_t config;
    config.blockDim = dim3(32);
    cudaLaunchKernelEx(&config, roots_and_quotients, a.data(), b.data(), root.data(),
                       quotient.data());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(patterns::comparable(root[i]), patterns::comparable(std::sqrt(a[i]))) << a[i];
      ASSERT_EQ(patterns::comparable(quotient[i]), patterns::comparable(a[i] / b[i]))
          << a[i] << " / " << b[i];
    }
  }
}

}  // namespace
