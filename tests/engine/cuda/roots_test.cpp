// The refined roots and quotients are IEEE's for every mantissa and every seed within the bounds
// that NVIDIA gives. Of quotients there are too many to try: first the reciprocal is shown to be
// the nearest for every divisor; then, that the quotient is right wherever the exact one lies so
// near to the middle between two numbers that the error of the steps could matter. Numbers at the
// limits and random ones are tried as well.

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

/// How many pairs of a mantissa and a seed off by at most `bound` of its size have a wrong root.
WITH_FMA int wrong_roots(double bound) {
  int wrong = 0;
  for (std::uint32_t x = 0x3f800000; x < 0x40800000; ++x) {  // two octaves: all mantissas
    const float number = real(x);
    const double exact = 1 / __builtin_sqrt(double(number));
    for (int error = -4; error <= 4; ++error) {
      const float seed = real(bits(float(exact)) + std::uint32_t(error));
      if (std::abs(double(seed) - exact) <= bound * exact)
        wrong += bits(refined_root::refine(number, seed)) != bits(__builtin_sqrtf(number));
    }
  }
  return wrong;
}
TEST(RefinedRoot, IsTheNearestForEveryMantissa) {
  EXPECT_EQ(wrong_roots(0x1p-24), 0);  // the nearest seed
  EXPECT_EQ(wrong_roots(std::exp2(-22.9)), 2) << "of 50859330";
}
TEST(RefinedRoot, KeepsItsRangeWithinWhichScalesAreExact) {
  for (const std::uint32_t x : {refined_root::least, refined_root::least + 1, refined_root::most,
                                refined_root::most - 1, 0x00000000u})
    EXPECT_EQ(bits(refined_root::of(real(x))), bits(std::sqrt(real(x)))) << x;
}

constexpr std::uint32_t all_ones = 0x3fffffff;

/// Whether a number off by `error` from the one nearest to 1/b, 1 <= b < 2, is within a unit in the
/// last place of 1/b.
WITH_FMA bool is_seed(float b, int error) {
  const double exact = 1 / double(b);
  const float seed = real(bits(float(exact)) + std::uint32_t(error));
  return std::abs(double(seed) - exact) <= (b == 1 ? 0x1p-23 : 0x1p-24);
}
WITH_FMA int wrong_reciprocals() {
  int wrong = 0;
  for (std::uint32_t x = 0x3f800000; x < all_ones; ++x)
    for (int error = -1; error <= 1; ++error) {
      const float b = real(x), nearest = float(1 / double(b));
      if (is_seed(b, error))
        wrong += bits(refined_quotient::reciprocal(
                     b, real(bits(nearest) + std::uint32_t(error)))) != bits(nearest);
    }
  return wrong;
}
TEST(RefinedQuotient, HasTheNearestReciprocalOfEveryMantissaButAllOnes) {
  EXPECT_EQ(wrong_reciprocals(), 0);
}

/// The quotients A / B of 24 bits each that lie r / 2B units from the middle between two numbers,
/// for 0 < |r| <= `distance`: A 2^(k+1) = B (2q + 1) + r with q of 24 bits and k = 23 or 24. How
/// many of all there are are wrong.
struct hard_quotients {
  std::uint64_t all = 0, wrong = 0;

  WITH_FMA void add(std::uint32_t B, int distance) {
    const int zeros = __builtin_ctz(B);
    const std::uint64_t odd = B >> zeros;
    std::uint64_t inverse = 1;  // of the odd part of B, modulo 2^64
    for (int i = 0; i < 6; ++i) inverse *= 2 - odd * inverse;
    const float b = std::ldexp(float(B), -23), seed = float(1 / double(b));
    for (int k = 23; k <= 24; ++k)
      for (std::int64_t r = -distance; r <= distance; ++r) {
        if (r == 0 || r % (std::int64_t(1) << zeros) != 0) continue;
        const std::uint64_t period = std::uint64_t(1) << (k + 1 - zeros);
        std::uint64_t middle = std::uint64_t(-(r >> zeros)) * inverse & (period - 1);
        for (; middle < 1u << 25; middle += period) {
          if (middle < 1u << 24 || middle % 2 == 0) continue;
          const std::uint64_t A = (B * middle + std::uint64_t(r)) >> (k + 1);
          if (A < 1u << 23 || A >= 1u << 24) continue;
          const float a = std::ldexp(float(A), -23);
          ++all;
          wrong += bits(refined_quotient::refine(a, b, seed)) != bits(a / b);
        }
      }
  }
};
/// In units of 1 / 2B of the last place, the first quotient is off by at most 3 B, which the exact
/// error 2^-24 of the reciprocal makes 3, and the rounding of the remainder adds 2.
TEST(RefinedQuotient, IsTheNearestForEveryPairOfMantissasThatCouldGoWrong) {
  hard_quotients hard;
  for (std::uint32_t B = 1u << 23; B < 1u << 24; ++B) hard.add(B, 6);
  EXPECT_GT(hard.all, 1u << 24);
  EXPECT_EQ(hard.wrong, 0u);
}
/// All dividends of a divisor with all its seeds.
WITH_FMA std::uint64_t wrong_quotients(float b) {
  std::uint64_t wrong = 0;
  for (int error = -1; error <= 1; ++error) {
    const float seed = real(bits(float(1 / double(b))) + std::uint32_t(error));
    for (std::uint32_t x = 0x3f800000; x < 0x40000000 && is_seed(b, error); ++x)
      wrong += bits(refined_quotient::refine(real(x), b, seed)) != bits(real(x) / b);
  }
  return wrong;
}
TEST(RefinedQuotient, IsTheNearestForAllDividendsOfSomeDivisors) {
  patterns::source random(1);
  EXPECT_EQ(wrong_quotients(1), 0u);
  for (int i = 0; i < 8; ++i) {
    const auto mantissa = std::uint32_t(random.word() & 0x7fffff);
    EXPECT_EQ(wrong_quotients(real(0x3f800000u | mantissa)), 0u) << mantissa;
  }
  EXPECT_EQ(wrong_quotients(real(all_ones)), 1u) << "a power of two by the seed 1/2, as by div.rn";
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
