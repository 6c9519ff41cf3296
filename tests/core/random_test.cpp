// The random bits: known answers of the hash, and what stochastic rounding needs of the bits. Each
// statistic has a fixed seed, so it passes always or never; its bound is one that a true source of
// random bits exceeds once in a hundred thousand runs.

#include <leanopt/core/random.hpp>
#include <leanopt/engine/cpu.hpp>

#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

namespace {

using leanopt::mix;
using leanopt::random_key;
using leanopt::random_word;

constexpr std::uint64_t increment = 0x9E3779B97F4A7C15u;

TEST(Mix, IsTheFinalizerOfSplitMix64) {
  const std::uint64_t published[] = {
      6457827717110365317u, 3203168211198807973u, 9817491932198370423u, 4593380528125082431u,
      16408922859458223821u};  // the generator's outputs, seed 1234567
  std::uint64_t state = 1234567;
  for (const std::uint64_t expected : published) {
    EXPECT_EQ(mix(state), expected);
    state += increment;
  }
}

/// Undoes y = x ^ (x >> s).
std::uint64_t undo_shift(std::uint64_t y, int s) {
  std::uint64_t x = y;
  for (int done = s; done < 64; done += s) x = y ^ (x >> s);
  return x;
}
/// The inverse of an odd number modulo 2^64, by Newton's iteration.
std::uint64_t inverse(std::uint64_t a) {
  std::uint64_t x = a;
  for (int i = 0; i < 6; ++i) x *= 2 - a * x;
  return x;
}
TEST(Mix, CanBeUndone) {  // so no two keys meet before the last word is cut
  patterns::source random(1);
  for (int i = 0; i < 100000; ++i) {
    const std::uint64_t z = i < 64 ? std::uint64_t(1) << i : random.word();
    std::uint64_t x = undo_shift(mix(z), 31) * inverse(0x94D049BB133111EBu);
    x = undo_shift(x, 27) * inverse(0xBF58476D1CE4E5B9u);
    ASSERT_EQ(undo_shift(x, 30) - increment, z);
  }
}

TEST(Key, DiffersForEverySeedStepAndOrdinal) {
  std::set<std::uint64_t> keys;
  for (std::uint64_t seed : {0ull, 1ull, 2ull, 42ull, ~0ull})
    for (std::uint64_t step = 1; step <= 100; ++step)
      for (std::uint64_t ordinal = 0; ordinal < 100; ++ordinal)
        keys.insert(random_key(seed, step, ordinal));
  EXPECT_EQ(keys.size(), 5u * 100 * 100);
}

TEST(Key, WordsAreAPureFunction) {
  const std::uint64_t key = random_key(7, 8, 9);
  const std::uint32_t word = random_word(key, 10, 1);
  for (int i = 0; i < 3; ++i) random_word(key + 1, i, 0);
  EXPECT_EQ(random_key(7, 8, 9), key);
  EXPECT_EQ(random_word(key, 10, 1), word);
}

/// Chi-square of counts that should be alike, as a number of standard deviations from its mean.
double excess(const std::vector<std::uint64_t>& counts) {
  double total = 0;
  for (const std::uint64_t c : counts) total += double(c);
  const double expected = total / double(counts.size());
  double chi = 0;
  for (const std::uint64_t c : counts)
    chi += (double(c) - expected) * (double(c) - expected) / expected;
  const double freedom = double(counts.size() - 1);
  return (chi - freedom) / std::sqrt(2 * freedom);
}
constexpr double rare = 5;  // standard deviations

/// Draw of element `j` of a block, by the definition: a lattice rotated by the block's word.
std::uint32_t draw(std::uint32_t word, std::uint32_t j) { return word + j * 0x9E3779B9u; }

struct sample {
  std::uint64_t seed, step, ordinal, block;
  int stream;
};
/// Words of many samples; `vary` changes one thing from word to word.
template <class F>
std::vector<std::uint32_t> words(F vary) {
  std::vector<std::uint32_t> result;
  for (std::uint64_t i = 0; i < 1 << 16; ++i) {
    sample s{3, 5, 2, 11, 0};
    vary(s, i);
    result.push_back(random_word(random_key(s.seed, s.step, s.ordinal), s.block, s.stream));
  }
  return result;
}
const auto by_block = [](sample& s, std::uint64_t i) { s.block = i; };
const auto by_step = [](sample& s, std::uint64_t i) { s.step = i; };
const auto by_ordinal = [](sample& s, std::uint64_t i) { s.ordinal = i; };
const auto by_seed = [](sample& s, std::uint64_t i) { s.seed = i; };

void expect_uniform(const std::vector<std::uint32_t>& x) {
  for (const int shift : {24, 12, 0}) {
    std::vector<std::uint64_t> counts(256);
    for (const std::uint32_t w : x) ++counts[w >> shift & 0xff];
    EXPECT_LT(std::abs(excess(counts)), rare) << "bits from " << shift;
  }
}
/// Of pairs: each of 16 x 16 combinations of top bits is as frequent as every other.
void expect_independent(const std::vector<std::uint32_t>& x, const std::vector<std::uint32_t>& y) {
  ASSERT_EQ(x.size(), y.size());
  std::vector<std::uint64_t> counts(256);
  for (std::size_t i = 0; i < x.size(); ++i) ++counts[x[i] >> 28 << 4 | y[i] >> 28];
  EXPECT_LT(std::abs(excess(counts)), rare);
}
std::vector<std::uint32_t> shifted(const std::vector<std::uint32_t>& x) {
  std::vector<std::uint32_t> y(x.begin() + 1, x.end());
  y.push_back(x[0]);
  return y;
}

TEST(Word, IsUniformAndIndependentAlongEveryArgument) {
  const auto check = [](auto vary) {
    const auto x = words(vary);
    expect_uniform(x);
    expect_independent(x, shifted(x));
  };
  check(by_block);
  check(by_step);
  check(by_ordinal);
  check(by_seed);
}

TEST(Word, StreamsAreIndependent) {
  std::vector<std::vector<std::uint32_t>> x;
  for (int stream = 0; stream < 4; ++stream)
    x.push_back(words([&](sample& s, std::uint64_t i) {
      s.block = i;
      s.stream = stream;
    }));
  for (int a = 0; a < 4; ++a) {
    expect_uniform(x[a]);
    for (int b = 0; b < a; ++b) expect_independent(x[a], x[b]);
  }
}

TEST(Word, NeighbouringTensorsShareNothing) {  // block i of one, block i of the next
  const auto x = words(by_block);
  const auto y = words([](sample& s, std::uint64_t i) {
    s.block = i;
    ++s.ordinal;
  });
  const auto z = words([](sample& s, std::uint64_t i) {
    s.block = i;
    ++s.step;
  });
  expect_independent(x, y);
  expect_independent(x, z);
  std::set<std::uint32_t> all(x.begin(), x.end());
  std::size_t met = 0;
  for (const std::uint32_t w : y) met += all.count(w);
  EXPECT_LE(met, 10u);  // 2^16 pairs of 2^16 in 2^32: one on average
}

struct lattice_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(std::uint32_t word, std::uint32_t first, float* out,
                                 std::size_t n) {
    using leanopt::real;
    using V = leanopt::cpu::detail::lanes_of<Width, float>;
    using L = leanopt::lane_traits<V>;
    leanopt::lattice<V> draws(word, first);
    for (std::size_t i = 0; i < n; i += L::count) L::store(out + i, V(real(draws.next())));
  }
};
TEST(Lattice, IsTheSameAtEveryWidthAndFromAnyElementOn) {
  for (const auto l : levels::all_here())
    for (const std::uint32_t word : {0u, 1u, 0x80000000u, 0xdeadbeefu})
      for (const std::uint32_t first : {0u, 1u, 31u, 32u, 255u}) {
        std::vector<float> out(256);
        leanopt::cpu::detail::launch<lattice_kernel, leanopt::cpu::level::avx512>(
            l, word, first, out.data(), out.size());
        for (std::uint32_t j = 0; j < 256; ++j)
          ASSERT_EQ(patterns::cast<std::uint32_t>(out[j]), draw(word, first + j))
              << "element " << first << " + " << j << ", " << leanopt::cpu::name_of(l);
      }
}

TEST(Lattice, SpreadsTheDrawsOfABlockEvenly) {
  // Multiples of a number leave gaps of three sizes at most (the three-gap theorem), and those of
  // the golden ratio none as wide as twice the even distance. So no block is rounded one way.
  std::set<std::uint32_t> points;
  for (std::uint32_t j = 0; j < 256; ++j) points.insert(draw(12345, j));
  ASSERT_EQ(points.size(), 256u);
  std::set<std::uint32_t> gaps;
  std::uint32_t before = *points.rbegin();
  for (const std::uint32_t p : points) {
    gaps.insert(p - before);
    before = p;
  }
  EXPECT_LE(gaps.size(), 3u);
  EXPECT_LT(double(*gaps.rbegin()), 2 * 0x1p32 / 256);
}

TEST(Lattice, EveryElementIsUniformAndIndependentFromStepToStep) {
  const auto x = words(by_step);
  for (const std::uint32_t j : {0u, 1u, 100u, 255u}) {
    std::vector<std::uint32_t> draws;
    for (const std::uint32_t w : x) draws.push_back(draw(w, j));
    expect_uniform(draws);
    expect_independent(draws, shifted(draws));
  }
}

}  // namespace
