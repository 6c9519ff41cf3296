// The global norm and what is made of it, and codes alone, under the emulator.

#include "tests/conformance/lists.hpp"
#include "tests/engine/cuda/runs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>

namespace {

using namespace cuda_runs;
using namespace kernel_runs;
using leanopt::formats::full;
using leanopt::weights::plain;
using patterns::kind;
using adamw_way = way<leanopt::rules::adamw, false>;

struct norm_case {
  std::deque<tensor> tensors;
  double exact = 0;  ///< in long double, and rounded

  norm_case(number type, std::uint64_t seed) {
    patterns::source random(seed);
    long double sum = 0;
    for (const std::size_t n : {1, 0, 300, 5000, 4096, 77}) {
      tensor t = fresh<adamw_way::formula, full, plain>(type, {1, 1, n}, random);
      t.set_gradient(kind::octaves, random);
      for (std::size_t i = 0; i < n; ++i) {
        const long double x = value(t, i);
        sum += x * x;
      }
      tensors.push_back(std::move(t));
    }
    exact = double(std::sqrt(sum));
  }
  static long double value(const tensor& t, std::size_t i) {
    const std::uint64_t x = t.g[i];
    if (t.type == number::float64) return patterns::cast<double>(x);
    const auto low = std::uint32_t(x);
    if (t.type == number::float32) return leanopt::real(low);
    if (t.type == number::bfloat16)
      return leanopt::bfloat16_bits::widen<leanopt::scalar<float>>(low).v;
    return leanopt::float16_bits::widen<leanopt::scalar<float>>(low).v;
  }
  leanopt::cuda::norm_result run(double most, const leanopt::cuda::device_scalars& scalars = {}) {
    leanopt::cuda::table table;
    std::vector<const void*> gradients;
    for (tensor& t : tensors) {
      table.add(tensor_of(t, weights_kind::plain, 0));
      gradients.push_back(t.g.data());
    }
    device_list device(table);
    device.set_gradients(gradients);
    std::vector<double> sums(table.units(), NAN);
    leanopt::cuda::norm_result result{};
    EXPECT_EQ(
        leanopt::cuda::global_norm(device.list(), sums.data(), &result, most, scalars, nullptr), 0);
    return result;
  }
};

/// Each of the n sums adds an error of half a unit at most, and the root halves what it gets.
TEST(GlobalNorm, IsThatOfAllGradients) {
  for (const number type : {number::float32, number::bfloat16, number::float16, number::float64}) {
    norm_case c(type, 5);
    const auto r = c.run(1e30);
    EXPECT_NEAR(r.norm, c.exact, c.exact * 9474 * 0x1p-53) << int(type);
    EXPECT_EQ(r.clip, 1);
    EXPECT_EQ(r.found_inf, 0);
    const auto clipped = c.run(r.norm / 4);
    EXPECT_NEAR(clipped.clip, 0.25, 0x1p-52);
  }
}
TEST(GlobalNorm, DoesNotDependOnTheOrderOfWarps) {
  norm_case c(number::float32, 6);
  emulator::here().seed = 1;
  const double first = c.run(1).norm;
  for (unsigned seed = 2; seed < 6; ++seed) {
    emulator::here().seed = seed;
    emulator::here().processors = int(seed);
    EXPECT_EQ(c.run(1).norm, first);
  }
  emulator::here().processors = 2;
}
TEST(GlobalNorm, FindsWhatIsNotFinite) {
  for (const std::uint64_t bad : {0x7f800000u, 0xff800000u, 0x7fc00000u})
    for (const std::size_t which : {std::size_t(0), std::size_t(2), std::size_t(5)}) {
      norm_case c(number::float32, 7);
      tensor& t = c.tensors[which];
      t.g.set(t.elements() - 1, bad);
      EXPECT_EQ(c.run(1).found_inf, 1);
    }
  norm_case c(number::float32, 7);
  const float before = 1;
  leanopt::cuda::device_scalars scalars;
  scalars.found_inf = &before;
  EXPECT_EQ(c.run(1, scalars).found_inf, 1) << "found before";
}
TEST(GlobalNorm, IsScaled) {
  norm_case c(number::float32, 8);
  const double inv_scale = 0x1p-16;
  leanopt::cuda::device_scalars scalars;
  scalars.inv_scale = &inv_scale;
  EXPECT_EQ(c.run(1, scalars).norm, c.run(1).norm * inv_scale);
}
TEST(GlobalNorm, OfNothingIsZero) {
  norm_case c(number::float32, 9);
  c.tensors.clear();
  const auto r = c.run(1);
  EXPECT_EQ(r.norm, 0);
  EXPECT_EQ(r.clip, 1);
  EXPECT_EQ(r.found_inf, 0);
}

// ---- codes alone --------------------------------------------------------------------------------

template <class Formula, class Format>
void check_codes(std::size_t n, std::size_t shift, kind k) {
  using header =
      std::conditional_t<std::is_void_v<typename Format::header>, char, typename Format::header>;
  using stored = typename Format::template stored<float>;
  patterns::source random(n);
  std::vector<float> x(n + shift), y(n + shift, -1), back(n, -1);
  for (std::size_t i = 0; i < n; ++i)
    x[shift + i] = Formula::slots[0].range == leanopt::values::any ? random.number<float>(k)
                                                                   : random.positive<float>(k);
  constexpr std::size_t block = Format::block;
  std::vector<stored> codes[2] = {std::vector<stored>(n + shift), std::vector<stored>(n + shift)};
  std::vector<header> headers[2] = {std::vector<header>(n / block + 1),
                                    std::vector<header>(n / block + 1)};
  leanopt::cuda::coded t;
  t.slots[0] = codes[0].data() + shift;
  t.headers[0] = headers[0].data();
  t.elements = n;
  t.key = 99;
  t.tables = cuda_runs::tables_of<Format>();
  const float* const from[3] = {x.data() + shift};
  float* const to[3] = {y.data() + shift};
  ASSERT_EQ((leanopt::cuda::encode<Formula, Format>(t, from, nullptr)), 0);
  ASSERT_EQ((leanopt::cuda::decode<Formula, Format>(t, to, nullptr)), 0);

  leanopt::cpu::stored_moments<float, Format, 1> c{{}, {}, n, 0, 99};
  c.slots[0] = codes[1].data() + shift;
  if constexpr (leanopt::has_headers<Format>) c.headers[0] = headers[1].data();
  float* decoded[] = {back.data()};
  leanopt::cpu::encode<Formula, Format>(leanopt::cpu::best_level(), c, from);
  leanopt::cpu::decode<Formula, Format>(leanopt::cpu::best_level(), c, decoded);
  EXPECT_EQ(codes[0], codes[1]) << Format::name << ", " << n;
  EXPECT_EQ(headers[0], headers[1]) << Format::name << ", " << n;
  for (std::size_t i = 0; i < n; ++i)
    ASSERT_EQ(patterns::comparable(y[shift + i]), patterns::comparable(back[i])) << i;
}
template <class Format>
void check_format() {
  using leanopt::values;
  for (const std::size_t n : {1, 63, 64, 65, 255, 256, 257, 3000})
    for (const kind k : patterns::all_kinds)
      for (const std::size_t shift : {0, 1}) {
        check_codes<leanopt::one_slot<values::any>, Format>(n, shift, k);
        check_codes<leanopt::one_slot<values::non_negative>, Format>(n, shift, k);
      }
}
TEST(Codes, AreThoseOfTheCpu) {
  check_format<leanopt::formats::log8>();
  check_format<leanopt::formats::log8_blocks<64>>();
  check_format<leanopt::formats::dynamic8>();
  check_format<leanopt::formats::dynamic8_strict>();
  check_format<leanopt::formats::bfloat16_stochastic>();
}

}  // namespace
