// Every rule with every format and every kind of weights, over the lists. A step is: read the
// weight, decode the moments, the rule's step in full precision, encode, write the weight; each
// restated here from the definitions of one number, and the same bits at every instruction set,
// however the work is cut and the operands lie in memory. And what nonfinite::skip_element leaves
// alone, told by what it promises.

#include <leanopt/core/random.hpp>

#include "tests/conformance/lists.hpp"
#include "tests/engine/kernel_runs.hpp"
#include "tests/formats/support.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace kernel_runs;
using leanopt::has_headers;
using leanopt::scalar;
using leanopt::values;
using leanopt::formats::full;
using leanopt::weights::plain;
using patterns::kind;

// ---- the definition -----------------------------------------------------------------------------

namespace definition {

/// Element j of a stream of random numbers.
std::uint32_t draw(std::uint64_t key, std::size_t block, int stream, std::size_t j) {
  return leanopt::random_word(key, block, stream) + std::uint32_t(j) * 0x9E3779B9u;
}
std::uint64_t key_of(const tensor& t, int step_number) {
  return leanopt::random_key(1, std::uint64_t(step_number), t.elements());
}

/// f(Bits{}) for a type of 16 bits.
template <class F>
auto with_bits(number type, F f) {
  return type == number::float16 ? f(leanopt::float16_bits{}) : f(leanopt::bfloat16_bits{});
}
std::uint32_t extended(const array& residual, std::size_t i) {
  if (residual.size() == 0) return 0;
  return residual.width() == 1 ? std::uint32_t(residual.data<std::int8_t>()[i])
                               : std::uint32_t(residual.data<std::int16_t>()[i]);
}

/// The numbers of a parameter, or of a gradient with plain weights.
template <class Weights, class T>
std::vector<T> read(const tensor& t, const array& x, const array& residual) {
  std::vector<T> result(t.elements());
  for (std::size_t i = 0; i < result.size(); ++i)
    if (leanopt::bytes_of(t.type) == sizeof(T))
      result[i] = x.data<T>()[i];
    else
      result[i] = with_bits(t.type, [&](auto bits) {
        return Weights::template read<decltype(bits), scalar<float>>(std::uint32_t(x[i]),
                                                                     extended(residual, i))
            .v;
      });
  return result;
}
template <class Weights, class T>
void write(tensor& t, const std::vector<T>& p, std::uint64_t key) {
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (leanopt::bytes_of(t.type) == sizeof(T)) {
      t.p.data<T>()[i] = p[i];
      continue;
    }
    const std::uint32_t random = draw(key, i / 256, leanopt::weight_stream, i % 256);
    std::uint32_t rest = 0;
    t.p.set(i, with_bits(t.type, [&](auto bits) {
              return Weights::template write<decltype(bits), scalar<float>>(
                  scalar<float>(float(p[i])), random, rest);
            }));
    if (t.residual.size()) t.residual.set(i, rest);
  }
}

/// The numbers of a slot.
template <class T>
using moments_t = std::vector<std::vector<T>>;

template <class Format>
typename Format::scale scale_of(const tensor& t, int k, std::size_t i) {
  if constexpr (std::is_void_v<typename Format::header>)
    return {};
  else
    return Format::open(t.headers[k].data<typename Format::header>()[i / Format::block]);
}
template <class Formula, class Format, class T>
moments_t<T> decode(const tensor& t) {
  moments_t<T> result(Formula::slot_count, std::vector<T>(t.elements()));
  leanopt::each<Formula::slot_count>([&](auto k) {
    for (std::size_t i = 0; i < t.elements(); ++i)
      if constexpr (Format::block == 0)
        result[k][i] = t.slots[k].template data<T>()[i];
      else
        result[k][i] = T(format_runs::decode<Format, Formula::slots[k].range>(
            scale_of<Format>(t, k, i), std::uint32_t(t.slots[k][i])));
  });
  return result;
}

/// Elements of a block [first, last) of which the format cannot hold a moment get NaN as parameter
/// and, as moments, 0 or the largest of the others.
template <class Formula, class Format, class T>
void repair(std::vector<T>& p, std::vector<std::vector<float>>& m, std::size_t first,
            std::size_t last) {
  std::vector<bool> large(last);
  leanopt::each<Formula::slot_count>([&](auto k) {
    constexpr values range = Formula::slots[k].range;
    for (std::size_t i = first; i < last; ++i)
      if (leanopt::is_large<range>(leanopt::bits(m[k][i]), Format::large)) large[i] = true;
  });
  leanopt::each<Formula::slot_count>([&](auto k) {
    constexpr values range = Formula::slots[k].range;
    typename Format::template range<scalar<float>> found;
    for (std::size_t i = first; i < last; ++i)
      if (!large[i]) found.template add<range>(scalar<float>(m[k][i]));
    for (std::size_t i = first; i < last; ++i)
      if (large[i]) m[k][i] = range == values::any ? 0.0f : leanopt::real(found.largest);
  });
  for (std::size_t i = first; i < last; ++i)
    if (large[i]) p[i] = std::numeric_limits<T>::quiet_NaN();
}
template <class Formula, class Format>
void encode_block(tensor& t, const std::vector<std::vector<float>>& m, std::size_t first,
                  std::size_t last, std::uint64_t key) {
  constexpr int S = Formula::slot_count;
  const std::size_t block = first / Format::block;
  typename Format::scale scales[S];
  if constexpr (has_headers<Format>) {
    typename Format::template range<scalar<float>> found[S];
    leanopt::each<S>([&](auto k) {
      for (std::size_t i = first; i < last; ++i)
        found[k].template add<Formula::slots[k].range>(scalar<float>(m[k][i]));
    });
    Format::template fit<Formula>(found, scales);
  }
  leanopt::each<S>([&](auto k) {
    using header = typename Format::header;
    if constexpr (has_headers<Format>)
      t.headers[k].template data<header>()[block] = Format::close(scales[k]);
    for (std::size_t i = first; i < last; ++i)
      t.slots[k].set(i, format_runs::encode<Format, Formula::slots[k].range>(
                            scales[k], m[k][i], draw(key, block, k, i - first)));
  });
}
template <class Formula, class Format, class T>
void encode(tensor& t, std::vector<T>& p, const moments_t<T>& m, std::uint64_t key) {
  constexpr int S = Formula::slot_count;
  if constexpr (Format::block == 0) {
    for (int k = 0; k < S; ++k) std::copy(m[k].begin(), m[k].end(), t.slots[k].data<T>());
  } else {
    std::vector<std::vector<float>> narrow(S);
    for (int k = 0; k < S; ++k)
      for (const T x : m[k]) narrow[k].push_back(static_cast<float>(x));
    for (std::size_t i = 0; i < p.size(); i += Format::block) {
      const std::size_t last = std::min(p.size(), i + Format::block);
      if constexpr (has_headers<Format>) repair<Formula, Format>(p, narrow, i, last);
      encode_block<Formula, Format>(t, narrow, i, last, key);
    }
  }
}

/// The rule's step in full precision: p and m become the new ones, and the state that a tensor rule
/// keeps beside them. In formats with blocks a parameter that is not finite makes its moments NaN,
/// so that it has no say in headers.
template <class Way, class T>
void move(const plain_options::of<typename Way::rule>& o, int step_number, tensor& t,
          std::vector<T>& p, std::vector<T>& g, moments_t<T>& m, bool blocks) {
  using rule = typename Way::rule;
  using formula = typename Way::formula;
  constexpr int S = formula::slot_count;
  const leanopt::cpu::float_environment guard;
  const auto lose = [&] {
    for (std::size_t i = 0; i < p.size(); ++i)
      if (blocks && !std::isfinite(p[i])) g[i] = std::numeric_limits<T>::quiet_NaN();
  };
  if constexpr (rule::elementwise) {
    lose();
    const auto c = rule::template prepare<T>(o, step_number);
    for (std::size_t i = 0; i < p.size(); ++i) {
      scalar<T> x = p[i], s[S];
      for (int k = 0; k < S; ++k) s[k] = m[k][i];
      formula::apply(c, x, scalar<T>(g[i]), s);
      for (int k = 0; k < S; ++k) m[k][i] = s[k].v;
      p[i] = x.v;
    }
  } else {  // the engine's own passes over plain arrays, which tests/rules compares with the papers
    tensor wide = t.as_run();
    wide.type = sizeof(T) == 8 ? number::float64 : number::float32;
    wide.factor = 1;
    wide.skips = false;
    const auto give = [&](array& to, const std::vector<T>& x) {
      to = array("", x.size(), wide.type);
      std::copy(x.begin(), x.end(), to.data<T>());
    };
    give(wide.p, p);
    give(wide.g, g);
    for (int k = 0; k < S; ++k) give(wide.slots[k], m[k]);
    const auto last = [&](auto& passes, const auto& c) {
      lose();
      std::copy(g.begin(), g.end(), wide.g.data<T>());
      passes.template apply<formula, full>(c, unit_loop{cut::whole});
    };
    passes_of<rule, plain, T>(level::scalar, o, step_number, epsilon_of(t.type), wide, cut::whole,
                              last);
    std::copy_n(wide.p.data<T>(), p.size(), p.begin());
    for (int k = 0; k < S; ++k) std::copy_n(wide.slots[k].data<T>(), p.size(), m[k].begin());
    t.row = wide.row;
    t.column = wide.column;
    t.variance = wide.variance;
  }
}

/// Whether nonfinite::skip_element leaves an element with this gradient alone, whose square is kept
/// in float where `in_float`.
template <class T>
bool is_bad(T g, bool in_float) {
  const T limit = sizeof(T) == 8 && !in_float ? T(0x1p512) : T(0x1p64f);
  return !(g < limit && g > -limit);
}

template <class Way, class Format, class Weights, class T>
void step_in(const plain_options::of<typename Way::rule>& o, int step_number, tensor& t) {
  using formula = typename Way::formula;
  std::vector<T> p = read<Weights, T>(t, t.p, t.residual);
  std::vector<T> g = read<plain, T>(t, t.g, array());
  for (T& x : g) x *= T(t.factor);
  moments_t<T> m = decode<formula, Format, T>(t);
  const std::vector<T> p_before = p;
  const moments_t<T> m_before = m;
  const array variance_before = t.variance;
  std::vector<bool> kept(p.size());
  for (std::size_t i = 0; i < p.size(); ++i)
    if (t.skips && is_bad(g[i], Format::compressed && Way::rule::elementwise)) {
      kept[i] = true;
      g[i] = 0;
      ++t.skipped;
    }
  move<Way>(o, step_number, t, p, g, m, Format::block != 0);
  const auto keep = [&] {
    for (std::size_t i = 0; i < p.size(); ++i) {
      if (!kept[i]) continue;
      p[i] = p_before[i];
      for (std::size_t k = 0; k < m.size(); ++k) m[k][i] = m_before[k][i];
      if (t.variance.size()) t.variance.set(i, variance_before[i]);
    }
  };
  keep();
  encode<formula, Format>(t, p, m, key_of(t, step_number));
  write<Weights>(t, p, key_of(t, step_number));
}
template <class Way, class Format, class Weights>
void step(const plain_options::of<typename Way::rule>& o, int step_number, tensor& t) {
  t.type == number::float64 ? step_in<Way, Format, Weights, double>(o, step_number, t)
                            : step_in<Way, Format, Weights, float>(o, step_number, t);
}

/// The values of all codes that element i of a slot could have.
template <class Formula, class Format>
std::vector<float> values_of_codes(const tensor& t, int slot, std::size_t i) {
  std::vector<float> result;
  leanopt::each<Formula::slot_count>([&](auto k) {
    if constexpr (Format::block != 0)
      for (std::uint32_t c = 0; k == slot && c < format_runs::code_count<Format>; ++c)
        result.push_back(
            format_runs::decode<Format, Formula::slots[k].range>(scale_of<Format>(t, k, i), c));
  });
  return result;
}

}  // namespace definition

// ---- pairs --------------------------------------------------------------------------------------

/// A way of a rule with a format and weights, without their types, so that a test is compiled once.
struct pair {
  std::string name;
  bool elementwise, takes_float16;
  bool squares_in_float;  ///< of float64 parameters too
  std::size_t block;      ///< of values that share a header; 1 where none do
  int slots;
  tensor (*fresh)(number, const shape&, patterns::source&, const layout*, const layout*);
  void (*step)(level, int, tensor&, cut);
  void (*step_by_definition)(int, tensor&);
  std::vector<float> (*values_of_codes)(const tensor&, int, std::size_t);

  std::vector<number> types() const {
    std::vector<number> all = {number::bfloat16, number::float32, number::float64};
    if (takes_float16) all.push_back(number::float16);
    return all;
  }
};

void PrintTo(const pair& x, std::ostream* s) { *s << x.name; }

template <class Way, class Format, class Weights>
pair pair_of() {
  using formula = typename Way::formula;
  pair result;
  result.name = Way::name() + "_" + Format::name + "_" + Weights::name;
  std::replace(result.name.begin(), result.name.end(), '/', '_');
  result.elementwise = Way::rule::elementwise;
  result.takes_float16 = Weights::takes_float16;
  result.squares_in_float = Format::compressed && Way::rule::elementwise;
  result.block = std::is_void_v<typename Format::header> ? 1 : std::size_t(Format::block);
  result.slots = formula::slot_count;
  result.fresh = fresh<formula, Format, Weights>;
  result.step = [](level l, int step_number, tensor& t, cut how) {
    kernel_runs::step<Way, Format, Weights>(l, Way::options(), step_number, t, how);
  };
  result.step_by_definition = [](int step_number, tensor& t) {
    definition::step<Way, Format, Weights>(Way::options(), step_number, t);
  };
  result.values_of_codes = definition::values_of_codes<formula, Format>;
  return result;
}

#if defined(__SANITIZE_ADDRESS__)  // g++ takes minutes to instrument all: some of each kind
using formats_here = conformance::list<leanopt::formats::bfloat16_stochastic,
                                       leanopt::formats::log8, leanopt::formats::dynamic8>;
using weights_here = conformance::list<plain, leanopt::weights::split24>;
#else
using formats_here = conformance::compressed_formats;
using weights_here = conformance::all_weights;
#endif

template <class Way, class Format, class... Weights>
void add_weights(std::vector<pair>& all, conformance::list<Weights...>) {
  (all.push_back(pair_of<Way, Format, Weights>()), ...);
}
template <class Way, class... Format>
void add_formats(std::vector<pair>& all, conformance::list<Format...>) {
  (add_weights<Way, Format>(all, weights_here()), ...);
}
template <class... Rule>
std::vector<pair> pairs_of(conformance::list<Rule...>) {
  std::vector<pair> all;
  (add_formats<way<Rule, false>>(all, conformance::list<full>()), ...);
  (add_formats<way<Rule, true>>(all, conformance::list<full>()), ...);
  (add_formats<compressed_way<Rule>>(all, formats_here()), ...);
  return all;
}

class Pair : public testing::TestWithParam<pair> {};
INSTANTIATE_TEST_SUITE_P(All, Pair, testing::ValuesIn(pairs_of(conformance::all_rules())),
                         [](const auto& info) { return info.param.name; });

// ---- what a step does ---------------------------------------------------------------------------

/// Sizes around those of registers, blocks and stages, and some of more than a unit.
const shape shapes[] = {{1, 1, 1},   {1, 1, 7},         {1, 1, 8, true}, {1, 3, 3},   {1, 1, 31},
                        {3, 7, 3},   {1, 8, 8},         {1, 5, 13},      {1, 127, 1}, {1, 15, 17},
                        {1, 16, 16}, {1, 1, 257, true}, {3, 4, 25},      {1, 1, 513}, {1, 100, 10}};
const shape large_shapes[] = {{2, 70, 33}, {1, 1, 4099, true}};

constexpr int steps = 3;

/// Runs `start` by the definition and in all ways by the engine.
void expect_the_definition(const pair& x, const tensor& start, kind k) {
  tensor expected = start.as_run();
  std::vector<array> gradients;
  patterns::source random(start.elements() + std::uint64_t(k));
  tensor from = start;
  for (int i = 1; i <= steps; ++i) {
    from.set_gradient(k, random);
    if (k == kind::non_finite)  // finite, and its square is not
      from.g.set(from.g.size() / 2, infinity_of(start.type) - 1);
    gradients.push_back(from.g);
    expected.g = from.as_run().g;
    x.step_by_definition(i, expected);
  }
  for (const level l : levels::all_here())
    for (const cut how : {cut::whole, cut::parts}) {
      tensor t = start;
      for (int i = 1; i <= steps; ++i) {
        t.g = gradients[std::size_t(i - 1)];
        x.step(l, i, t, how);
      }
      ASSERT_EQ(difference(t, expected), "")
          << "here and by the definition; " << leanopt::cpu::name_of(l) << ", "
          << (how == cut::whole ? "whole" : "in parts") << ", " << start.shape.text() << ", type "
          << int(start.type) << ", kind " << int(k) << (start.skips ? ", skipping" : "");
    }
}

TEST_P(Pair, StepsByItsDefinition) {
  const pair& x = GetParam();
  for (const number type : x.types()) {
    const auto check = [&](const shape& s, kind k, bool skips) {
      patterns::source random(s.elements());
      tensor start = x.fresh(type, s, random, nullptr, nullptr);
      start.factor = s.rows > 1 ? 0.3 : 1;
      start.skips = skips;
      expect_the_definition(x, start, k);
    };
    for (const kind k : patterns::all_kinds)
      for (const shape& s : shapes) {
        if (HasFatalFailure()) return;
        check(s, k, k == kind::octaves);
      }
    for (const shape& s : large_shapes) {
      if (HasFatalFailure()) return;
      check(s, s.is_vector ? kind::non_finite : kind::normal, s.is_vector);
    }
  }
}

struct layout_case {
  kernel_runs::shape shape;
  kernel_runs::layout layout;
};
const layout_case layouts[] = {
    {{1, 50, 13}, {{50, 13}, {1, 50}, 650}},                    // a transpose
    {{1, 50, 13}, {{50, 13}, {20, 1}, 1000}},                   // rows with gaps
    {{1, 1, 600, true}, {{600}, {3}, 1800}},                    // a column of three
    {{3, 5, 40}, {{3, 5, 40}, {1, 123, 3}, 615}},               // inner dimensions exchanged
    {{2, 12, 30}, {{2, 3, 4, 5, 6}, {1, 2, 6, 24, 120}, 720}},  // all reversed
    {{1, 4, 300}, {{4, 300}, {0, 1}, 300}},                     // a gradient that was expanded
    {{1, 7, 300}, {{7, 300}, {1, 7}, 2100}},                    // rows longer than a stage
};

TEST_P(Pair, StepsAlikeWhereverItsNumbersLie) {
  const pair& x = GetParam();
  for (const number type : x.types())
    for (const layout_case& c : layouts)
      for (const kind k : {kind::normal, kind::non_finite}) {
        const bool overlaps = c.layout.room < c.shape.elements();
        patterns::source random(c.layout.room);
        tensor start = x.fresh(type, c.shape, random, overlaps ? nullptr : &c.layout, &c.layout);
        start.factor = k == kind::normal ? -3 : 1;
        start.skips = k == kind::non_finite;
        ASSERT_NO_FATAL_FAILURE(expect_the_definition(x, start, k));
      }
}

/// The numbers between those of a parameter are somebody else's.
TEST_P(Pair, WritesNothingBetweenItsNumbers) {
  const pair& x = GetParam();
  for (const number type : x.types())
    for (const layout_case& c : layouts) {
      if (c.layout.room <= c.shape.elements()) continue;
      patterns::source random(1);
      tensor t = x.fresh(type, c.shape, random, &c.layout, &c.layout);
      const array before = t.p;
      std::vector<bool> used(before.size());
      for (std::size_t i = 0; i < t.elements(); ++i) used[t.p_at(i)] = true;
      t.set_gradient(kind::normal, random);
      x.step(leanopt::cpu::best_level(), 1, t, cut::whole);
      for (std::size_t i = 0; i < before.size(); ++i)
        ASSERT_TRUE(used[i] || t.p[i] == before[i]) << i;
    }
}

// ---- elements that are left out -----------------------------------------------------------------

/// Bits of 1.5, and of gradients that are not finite or whose squares are not. The last one is
/// good: the largest number whose square is finite.
struct gradients {
  std::uint64_t some;
  std::vector<std::uint64_t> bad;
  std::uint64_t largest_good;
};
gradients gradients_of(number type, bool squares_in_float) {
  switch (type) {
    case number::float64:
      if (squares_in_float)
        return {0x3ff8000000000000u,
                {0x7ff8000000000000u, 0xfff8000000000001u, 0x7ff0000000000000u, 0xfff0000000000000u,
                 0x43f0000000000000u, 0xc3f0000000000000u},
                0x43efffffe0000000u};
      return {0x3ff8000000000000u,
              {0x7ff8000000000000u, 0xfff8000000000001u, 0x7ff0000000000000u, 0xfff0000000000000u,
               0x5ff0000000000000u, 0xdff0000000000000u},
              0x5fefffffffffffffu};
    case number::float32:
      return {0x3fc00000u,
              {0x7fc00000u, 0xffc00001u, 0x7f800000u, 0xff800000u, 0x5f800000u, 0xdf800000u},
              0x5f7fffffu};
    case number::bfloat16:
      return {0x3fc0u, {0x7fc0u, 0xffc1u, 0x7f80u, 0xff80u, 0x5f80u, 0xdf80u}, 0x5f7fu};
    case number::float16: break;  // its squares are finite in float32
  }
  return {0x3e00u, {0x7e00u, 0xfe01u, 0x7c00u, 0xfc00u}, 0x7bffu};
}

/// A tensor after some steps, with a gradient for the next.
tensor stepped(const pair& x, number type, const shape& s) {
  patterns::source random(s.elements() * 3);
  tensor t = x.fresh(type, s, random, nullptr, nullptr);
  for (int i = 1; i <= 2; ++i) {
    t.set_gradient(kind::normal, random);
    x.step(leanopt::cpu::best_level(), i, t, cut::whole);
  }
  t.set_gradient(kind::normal, random);
  return t;
}
tensor after_next_step(const pair& x, tensor t) {
  x.step(leanopt::cpu::best_level(), 3, t, cut::whole);
  return t;
}

/// The parameter, its residual bits and the moments of an element. A moment has its value again if
/// the format has that value still. The header of its block may have moved with the neighbours:
/// then it is one of the two values of the new codes around it.
void expect_kept(const pair& x, const tensor& before, const tensor& after, std::size_t at) {
  const auto same = [&](const array& now, const array& then) {
    return now.size() == 0 || now.comparable(at) == then.comparable(at);
  };
  ASSERT_TRUE(same(after.p, before.p) && same(after.residual, before.residual));
  ASSERT_TRUE(same(after.variance, before.variance));
  for (int k = 0; k < x.slots; ++k) {
    if (x.block == 1) {
      ASSERT_EQ(after.slots[k].comparable(at), before.slots[k].comparable(at));
      continue;
    }
    const auto value = [&](const tensor& t) { return x.values_of_codes(t, k, at)[t.slots[k][at]]; };
    const float was = value(before), is = value(after);
    const std::size_t block = at / x.block;
    ASSERT_TRUE(is == was || before.headers[k][block] != after.headers[k][block]);
    for (const float v : x.values_of_codes(after, k, at))
      ASSERT_FALSE(std::min(was, is) < v && v < std::max(was, is))
          << "slot " << k << ": " << was << " became " << is << ", not the nearer " << v;
  }
}

/// What is not element `at`, or of its block, as with another gradient there.
void expect_others_alike(const pair& x, const tensor& with_bad, const tensor& with_good,
                         std::size_t at) {
  tensor a = with_bad, b = with_good;
  const auto hide = [](array& p, array& q, std::size_t i) { p.set(i, q[i]); };
  hide(a.p, b.p, at);
  if (a.residual.size()) hide(a.residual, b.residual, at);
  if (a.variance.size()) hide(a.variance, b.variance, at);
  const std::size_t first = at / x.block * x.block;
  for (int k = 0; k < x.slots; ++k) {
    for (std::size_t i = first; i < std::min(first + x.block, a.elements()); ++i)
      hide(a.slots[k], b.slots[k], i);
    if (x.block != 1) hide(a.headers[k], b.headers[k], at / x.block);
  }
  a.skipped = b.skipped;
  ASSERT_EQ(difference(a, b), "") << "with the bad gradient, and with a good one";
}

TEST_P(Pair, LeavesABadElementAlone) {
  const pair& x = GetParam();
  for (const number type : x.types()) {
    const gradients some = gradients_of(type, x.squares_in_float);
    for (const shape& s : {shape{1, 20, 31}, shape{1, 1, 300, true}}) {
      tensor before = stepped(x, type, s);
      const std::size_t n = before.elements();
      for (const std::size_t at : {std::size_t(0), std::size_t(63), std::size_t(64),
                                   std::size_t(255), std::size_t(256), n - 1}) {
        tensor good = before, bad = before;
        // Sums take the element as a 0; without sums a gradient has no part in its neighbours.
        good.g.set(at, x.elementwise ? some.some : 0);
        good = after_next_step(x, good);
        bad.skips = true;
        for (const std::uint64_t gradient : some.bad) {
          SCOPED_TRACE(testing::Message()
                       << "type " << int(type) << ", " << s.text() << ", element " << at
                       << ", gradient " << std::hex << gradient);
          bad.g.set(at, gradient);
          const tensor after = after_next_step(x, bad);
          ASSERT_EQ(after.skipped, 1);
          ASSERT_NO_FATAL_FAILURE(expect_kept(x, before, after, at));
          ASSERT_NO_FATAL_FAILURE(expect_others_alike(x, after, good, at));
        }
      }
    }
  }
}

TEST_P(Pair, CountsBadElementsAndNoOthers) {
  const pair& x = GetParam();
  for (const number type : x.types()) {
    const gradients some = gradients_of(type, x.squares_in_float);
    const tensor before = stepped(x, type, {1, 20, 31});
    const std::size_t n = before.elements();

    tensor good = before;
    good.g.set(n / 2, some.largest_good);
    tensor watched = good;
    watched.skips = true;
    EXPECT_EQ(difference(after_next_step(x, watched), after_next_step(x, good)), "")
        << "watched, and not";

    tensor bad = before;
    bad.skips = true;
    bad.skipped = 1000;
    for (std::size_t i = 0; i < n; ++i) bad.g.set(i, some.bad[i % some.bad.size()]);
    const tensor after = after_next_step(x, bad);
    EXPECT_EQ(after.skipped, 1000 + std::int64_t(n));
    for (std::size_t i = 0; i < n; ++i)
      ASSERT_NO_FATAL_FAILURE(expect_kept(x, before, after, i)) << "element " << i;
  }
}

}  // namespace
