// Square roots and quotients of several numbers at a time, rounded correctly where the device's
// seeds are as good as sqrt.rn and div.rn need them. The steps are those to which ptxas turns
// these: they refine a seed of the device (Markstein 1990). Here one test tells for all numbers
// whether the steps are right, instead of one each, and where they are not it is sqrt.rn and div.rn
// one by one. The tests prove the steps for all mantissas and the nearest seed; with seeds one unit
// further they list the few mantissas that would go wrong. What seeds a device has, only a device
// can show.
#pragma once

#include <leanopt/core/lane.hpp>

#include <cstdint>

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// 1/x and 1/sqrt(x) of normal numbers, off by a unit in the last place or two.
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
/// `most_dividend`: quotients and remainders are normal numbers.
struct refined_quotient {
  static constexpr std::uint32_t least = 0x2b800000, most = 0x49800000;  ///< 2^-40 and 2^20
  static constexpr std::uint32_t least_dividend = 0x0d800000;            ///< 2^-100
  static constexpr std::uint32_t most_dividend = 0x5d800000;             ///< 2^60

  /// The nearest number to 1/b.
  LEANOPT_HD static float reciprocal(float b, float seed) {
    using namespace leanopt::detail;
    return fused(fused(-b, seed, 1.0f), seed, seed);
  }
  LEANOPT_HD static float refine(float a, float b, float seed) {
    using namespace leanopt::detail;
    const float y = reciprocal(b, seed), near = multiply(a, y);
    // Remainders and their factor with the signs that keep that of a zero.
    const float nearer = fused(fused(near, b, -a), -y, near);
    return fused(fused(nearer, b, -a), -y, nearer);
  }
  __device__ __forceinline__ static float of(float a, float b) {
    return refine(a, b, reciprocal_seed(b));
  }
};

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
