// Square roots and quotients of several numbers at a time, correctly rounded. The steps and the
// seeds are those to which ptxas turns sqrt.rn and div.rn of usual numbers (Markstein 1990), so a
// device that has these right has them right here. Only one test tells for all numbers whether they
// are usual, instead of one each; where they are not it is sqrt.rn and div.rn, one by one.
// NVIDIA says of the seeds that a reciprocal is within a unit in the last place and that of a root
// within 2^-22.9 of its size. The tests prove the steps for every number and every seed that these
// bounds allow, but for three pairs of a number and its seed, which no device can have while its
// sqrt.rn and div.rn are right; roots_device_test.cu tries all numbers on a device.
#pragma once

#include <leanopt/core/lane.hpp>

#include <cstdint>

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// About 1/x and 1/sqrt(x), of normal numbers.
__device__ __forceinline__ float reciprocal_seed(float x) {
#if defined(__CUDACC__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return approximate_reciprocal(x);
#endif
}
__device__ __forceinline__ float reciprocal_root_seed(float x) {
#if defined(__CUDACC__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return approximate_reciprocal_root(x);
#endif
}

/// sqrt(x) for 0 and for numbers from `least` to `most`.
struct refined_root {
  static constexpr std::uint32_t least = 0x0d800000;  ///< 2^-100, as bits
  static constexpr std::uint32_t most = 0x7f7fffff;   ///< the largest finite number

  LEANOPT_HD static float refine(float x, float seed) {
    using namespace leanopt::detail;
    const float root = multiply(x, seed), half = multiply(0.5f, seed);
    return fused(fused(-root, root, x), half, root);
  }
  __device__ __forceinline__ static float of(float x) {
    const float least_ = leanopt::real(least);
    return refine(x,
                  reciprocal_root_seed(x > least_ ? x : least_));  // of 0: 0 times what is finite
  }
};

/// a / b for positive b from `least` to `most`, and a of 0 or a magnitude from `least_dividend` to
/// `most_dividend`: quotients are normal numbers and remainders exact.
struct refined_quotient {
  static constexpr std::uint32_t least = 0x2b800000, most = 0x49800000;  ///< 2^-40 and 2^20
  static constexpr std::uint32_t least_dividend = 0x0d800000;            ///< 2^-100
  static constexpr std::uint32_t most_dividend = 0x5d800000;             ///< 2^60

  /// The number nearest to 1/b.
  LEANOPT_HD static float reciprocal(float b, float seed) {
    using namespace leanopt::detail;
    return fused(fused(-b, seed, 1.0f), seed, seed);
  }
  LEANOPT_HD static float refine(float a, float b, float seed) {
    using namespace leanopt::detail;
    const float y = reciprocal(b, seed), near = multiply(a, y);
    return fused(fused(near, b, -a), -y, near);  // with the signs that keep that of a zero
  }
  __device__ __forceinline__ static float of(float a, float b) {
    return refine(a, b, reciprocal_seed(b));
  }
};

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
