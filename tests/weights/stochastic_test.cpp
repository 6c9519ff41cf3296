// Weights rounded stochastically: one of the two bfloat16 numbers around, in the mean the number
// itself. And what all weights share: NaN stays NaN, what is finite stays finite.

#include <leanopt/engine/cpu.hpp>

#include "tests/conformance/lists.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <type_traits>
#include <vector>

// Lanes are passed inside always-inlined kernels only, so the ABI that g++ warns about never
// exists.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace {

using leanopt::ints;
using leanopt::lane_traits;
using leanopt::real;
using leanopt::reduce_max;
using leanopt::scalar;
using leanopt::cpu::level;
using leanopt::cpu::detail::lanes_of;
using leanopt::weights::stochastic;

constexpr std::uint32_t sign = 0x80000000u, infinity = 0x7f800000u;

/// How many of the 65536 random values round x up, and whether any gives something else than the
/// two numbers around x.
struct count_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(std::uint32_t x, std::uint32_t* count, bool* is_wrong) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    using I = ints<V>;
    // What lies below the upper half of a random value has no say.
    I random = (L::iota() << 16) | I(0xbeefu), up(0u), wrong(0u), rest(0u);
    for (std::uint32_t r = 0; r < 1u << 16; r += L::count) {
      const I above =
          stochastic::write<leanopt::bfloat16_bits, V>(V(real(I(x))), random, rest) - I(x >> 16);
      up = up + above;
      wrong = wrong | (above & I(~1u));
      random = random + (I(std::uint32_t(L::count)) << 16);
    }
    float lanes[L::count];
    L::store(lanes, V(real(up)));
    *count = 0;
    for (const float one : lanes) *count += leanopt::bits(one);
    *is_wrong = reduce_max(wrong) != 0;
  }
};

TEST(Stochastic, IsOneOfTheTwoNeighboursAndRightInTheMean) {
  patterns::source random(16);
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t upper = 0; upper < 512; ++upper) {  // every sign and exponent
    if ((upper & 0xff) == 0xff) continue;
    for (const std::uint32_t low : {0u, 1u, 0x8000u, 0xffffu, 0x7f0001u, 0x7f8000u, 0x7fffffu})
      numbers.push_back(upper << 23 | low);
    numbers.push_back(upper << 23 | (std::uint32_t(random.word()) & 0x7fffffu));
  }
  for (const level l : levels::all_here())
    for (const std::uint32_t x : numbers) {
      if (l == level::scalar && x & 1u << 23) continue;  // half of them, at sixteenth the speed
      std::uint32_t count;
      bool wrong;
      leanopt::cpu::detail::launch<count_kernel, level::avx512>(l, x, &count, &wrong);
      ASSERT_FALSE(wrong) << std::hex << x;
      const bool is_largest = (x & ~sign) >= 0x7f7f0000u;  // above which there is no number
      ASSERT_EQ(count, is_largest ? 0 : x & 0xffffu) << std::hex << x;
    }
}

template <class Weights>
void check_special() {
  for (const std::uint32_t random : {0u, 0x80000000u, 0xffffffffu}) {
    const auto back = [&](std::uint32_t x) {
      std::uint32_t rest = 0;
      const std::uint32_t word = Weights::template write<leanopt::bfloat16_bits, scalar<float>>(
          scalar<float>(real(x)), random, rest);
      EXPECT_LT(word, 0x10000u);
      using residual = typename Weights::residual;
      if constexpr (!std::is_void_v<residual>) rest = std::uint32_t(residual(rest));
      return bits(Weights::template read<leanopt::bfloat16_bits, scalar<float>>(word, rest));
    };
    for (const std::uint32_t s : {0u, sign}) {
      EXPECT_EQ(back(s), s);
      EXPECT_EQ(back(infinity | s), infinity | s);
      for (const std::uint32_t nan : {0x7f800001u, 0x7f80ffffu, 0x7fc00000u, 0x7fffffffu})
        EXPECT_GT(back(nan | s) & ~sign, infinity) << Weights::name << std::hex << nan;
      // Plain weights are rounded to the nearest, as everywhere: the largest to infinity.
      EXPECT_EQ((back(0x7f7fffffu | s) & ~sign) == infinity,
                (std::is_same_v<Weights, leanopt::weights::plain>));
      for (std::uint32_t word = 0; word < 0x7f80u; ++word)
        ASSERT_EQ(back(word << 16 | s), word << 16 | s) << Weights::name;
    }
  }
}
template <class... Weights>
void check_all(conformance::list<Weights...>) {
  (check_special<Weights>(), ...);
}
TEST(EveryWeight, KeepsBfloat16AndWhatIsNotFinite) { check_all(conformance::all_weights()); }

}  // namespace
