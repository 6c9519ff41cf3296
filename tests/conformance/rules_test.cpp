// What every rule does, over the list: both formulas of each, which for Adafactor are its two
// published forms. That a rule computes what its paper says is tested in tests/rules.

#include <leanopt/formats/full.hpp>
#include <leanopt/weights/plain.hpp>

#include "tests/conformance/lists.hpp"
#include "tests/engine/kernel_runs.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/plain_options.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace kernel_runs;
using patterns::kind;

// ---- what is known of each rule -----------------------------------------------------------------

/// The names of Python's state, and options with which the size of gradients cannot matter.
template <class Rule>
struct facts;

template <bool Decoupled>
struct facts<leanopt::rules::adam_rule<Decoupled>> {
  static std::set<std::string> names() { return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}; }
  template <class Options>
  static void forget_scale(Options& o) {
    o.eps(0);
  }
  template <class Options>
  static void hurry(Options&) {}
  static constexpr bool follows_the_parameter = false;
};
template <>
struct facts<leanopt::rules::adafactor> {
  static std::set<std::string> names() { return {"exp_avg", "row_var", "col_var", "variance"}; }
  /// torch.optim's first epsilon is a floor, which can be 0. Hugging Face's is added to squares;
  /// the smallest there is disappears in those of ordinary gradients.
  template <class Options>
  static void forget_scale(Options& o) {
    o.eps(typename Options::epsilons(o.is_hugging_face() ? 1e-30 : 0.0, 0.0));
  }
  /// A tenth of the parameter's RMS a step: its default, a hundredth, takes thousands of steps.
  template <class Options>
  static void hurry(Options& o) {
    o.lr(0.1).relative_step(false);
  }
  static constexpr bool follows_the_parameter = true;  ///< its rate is relative to their RMS
};

template <class... Rule>
auto ways_of(conformance::list<Rule...>) -> testing::Types<way<Rule, false>..., way<Rule, true>...>;
struct way_name {
  template <class Way>
  static std::string GetName(int) {
    return Way::name();
  }
};

template <class Way>
class Rule : public testing::Test {
 public:
  using rule = typename Way::rule;
  using formula = typename Way::formula;
  using options = plain_options::of<rule>;
  using known = facts<rule>;

  static options undecayed() {
    options o = Way::options();
    o.weight_decay(0);
    return o;
  }
  static tensor start(number type, const shape& s) {
    patterns::source random(s.elements());
    return fresh<formula, leanopt::formats::full, leanopt::weights::plain>(type, s, random);
  }
  static void step(const options& o, int step_number, tensor& t) {
    kernel_runs::step<Way, leanopt::formats::full, leanopt::weights::plain>(
        leanopt::cpu::best_level(), o, step_number, t);
  }
};
using ways = decltype(ways_of(conformance::all_rules()));
TYPED_TEST_SUITE(Rule, ways, way_name);

const shape shapes[] = {{1, 20, 30}, {2, 70, 9}, {1, 1, 100, true}};

// ---- options and slots --------------------------------------------------------------------------

TYPED_TEST(Rule, NamesItsSlotsAsPythonDoes) {
  using formula = typename TestFixture::formula;
  using longest = typename TestFixture::rule::template formula<true>;
  std::set<std::string> seen;
  for (int k = 0; k < formula::slot_count; ++k) {
    EXPECT_TRUE(seen.insert(formula::slots[k].name).second) << formula::slots[k].name;
    EXPECT_STREQ(formula::slots[k].name, longest::slots[k].name);  // the short one is its beginning
    EXPECT_EQ(formula::slots[k].range, longest::slots[k].range);
  }
  if constexpr (!TestFixture::rule::elementwise)
    for (const auto& slot : TestFixture::rule::moments) seen.insert(slot.name);
  for (const std::string& name : seen) EXPECT_TRUE(TestFixture::known::names().count(name)) << name;
}

/// The numbers that a field holds.
std::vector<double> numbers_of(double x) { return {x}; }
std::vector<double> numbers_of(const leanopt::field::pair& x) {
  return {std::get<0>(x), std::get<1>(x)};
}
std::vector<double> numbers_of(const leanopt::field::optional& x) {
  return x ? std::vector<double>{*x} : std::vector<double>{};
}
std::vector<double> numbers_of(const leanopt::field::optional_pair& x) {
  return {std::get<0>(x).value_or(std::get<1>(x)), std::get<1>(x)};
}
std::vector<double> numbers_of(bool) { return {}; }
std::vector<double> numbers_of(leanopt::nonfinite) { return {}; }
std::vector<double> numbers_of(std::int64_t x) { return {double(x)}; }

TYPED_TEST(Rule, ListsEveryOptionOnceAndInRange) {
  typename TestFixture::options untouched;
  auto o = TypeParam::options();
  std::set<std::string> names;
  std::set<const void*> places;
  for (const leanopt::field& f : o.all()) {
    EXPECT_TRUE(names.insert(f.name).second) << f.name;
    EXPECT_TRUE(places.insert(f.value).second) << f.name;
    f.visit([&](const auto& value) {
      for (const double x : numbers_of(value)) EXPECT_TRUE(f.allowed.contains(x)) << f.name;
    });
    for (const double x : {-1.0, double(NAN), double(INFINITY)})
      EXPECT_FALSE(std::string(f.name) == "lr" && f.allowed.contains(x)) << x;
  }
  for (const leanopt::field& f : untouched.all())
    f.visit([&](const auto& value) {
      for (const double x : numbers_of(value)) EXPECT_TRUE(f.allowed.contains(x)) << f.name;
    });
  for (const char* name : {"lr", "weight_decay"}) EXPECT_TRUE(names.count(name)) << name;
}

/// The list is all that save, load, compare and print know of options: what it carries from one
/// object to another makes the same step.
TYPED_TEST(Rule, StepsAlikeWithOptionsThatWereCopiedByTheirList) {
  auto from = TypeParam::options();
  typename TestFixture::options to;
  auto sources = from.all(), targets = to.all();
  ASSERT_EQ(sources.size(), targets.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    ASSERT_STREQ(sources[i].name, targets[i].name);
    ASSERT_EQ(sources[i].type, targets[i].type);
    sources[i].visit([&](const auto& value) {
      targets[i].template as<std::decay_t<decltype(value)>>() = value;
    });
  }
  const typename TestFixture::options untouched;
  for (const shape& s : shapes) {
    tensor expected = this->start(number::float64, s), copied = expected, other = expected;
    patterns::source random(3);
    for (int i = 1; i <= 3; ++i) {
      expected.set_gradient(kind::normal, random);
      copied.g = other.g = expected.g;
      this->step(from, i, expected);
      this->step(to, i, copied);
      this->step(untouched, i, other);
    }
    EXPECT_EQ(difference(copied, expected), "");
    EXPECT_NE(difference(other, expected), "") << "the options that were copied must matter";
  }
}

template <class T, class Coefficients>
void expect_finite(const Coefficients& c, const char* what, std::int64_t step) {
  static_assert(sizeof c % sizeof(T) == 0, "coefficients are numbers of one type");
  T all[sizeof c / sizeof(T)];
  std::memcpy(all, &c, sizeof c);
  for (const T x : all) EXPECT_TRUE(std::isfinite(x)) << what << ", step " << step;
}
template <class Rule, class T, class Options>
void check_coefficients(const Options& o) {
  for (const std::int64_t step : {std::int64_t(1), std::int64_t(2), std::int64_t(1000000),
                                  std::numeric_limits<std::int64_t>::max()}) {
    if constexpr (Rule::elementwise) {
      expect_finite<T>(Rule::template prepare<T>(o, step), "prepare", step);
    } else {
      expect_finite<T>(
          Rule::template prepare<T>(o, step, double(std::numeric_limits<T>::epsilon())), "prepare",
          step);
      for (const double rms : {0.0, 1e-30, 1.0, 1e30}) {
        const double rate = Rule::rate(o, step, rms);
        EXPECT_TRUE(std::isfinite(rate)) << step << ", RMS " << rms;
        for (const double of_update : {0.0, 1.0, 1e30})
          expect_finite<T>(Rule::template finish<T>(o, rate, of_update), "finish", step);
      }
    }
  }
}
TYPED_TEST(Rule, HasFiniteCoefficientsForever) {
  using rule = typename TestFixture::rule;
  auto largest = TypeParam::options();  // the ends of what is allowed
  for (const leanopt::field& f : largest.all())
    if (f.allowed.low == 0 && f.allowed.high == 1 && f.type == leanopt::field::kind::pair)
      f.template as<leanopt::field::pair>() = {std::nextafter(1.0, 0), std::nextafter(1.0, 0)};
  for (const auto& o : {TypeParam::options(), typename TestFixture::options(), largest}) {
    check_coefficients<rule, float>(o);
    check_coefficients<rule, double>(o);
  }
}

// ---- steps --------------------------------------------------------------------------------------

TYPED_TEST(Rule, LeavesAParameterWithoutGradientAndDecay) {
  for (const number type : {number::float32, number::float64})
    for (const shape& s : shapes) {
      tensor t = this->start(type, s);
      const array before = t.p;
      for (int i = 1; i <= 3; ++i) {
        this->step(this->undecayed(), i, t);  // a fresh gradient is zero
        for (std::size_t j = 0; j < t.elements(); ++j) ASSERT_EQ(t.p[j], before[j]) << j;
      }
      t = this->start(type, s);
      this->step(TypeParam::options(), 1, t);
      std::size_t moved = 0;
      for (std::size_t j = 0; j < t.elements(); ++j) moved += t.p[j] != before[j];
      EXPECT_EQ(moved, t.elements()) << "decay moves every element";
    }
}

/// Half the sum of a p^2, with curvatures a of three magnitudes, from magnitudes of 1 to 2:
/// factored moments take long where few elements of a row are left.
TYPED_TEST(Rule, DescendsOnAQuadratic) {
  const double curvatures[] = {1, 10, 100};
  auto o = this->undecayed();
  TestFixture::known::hurry(o);
  for (const shape& s : shapes) {
    tensor t = this->start(number::float32, s);
    const std::size_t n = t.elements();
    for (std::size_t j = 0; j < n; ++j) t.p.set(j, (t.p[j] & 0x807fffffu) | 0x3f800000u);
    const auto loss = [&] {
      double sum = 0;
      for (std::size_t j = 0; j < n; ++j) {
        const double x = t.p.template data<float>()[j];
        sum += curvatures[j % 3] * x * x / 2;
      }
      return sum;
    };
    const double before = loss();
    for (int i = 1; i <= tolerance::quadratic_steps; ++i) {
      for (std::size_t j = 0; j < n; ++j)
        t.g.template data<float>()[j] = float(curvatures[j % 3]) * t.p.template data<float>()[j];
      this->step(o, i, t);
    }
    EXPECT_LT(loss(), tolerance::quadratic_loss * before) << s.text();
  }
}

/// Multiplies by 2^k, which every operation passes on exactly.
void scale(array& x, int k) {
  for (std::size_t j = 0; j < x.size(); ++j) x.data<float>()[j] = std::ldexp(x.data<float>()[j], k);
}
/// Steps with gradients times 2^k and, where it has a say, the parameter times 2^l.
template <class Fixture>
tensor scaled_run(const shape& s, int k, int l) {
  auto o = Fixture::undecayed();
  Fixture::known::forget_scale(o);
  tensor t = Fixture::start(number::float32, s);
  scale(t.p, l);
  patterns::source random(7);
  for (int i = 1; i <= 10; ++i) {
    t.set_gradient(kind::normal, random);
    scale(t.g, k);
    Fixture::step(o, i, t);
  }
  return t;
}
TYPED_TEST(Rule, DoesNotFeelTheScaleOfGradients) {
  for (const shape& s : shapes) {
    const tensor expected = scaled_run<TestFixture>(s, 0, 0);
    for (const int k : {-10, 10}) {
      const tensor t = scaled_run<TestFixture>(s, k, 0);
      for (std::size_t j = 0; j < t.elements(); ++j) ASSERT_EQ(t.p[j], expected.p[j]) << k;
    }
  }
}
TYPED_TEST(Rule, FollowsTheScaleOfParametersIfItsRateIsRelative) {
  for (const shape& s : shapes) {
    const tensor expected = scaled_run<TestFixture>(s, 0, 0);
    for (const int l : {-10, 10}) {
      tensor t = scaled_run<TestFixture>(s, 0, l);
      scale(t.p, -l);
      std::size_t equal = 0;
      for (std::size_t j = 0; j < t.elements(); ++j) equal += t.p[j] == expected.p[j];
      if (TestFixture::known::follows_the_parameter)
        EXPECT_EQ(equal, t.elements()) << l;
      else
        EXPECT_LT(equal, t.elements()) << "a step of Adam has a size of its own";
    }
  }
}

}  // namespace
