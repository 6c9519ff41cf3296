// Adafactor against its two published forms, restated in long double with whole matrices of
// squares: trajectories through the engine's passes at the scalar level, and the options, rates and
// refusals one by one.

#include <leanopt/engine/cpu.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/weights/plain.hpp>

#include "tests/support/patterns.hpp"
#include "tests/support/plain_options.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using leanopt::rules::adafactor;
using options = plain_options::adafactor;
using real = long double;
using reals = std::vector<real>;

struct shape {
  std::size_t batch, rows, columns;
  bool vector = false;
  std::size_t elements() const { return batch * rows * columns; }
};

// ---- the published forms ------------------------------------------------------------------------

real mean(const reals& x) {
  real sum = 0;
  for (const real v : x) sum += v;
  return sum / real(x.size());
}
real root_mean_square(const reals& x) {
  real sum = 0;
  for (const real v : x) sum += v * v;
  return std::sqrt(sum / real(x.size()));
}

/// What both forms do with a batch of matrices, or a vector of variances.
class textbook {
 public:
  textbook(const shape& s, reals p) : p(std::move(p)), s_(s) {
    row.resize(s.batch * s.rows);
    column.resize(s.batch * s.columns);
    variance.resize(s.elements());
    first.resize(s.elements());
  }

  reals p, row, column, variance, first;
  int t = 0;

  /// torch.optim.Adafactor.
  void torch_step(const options& o, reals g, real epsilon) {
    ++t;
    if (o.maximize())
      for (real& x : g) x = -x;
    const real eps1 = std::get<0>(o.eps()).value_or(double(epsilon)), eps2 = std::get<1>(o.eps());
    const real weight = std::pow(real(t), real(o.beta2_decay()));
    const real alpha =
        std::max(eps2, root_mean_square(p)) * std::min(real(o.lr()), 1 / std::sqrt(real(t)));
    for (real& x : p) x *= 1 - real(o.lr()) * o.weight_decay();
    track(g, weight, 0);
    reals update(g.size());
    for (std::size_t i = 0; i < g.size(); ++i) {
      const real estimate =
          s_.vector ? variance[i]
                    : row[i / s_.columns] * column[column_of(i)] / std::max(eps1, mean_row(i));
      update[i] = g[i] / std::sqrt(std::max(estimate, eps1 * eps1));
    }
    const real denominator = std::max(real(1), root_mean_square(update) / o.d());
    for (std::size_t i = 0; i < g.size(); ++i) p[i] -= alpha / denominator * update[i];
  }

  /// Hugging Face's Adafactor.
  void hugging_face_step(const options& o, const reals& g) {
    ++t;
    const auto [eps1, eps2] = o.eps();
    real lr = o.lr();
    if (o.relative_step())
      lr = std::min(o.warmup_init() ? 1e-6L * t : 1e-2L, 1 / std::sqrt(real(t)));
    if (o.scale_parameter()) lr *= std::max(real(eps2), root_mean_square(p));
    track(g, std::pow(real(t), real(o.decay_rate())), *eps1);
    reals update(g.size());
    for (std::size_t i = 0; i < g.size(); ++i)
      update[i] = g[i] / (s_.vector ? std::sqrt(variance[i])
                                    : std::sqrt(row[i / s_.columns] / mean_row(i)) *
                                          std::sqrt(column[column_of(i)]));
    const real clip = std::max(real(1), root_mean_square(update) / o.clip_threshold());
    for (std::size_t i = 0; i < g.size(); ++i) {
      update[i] *= lr / clip;
      if (o.beta1()) {
        first[i] = *o.beta1() * first[i] + (1 - real(*o.beta1())) * update[i];
        update[i] = first[i];
      }
      p[i] -= o.weight_decay() * lr * p[i];
      p[i] -= update[i];
    }
  }

 private:
  std::size_t matrix_of(std::size_t i) const { return i / (s_.rows * s_.columns); }
  std::size_t column_of(std::size_t i) const { return matrix_of(i) * s_.columns + i % s_.columns; }
  real mean_row(std::size_t i) const {
    const auto from = row.begin() + std::ptrdiff_t(matrix_of(i) * s_.rows);
    return mean(reals(from, from + std::ptrdiff_t(s_.rows)));
  }
  /// Moving averages of the means of g^2 + added, of which each has `weight`.
  void track(const reals& g, real weight, real added) {
    reals rows(row.size()), columns(column.size());
    for (std::size_t i = 0; i < g.size(); ++i) {
      const real square = g[i] * g[i] + added;
      rows[i / s_.columns] += square / real(s_.columns);
      columns[column_of(i)] += square / real(s_.rows);
      variance[i] += weight * (square - variance[i]);
    }
    for (std::size_t r = 0; r < row.size(); ++r) row[r] += weight * (rows[r] - row[r]);
    for (std::size_t c = 0; c < column.size(); ++c) column[c] += weight * (columns[c] - column[c]);
  }

  shape s_;
};

// ---- ours ---------------------------------------------------------------------------------------

struct serially {
  template <class F>
  void operator()(std::size_t count, F f) const {
    f(std::size_t(0), count);
  }
};

template <class T>
class ours {
 public:
  ours(const shape& s, std::vector<T> start) : p(std::move(start)), s_(s) {
    row.resize(s.batch * s.rows);
    column.resize(s.batch * s.columns);
    variance.resize(s.elements());
    first.resize(s.elements());
  }

  std::vector<T> p, row, column, variance, first;
  int t = 0;

  void step(const options& o, std::vector<T> g) {
    ++t;
    leanopt::cpu::matrix_step work;
    const auto type = sizeof(T) == 8 ? leanopt::number::float64 : leanopt::number::float32;
    work.p = {p.data(), type, {}};
    work.g = {g.data(), type, {}};
    work.elements = p.size();
    work.batch = s_.batch;
    work.rows = s_.rows;
    work.columns = s_.columns;
    work.slots[0] = first.data();
    if (s_.vector) {
      work.variance = variance.data();
    } else {
      work.row = row.data();
      work.column = column.data();
    }
    using passes_of = leanopt::cpu::matrix_passes<adafactor, T, leanopt::weights::plain>;
    std::vector<double> scratch(passes_of::scratch_bytes(work) / sizeof(double) + 1);
    passes_of passes(leanopt::cpu::level::scalar, work,
                     adafactor::prepare<T>(o, t, std::numeric_limits<T>::epsilon()),
                     reinterpret_cast<char*>(scratch.data()));
    passes.track(serially{});
    const auto rms = passes.root_mean_squares(serially{});
    const auto c = adafactor::finish<T>(o, adafactor::rate(o, t, rms.parameter), rms.update);
    using leanopt::formats::full;
    if (o.beta1())
      passes.template apply<adafactor::formula<true>, full>(c, serially{});
    else
      passes.template apply<adafactor::formula<false>, full>(c, serially{});
  }

 private:
  shape s_;
};

template <class T>
double difference(const std::vector<T>& actual, const reals& exact) {
  real scale = 0, worst = 0;
  for (const real x : exact) scale = std::max(scale, std::fabs(x));
  if (scale == 0) scale = 1;
  for (std::size_t i = 0; i < exact.size(); ++i)
    worst = std::max(worst, std::fabs(actual[i] - exact[i]) / scale);
  return double(worst);
}

template <class T>
void check(const shape& s, const options& o, double bound) {
  patterns::source random(s.elements());
  const auto start = random.numbers<T>(s.elements(), patterns::kind::normal);
  ours<T> actual(s, start);
  textbook expected(s, reals(start.begin(), start.end()));
  for (int step = 1; step <= 20; ++step) {
    const auto g = random.numbers<T>(s.elements(), patterns::kind::normal);
    actual.step(o, g);
    if (o.is_hugging_face())
      expected.hugging_face_step(o, reals(g.begin(), g.end()));
    else
      expected.torch_step(o, reals(g.begin(), g.end()), std::numeric_limits<T>::epsilon());
    EXPECT_LE(difference(actual.p, expected.p), bound) << "step " << step;
    EXPECT_LE(difference(actual.first, expected.first), bound) << "step " << step;
    if (s.vector) {
      EXPECT_LE(difference(actual.variance, expected.variance), bound) << "step " << step;
    } else {
      EXPECT_LE(difference(actual.row, expected.row), bound) << "step " << step;
      EXPECT_LE(difference(actual.column, expected.column), bound) << "step " << step;
    }
  }
}

struct named {
  std::string name;
  options o;
};
named torch_form(const std::string& name, std::function<void(options&)> change) {
  options o;
  change(o);
  return {"torch.optim, " + name, o};
}
named hugging_face_form(const std::string& name, std::function<void(options&)> change) {
  options o = options::hugging_face();
  change(o);
  return {"Hugging Face, " + name, o};
}

std::vector<named> all_options() {
  return {
      torch_form("defaults", [](options&) {}),
      torch_form("large rate", [](options& o) { o.lr(0.5); }),
      torch_form("decay", [](options& o) { o.lr(0.1).weight_decay(0.3); }),
      torch_form("eps",
                 [](options& o) { o.eps(options::epsilons(1e-2, 0.5)); }),  // both floors act
      torch_form("beta2_decay", [](options& o) { o.beta2_decay(-0.5).d(1.5); }),
      torch_form("maximize", [](options& o) { o.maximize(true); }),
      hugging_face_form("defaults", [](options&) {}),
      hugging_face_form("rate given", [](options& o) { o.lr(0.1).relative_step(false); }),
      hugging_face_form("unscaled",
                        [](options& o) {
                          o.lr(0.1).relative_step(false).scale_parameter(false).weight_decay(0.3);
                        }),
      hugging_face_form("warmup", [](options& o) { o.warmup_init(true); }),
      hugging_face_form("first moment", [](options& o) { o.beta1(0.9).weight_decay(0.1); }),
      hugging_face_form("eps, decay_rate, clip",
                        [](options& o) {
                          o.eps(options::epsilons(1e-3, 0.7)).decay_rate(-0.6).clip_threshold(0.5);
                        }),
  };
}

const shape all_shapes[] = {{1, 1, 1},       {1, 1, 17},        {1, 17, 1},        {1, 3, 5},
                            {4, 3, 5},       {1, 70, 33},       {2, 130, 20},      {1, 4, 1100},
                            {1, 1, 1, true}, {1, 1, 300, true}, {1, 1, 5000, true}};

TEST(Adafactor, IsThePublishedAlgorithmInDouble) {
  for (const named& n : all_options())
    for (const shape& s : all_shapes) {
      SCOPED_TRACE(n.name + " " + std::to_string(s.batch) + "x" + std::to_string(s.rows) + "x" +
                   std::to_string(s.columns) + (s.vector ? " vector" : ""));
      check<double>(s, n.o, tolerance::adafactor_formula_f64);
    }
}
TEST(Adafactor, IsThePublishedAlgorithmInFloat) {
  for (const named& n : all_options())
    for (const shape& s : all_shapes) {
      SCOPED_TRACE(n.name + " " + std::to_string(s.batch) + "x" + std::to_string(s.rows) + "x" +
                   std::to_string(s.columns) + (s.vector ? " vector" : ""));
      check<float>(s, n.o, tolerance::adafactor_formula_f32);
    }
}

// ---- pieces -------------------------------------------------------------------------------------

TEST(AdafactorOptions, HaveThePublishedDefaults) {
  const options t;
  EXPECT_EQ(t.lr(), 1e-2);
  EXPECT_EQ(t.eps(), options::epsilons(std::nullopt, 1e-3));
  EXPECT_EQ(t.weight_decay(), 0);
  EXPECT_EQ(t.beta2_decay(), -0.8);
  EXPECT_EQ(t.d(), 1);
  EXPECT_FALSE(t.maximize());
  EXPECT_FALSE(t.beta1().has_value());
  const options h = options::hugging_face();
  EXPECT_EQ(h.eps(), options::epsilons(1e-30, 1e-3));
  EXPECT_EQ(h.clip_threshold(), 1);
  EXPECT_EQ(h.decay_rate(), -0.8);
  EXPECT_EQ(h.weight_decay(), 0);
  EXPECT_FALSE(h.beta1().has_value());
  EXPECT_TRUE(h.scale_parameter());
  EXPECT_TRUE(h.relative_step());
  EXPECT_FALSE(h.warmup_init());
  EXPECT_FALSE(t.initial().is_hugging_face());
  EXPECT_TRUE(h.initial().is_hugging_face());
}

TEST(AdafactorRate, FollowsTheFormAndTheStep) {
  const options t;
  EXPECT_EQ(adafactor::rate(t, 1, 2.0), 2.0 * 1e-2);
  EXPECT_EQ(adafactor::rate(t, 1000000, 2.0), 2.0 * 1e-3);  // 1/sqrt(t) below lr
  EXPECT_EQ(adafactor::rate(t, 1, 1e-9), 1e-3 * 1e-2);      // eps2 for small parameters
  options h = options::hugging_face();
  EXPECT_EQ(adafactor::rate(h, 1, 2.0), 2.0 * 1e-2);
  EXPECT_EQ(adafactor::rate(h, 1000000, 2.0), 2.0 * 1e-3);
  h.warmup_init(true);
  EXPECT_EQ(adafactor::rate(h, 3, 2.0), 2.0 * (1e-6 * 3));
  h.warmup_init(false).relative_step(false).scale_parameter(false).lr(0.25);
  EXPECT_EQ(adafactor::rate(h, 1000000, 2.0), 0.25);
  h.scale_parameter(true);
  EXPECT_EQ(adafactor::rate(h, 1000000, 2.0), 0.5);
}

TEST(AdafactorClip, LeavesSmallUpdatesAndKeepsNaNVisible) {
  options t;
  t.d(2);
  EXPECT_EQ(adafactor::finish<double>(t, 0.5, 1.9).scale, 0.5);
  EXPECT_EQ(adafactor::finish<double>(t, 0.5, 4.0).scale, 0.25);
  EXPECT_TRUE(std::isnan(adafactor::finish<double>(t, 0.5, NAN).scale));
  t.maximize(true);
  EXPECT_EQ(adafactor::finish<double>(t, 0.5, 1.9).scale, -0.5);
}

TEST(AdafactorFloors, AreThoseOfTheForm) {
  options t;
  const auto own = adafactor::prepare<float>(t, 1, 0x1p-23);
  EXPECT_EQ(own.mean_floor, 0x1p-23f);  // unset eps1: the epsilon of the parameter's type
  EXPECT_EQ(own.limit, 0x1p23f);
  EXPECT_EQ(own.added, 0);
  EXPECT_EQ(own.weight, 1);  // the first step forgets the zeros before it
  t.eps(options::epsilons(0.0, 1e-3));
  const auto none = adafactor::prepare<float>(t, 1, 0x1p-23);
  EXPECT_EQ(none.mean_floor, 0);
  EXPECT_EQ(none.limit, std::numeric_limits<float>::max());
  const auto h = adafactor::prepare<float>(options::hugging_face(), 4, 0x1p-23);
  EXPECT_EQ(h.added, 1e-30f);
  EXPECT_EQ(h.mean_floor, 0);
  EXPECT_EQ(h.weight, float(std::pow(4.0, -0.8)));
}

/// What is said of options in which the fields called `given` were given.
std::string contradiction(const options& o, std::vector<std::string> given,
                          bool compressed = false) {
  return o.contradiction(
      [&](const std::string& name) {
        return std::find(given.begin(), given.end(), name) != given.end();
      },
      compressed);
}
TEST(AdafactorOptions, OfOneFormRefuseFieldsOfTheOther) {
  for (const char* field :
       {"clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init"})
    EXPECT_NE(contradiction(options(), {field}), "") << field;
  for (const char* field : {"beta2_decay", "d", "maximize"})
    EXPECT_NE(contradiction(options::hugging_face(), {field}), "") << field;
  for (const char* field : {"lr", "eps", "weight_decay", "beta2_decay", "d", "maximize"})
    EXPECT_EQ(contradiction(options(), {field}), "") << field;
  for (const char* field : {"eps", "weight_decay", "clip_threshold", "decay_rate", "beta1",
                            "scale_parameter", "relative_step", "warmup_init"})
    EXPECT_EQ(contradiction(options::hugging_face(), {field}), "") << field;
}
TEST(AdafactorOptions, RefuseWhatExcludesItself) {
  options h = options::hugging_face();
  EXPECT_NE(contradiction(h, {"lr"}), "");  // relative_step chooses the rate itself
  h.relative_step(false);
  EXPECT_EQ(contradiction(h, {"lr", "relative_step"}), "");
  EXPECT_NE(contradiction(h, {"relative_step"}), "");
  h.warmup_init(true);
  EXPECT_NE(contradiction(h, {"lr", "relative_step", "warmup_init"}), "");
  options zero = options::hugging_face();
  zero.eps(options::epsilons(0.0, 1e-3));
  EXPECT_NE(contradiction(zero, {"eps"}), "");
}
TEST(AdafactorOptions, InACompressedFormatNeedAFirstMoment) {
  EXPECT_NE(contradiction(options(), {}, true), "");
  EXPECT_NE(contradiction(options::hugging_face(), {}, true), "");
  options o;
  o.adapt_to_compression();
  EXPECT_EQ(contradiction(o, {}, true), "");
  EXPECT_EQ(o.beta1(), 0.9);
  EXPECT_TRUE(o.is_hugging_face());
}

/// The outer product is filled in pieces that start and end anywhere, over the ends of rows and
/// matrices.
TEST(InverseRoots, AreThoseOfTheirRowAndColumn) {
  const std::size_t batch = 3, rows = 7, columns = 5, n = batch * rows * columns;
  patterns::source random(1);
  std::vector<float> row(batch * rows), column(batch * columns);
  for (float& x : row) x = random.positive<float>(patterns::kind::normal);
  for (float& x : column) x = random.positive<float>(patterns::kind::normal);
  leanopt::rules::inverse_roots<float> in;
  in.row = row.data();
  in.column = column.data();
  in.rows = rows;
  in.columns = columns;
  in.limit = 0.5f;
  for (std::size_t first = 0; first < n; ++first)
    for (std::size_t count : {std::size_t(1), std::size_t(4), std::size_t(36), n - first}) {
      count = std::min(count, n - first);
      std::vector<float> out(count + 1, -1);
      in.fill<leanopt::scalar<float>>(out.data(), first, count);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = first + i, matrix = at / (rows * columns);
        ASSERT_EQ(out[i],
                  std::min(0.5f, row[at / columns] * column[matrix * columns + at % columns]));
      }
      ASSERT_EQ(out[count], -1);
    }
}

}  // namespace
