// The kernels give the same bits at every instruction set: parameters, moments, codes, headers and
// factors of every formula, format and type, for sizes around those of registers, blocks and units.
// Neither the layout of the operands nor the way the work is cut changes a bit.

#include "tests/engine/kernel_runs.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace {

using namespace kernel_runs;
using leanopt::operand;
using patterns::kind;

constexpr std::size_t sizes[] = {1,    2,    3,    7,     8,     9,     15,   16,  17,
                                 31,   33,   63,   64,    65,    100,   127,  128, 129,
                                 255,  256,  257,  300,   511,   513,   700,  900, 1023,
                                 4095, 4096, 4097, 10007, 65535, 65536, 65537};

template <class F, class Storage, class T>
struct combination {
  using formula = F;
  using format = Storage;
  using real = T;
};
using leanopt::formats::log8_blocks;
using combinations = testing::Types<
    combination<adam_formula<false>, full, float>, combination<adam_formula<false>, full, double>,
    combination<adam_formula<true>, full, float>, combination<adam_formula<true>, full, double>,
    combination<adam_formula<false>, log8, float>, combination<adam_formula<false>, log8, double>,
    combination<adam_formula<false>, log8_blocks<64>, float>,
    combination<adam_formula<false>, log8_blocks<128>, double>,
    combination<adafactor_formula<false>, full, float>,
    combination<adafactor_formula<false>, full, double>,
    combination<adafactor_formula<true>, full, float>,
    combination<adafactor_formula<true>, full, double>,
    combination<adafactor_formula<true>, log8, float>,
    combination<adafactor_formula<true>, log8, double>,
    combination<adafactor_formula<true>, log8_blocks<64>, float>>;

template <class C>
class SameBits : public testing::Test {};
TYPED_TEST_SUITE(SameBits, combinations);

TYPED_TEST(SameBits, AtEveryLevel) {
  LEANOPT_NEEDS_VECTOR_LEVELS();
  using F = typename TypeParam::formula;
  using S = typename TypeParam::format;
  using T = typename TypeParam::real;
  for (const kind k : patterns::all_kinds)
    for (const std::size_t n : sizes) {
      const int steps = n > 10000 ? 3 : 6;
      const std::uint64_t expected = run<F, S, T>(level::scalar, n, k, steps);
      for (const level l : levels::all_here())
        ASSERT_EQ((run<F, S, T>(l, n, k, steps)), expected)
            << leanopt::cpu::name_of(l) << ", " << n << " elements, kind " << int(k);
    }
}

TYPED_TEST(SameBits, HoweverTheWorkIsCut) {
  using F = typename TypeParam::formula;
  using S = typename TypeParam::format;
  using T = typename TypeParam::real;
  const std::size_t n = 10007;
  for (const level l : levels::all_here()) {
    const std::uint64_t expected = run<F, S, T>(l, n, kind::normal, 3);
    EXPECT_EQ((run<F, S, T>(l, n, kind::normal, 3, {{4096, 8192}, {8192, n}, {0, 4096}})),
              expected);
    ranges blocks;
    for (std::size_t first = 0; first < n; first += 256)
      blocks.insert(blocks.begin(), {first, std::min(n, first + 256)});
    EXPECT_EQ((run<F, S, T>(l, n, kind::normal, 3, blocks)), expected);
    EXPECT_NE((run<F, S, T>(l, n, kind::normal, 3, {{0, 9984}})), expected);  // the tail counts
  }
}

// ---- layouts ------------------------------------------------------------------------------------

/// A tensor with gaps, in an order of its own: sizes and strides in elements, outermost first.
struct layout {
  std::vector<std::int64_t> sizes, strides;
  std::size_t room;  ///< elements that its memory spans

  std::size_t elements() const {
    std::size_t n = 1;
    for (const std::int64_t s : sizes) n *= std::size_t(s);
    return n;
  }
  std::size_t offset(std::size_t i) const {
    std::size_t at = 0;
    for (std::size_t d = sizes.size(); d-- > 0; i /= std::size_t(sizes[d]))
      at += i % std::size_t(sizes[d]) * std::size_t(strides[d]);
    return at;
  }
  leanopt::strided shape() const { return {int(sizes.size()), sizes.data(), strides.data()}; }
};
const layout layouts[] = {
    {{50, 13}, {1, 50}, 650},                    // a transpose
    {{50, 13}, {20, 1}, 1000},                   // rows with gaps
    {{600}, {3}, 1800},                          // a column of three
    {{3, 5, 40}, {1, 123, 3}, 615},              // inner dimensions exchanged, with a gap
    {{2, 3, 4, 5, 6}, {1, 2, 6, 24, 120}, 720},  // all reversed
    {{4, 300}, {0, 1}, 300},                     // a gradient that was expanded
    {{7, 300}, {1, 7}, 2100},                    // rows longer than a stage
};

template <class T>
void check_layouts() {
  for (const layout& form : layouts) {
    const bool overlaps = form.room < form.elements();
    const std::size_t n = form.elements();
    for (const level l : levels::all_here()) {
      patterns::source random(n);
      std::vector<T> p_memory = random.numbers<T>(form.room, kind::normal);
      const std::vector<T> start = p_memory;
      std::vector<T> p(n);
      for (std::size_t i = 0; i < n; ++i) p[i] = start[form.offset(i)];
      std::vector<T> apart = p;  // where p itself must not overlap
      using formula = adam_formula<false>;
      const driver<formula, T> d(n, n);
      state<formula, log8, T> strided_state(n), plain_state(n);
      for (int step_number = 1; step_number <= 3; ++step_number) {
        std::vector<T> g_memory = random.numbers<T>(form.room, kind::normal), g(n);
        for (std::size_t i = 0; i < n; ++i) g[i] = g_memory[form.offset(i)];
        const operand strided_g{g_memory.data(), number_of<T>, form.shape()};
        const operand strided_p = overlaps ? operand{apart.data(), number_of<T>, {}}
                                           : operand{p_memory.data(), number_of<T>, form.shape()};
        step<formula, log8, T>(l, step_number, strided_p, strided_g, n, d, strided_state,
                               {{256, n}, {0, 256}});
        step<formula, log8, T>(l, step_number, {p.data(), number_of<T>, {}},
                               {g.data(), number_of<T>, {}}, n, d, plain_state, {{0, n}});
      }
      std::vector<bool> used(form.room);
      for (std::size_t i = 0; i < n; ++i) {
        const T actual = overlaps ? apart[i] : p_memory[form.offset(i)];
        ASSERT_EQ(patterns::comparable(actual), patterns::comparable(p[i])) << i;
        used[form.offset(i)] = true;
      }
      for (std::size_t at = 0; at < form.room; ++at)
        ASSERT_TRUE(used[at] || p_memory[at] == start[at]) << "a gap was written at " << at;
      for (int k = 0; k < 2; ++k) {
        EXPECT_EQ(strided_state.slots[k], plain_state.slots[k]);
        EXPECT_EQ(strided_state.headers[k], plain_state.headers[k]);
      }
    }
  }
}
TEST(Layout, DoesNotChangeABit) {
  check_layouts<float>();
  check_layouts<double>();
}

/// What 16-bit operands must do: widen, step in float, narrow.
template <class Bits>
void check_16_bits(leanopt::number type) {
  const layout& form = layouts[0];
  const std::size_t n = form.elements();
  using formula = adam_formula<false>;
  using one = leanopt::scalar<float>;
  for (const level l : levels::all_here())
    for (const bool is_strided : {false, true}) {
      patterns::source random(3);
      std::vector<std::uint16_t> p(form.room), g(form.room);
      std::vector<float> wide_p(n), wide_g(n);
      const auto at = [&](std::size_t i) { return is_strided ? form.offset(i) : i; };
      const auto fill = [&](std::vector<std::uint16_t>& x) {
        for (auto& v : x)
          v = std::uint16_t(Bits::template narrow<one>(one(random.number<float>(kind::normal))));
      };
      const auto widened = [&](const std::vector<std::uint16_t>& x, std::size_t i) {
        return Bits::template widen<one>(std::uint32_t(x[at(i)])).v;
      };
      fill(p);
      const driver<formula, float> d(n, n);
      state<formula, full, float> state_16(n), state_32(n);
      for (int step_number = 1; step_number <= 3; ++step_number) {
        fill(g);
        for (std::size_t i = 0; i < n; ++i) {
          wide_p[i] = widened(p, i);
          wide_g[i] = widened(g, i);
        }
        const auto shape = is_strided ? form.shape() : leanopt::strided{};
        step<formula, full, float>(l, step_number, {p.data(), type, shape}, {g.data(), type, shape},
                                   n, d, state_16, {{0, n}});
        step<formula, full, float>(l, step_number, {wide_p.data(), leanopt::number::float32, {}},
                                   {wide_g.data(), leanopt::number::float32, {}}, n, d, state_32,
                                   {{0, n}});
        for (std::size_t i = 0; i < n; ++i)
          ASSERT_EQ(p[at(i)], Bits::template narrow<one>(one(wide_p[i]))) << i;
        EXPECT_EQ(state_16.slots[0], state_32.slots[0]);
        EXPECT_EQ(state_16.slots[1], state_32.slots[1]);
      }
    }
}
TEST(SixteenBits, AreWidenedForTheStepAndRoundedAfterIt) {
  check_16_bits<leanopt::bfloat16_bits>(leanopt::number::bfloat16);
  check_16_bits<leanopt::float16_bits>(leanopt::number::float16);
}
TEST(SixteenBits, HaveTheSameBitsAtEveryLevel) {
  LEANOPT_NEEDS_VECTOR_LEVELS();
  for (const auto type : {leanopt::number::bfloat16, leanopt::number::float16})
    for (const std::size_t n : sizes) {
      const auto full_bits = [&](level l) {
        return run_16_bits<adam_formula<false>, full>(l, n, type, 3);
      };
      const auto log8_bits = [&](level l) {
        return run_16_bits<adafactor_formula<true>, log8>(l, n, type, 3);
      };
      for (const level l : levels::all_here()) {
        ASSERT_EQ(full_bits(l), full_bits(level::scalar)) << n << leanopt::cpu::name_of(l);
        ASSERT_EQ(log8_bits(l), log8_bits(level::scalar)) << n << leanopt::cpu::name_of(l);
      }
    }
}

// ---- blocks -------------------------------------------------------------------------------------

/// A step of a block is: decode, the step in full precision, encode.
TEST(CompressedStep, IsTheFullStepBetweenDecodingAndEncoding) {
  using formula = adam_formula<false>;
  const std::size_t n = 1000;
  for (const level l : levels::all_here())
    for (const kind k : {kind::normal, kind::octaves, kind::subnormal}) {
      patterns::source random(17);
      std::vector<float> p = random.numbers<float>(n, kind::normal), plain_p = p;
      const driver<formula, float> d(n, n);
      state<formula, log8, float> codes(n), again(n);
      state<formula, full, float> moments(n);
      for (int i = 1; i <= 5; ++i) {
        std::vector<float> g = random.numbers<float>(n, k);
        const auto piece = [&](state<formula, log8, float>& s) {
          return leanopt::cpu::piece<float, log8, 2>{nullptr,
                                                     nullptr,
                                                     {s.slots[0].data(), s.slots[1].data()},
                                                     {s.headers[0].data(), s.headers[1].data()},
                                                     n,
                                                     0,
                                                     leanopt::random_key(1, std::uint64_t(i), n)};
        };
        float* const decoded[] = {moments.slots[0].data(), moments.slots[1].data()};
        leanopt::cpu::decode<formula, log8>(l, piece(codes), decoded);
        const operand gradient{g.data(), leanopt::number::float32, {}};
        step<formula, full, float>(l, i, {plain_p.data(), leanopt::number::float32, {}}, gradient,
                                   n, d, moments, {{0, n}});
        leanopt::cpu::encode<formula, log8>(l, piece(again), decoded);
        step<formula, log8, float>(l, i, {p.data(), leanopt::number::float32, {}}, gradient, n, d,
                                   codes, {{0, n}});
        ASSERT_EQ(p, plain_p);
        for (int slot = 0; slot < 2; ++slot) {
          ASSERT_EQ(codes.slots[slot], again.slots[slot]);
          ASSERT_EQ(codes.headers[slot], again.headers[slot]);
        }
      }
    }
}

// ---- Adafactor ----------------------------------------------------------------------------------

const matrices all_matrices[] = {
    {1, 1, 1},          {1, 1, 7},    {1, 1, 256},     {1, 1, 5000},     {1, 7, 1},
    {1, 1000, 1},       {1, 2, 2},    {700, 2, 2},     {300, 1, 1},      {300, 1, 5},
    {90, 3, 17},        {1, 16, 16},  {1, 63, 100},    {1, 64, 1024},    {1, 65, 1025},
    {1, 200, 300},      {2, 130, 17}, {3, 65, 129},    {1, 5, 3000},     {1, 128, 255},
    {1, 129, 2049},     {5, 1, 300},  {1, 1, 1, true}, {1, 1, 15, true}, {1, 1, 257, true},
    {1, 1, 10007, true}};

template <class Format, class T>
void check_matrices() {
  for (const matrices& m : all_matrices)
    for (const bool hugging_face : {false, true})
      for (const kind k : patterns::all_kinds) {
        const auto bits = [&](level l, auto for_units) {
          return run_adafactor<Format, T>(l, m, hugging_face, k, 3, for_units);
        };
        const std::uint64_t expected = bits(level::scalar, in_order{});
        for (const level l : levels::all_here()) {
          const auto where = ::testing::Message()
                             << leanopt::cpu::name_of(l) << ", " << m.batch << 'x' << m.rows << 'x'
                             << m.columns << (m.vector ? ", vector" : "") << ", kind " << int(k);
          ASSERT_EQ(bits(l, in_order{}), expected) << where;
          ASSERT_EQ(bits(l, in_reverse{}), expected) << where << ", units in reverse";
        }
      }
}
TEST(AdafactorPasses, HaveTheSameBitsInFloat) { check_matrices<full, float>(); }
TEST(AdafactorPasses, HaveTheSameBitsInDouble) { check_matrices<full, double>(); }
TEST(AdafactorPasses, HaveTheSameBitsWithCodes) { check_matrices<log8, float>(); }

/// Strided gradients and parameters of 16 bits go through a copy in L1, with the same sums.
TEST(AdafactorPasses, DoNotDependOnTheLayout) {
  using passes_of = leanopt::cpu::matrix_passes<adafactor, float, plain>;
  const std::int64_t rows = 130, columns = 1100;
  const std::int64_t sizes_2d[] = {rows, columns}, transposed[] = {1, rows};
  const auto n = std::size_t(rows * columns);
  patterns::source random(1);
  std::vector<float> p(n), g(n), p_columns(n), g_columns(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t at = i % std::size_t(columns) * std::size_t(rows) + i / std::size_t(columns);
    p[i] = p_columns[at] = random.number<float>(kind::normal);
    g[i] = g_columns[at] = random.number<float>(kind::normal);
  }
  for (const level l : levels::all_here()) {
    const auto step_of = [&](std::vector<float> parameter, std::vector<float> gradient,
                             leanopt::strided shape) {
      leanopt::cpu::matrix_step t;
      std::vector<float> row(rows), column(columns);
      t.p = {parameter.data(), leanopt::number::float32, shape};
      t.g = {gradient.data(), leanopt::number::float32, shape};
      t.elements = n;
      t.rows = std::size_t(rows);
      t.columns = std::size_t(columns);
      t.row = row.data();
      t.column = column.data();
      plain_options::adafactor o;
      std::vector<double> scratch(passes_of::scratch_bytes(t) / sizeof(double) + 1);
      passes_of passes(l, t, adafactor::prepare<float>(o, 1, 0x1p-23),
                       reinterpret_cast<char*>(scratch.data()));
      const double rms = passes.root_mean_square_of_parameter(in_order{});
      passes.track(in_order{});
      const double rms_of_update = passes.root_mean_square_of_update(in_order{});
      passes.apply<adafactor_formula<false>, full>(
          adafactor::finish<float>(o, adafactor::rate(o, 1, rms), rms_of_update), in_order{});
      return std::tuple(rms, rms_of_update, row, column, parameter);
    };
    const auto [rms, rms_of_update, row, column, stepped] = step_of(p, g, {});
    const auto other = step_of(p_columns, g_columns, {2, sizes_2d, transposed});
    EXPECT_EQ(std::get<0>(other), rms);
    EXPECT_EQ(std::get<1>(other), rms_of_update);
    EXPECT_EQ(std::get<2>(other), row);
    EXPECT_EQ(std::get<3>(other), column);
    const std::vector<float>& columns_first = std::get<4>(other);
    for (std::size_t i = 0; i < n; ++i)
      ASSERT_EQ(
          columns_first[i % std::size_t(columns) * std::size_t(rows) + i / std::size_t(columns)],
          stepped[i]);
  }
}

}  // namespace
