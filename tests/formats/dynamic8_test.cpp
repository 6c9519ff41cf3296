// dynamic8: its code books, the nearest code and ties against bitsandbytes' rule restated, ends and
// headers, and where the default differs from dynamic8_strict. What the peer recorded is compared
// in bitsandbytes_test.cpp.

#include <leanopt/formats/dynamic8.hpp>

#include "tests/formats/bitsandbytes.hpp"
#include "tests/formats/support.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using format_runs::level;
using format_runs::values;
using leanopt::formats::dynamic8;
using leanopt::formats::dynamic8_strict;

std::uint32_t bits(float x) { return patterns::cast<std::uint32_t>(x); }
float real(std::uint32_t x) { return patterns::cast<float>(x); }

std::vector<float> our_book(bool is_signed) {
  const leanopt::formats::dynamic_book book(is_signed);
  std::vector<float> result;
  for (const std::uint32_t value : book.value) result.push_back(real(value));
  return result;
}

template <class Format, values Range>
int encode(const typename Format::scale& s, float x) {
  return int(format_runs::encode<Format, Range>(s, x, 0));
}

// ---- D32: the code books ------------------------------------------------------------------------

TEST(Dynamic8Book, IsStrictlyIncreasingWithTheKnownLandmarks) {
  for (const bool is_signed : {true, false}) {
    const std::vector<float> book = our_book(is_signed);
    ASSERT_EQ(book.size(), 256u);
    for (std::size_t k = 1; k < 256; ++k) EXPECT_LT(book[k - 1], book[k]) << k;
  }
  const std::vector<float> with_sign = our_book(true), without = our_book(false);
  struct landmark {
    const std::vector<float>& book;
    std::size_t code;
    float value;
  };
  for (const landmark& one : {landmark{with_sign, 0, -0.992968738f},
                              {with_sign, 127, 0},
                              {with_sign, 128, 5.49999982e-07f},
                              {with_sign, 254, 0.992968738f},
                              {with_sign, 255, 1},
                              {without, 0, 0},
                              {without, 1, 3.25000002e-07f},
                              {without, 127, 0.103515625f},
                              {without, 254, 0.996484399f},
                              {without, 255, 1}})
    EXPECT_NEAR(one.book[one.code], one.value, tolerance::code_book * std::abs(one.value))
        << one.code;
  for (std::size_t k = 0; k < 127; ++k) EXPECT_EQ(with_sign[k], -with_sign[254 - k]) << k;
}

TEST(Dynamic8Book, IsThatOfBitsandbytesAndTorchaoBitForBit) {
  const auto same = [](const std::vector<float>& ours, const std::string& name) {
    const bitsandbytes::book theirs = bitsandbytes::recorded_book(name);
    ASSERT_EQ(theirs.size(), 256u);
    for (std::size_t k = 0; k < 256; ++k) EXPECT_EQ(bits(ours[k]), bits(theirs[k])) << name << k;
  };
  same(our_book(true), "bnb.signed");
  same(our_book(true), "ao.signed8");
  same(our_book(false), "bnb.unsigned");
  same(our_book(false), "ao.unsigned8");
}

// ---- D33: the nearest code, ties, ends ----------------------------------------------------------

template <class Format>
void expect_known_codes() {
  const bitsandbytes::book& book = bitsandbytes::book_of(true);
  const float first = bitsandbytes::midpoint(book, 130), second = bitsandbytes::midpoint(book, 131);
  const std::vector<std::pair<float, int>> known = {{1.0f, 255},
                                                    {-1.0f, 0},
                                                    {0.0f, 127},
                                                    {-0.0f, 127},
                                                    {first, 130},  // ties go to the even code
                                                    {second, 132},
                                                    {std::nextafter(first, 0.0f), 130},
                                                    {std::nextafter(first, 1.0f), 131}};
  std::vector<float> x(256);
  for (std::size_t i = 0; i < known.size(); ++i) x[i] = known[i].first;
  for (const level l : levels::all_here()) {
    auto e = format_runs::encode<Format, values::any>(l, x, 0);
    EXPECT_EQ(e.headers[0], 1);
    for (std::size_t i = 0; i < known.size(); ++i)
      EXPECT_EQ(int(e.codes[i]), known[i].second) << known[i].first;
    const auto decoded = format_runs::decode<Format, values::any>(l, e);
    EXPECT_EQ(decoded[0], 1);
    EXPECT_EQ(decoded[1], -0.992968738f);
    EXPECT_EQ(bits(decoded[2]), 0u);
  }
}
TEST(Dynamic8Code, OfTheKnownNumbers) {
  expect_known_codes<dynamic8>();
  expect_known_codes<dynamic8_strict>();
}

template <class Format, values Range>
void expect_zero_block() {
  for (const level l : levels::all_here()) {
    auto e = format_runs::encode<Format, Range>(l, std::vector<float>(300), 0);
    EXPECT_EQ(bits(e.headers[0]), 0u);
    EXPECT_EQ(bits(e.headers[1]), 0u);
    for (const float one : format_runs::decode<Format, Range>(l, e)) ASSERT_EQ(one, 0);
  }
}
TEST(Dynamic8Code, OfABlockOfZerosReadsBackZero) {
  expect_zero_block<dynamic8, values::any>();
  expect_zero_block<dynamic8, values::non_negative>();
  expect_zero_block<dynamic8_strict, values::any>();
  expect_zero_block<dynamic8_strict, values::non_negative>();
}

/// Our code for every threshold of a book and its neighbours, in a block of maximum 1.
template <values Range>
void expect_thresholds() {
  const bitsandbytes::book& book = bitsandbytes::book_of(Range == values::any);
  const auto s = format_runs::scale_of<dynamic8_strict, Range>({1});
  for (int k = 0; k < 255; ++k) {
    const float middle = bitsandbytes::midpoint(book, k);
    for (const float x : {middle, std::nextafter(middle, -2.0f), std::nextafter(middle, 2.0f)}) {
      const int expected = Range == values::any ? bitsandbytes::step_code(book, x)
                                                : bitsandbytes::nearest_code(book, x);
      ASSERT_EQ((encode<dynamic8_strict, Range>(s, x)), expected) << "midpoint " << k << ", " << x;
    }
  }
}
TEST(Dynamic8Code, ChangesAtTheMidpoints) {
  expect_thresholds<values::any>();
  expect_thresholds<values::non_negative>();
}

/// What the default makes of a code of the peer's rule.
template <class Format, values Range>
int stored_code(int code, float x) {
  const bool is_raised = std::is_same_v<Format, dynamic8> && Range == values::non_negative && x > 0;
  return is_raised ? std::max(code, 1) : code;
}

/// A block of every magnitude from largest on downwards, the largest among them.
template <values Range>
std::vector<float> block_of(float largest, patterns::source& random) {
  std::vector<float> x;
  for (int i = 0; i < 256; ++i) {
    const auto fraction = std::ldexp(float(random.below(1 << 24)), -24 - int(random.below(28)));
    const bool negative = Range == values::any && random.below(2) != 0;
    x.push_back(negative ? -largest * fraction : largest * fraction);
  }
  x[random.below(256)] = largest;
  return x;
}

/// Scaled by the reciprocal of the header, as in the peer's quantizer.
template <class Format, values Range>
void expect_codes_of_peer() {
  const bitsandbytes::book& book = bitsandbytes::book_of(Range == values::any);
  patterns::source random(1);
  for (int i = 0; i < 400; ++i) {
    const float largest = std::ldexp(1 + float(random.below(1 << 23)) * 0x1p-23f, i / 2 - 100);
    const std::vector<float> x = block_of<Range>(largest, random);
    const level l = levels::all_here()[std::size_t(i) % levels::all_here().size()];
    auto e = format_runs::encode<Format, Range>(l, x, 0);
    ASSERT_EQ(e.headers[0], largest);
    for (std::size_t j = 0; j < 256; ++j) {
      const float scaled = x[j] * (1 / largest);
      const int code = Range == values::any ? bitsandbytes::step_code(book, scaled)
                                            : bitsandbytes::nearest_code(book, scaled);
      ASSERT_EQ(int(e.codes[j]), (stored_code<Format, Range>(code, x[j])))
          << x[j] << " in a block of " << largest;
    }
    const auto decoded = format_runs::decode<Format, Range>(l, e);
    for (std::size_t j = 0; j < 256; ++j) ASSERT_EQ(decoded[j], book[e.codes[j]] * largest);
  }
}
TEST(Dynamic8Code, IsThatOfTheStepKernel) {
  expect_codes_of_peer<dynamic8, values::any>();
  expect_codes_of_peer<dynamic8, values::non_negative>();
  expect_codes_of_peer<dynamic8_strict, values::any>();
  expect_codes_of_peer<dynamic8_strict, values::non_negative>();
}

/// Where the reciprocal of the header is no normal number, the code is still the nearest.
template <class Format, values Range>
void expect_nearest() {
  const bitsandbytes::book& book = bitsandbytes::book_of(Range == values::any);
  patterns::source random(2);
  for (const int exponent : {-126, -125, -110, -101, -100, 100, 101, 110, 126, 127})
    for (int i = 0; i < 20; ++i) {
      const float largest = std::ldexp(1 + float(random.below(1 << 23)) * 0x1p-23f, exponent);
      const std::vector<float> x = block_of<Range>(largest, random);
      const auto s = format_runs::scale_of<Format, Range>(x);
      for (const float one : x) {
        const double quotient = double(one) / double(largest);
        double smallest = 2;
        for (const float value : book)
          smallest = std::min(smallest, std::abs(double(value) - quotient));
        const int code = encode<Format, Range>(s, one);
        const bool next_to_zero = std::abs(quotient) < 5.5e-7;  // where other rules apply
        if (next_to_zero) continue;
        ASSERT_LE(std::abs(double(book[std::size_t(code)]) - quotient),
                  smallest + tolerance::half_gap * std::abs(quotient))
            << one << " in a block of " << largest;
      }
    }
}
TEST(Dynamic8Code, IsTheNearestAtBothEndsOfFloat) {
  expect_nearest<dynamic8, values::any>();
  expect_nearest<dynamic8, values::non_negative>();
  expect_nearest<dynamic8_strict, values::any>();
  expect_nearest<dynamic8_strict, values::non_negative>();
}

TEST(Dynamic8Code, OfAMaximumIsExactAndOfANegativeOneTheLowest) {
  for (int exponent = -126; exponent <= 127; ++exponent)
    for (const float largest : {std::ldexp(1.0f, exponent), std::ldexp(1.7f, exponent)}) {
      const auto s = format_runs::scale_of<dynamic8, values::any>({-largest});
      EXPECT_EQ(dynamic8::close(s), largest);
      EXPECT_EQ((encode<dynamic8, values::any>(s, largest)), 255);
      EXPECT_EQ((format_runs::decode<dynamic8, values::any>(s, 255)), largest);
      EXPECT_EQ((encode<dynamic8, values::any>(s, -largest)), 0);
      EXPECT_EQ((format_runs::decode<dynamic8, values::any>(s, 0)), -0.992968738f * largest);
      const auto v = format_runs::scale_of<dynamic8, values::non_negative>({largest});
      EXPECT_EQ((encode<dynamic8, values::non_negative>(v, largest)), 255);
      EXPECT_EQ((format_runs::decode<dynamic8, values::non_negative>(v, 255)), largest);
    }
}

// ---- where the default differs from the peer ----------------------------------------------------

TEST(Dynamic8Default, DiffersWhereASecondMomentWouldBecomeZero) {
  patterns::source random(3);
  int raised = 0;
  for (int i = 0; i < 200; ++i) {
    const float largest = std::ldexp(1 + float(random.below(1 << 23)) * 0x1p-23f, i - 100);
    const std::vector<float> m = block_of<values::any>(largest, random),
                             v = block_of<values::non_negative>(largest, random);
    EXPECT_TRUE((format_runs::encode<dynamic8, values::any>(level::scalar, m, 0).codes ==
                 format_runs::encode<dynamic8_strict, values::any>(level::scalar, m, 0).codes));
    const auto ours = format_runs::encode<dynamic8, values::non_negative>(level::scalar, v, 0);
    const auto peers =
        format_runs::encode<dynamic8_strict, values::non_negative>(level::scalar, v, 0);
    EXPECT_EQ(ours.headers, peers.headers);
    for (std::size_t j = 0; j < 256; ++j) {
      const bool is_lost = v[j] > 0 && peers.codes[j] == 0;
      ASSERT_EQ(int(ours.codes[j]), is_lost ? 1 : int(peers.codes[j])) << v[j];
      raised += is_lost;
    }
  }
  EXPECT_GT(raised, 100);
}

/// Below the smallest normal number a code would stand for zero, so the header is not below it.
TEST(Dynamic8Default, HeadersAreZeroOrNormal) {
  for (const float largest : {0x1p-149f, 0x1p-140f, 0x1.fffffcp-127f, 0x1p-126f, 0x1.8p-126f}) {
    const auto ours = format_runs::scale_of<dynamic8, values::non_negative>({largest});
    const auto peers = format_runs::scale_of<dynamic8_strict, values::non_negative>({largest});
    EXPECT_EQ(dynamic8::close(ours), std::max(largest, 0x1p-126f));
    EXPECT_EQ(dynamic8_strict::close(peers), largest);
    for (const float x : {0x1p-149f, largest}) {
      const int code = encode<dynamic8, values::non_negative>(ours, x);
      EXPECT_GT((format_runs::decode<dynamic8, values::non_negative>(ours, std::uint32_t(code))),
                0);
    }
  }
}

/// Below half of code 1 the peer stores zero, and its next step divides by eps alone.
TEST(Dynamic8Default, KeepsASmallSecondMomentPositive) {
  const auto ours = format_runs::scale_of<dynamic8, values::non_negative>({1});
  const auto peers = format_runs::scale_of<dynamic8_strict, values::non_negative>({1});
  const float half = bitsandbytes::midpoint(bitsandbytes::book_of(false), 0);
  for (const float x : {0x1p-149f, 0x1p-126f, 1e-10f, half}) {
    EXPECT_EQ((encode<dynamic8_strict, values::non_negative>(peers, x)), 0) << x;
    EXPECT_EQ((encode<dynamic8, values::non_negative>(ours, x)), 1) << x;
  }
  EXPECT_EQ((encode<dynamic8, values::non_negative>(ours, 0)), 0);
}

}  // namespace
