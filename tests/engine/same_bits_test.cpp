// The passes of a tensor rule, which add many numbers to one: their sums have one order, so shape
// for shape they give the same bits at every instruction set, with the units of work in any order,
// wherever the numbers lie, and whatever the caller has the processor do with subnormal numbers.
// What is done to each element is tested for all pairs in tests/conformance.

#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/weights/plain.hpp>
#include <leanopt/weights/split.hpp>

#include "tests/engine/kernel_runs.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace {

using namespace kernel_runs;
using leanopt::formats::full;
using leanopt::formats::log8;
using leanopt::rules::adafactor;
using leanopt::weights::plain;
using leanopt::weights::split24;
using patterns::kind;
using torch_form = way<adafactor, false>;
using hugging_face_form = way<adafactor, true>;

const shape shapes[] = {{1, 1, 1},         {1, 1, 7},          {1, 1, 256},     {1, 1, 5000},
                        {1, 7, 1},         {1, 1000, 1},       {1, 2, 2},       {700, 2, 2},
                        {300, 1, 1},       {300, 1, 5},        {90, 3, 17},     {1, 16, 16},
                        {1, 63, 100},      {1, 64, 1024},      {1, 65, 1025},   {1, 200, 300},
                        {2, 130, 17},      {3, 65, 129},       {1, 5, 3000},    {1, 128, 255},
                        {1, 129, 2049},    {5, 1, 300},        {1, 1, 1, true}, {1, 1, 15, true},
                        {1, 1, 257, true}, {1, 1, 10007, true}};

template <class Way, class Format, class Weights, class T>
void check_levels(number type) {
  for (const shape& s : shapes)
    for (const kind k : patterns::all_kinds) {
      const auto bits = [&](level l, cut how) {
        return run<Way, Format, Weights, T>(l, type, s, k, 3, how);
      };
      const std::uint64_t expected = bits(level::scalar, cut::whole);
      for (const level l : levels::all_here()) {
        const auto where = testing::Message()
                           << leanopt::cpu::name_of(l) << ", " << s.text() << ", kind " << int(k);
        ASSERT_EQ(bits(l, cut::whole), expected) << where;
        ASSERT_EQ(bits(l, cut::parts), expected) << where << ", units in reverse";
      }
    }
}
TEST(AdafactorPasses, HaveTheSameBitsInFloat) {
  check_levels<torch_form, full, plain, float>(number::float32);
  check_levels<hugging_face_form, log8, plain, float>(number::float32);
}
TEST(AdafactorPasses, HaveTheSameBitsInDouble) {
  check_levels<hugging_face_form, full, plain, double>(number::float64);
}
TEST(AdafactorPasses, HaveTheSameBitsOverASplitParameter) {
  check_levels<torch_form, full, split24, float>(number::bfloat16);
}

/// Rows of a transpose are no runs in memory, and longer than a tile of the sums.
TEST(AdafactorPasses, DoNotDependOnTheLayout) {
  const shape s{1, 130, 4200};
  const layout transpose{{130, 4200}, {1, 130}, s.elements()};
  for (const number type : {number::float32, number::bfloat16})
    for (const level l : levels::all_here()) {
      patterns::source random(1);
      const auto o = torch_form::options();
      tensor strided =
          fresh<torch_form::formula, full, split24>(type, s, random, &transpose, &transpose);
      strided.set_gradient(kind::normal, random);
      tensor as_run = strided.as_run();
      step<torch_form, full, split24>(l, o, 1, strided);
      step<torch_form, full, split24>(l, o, 1, as_run);
      EXPECT_EQ(difference(strided, as_run), "") << leanopt::cpu::name_of(l);
    }
}

#if defined(__x86_64__)
/// Makes zeros of subnormal numbers while it lives, as at::set_flush_denormal does.
class flushed_subnormals {
 public:
  static constexpr unsigned flush = 0x8040;
  flushed_subnormals() : saved_(__builtin_ia32_stmxcsr()) {
    __builtin_ia32_ldmxcsr(saved_ | flush);
  }
  ~flushed_subnormals() { __builtin_ia32_ldmxcsr(saved_); }
  flushed_subnormals(const flushed_subnormals&) = delete;
  flushed_subnormals& operator=(const flushed_subnormals&) = delete;

 private:
  unsigned saved_;
};

/// A number whose square is subnormal.
std::uint64_t with_subnormal_square(number type, patterns::source& random) {
  const std::uint64_t word = random.word();
  const std::uint32_t below = random.below(8);
  if (type == number::float64)
    return (word & 0x800fffffffffffffu) | std::uint64_t(1023 - 524 - below) << 52;
  const auto x = std::uint32_t((word & 0x807fffffu) | (127 - 66 - below) << 23);
  return type == number::bfloat16 ? x >> 16 : x;
}
template <class Weights>
tensor stepped_subnormals(level l, number type, const shape& s) {
  patterns::source random(5);
  tensor t = fresh<torch_form::formula, full, Weights>(type, s, random);
  for (std::size_t i = 0; i < t.elements(); ++i)
    t.p.set(i,
            i % 8 ? with_subnormal_square(type, random) : number_of(type, kind::subnormal, random));
  auto o = torch_form::options();
  o.eps(decltype(o)::epsilons(0, 0));  // no floor hides what is small
  for (int i = 1; i <= 3; ++i) {
    for (std::size_t j = 0; j < t.elements(); ++j) t.g.set(j, with_subnormal_square(type, random));
    step<torch_form, full, Weights>(l, o, i, t);
  }
  return t;
}
template <class Weights>
void check_flushed(number type) {
  for (const shape& s : {shape{2, 70, 129}, shape{1, 20, 30}, shape{1, 1, 500, true}}) {
    const tensor expected = stepped_subnormals<Weights>(level::scalar, type, s);
    for (const level l : levels::all_here()) {
      const flushed_subnormals guard;
      EXPECT_EQ(difference(stepped_subnormals<Weights>(l, type, s), expected), "")
          << leanopt::cpu::name_of(l) << ", " << s.text() << ", type " << int(type);
      EXPECT_EQ(__builtin_ia32_stmxcsr() & guard.flush, guard.flush) << "the caller's, as it was";
    }
  }
}
TEST(AdafactorPasses, DoNotFlushSubnormals) {
  volatile float smallest = std::numeric_limits<float>::min();
  {
    const flushed_subnormals guard;
    ASSERT_EQ(smallest / 2, 0) << "this processor cannot flush";
  }
  ASSERT_GT(smallest / 2, 0);
  check_flushed<plain>(number::float32);
  check_flushed<plain>(number::float64);
  check_flushed<split24>(number::bfloat16);
}
#endif

}  // namespace
