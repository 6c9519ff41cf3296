// Which formats follow the truth in which experiments, and which do not: the numbers are bounded on
// both sides, so that a bound that nothing could miss would show. Formats that fail are kept here
// because they are the peers' (tests/formats says so) or what log8 would be without its random
// bits.
#include "tests/numerics/experiments.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <iostream>
#include <string>

namespace {

using namespace numerics;

enum experiment : unsigned {
  shrinks = 1,
  grows = 2,
  beside_large_ones = 4,
  in_noise = 8,
  after_a_spike = 16,
  as_splats = 32,
  all = 63,
};

/// The table: which experiments a format passes. It fails the others.
template <class Format>
constexpr unsigned passes = 0;
template <>
constexpr unsigned passes<formats::full> = all;
template <>
constexpr unsigned passes<formats::log8> = all;
template <>
constexpr unsigned passes<formats::log8_blocks<128>> = all;
template <>
constexpr unsigned passes<formats::log8_blocks<64>> = all;
template <>
constexpr unsigned passes<log8_nearest> = after_a_spike | as_splats;
template <>
constexpr unsigned passes<formats::dynamic8> = beside_large_ones | after_a_spike | as_splats;
template <>
constexpr unsigned passes<formats::dynamic8_strict> = 0;
template <>
constexpr unsigned passes<formats::bfloat16> = after_a_spike | as_splats;
template <>
constexpr unsigned passes<formats::bfloat16_stochastic> = all;

/// Whether each of `measured` is within the bounds, as the table says.
template <class Format>
void expect(experiment e, std::initializer_list<double> measured, tolerance::bounds allowed) {
  bool inside = true;
  std::cout << Format::name << ':';
  for (const double x : measured) {
    std::cout << ' ' << x;
    inside = inside && allowed.low <= x && x <= allowed.high;
  }
  std::cout << '\n';
  EXPECT_EQ(inside, (passes<Format> & e) != 0)
      << "bounds " << allowed.low << " to " << allowed.high;
}

struct names {
  template <class Format>
  static std::string GetName(int) {
    std::string name = Format::name;
    std::replace(name.begin(), name.end(), '/', '_');
    return name;
  }
};

template <class Format>
class moments : public testing::Test {};
using every_format =
    testing::Types<formats::full, formats::log8, formats::log8_blocks<128>,
                   formats::log8_blocks<64>, log8_nearest, formats::dynamic8,
                   formats::dynamic8_strict, formats::bfloat16, formats::bfloat16_stochastic>;
TYPED_TEST_SUITE(moments, every_format, names);

TYPED_TEST(moments, follow_a_gradient_that_shrinks) {
  expect<TypeParam>(shrinks, {shrinking<TypeParam>()}, tolerance::tracked_moment);
}
TYPED_TEST(moments, follow_a_gradient_that_grows) {
  expect<TypeParam>(grows, {growing<TypeParam>()}, tolerance::tracked_moment);
}
TYPED_TEST(moments, of_small_gradients_survive_beside_large_ones) {
  expect<TypeParam>(beside_large_ones,
                    {beside_large<TypeParam>(1e-3f), beside_large<TypeParam>(2e-4f)},
                    tolerance::step_beside_large);
}
TYPED_TEST(moments, of_noise_give_steps_of_the_right_size) {
  expect<TypeParam>(in_noise, {noise_over_decades<TypeParam>()}, tolerance::tracked_moment);
}
TYPED_TEST(moments, after_a_spike_explode_no_step) {
  expect<TypeParam>(after_a_spike, {step_after_a_spike<TypeParam>()}, {0, 2});
}
TYPED_TEST(moments, of_sparse_tiny_gradients_explode_no_step) {
  const sparse_rows result = splats<TypeParam>();
  expect<TypeParam>(as_splats, {result.largest}, {0, tolerance::step_beside_large.high});
  EXPECT_EQ(result.untouched, 0) << "a row without gradients moved";
}

// Runs of 100,000 steps

template <class Format>
constexpr bool is_faithful = passes<Format> == all;

void expect_drift(bool is_small, double measured, double allowed, const char* what) {
  std::cout << what << ": " << measured << '\n';
  EXPECT_EQ(std::abs(measured) <= allowed, is_small) << what << ' ' << measured;
}

/// The means of the others need not be known to a thousandth.
template <class Format>
constexpr std::size_t elements(std::size_t n) {
  return is_faithful<Format> ? n : 2 * block;
}

template <class Format>
class drifts : public testing::Test {};
using some_formats = testing::Types<formats::log8, formats::bfloat16_stochastic, log8_nearest,
                                    formats::bfloat16, formats::dynamic8>;
TYPED_TEST_SUITE(drifts, some_formats, names);

TYPED_TEST(drifts, of_constant_gradients) {
  const auto n = elements<TypeParam>(4 * block);
  const drift d = under_constant_gradients<TypeParam>(0.999, n);
  expect_drift(is_faithful<TypeParam>, d.of_moment, tolerance::moment_drift, "second moment");
  expect_drift(is_faithful<TypeParam>, d.of_parameter, tolerance::parameter_drift, "parameter");
  const drift slow = under_constant_gradients<TypeParam>(0.9999, n);
  expect_drift(is_faithful<TypeParam>, slow.of_moment, tolerance::moment_drift,
               "second moment at 0.9999");
}
TYPED_TEST(drifts, of_noise) {
  const drift d = under_noise<TypeParam>(0.999, elements<TypeParam>(16 * block));
  expect_drift(is_faithful<TypeParam>, d.of_moment, tolerance::moment_drift, "second moment");
  expect_drift(is_faithful<TypeParam>, d.of_parameter, tolerance::parameter_drift, "steps");
}
/// Its memory is ten times as long, and the rounding errors average as much more slowly.
TYPED_TEST(drifts, of_noise_with_a_long_memory) {
  const drift d = under_noise<TypeParam>(0.9999, elements<TypeParam>(32 * block));
  expect_drift(is_faithful<TypeParam>, d.of_moment, tolerance::moment_drift, "second moment");
}

}  // namespace
