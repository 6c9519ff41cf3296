// log8 against its definition, restated here in plain code of one number at a time. What a code
// means and how a number becomes one is tested for every base and mantissa width; what a block does
// with its statistics, rare values and random bits through the engine, at every instruction set.
// What all formats have in common is tested in tests/conformance.

#include <leanopt/engine/cpu.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>

#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace {

using leanopt::scalar;
using leanopt::values;
using leanopt::cpu::level;
using leanopt::formats::log8;
using leanopt::formats::log8_blocks;
using patterns::kind;
using two_moments = leanopt::rules::adam_formula<false>;
using one_moment = leanopt::rules::adafactor_formula<true>;

// ---- the definition -----------------------------------------------------------------------------

namespace definition {

std::uint32_t bits(float x) { return patterns::cast<std::uint32_t>(x); }
float real(std::uint32_t x) { return patterns::cast<float>(x); }

int width(std::uint16_t header) { return 3 + (header >> 14); }  // M
std::uint32_t base(std::uint16_t header) {
  return std::uint32_t(header & 0x3fff) << (23 - width(header));
}

float decode_signed(std::uint16_t h, std::uint8_t c) {
  const std::uint32_t b = base(h);
  const float magnitude = real(b + (std::uint32_t(c & 127) << (23 - width(h)))) - real(b);
  return c & 128 ? -magnitude : magnitude;
}
float decode_positive(std::uint16_t h, std::uint8_t c) {
  const std::uint32_t b = base(h);
  return real(b + (std::uint32_t(c) << (23 - width(h)))) - real(b);
}

std::uint8_t encode_magnitude(std::uint16_t h, float x, std::uint32_t random) {
  const int s = 23 - width(h);
  return std::uint8_t((bits(x + real(base(h))) - base(h) + (random >> (32 - s))) >> s);
}
std::uint8_t encode_signed(std::uint16_t h, float x, std::uint32_t random) {
  return std::uint8_t(encode_magnitude(h, std::fabs(x), random) | (std::signbit(x) ? 128 : 0));
}
/// Nothing positive is stored below code 1: it is raised to what that stands for.
std::uint8_t encode_positive(std::uint16_t h, float x, std::uint32_t random) {
  return encode_magnitude(h, x > 0 ? std::max(x, decode_positive(h, 1)) : x, random);
}

/// The base whose `codes` codes hold `largest`, in units of 2^s.
std::uint32_t fit(std::uint32_t largest, int codes, int M) {
  const int s = 23 - M;
  const auto up = [&](std::uint32_t x) {
    const std::int64_t units = (x + (std::int64_t(1) << s) - 1) >> s;
    return std::max<std::int64_t>(units - (codes - 1), 1 << M);
  };
  const float guess = real(std::uint32_t(up(largest) + 5) << s);
  return std::uint32_t(up(bits(real(largest) + guess)));
}

bool too_large(float x) { return !(std::fabs(x) < 0x1p127f); }

struct block {
  std::uint16_t header_m = 0, header_v = 0;
  std::vector<std::uint8_t> m, v;
};

std::uint32_t random(std::uint64_t key, std::uint64_t number, int stream, std::uint32_t j) {
  const std::uint64_t hash = leanopt::mix(key + number);
  return std::uint32_t(stream ? hash >> 32 : hash) + j * 0x9E3779B9u;
}

/// What becomes of a whole block of moments; a short one is given as it is.
block encode(std::vector<float> m, std::vector<float> v, std::uint64_t key, std::uint64_t number) {
  const std::size_t n = m.size();
  float largest_v = 0;
  std::vector<bool> large(n);
  for (std::size_t j = 0; j < n; ++j) {
    large[j] = too_large(m[j]) || too_large(v[j]);
    if (!large[j]) largest_v = std::max(largest_v, v[j]);
  }
  for (std::size_t j = 0; j < n; ++j)
    if (large[j]) {
      m[j] = 0;
      v[j] = largest_v;
    }
  float largest_m = 0, smallest_v = std::numeric_limits<float>::infinity();
  for (std::size_t j = 0; j < n; ++j) {
    largest_m = std::max(largest_m, std::fabs(m[j]));
    if (v[j] > 0) smallest_v = std::min(smallest_v, v[j]);
  }
  const std::uint32_t spread = bits(largest_v) - bits(smallest_v);
  const int M = largest_v == 0 ? 3 : spread <= 7u << 23 ? 5 : spread <= 15u << 23 ? 4 : 3;

  block result;
  result.header_m = std::uint16_t(fit(bits(largest_m), 128, M) | std::uint32_t(M - 3) << 14);
  result.header_v = std::uint16_t(fit(bits(largest_v), 256, M) | std::uint32_t(M - 3) << 14);
  for (std::size_t j = 0; j < n; ++j) {
    const auto at = std::uint32_t(j);
    result.m.push_back(encode_signed(result.header_m, m[j], random(key, number, 0, at)));
    result.v.push_back(encode_positive(result.header_v, v[j], random(key, number, 1, at)));
  }
  return result;
}

}  // namespace definition

// ---- codes --------------------------------------------------------------------------------------

constexpr int code_count(values range) { return range == values::any ? 128 : 256; }

/// f(header) for every base of a width whose codes are numbers.
template <class F>
void each_header(int M, int codes, F f) {
  const std::uint32_t end = 0x7f800000u >> (23 - M);
  for (std::uint32_t b = 1u << M; b + std::uint32_t(codes) <= end; ++b)
    f(std::uint16_t(b | std::uint32_t(M - 3) << 14));
}

template <values Range>
float decode(std::uint16_t header, int code) {
  using byte = log8::code<Range>;
  const auto extended = std::uint32_t(std::int32_t(byte(code)));
  return log8::decode<Range, scalar<float>>(log8::open(header), extended).v;
}
template <values Range>
int encode(std::uint16_t header, float x, std::uint32_t random) {
  return int(log8::encode<Range, scalar<float>>(log8::open(header), scalar<float>(x), random));
}

TEST(Log8Header, HoldsTheBaseAndTheWidthOfEverySlot) {
  for (int M = 3; M <= 5; ++M)
    for (std::uint32_t b = 0; b <= 0x7f800000u >> (23 - M); ++b) {  // 0 in fresh memory
      const auto h = std::uint16_t(b | std::uint32_t(M - 3) << 14);
      const auto s = log8::open(h);
      ASSERT_EQ(s.shift, 23 - M);
      ASSERT_EQ(s.base, definition::base(h));
      ASSERT_EQ(log8::close(s), h);
    }
  static_assert(std::is_same_v<log8::header, std::uint16_t>);
}

TEST(Log8Header, OfFreshMemoryDecodesToZero) {
  EXPECT_EQ(patterns::comparable(decode<values::any>(0, 0)), 0u);
  EXPECT_EQ(patterns::comparable(decode<values::non_negative>(0, 0)), 0u);
}

template <values Range>
void check_codes(int M) {
  constexpr int codes = code_count(Range);
  constexpr bool is_signed = Range == values::any;
  patterns::source random(M);
  each_header(M, codes, [&](std::uint16_t h) {
    const std::uint32_t dithers[] = {0, 0x7fffffffu, 0x80000000u, 0xffffffffu,
                                     std::uint32_t(random.word())};
    float before = -1;
    for (int c = 0; c < codes; ++c) {
      const float x = decode<Range>(h, c);
      ASSERT_EQ(x, is_signed ? definition::decode_signed(h, std::uint8_t(c))
                             : definition::decode_positive(h, std::uint8_t(c)));
      ASSERT_GT(x, before) << "header " << h << " code " << c;
      before = x;
      for (const std::uint32_t r : dithers)
        ASSERT_EQ(encode<Range>(h, x, r), c) << "header " << h << " random " << r;
      if constexpr (is_signed) {
        ASSERT_EQ(decode<Range>(h, c | 128), -x) << "header " << h << " code " << c;
        for (const std::uint32_t r : dithers)  // -0 is a float as well, and code 128 another zero
          ASSERT_EQ(encode<Range>(h, -x, r), c | 128) << "header " << h << " random " << r;
      }
    }
    ASSERT_EQ(decode<Range>(h, 0), 0);
  });
}
TEST(Log8Code, SurvivesDecodingAndEncodingWhateverTheRandomBits) {
  for (int M = 3; M <= 5; ++M) {
    check_codes<values::any>(M);
    check_codes<values::non_negative>(M);
  }
}

template <values Range>
void check_error(int M) {
  constexpr int codes = code_count(Range);
  patterns::source random(10 + M);
  each_header(M, codes, [&](std::uint16_t h) {
    const double bias = definition::real(definition::base(h));
    for (int i = 0; i < 16; ++i) {
      const int c = int(random.below(codes - 1));
      const double low = decode<Range>(h, c), high = decode<Range>(h, c + 1);
      // a float between two neighbours, of any distance from them
      const auto x = float(low + (high - low) * double(random.below(1 << 20)) * 0x1p-20);
      const auto r = std::uint32_t(random.word());
      const int code = encode<Range>(h, x, r);
      ASSERT_TRUE(code == c || code == c + 1) << "header " << h << ": " << x << " became " << code;
      const double bound = std::ldexp(double(x) + bias, -M);
      ASSERT_LE(std::abs(decode<Range>(h, code) - double(x)), bound) << "header " << h;
      ASSERT_EQ(code, Range == values::any ? definition::encode_signed(h, x, r)
                                           : definition::encode_positive(h, x, r));
    }
  });
}
TEST(Log8Code, IsANeighbourOfWhatItStandsFor) {  // so the error is below (|x| + bias) / 2^M
  for (int M = 3; M <= 5; ++M) {
    check_error<values::any>(M);
    check_error<values::non_negative>(M);
  }
}

template <values Range>
void check_mean(int M) {
  constexpr int codes = code_count(Range);
  patterns::source random(20 + M);
  const int s = 23 - M;
  for (int i = 0; i < 24; ++i) {
    const std::uint32_t b = (1u << M) + random.below((100u << M) - (1u << M));
    const auto h = std::uint16_t(b | std::uint32_t(M - 3) << 14);
    constexpr int lowest = Range == values::any ? 0 : 1;  // code 0 is for zero alone
    const int c = i == 0 ? lowest : int(lowest + random.below(codes - 1 - lowest));
    const double low = decode<Range>(h, c), high = decode<Range>(h, c + 1);
    const auto x = float(low + (high - low) * double(random.below(1 << 20)) * 0x1p-20);
    std::uint64_t upper = 0;
    for (std::uint32_t r = 0; r < 1u << s; ++r)
      upper += encode<Range>(h, x, r << (32 - s)) == c + 1;
    const double mean = low + (high - low) * std::ldexp(double(upper), -s);
    // Exact but for the rounding of x + bias, half a unit in the last place.
    const double sum = double(x) + definition::real(definition::base(h));
    EXPECT_NEAR(mean, x, std::ldexp(sum, -24)) << "header " << h << " code " << c;
  }
}
TEST(Log8Code, HasTheRightMeanOverAllRandomBits) {
  for (int M = 3; M <= 5; ++M) {
    check_mean<values::any>(M);
    check_mean<values::non_negative>(M);
  }
}

// ---- scales -------------------------------------------------------------------------------------

/// Largest values that a block can have: over all exponents, dense and at the edges of lattices.
std::vector<std::uint32_t> maxima() {
  std::vector<std::uint32_t> result;
  for (std::uint32_t exponent = 0; exponent < 254; ++exponent) {
    for (std::uint32_t k = 0; k < 1 << 10; ++k) result.push_back(exponent << 23 | k << 13);
    for (std::uint32_t k = 0; k < 1 << 7; ++k)
      for (int offset : {-2, -1, 1, 2, 4095})
        result.push_back((exponent << 23 | k << 16) + std::uint32_t(offset));
  }
  for (std::uint32_t& x : result) x = std::min(x, 0x7effffffu);  // below 2^127, not below zero
  result.push_back(0);
  return result;
}

/// What `fit` makes of a block with these ranges.
template <class Formula>
std::vector<std::uint16_t> headers(std::uint32_t largest_m, std::uint32_t largest_v,
                                   std::uint32_t smallest_v) {
  using range = log8::range<scalar<float>>;
  range r[Formula::slot_count];
  r[0].largest = largest_m;
  if constexpr (Formula::slot_count == 2) {
    r[1].largest = largest_v;
    r[1].smallest = smallest_v - 1;  // as range.add keeps it
  }
  log8::scale s[Formula::slot_count];
  log8::fit<Formula>(r, s);
  std::vector<std::uint16_t> result;
  for (const auto& one : s) result.push_back(log8::close(one));
  return result;
}

void expect_fits(std::uint16_t h, std::uint32_t largest, values range) {
  const int top = code_count(range) - 1, M = definition::width(h);
  const float x = definition::real(largest);
  const bool is_signed = range == values::any;
  const auto code = [&](std::uint32_t random) {
    return is_signed ? encode<values::any>(h, x, random)
                     : encode<values::non_negative>(h, x, random);
  };
  ASSERT_EQ(std::uint32_t(h & 0x3fff), definition::fit(largest, top + 1, M)) << largest;
  ASSERT_LE(code(0xffffffffu), top) << "the largest, " << largest << ", overflows header " << h;
  if ((h & 0x3fff) > 1 << M) {
    ASSERT_GE(code(0), top - 2) << "codes stay unused: " << largest << ", header " << h;
  }
}

TEST(Log8Scale, OfEveryMaximumHoldsIt) {
  const std::uint32_t one = definition::bits(1.0f);
  for (const std::uint32_t x : maxima()) {
    const std::uint32_t spreads[] = {15u << 23 | 1, 15u << 23, 7u << 23};  // M = 3, 4, 5
    for (int M = 3; M <= 5; ++M) {
      const std::uint32_t spread = spreads[M - 3];
      const auto m = headers<two_moments>(x, one, one - spread);
      ASSERT_EQ(definition::width(m[0]), M);
      ASSERT_EQ(definition::width(m[1]), M);
      expect_fits(m[0], x, values::any);
      if (x > spread) {
        const auto v = headers<two_moments>(one, x, x - spread);
        ASSERT_EQ(definition::width(v[1]), M) << x;
        expect_fits(v[1], x, values::non_negative);
      }
    }
    const auto alone = headers<one_moment>(x, 0, 0);
    ASSERT_EQ(definition::width(alone[0]), 4);
    expect_fits(alone[0], x, values::any);
  }
}

TEST(Log8Scale, WidthIsTheLargestThatTheRangeAllows) {
  const auto width = [](std::uint32_t largest, std::uint32_t smallest) {
    return definition::width(headers<two_moments>(0, largest, smallest)[1]);
  };
  const std::uint32_t one = definition::bits(1.0f);
  EXPECT_EQ(width(0, 0), 3);  // no positive value
  EXPECT_EQ(width(one, one), 5);
  EXPECT_EQ(width(one, one - (7u << 23)), 5);
  EXPECT_EQ(width(one, one - (7u << 23) - 1), 4);
  EXPECT_EQ(width(one, one - (15u << 23)), 4);
  EXPECT_EQ(width(one, one - (15u << 23) - 1), 3);
  EXPECT_EQ(width(one, 1), 3);
}

// ---- blocks -------------------------------------------------------------------------------------

struct encoded {
  std::vector<std::uint8_t> m, v;
  std::vector<std::uint16_t> header_m, header_v;
};
constexpr std::uint8_t untouched = 0xa5;

template <class Format>
auto moments_of(encoded& e, std::size_t n, std::uint64_t key) {
  return leanopt::cpu::stored_moments<float, Format, 2>{
      {e.m.data(), e.v.data()}, {e.header_m.data(), e.header_v.data()}, n, 0, key};
}
/// With one block's room behind the codes, so that a write past the tail shows.
template <class Format>
encoded encode_all(level l, const std::vector<float>& m, const std::vector<float>& v,
                   std::uint64_t key) {
  const std::size_t n = m.size(), blocks = (n + Format::block - 1) / Format::block;
  encoded e;
  e.m.assign(n + 256, untouched);
  e.v.assign(n + 256, untouched);
  e.header_m.assign(blocks + 1, untouched);
  e.header_v.assign(blocks + 1, untouched);
  const float* moments[] = {m.data(), v.data()};
  leanopt::cpu::encode<two_moments, Format>(l, moments_of<Format>(e, n, key), moments);
  return e;
}
template <class Format>
std::vector<std::vector<float>> decode_all(level l, encoded& e, std::size_t n) {
  std::vector<std::vector<float>> result(2, std::vector<float>(n));
  float* moments[] = {result[0].data(), result[1].data()};
  leanopt::cpu::decode<two_moments, Format>(l, moments_of<Format>(e, n, 0), moments);
  return result;
}

std::vector<float> part(const std::vector<float>& x, std::size_t first, std::size_t n) {
  return {x.begin() + std::ptrdiff_t(first),
          x.begin() + std::ptrdiff_t(std::min(x.size(), first + n))};
}
bool is_untouched(const std::vector<std::uint8_t>& codes, std::size_t from) {
  return std::all_of(codes.begin() + std::ptrdiff_t(from), codes.end(),
                     [](std::uint8_t c) { return c == untouched; });
}

template <class Format>
void expect_defined(const std::vector<float>& m, const std::vector<float>& v, std::uint64_t key) {
  const std::size_t n = m.size(), B = Format::block;
  for (const level l : levels::all_here()) {
    encoded e = encode_all<Format>(l, m, v, key);
    const auto decoded = decode_all<Format>(l, e, n);
    for (std::size_t i = 0; i < n; i += B) {
      const auto expected = definition::encode(part(m, i, B), part(v, i, B), key, i / B);
      const std::string where = std::string(Format::name) + " at " + leanopt::cpu::name_of(l) +
                                ", " + std::to_string(n) + " elements, block " +
                                std::to_string(i / B);
      ASSERT_EQ(e.header_m[i / B], expected.header_m) << where;
      ASSERT_EQ(e.header_v[i / B], expected.header_v) << where;
      for (std::size_t j = 0; j < expected.m.size(); ++j) {
        ASSERT_EQ(int(e.m[i + j]), int(expected.m[j])) << where << ", element " << j;
        ASSERT_EQ(int(e.v[i + j]), int(expected.v[j])) << where << ", element " << j;
        ASSERT_EQ(decoded[0][i + j], definition::decode_signed(expected.header_m, expected.m[j]));
        ASSERT_EQ(decoded[1][i + j], definition::decode_positive(expected.header_v, expected.v[j]));
        if (definition::too_large(m[i + j]) || definition::too_large(v[i + j])) continue;
        ASSERT_EQ(decoded[1][i + j] > 0, v[i + j] > 0) << where << " lost " << v[i + j];
        ASSERT_TRUE(m[i + j] != 0 || decoded[0][i + j] == 0) << where;
      }
    }
    ASSERT_TRUE(is_untouched(e.m, n) && is_untouched(e.v, n))
        << "written past " << n << " elements";
    ASSERT_EQ(e.header_m.back(), untouched);
    ASSERT_EQ(e.header_v.back(), untouched);
  }
}

/// Moments as they come in training, of every kind, some of them zero.
void make_moments(std::uint64_t seed, std::size_t n, kind k, std::vector<float>& m,
                  std::vector<float>& v) {
  patterns::source random(seed);
  m = random.numbers<float>(n, k);
  v.resize(n);
  for (std::size_t j = 0; j < n; ++j) {
    v[j] = random.positive<float>(k);
    if (random.below(16) == 0) v[j] = 0;
    if (random.below(16) == 0) m[j] = 0;
  }
}

template <class Format>
void check_blocks() {
  std::vector<float> m, v;
  std::uint64_t seed = 0;
  for (const kind k : patterns::all_kinds)
    for (const std::size_t n : {1,   2,   15,  16,  17,  63,  64,  65,   127,  128, 200,
                                255, 256, 257, 300, 511, 512, 513, 1000, 4096, 5001}) {
      make_moments(++seed, n, k, m, v);
      expect_defined<Format>(m, v, leanopt::random_key(0, seed, n));
    }
}
TEST(Log8Block, HasTheCodesAndHeadersOfTheDefinition) {
  check_blocks<log8_blocks<64>>();
  check_blocks<log8_blocks<128>>();
  check_blocks<log8>();
}

TEST(Log8Block, HasThemForBlocksOfOneValueAndForEmptyOnes) {
  for (const float x : {0.0f, 1.0f, 0x1p-149f, 0x1p-126f, 0x1.fffffep126f, 0x1p127f, INFINITY, NAN})
    for (const std::size_t n : {1u, 100u, 256u}) {
      expect_defined<log8>(std::vector<float>(n, -x), std::vector<float>(n, x), 5);
      std::vector<float> m(n), v(n);
      m[n / 2] = -x;
      v[n / 2] = x;
      expect_defined<log8>(m, v, 6);
    }
}

TEST(Log8Block, RaisesWhatIsSmallInsteadOfLosingIt) {
  for (const float small : {0x1p-149f, 0x1p-126f, 1e-30f, 1e-12f, 1e-7f}) {
    std::vector<float> m(256), v(256, small);
    v[17] = 1e4f;
    expect_defined<log8>(m, v, 7);
    encoded e = encode_all<log8>(level::scalar, m, v, 7);
    const auto decoded = decode_all<log8>(level::scalar, e, 256)[1];
    const float floor = definition::decode_positive(e.header_v[0], 1);
    EXPECT_LT(small, floor);
    for (std::size_t j = 0; j < 256; ++j) EXPECT_TRUE(j == 17 || decoded[j] == floor) << decoded[j];
  }
}

/// An element of which one moment is no number, or too large: 0 and the block's largest finite v
/// take their place, and neither a header nor a neighbour can tell.
TEST(Log8Block, KeepsWhatIsNotFiniteFromItsNeighbours) {
  std::vector<float> m, v;
  make_moments(99, 700, kind::normal, m, v);
  const float bad[][2] = {
      {INFINITY, INFINITY}, {-INFINITY, INFINITY}, {NAN, NAN}, {1, INFINITY},
      {0x1p127f, 1},        {1e29f, INFINITY},     {1, NAN},   {-0x1p127f, 0x1p127f}};
  for (const level l : levels::all_here())
    for (const std::size_t at : {0u, 100u, 255u, 256u, 600u, 699u})
      for (const auto& [bad_m, bad_v] : bad) {
        auto clean_m = m, clean_v = v, dirty_m = m, dirty_v = v;
        clean_m[at] = clean_v[at] = 0;
        dirty_m[at] = bad_m;
        dirty_v[at] = bad_v;
        encoded clean = encode_all<log8>(l, clean_m, clean_v, 8);
        encoded dirty = encode_all<log8>(l, dirty_m, dirty_v, 8);
        const auto where = ::testing::Message() << bad_m << ", " << bad_v << " at " << at << ", "
                                                << leanopt::cpu::name_of(l);
        ASSERT_EQ(clean.header_m, dirty.header_m) << where;
        ASSERT_EQ(clean.header_v, dirty.header_v) << where;
        const auto decoded = decode_all<log8>(l, dirty, 700);
        EXPECT_EQ(decoded[0][at], 0) << where;
        const std::size_t first = at / 256 * 256, last = std::min<std::size_t>(first + 256, 700);
        const float largest = *std::max_element(clean_v.begin() + std::ptrdiff_t(first),
                                                clean_v.begin() + std::ptrdiff_t(last));
        EXPECT_NEAR(decoded[1][at], largest, largest / 8) << where;
        for (std::size_t j = 0; j < 700; ++j)
          ASSERT_TRUE(j == at || (clean.m[j] == dirty.m[j] && clean.v[j] == dirty.v[j]))
              << where << ", element " << j;
      }
}

}  // namespace
