// The elementwise kernel under the emulator has the bits of the CPU engine: for every formula and
// format, every type and kind of weights, at awkward sizes and places in memory, with gradients of
// all kinds, and for lists of many tensors.

#include "tests/conformance/lists.hpp"
#include "tests/engine/cuda/runs.hpp"

#include <gtest/gtest.h>

namespace {

using namespace cuda_runs;
using namespace kernel_runs;
using leanopt::formats::full;
using leanopt::rules::adam;
using leanopt::rules::adamw;
using patterns::kind;

template <class Way_, class Format_, class T_>
struct combination {
  using way = Way_;
  using format = Format_;
  using T = T_;
};
template <class C>
class Elementwise : public testing::Test {};
template <class Way, class Format>
using in_float = combination<Way, Format, float>;
template <class Way, class Format>
using in_double = combination<Way, Format, double>;
#if defined(__SANITIZE_ADDRESS__)  // of each family one: g++ takes minutes to instrument all
using combinations = testing::Types<in_float<way<adamw, false>, full>,
                                    in_float<way<adamw, false>, leanopt::formats::log8_blocks<64>>,
                                    in_float<way<adamw, false>, leanopt::formats::dynamic8>>;
#else
using combinations =
    testing::Types<in_float<way<adamw, false>, full>, in_float<way<adam, true>, full>,
                   in_double<way<adamw, false>, full>,
                   in_float<way<adamw, false>, leanopt::formats::bfloat16>,
                   in_float<way<adam, false>, leanopt::formats::bfloat16_stochastic>,
                   in_float<way<adamw, false>, leanopt::formats::log8>,
                   in_float<way<adam, false>, leanopt::formats::log8_blocks<128>>,
                   in_float<way<adamw, false>, leanopt::formats::log8_blocks<64>>,
                   in_float<way<adamw, false>, leanopt::formats::dynamic8>,
                   in_float<way<adam, false>, leanopt::formats::dynamic8_strict>,
                   in_double<way<adamw, false>, leanopt::formats::log8>>;
#endif
TYPED_TEST_SUITE(Elementwise, combinations);

/// f(Weights{}, type) for all that a combination takes.
template <class C, class F>
void each_weights(F f) {
  using namespace leanopt::weights;
  if constexpr (sizeof(typename C::T) == 8) {
    f(plain{}, number::float64);
  } else {
    f(plain{}, number::float32);
    f(split24{}, number::bfloat16);
#if !defined(__SANITIZE_ADDRESS__)
    f(plain{}, number::bfloat16);
    f(plain{}, number::float16);
    f(stochastic{}, number::bfloat16);
    f(split32{}, number::bfloat16);
#endif
  }
}

/// Some steps of a tensor on both engines. Where they differ, or nothing.
template <class C, class Weights>
std::string difference_of(tensor start, kind k, int steps, patterns::source& random) {
  using way = typename C::way;
  using format = typename C::format;
  const auto o = way::options();
  tensor a = start, b = start;
  for (int i = 1; i <= steps; ++i) {
    a.set_gradient(k, random);
    b.g = a.g;
    kernel_runs::step<way, format, Weights>(leanopt::cpu::best_level(), o, i, a);
    cuda_runs::step<way, format, typename C::T>(o, i, {&b}, {leanopt::cuda::kind_of<Weights>});
    const std::string d = difference(b, a);
    if (!d.empty()) return d + ", after step " + std::to_string(i);
  }
  return "";
}
template <class C, class Weights>
tensor fresh_of(number type, const shape& s, patterns::source& random,
                const layout* p_layout = nullptr, const layout* g_layout = nullptr) {
  return fresh<typename C::way::formula, typename C::format, Weights>(type, s, random, p_layout,
                                                                      g_layout);
}

TYPED_TEST(Elementwise, HasTheBitsOfTheCpu) {
  for (const std::size_t n : {1, 3, 4, 128, 131, 255, 256, 257, 511, 1024, 1100, 4095, 4096, 8200})
    each_weights<TypeParam>([&](auto weights, number type) {
      using Weights = decltype(weights);
      for (const kind k : patterns::all_kinds) {
        patterns::source random(n);
        const tensor t = fresh_of<TypeParam, Weights>(type, {1, 1, n}, random);
        emulator::here().seed = unsigned(n) + unsigned(k);
        emulator::here().seed_error = int(n % 3) - 1;
        ASSERT_EQ((difference_of<TypeParam, Weights>(t, k, 2, random)), "")
            << n << " elements of type " << int(type) << " with " << Weights::name << ", kind "
            << int(k);
      }
    });
}

const layout transpose{{50, 13}, {1, 50}, 650}, gaps{{50, 13}, {20, 1}, 1000},
    every_third{{650}, {3}, 1950}, reversed{{2, 13, 5, 5}, {1, 2, 26, 130}, 650},
    expanded{{13, 50}, {0, 1}, 650};
TYPED_TEST(Elementwise, TakesAnyLayout) {
  for (const layout* p : {&transpose, &gaps, &every_third, &reversed, (const layout*)nullptr})
    for (const layout* g : {&gaps, &transpose, &expanded, (const layout*)nullptr})
      each_weights<TypeParam>([&](auto weights, number type) {
        using Weights = decltype(weights);
        patterns::source random(1);
        const tensor t = fresh_of<TypeParam, Weights>(type, {1, 50, 13}, random, p, g);
        ASSERT_EQ((difference_of<TypeParam, Weights>(t, kind::normal, 2, random)), "")
            << "type " << int(type) << " with " << Weights::name;
      });
}

}  // namespace
