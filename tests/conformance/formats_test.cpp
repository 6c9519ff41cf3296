// What every compressed format promises, for all of conformance::compressed_formats: codes that
// survive, order, errors of at most a gap, means, signs, zeros, tails, bytes, and what becomes of
// numbers that are not finite. What a format promises beyond that is tested in tests/formats.

#include "tests/conformance/lists.hpp"
#include "tests/formats/support.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace {

using format_runs::encoded;
using format_runs::level;
using format_runs::untouched;
using format_runs::values;
using patterns::kind;

template <class... T>
testing::Types<T...> types_of(conformance::list<T...>);
struct names {
  template <class Format>
  static std::string GetName(int) {
    std::string name = Format::name;
    std::replace(name.begin(), name.end(), '/', '_');
    return name;
  }
};
template <class... A, class... B>
conformance::list<A..., B...> operator+(conformance::list<A...>, conformance::list<B...>);
template <class... T>
auto random_ones(conformance::list<T...>)
    -> decltype((conformance::list<>{} + ... +
                 std::conditional_t<T::random, conformance::list<T>, conformance::list<>>{}));

template <class Format>
class CompressedFormat : public testing::Test {};
TYPED_TEST_SUITE(CompressedFormat, decltype(types_of(conformance::compressed_formats{})), names);
template <class Format>
class RandomFormat : public testing::Test {};
using random_formats = decltype(random_ones(conformance::compressed_formats{}));
TYPED_TEST_SUITE(RandomFormat, decltype(types_of(random_formats{})), names);

/// f(values::any) and f(values::non_negative), as types.
template <class F>
void each_range(F f) {
  {
    SCOPED_TRACE("values of any sign");
    f(std::integral_constant<values, values::any>{});
  }
  if (testing::Test::HasFatalFailure()) return;
  SCOPED_TRACE("values that are not negative");
  f(std::integral_constant<values, values::non_negative>{});
}

/// bitsandbytes' own rule, of which it is known that it loses second moments.
template <class Format>
constexpr bool loses_small_values = false;
template <int Block>
constexpr bool loses_small_values<leanopt::formats::dynamic8_blocks<Block, true>> = true;

std::uint32_t bits(float x) { return patterns::cast<std::uint32_t>(x); }

/// Blocks whose scales are looked at: some widths between the largest and the smallest value, and
/// magnitudes from one end of float to the other.
std::vector<std::vector<float>> blocks() {
  std::vector<std::vector<float>> result;
  for (const float largest : {1e-37f, 3.7e-12f, 0.9999f, 1.0f, 1e37f, 0x1.fffffep126f})
    for (const float smallest : {1.0f, 0x1p-10f, 0x1p-30f})
      result.push_back({largest, std::max(largest * smallest, 0x1p-149f)});
  return result;
}

/// The numbers that a block can hold, in ascending order, each with a code of it.
template <class Format, values Range>
std::map<float, std::uint32_t> numbers(const typename Format::scale& s) {
  std::map<float, std::uint32_t> result;
  for (std::uint32_t c = 0; c < format_runs::code_count<Format>; ++c) {
    const float x = format_runs::decode<Format, Range>(s, c);
    const bool held = Range == values::any || !std::signbit(x);
    if (std::isfinite(x) && held) result.emplace(x, c);
  }
  return result;
}

constexpr std::uint32_t random_words[] = {0, 0x12345678u, 0x80000000u, 0xfedcba98u, 0xffffffffu};

// ---- codes --------------------------------------------------------------------------------------

TYPED_TEST(CompressedFormat, FreshMemoryIsZero) {
  each_range([](auto range) {
    const encoded<TypeParam> fresh(300, 0);
    for (const float x : format_runs::decode<TypeParam, range()>(level::scalar, fresh))
      ASSERT_EQ(x, 0);
  });
}

TYPED_TEST(CompressedFormat, CodesSurviveDecodingAndEncoding) {
  each_range([](auto range) {
    for (const auto& block : blocks()) {
      const auto s = format_runs::scale_of<TypeParam, range()>(block);
      for (std::uint32_t c = 0; c < format_runs::code_count<TypeParam>; ++c) {
        const float x = format_runs::decode<TypeParam, range()>(s, c);
        if (std::isnan(x) || (range() == values::non_negative && std::signbit(x))) continue;
        for (const std::uint32_t r : random_words) {
          const auto again = format_runs::encode<TypeParam, range()>(s, x, r);
          const float stored = format_runs::decode<TypeParam, range()>(s, again);
          ASSERT_TRUE(stored == x && (again == c || x == 0))  // zero may have two codes
              << "code " << c << " in a block of " << block[0];
        }
      }
    }
  });
}

/// Codes of one sign ascend or descend with what they stand for.
TYPED_TEST(CompressedFormat, CodesAreInOrder) {
  each_range([](auto range) {
    for (const auto& block : blocks()) {
      const auto s = format_runs::scale_of<TypeParam, range()>(block);
      const auto all = numbers<TypeParam, range()>(s);
      ASSERT_GT(all.size(), 200u);
      bool up[2] = {}, down[2] = {};
      for (auto high = std::next(all.begin()), low = all.begin(); high != all.end(); low = high++)
        if (low->first != 0 && high->first != 0)
          (low->second < high->second ? up : down)[low->first < 0] = true;
      ASSERT_TRUE(up[0] && !down[0]) << "positive numbers in a block of " << block[0];
      ASSERT_TRUE(range() == values::non_negative || up[1] != down[1])
          << "negative numbers in a block of " << block[0];
    }
  });
}

/// Numbers between two neighbours that a block can hold, in ascending order.
std::vector<float> between(float low, float high) {
  const float middle = float((double(low) + double(high)) / 2);
  std::vector<float> x = {low,
                          std::nextafter(low, high),
                          float(0.75 * double(low) + 0.25 * double(high)),
                          std::nextafter(middle, low),
                          middle,
                          std::nextafter(middle, high),
                          float(0.25 * double(low) + 0.75 * double(high)),
                          std::nextafter(high, low),
                          high};
  std::sort(x.begin(), x.end());
  return x;
}

/// What the block stores is one of the two neighbours of a number: the nearest, or with random bits
/// either. So signs are kept, nothing moves past a neighbour, and the order of numbers is kept.
TYPED_TEST(CompressedFormat, StoresANeighbour) {
  each_range([](auto range) {
    for (const auto& block : blocks()) {
      const auto s = format_runs::scale_of<TypeParam, range()>(block);
      const auto all = numbers<TypeParam, range()>(s);
      for (const std::uint32_t random : random_words) {
        float before = -std::numeric_limits<float>::infinity();
        for (auto high = std::next(all.begin()), low = all.begin(); high != all.end(); low = high++)
          for (const float x : between(low->first, high->first)) {
            if (std::abs(x) > block[0] && encoded<TypeParam>::has_headers) continue;
            const auto code = format_runs::encode<TypeParam, range()>(s, x, random);
            const float stored = format_runs::decode<TypeParam, range()>(s, code);
            ASSERT_TRUE(stored == low->first || stored == high->first)
                << x << " became " << stored << " in a block of " << block[0];
            ASSERT_GE(stored, before) << x << " in a block of " << block[0];
            before = stored;
            const bool next_to_zero = low->first == 0 || high->first == 0;
            if (TypeParam::random || next_to_zero) continue;
            const double gap = double(high->first) - double(low->first);
            const double magnitude = std::max(std::abs(low->first), std::abs(high->first));
            ASSERT_LE(std::abs(double(stored) - double(x)),
                      gap / 2 + tolerance::half_gap * magnitude)
                << x << " became " << stored << " in a block of " << block[0];
          }
      }
    }
  });
}

/// Over all that random bits can be, what is stored is the value on average.
TYPED_TEST(RandomFormat, RandomBitsHaveTheRightMean) {
  each_range([](auto range) {
    patterns::source random(1);
    for (const auto& block : blocks()) {
      const auto s = format_runs::scale_of<TypeParam, range()>(block);
      const auto all = numbers<TypeParam, range()>(s);
      for (int i = 0; i < 4; ++i) {
        // The gap next to zero, where second moments are raised, is not asked for a mean.
        const auto first = range() == values::any ? all.begin() : std::next(all.begin());
        const auto low =
            std::next(first, std::ptrdiff_t(random.below(std::uint32_t(all.size()) - 2)));
        const auto high = std::next(low);
        const double gap = double(high->first) - double(low->first);
        const auto x = float(double(low->first) + gap * random.below(1 << 20) * 0x1p-20);
        if (encoded<TypeParam>::has_headers && std::abs(x) > block[0]) continue;
        std::int64_t highs = 0;
        constexpr std::int64_t words = 1 << 20;  // the bits below are used by no format
        for (std::int64_t r = 0; r < words; ++r) {
          const auto code = format_runs::encode<TypeParam, range()>(s, x, std::uint32_t(r) << 12);
          highs += format_runs::decode<TypeParam, range()>(s, code) == high->first;
        }
        ASSERT_NEAR(double(low->first) + gap * double(highs) / words, x,
                    tolerance::mean_of_gap * gap)
            << "between " << low->first << " and " << high->first << " in a block of " << block[0];
      }
    }
  });
}

// ---- blocks -------------------------------------------------------------------------------------

constexpr std::size_t sizes[] = {1,   2,   15,  16,  17,  63,  64,  65,  127,  128,  129, 200,
                                 255, 256, 257, 300, 383, 511, 512, 513, 1000, 4096, 5001};

/// Moments as they come in training, some of them zero.
template <values Range>
std::vector<float> moments(std::size_t n, kind k) {
  patterns::source random(n * 5 + std::size_t(k));
  std::vector<float> x = random.numbers<float>(n, k);
  for (float& one : x) {
    if (Range == values::non_negative && std::signbit(one)) one = -one;
    if (random.below(16) == 0) one = 0;
  }
  return x;
}

/// Largest values of blocks from one end of float to the other, both ends of subnormal ones too.
std::vector<float> maxima() {
  std::vector<float> result = {0x1p-149f, 0x1p-148f,        0x1.8p-140f, 0x1p-133f,
                               0x1p-130f, 0x1.fffffcp-127f, 0x1p-126f};
  for (int exponent = -37; exponent <= 37; ++exponent)
    result.push_back(float(std::pow(10.0, exponent)));
  result.push_back(0x1.fffffep126f);
  return result;
}

TYPED_TEST(CompressedFormat, BlocksHoldZeroAndTheLargestAtEveryMagnitude) {
  each_range([](auto range) {
    for (const float largest : maxima())
      for (const float sign : {1.0f, -1.0f})
        for (const float others : {0.0f, 0.03f}) {
          if (range() == values::non_negative && sign < 0) continue;
          std::vector<float> x(300, largest * others);
          x[0] = 0;
          x[260] = range() == values::any ? -0.0f : 0.0f;
          x[17] = x[299] = sign * largest;
          const auto stored = format_runs::decode<TypeParam, range()>(
              level::scalar, format_runs::encode<TypeParam, range()>(level::scalar, x, 3));
          const double bound = tolerance::stored_of_largest * std::max(largest, 0x1p-126f);
          for (const std::size_t at : {17u, 299u})
            ASSERT_NEAR(stored[at], x[at], bound) << "block of " << largest;
          for (const std::size_t at : {0u, 260u}) ASSERT_EQ(stored[at], 0);
        }
  });
}

TYPED_TEST(CompressedFormat, APositiveSecondMomentNeverBecomesZero) {
  int lost = 0;
  for (const level l : levels::all_here())
    for (const float largest : maxima())
      for (const float small : {0x1p-149f, 0x1p-140f, 0x1p-126f, 1e-37f, 1e-30f, largest * 0x1p-40f,
                                largest * 1.6e-7f, largest * 1e-3f}) {
        std::vector<float> x(300, std::min(std::max(small, 0x1p-149f), largest));
        x[100] = x[270] = largest;
        encoded<TypeParam> e(x.size(), 0);
        format_runs::step<TypeParam, values::non_negative>(l, e, x, 4);
        for (const float one : format_runs::decode<TypeParam, values::non_negative>(l, e)) {
          lost += one == 0;
          ASSERT_GE(one, 0);
        }
      }
  EXPECT_EQ(lost > 0, loses_small_values<TypeParam>);
}

TYPED_TEST(CompressedFormat, HasTheSameBitsAtEveryLevel) {
  each_range([](auto range) {
    for (const kind k : patterns::all_kinds)
      for (const std::size_t n : sizes) {
        const std::vector<float> x = moments<range()>(n, k);
        const auto expected = format_runs::encode<TypeParam, range()>(level::scalar, x, 5);
        const auto stored = format_runs::decode<TypeParam, range()>(level::scalar, expected);
        for (const level l : levels::all_here()) {
          const auto where = testing::Message() << leanopt::cpu::name_of(l) << ", " << n
                                                << " elements of kind " << int(k);
          ASSERT_TRUE((format_runs::encode<TypeParam, range()>(l, x, 5) == expected)) << where;
          encoded<TypeParam> stepped(n);
          stepped.clear();
          format_runs::step<TypeParam, range()>(l, stepped, x, 5);
          ASSERT_TRUE(stepped == expected) << where;
          const std::vector<float> zeros(n);  // what is not finite would show in the parameter
          const auto read = format_runs::step<TypeParam, range()>(l, stepped, zeros, 5);
          for (std::size_t i = 0; i < n; ++i)
            ASSERT_EQ(patterns::comparable(read[i]), patterns::comparable(stored[i])) << where;
        }
      }
  });
}

TYPED_TEST(CompressedFormat, EveryBlockIsStoredOnItsOwn) {
  each_range([](auto range) {
    for (const std::size_t n : sizes) {
      const std::vector<float> x = moments<range()>(n, kind::normal);
      const std::uint64_t key = leanopt::random_key(0, 1, n);
      const auto whole = format_runs::encode<TypeParam, range()>(level::scalar, x, key);
      constexpr std::size_t block = TypeParam::block;
      for (std::size_t b = 0; b < whole.blocks(); ++b) {
        const auto one = format_runs::encode<TypeParam, range()>(
            level::scalar, format_runs::part(x, b * block, block), key + b);
        ASSERT_TRUE(std::equal(one.codes.begin(), one.codes.begin() + std::ptrdiff_t(one.elements),
                               whole.codes.begin() + std::ptrdiff_t(b * block)))
            << "block " << b << " of " << n << " elements";
        if (encoded<TypeParam>::has_headers) {
          ASSERT_EQ(one.headers[0], whole.headers[b]);
        }
      }
    }
  });
}

/// Step by step, what a short last block lacks counts as zeros that stay zero.
TYPED_TEST(CompressedFormat, AShortBlockIsAWholeOneWithZeros) {
  each_range([](auto range) {
    constexpr std::size_t block = TypeParam::block;
    for (const level l : levels::all_here())
      for (const std::size_t n : {std::size_t(1), std::size_t(17), block - 1}) {
        encoded<TypeParam> part(n, 0);
        auto whole = format_runs::encode<TypeParam, range()>(l, std::vector<float>(block), 0);
        for (std::uint64_t key = 1; key <= 4; ++key) {
          std::vector<float> x = moments<range()>(n, kind::normal);
          for (float& one : x) one = std::ldexp(one, -2 * int(key));
          if (range() == values::any && key % 2 == 0)  // the largest becomes smaller
            for (float& one : x) one *= -3.9f;
          format_runs::step<TypeParam, range()>(l, part, x, key, true);
          x.resize(block);
          format_runs::step<TypeParam, range()>(l, whole, x, key, true);
          ASSERT_TRUE(std::equal(part.codes.begin(), part.codes.begin() + std::ptrdiff_t(n),
                                 whole.codes.begin()))
              << n << " elements at " << leanopt::cpu::name_of(l);
          if (encoded<TypeParam>::has_headers) {
            ASSERT_EQ(part.headers[0], whole.headers[0]) << n << " elements";
          }
        }
      }
  });
}

/// The bytes of a that do not depend on what was there before, as b shows.
template <class T>
std::size_t written(const std::vector<T>& a, const std::vector<T>& b) {
  const auto *x = reinterpret_cast<const std::uint8_t*>(a.data()),
             *y = reinterpret_cast<const std::uint8_t*>(b.data());
  std::size_t count = 0, last = 0;
  for (std::size_t i = 0; i < a.size() * sizeof(T); ++i)
    if (x[i] == y[i]) {
      ++count;
      last = i + 1;
    }
  return count == last ? count : std::size_t(-1);  // without a hole
}
TYPED_TEST(CompressedFormat, WritesItsBytesAndNoMore) {
  each_range([](auto range) {
    using header = typename TypeParam::header;
    for (const std::size_t n : sizes)
      for (const level l : levels::all_here()) {
        const std::vector<float> x = moments<range()>(n, kind::octaves);
        const auto a = format_runs::encode<TypeParam, range()>(l, x, 6, untouched);
        const auto b = format_runs::encode<TypeParam, range()>(l, x, 6, std::uint8_t(~untouched));
        std::size_t bytes = n * sizeof(typename TypeParam::template stored<float>);
        ASSERT_EQ(written(a.codes, b.codes), bytes) << n;
        bytes = 0;
        if constexpr (!std::is_void_v<header>)
          bytes = (n + TypeParam::block - 1) / TypeParam::block * sizeof(header);
        ASSERT_EQ(written(a.headers, b.headers), bytes) << n;
      }
  });
}

/// The mean of many steps' roundings is the value: errors as a number of standard deviations.
TYPED_TEST(RandomFormat, IsUnbiasedFromStepToStep) {
  each_range([](auto range) {
    constexpr int steps = 4000;
    const std::vector<float> x = moments<range()>(256, kind::normal);
    std::vector<double> sum(256), squares(256);
    for (int step = 0; step < steps; ++step) {
      const std::uint64_t key = leanopt::random_key(1, std::uint64_t(step), 0);
      const auto stored = format_runs::decode<TypeParam, range()>(
          level::scalar,
          format_runs::encode<TypeParam, range()>(levels::all_here().back(), x, key));
      for (std::size_t j = 0; j < 256; ++j) {
        const double error = double(stored[j]) - double(x[j]);
        sum[j] += error;
        squares[j] += error * error;
      }
    }
    double mean_square = 0, largest = 0;
    int counted = 0;
    for (std::size_t j = 0; j < 256; ++j) {
      if (squares[j] == 0) continue;  // a value on the lattice has no error
      const double z = sum[j] / std::sqrt(squares[j]);
      mean_square += z * z;
      largest = std::max(largest, std::abs(z));
      ++counted;
    }
    ASSERT_GT(counted, 200);
    EXPECT_LT(mean_square / counted, tolerance::mean_square_of_deviations);
    EXPECT_LT(largest, tolerance::largest_deviation);
  });
}

// ---- what is not finite -------------------------------------------------------------------------

/// Where there is a header, such an element is stored as 0 or as the largest finite value of its
/// block. Where there is none it stays as it is. Its neighbours and their header cannot tell.
TYPED_TEST(CompressedFormat, KeepsWhatIsNotFiniteFromItsNeighbours) {
  each_range([](auto range) {
    const std::vector<float> x = moments<range()>(700, kind::normal);
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    std::vector<float> bad = {infinity, -infinity, nan, -nan};
    if constexpr (encoded<TypeParam>::has_headers) {
      const auto cannot_hold = [](float one) {
        return leanopt::is_large<decltype(range)::value>(bits(one), TypeParam::large);
      };
      ASSERT_TRUE(std::all_of(bad.begin(), bad.end(), cannot_hold));
      for (const float large : {0x1p127f, -0x1p127f, -1.0f})
        if (cannot_hold(large)) bad.push_back(large);
    }
    for (const level l : levels::all_here())
      for (const std::size_t at : {0u, 100u, 255u, 256u, 600u, 699u})
        for (const float one : bad) {
          std::vector<float> clean = x, dirty = x;
          clean[at] = 0;
          dirty[at] = one;
          encoded<TypeParam> a(700), b(700);
          format_runs::step<TypeParam, range()>(l, a, clean, 8);
          format_runs::step<TypeParam, range()>(l, b, dirty, 8);
          const float stored = format_runs::decode<TypeParam, range()>(level::scalar, b)[at];
          const auto where = testing::Message()
                             << one << " at " << at << ", " << leanopt::cpu::name_of(l);
          if (!encoded<TypeParam>::has_headers) {
            ASSERT_EQ(patterns::comparable(stored), patterns::comparable(one)) << where;
          } else if (range() == values::any) {
            ASSERT_EQ(stored, 0) << where;
          } else {
            constexpr std::size_t block = TypeParam::block;
            const auto neighbours = format_runs::part(clean, at / block * block, block);
            const float largest = *std::max_element(neighbours.begin(), neighbours.end());
            ASSERT_NEAR(stored, largest, tolerance::stored_of_largest * largest) << where;
          }
          b.codes[at] = a.codes[at];
          ASSERT_TRUE(a == b) << where;
        }
  });
}

TYPED_TEST(CompressedFormat, ABlockOfNothingFiniteIsZero) {
  each_range([](auto range) {
    const std::vector<float> x(300, std::numeric_limits<float>::infinity());
    for (const level l : levels::all_here())
      for (const float one : format_runs::decode<TypeParam, range()>(
               l, format_runs::encode<TypeParam, range()>(l, x, 9)))
        ASSERT_EQ(one, encoded<TypeParam>::has_headers ? 0 : x[0]);
  });
}

}  // namespace
