// Adam and AdamW against the published algorithm, restated in long double in its textbook form:
// bias corrections on the moments, the rate outside. One trajectory after the other through a
// formula's apply(), with the coefficients that prepare() makes.

#include <leanopt/core/lane.hpp>
#include <leanopt/rules/adam.hpp>

#include "tests/support/patterns.hpp"
#include "tests/support/plain_options.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

namespace {

using leanopt::scalar;
using leanopt::rules::adam;
using leanopt::rules::adamw;
using real = long double;

struct settings {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false, maximize = false;
};

template <class Options>
Options options_of(const settings& s) {
  Options o;
  o.lr(s.lr).betas(std::make_tuple(s.beta1, s.beta2)).eps(s.eps);
  o.weight_decay(s.weight_decay).amsgrad(s.amsgrad).maximize(s.maximize);
  return o;
}

/// Kingma and Ba, algorithm 1; with Loshchilov and Hutter's decay if `decoupled`; with the maximum
/// of Reddi, Kale and Kumar, which torch.optim takes before the correction.
struct textbook {
  settings s;
  bool decoupled;
  real p, m = 0, v = 0, most = 0;
  int t = 0;

  void step(real gradient) {
    ++t;
    real g = s.maximize ? -gradient : gradient;
    if (decoupled)
      p -= real(s.lr) * s.weight_decay * p;
    else
      g += s.weight_decay * p;
    m = s.beta1 * m + (1 - real(s.beta1)) * g;
    v = s.beta2 * v + (1 - real(s.beta2)) * g * g;
    most = std::max(most, v);
    const real m_hat = m / (1 - std::pow(real(s.beta1), t));
    const real v_hat = (s.amsgrad ? most : v) / (1 - std::pow(real(s.beta2), t));
    p -= s.lr * m_hat / (std::sqrt(v_hat) + s.eps);
  }
};

/// The largest difference of p from the textbook's over trajectories, in units of what the steps
/// moved or of p itself, and of the moments in units of their largest value so far.
template <class Rule, class Options, bool Amsgrad, class T>
double largest_difference(const settings& s) {
  const Options o = options_of<Options>(s);
  patterns::source random(11);
  double worst = 0;
  for (int trajectory = 0; trajectory < 20; ++trajectory) {
    T p0 = random.number<T>(patterns::kind::normal);
    textbook expected{s, std::is_same_v<Rule, adamw>, p0};
    scalar<T> p = p0, state[3] = {T(0), T(0), T(0)};
    real scale_p = std::fabs(p0), scale_m = 0, scale_v = 0;
    const auto compare = [&](T actual, real exact, real scale) {
      if (scale > 0) worst = std::max(worst, double(std::fabs(actual - exact) / scale));
    };
    for (int step = 1; step <= 50; ++step) {
      // Gradients that fade, so that AMSGrad's maximum is not the present value.
      const T g = T(random.number<T>(patterns::kind::normal) / step);
      expected.step(g);
      leanopt::rules::adam_formula<Amsgrad>::apply(Rule::template prepare<T>(o, step), p,
                                                   scalar<T>(g), state);
      scale_p = std::max({scale_p, std::fabs(expected.p), real(s.lr)});
      scale_m = std::max(scale_m, std::fabs(expected.m));
      scale_v = std::max(scale_v, expected.v);
      compare(p.v, expected.p, scale_p);
      compare(state[0].v, expected.m, scale_m);
      compare(state[1].v, expected.v, scale_v);
      if (Amsgrad) compare(state[2].v, expected.most, scale_v);
    }
  }
  return worst;
}

template <class Rule, class Options>
void check(const settings& s) {
  if (s.amsgrad) {
    EXPECT_LE((largest_difference<Rule, Options, true, double>(s)), tolerance::adam_formula_f64);
    EXPECT_LE((largest_difference<Rule, Options, true, float>(s)), tolerance::adam_formula_f32);
  } else {
    EXPECT_LE((largest_difference<Rule, Options, false, double>(s)), tolerance::adam_formula_f64);
    EXPECT_LE((largest_difference<Rule, Options, false, float>(s)), tolerance::adam_formula_f32);
  }
}

std::vector<settings> all_settings() {
  std::vector<settings> result;
  for (const double lr : {1e-3, 0.1})
    for (const auto& [beta1, beta2] : {std::pair{0.9, 0.999}, {0.0, 0.9}, {0.6, 0.6}})
      for (const double eps : {1e-8, 1e-3})
        for (const double decay : {0.0, 0.1})
          for (const bool amsgrad : {false, true})
            for (const bool maximize : {false, true})
              result.push_back({lr, beta1, beta2, eps, decay, amsgrad, maximize});
  return result;
}

TEST(Adam, IsThePublishedAlgorithm) {
  for (const settings& s : all_settings()) {
    SCOPED_TRACE(testing::Message() << "lr " << s.lr << " betas " << s.beta1 << ' ' << s.beta2
                                    << " eps " << s.eps << " decay " << s.weight_decay
                                    << " amsgrad " << s.amsgrad << " maximize " << s.maximize);
    check<adam, plain_options::adam>(s);
  }
}
TEST(AdamW, IsThePublishedAlgorithm) {
  for (const settings& s : all_settings()) {
    SCOPED_TRACE(testing::Message() << "lr " << s.lr << " betas " << s.beta1 << ' ' << s.beta2
                                    << " eps " << s.eps << " decay " << s.weight_decay
                                    << " amsgrad " << s.amsgrad << " maximize " << s.maximize);
    check<adamw, plain_options::adamw>(s);
  }
}

TEST(Adam, FirstStepIsTheRateInTheGradientsDirection) {
  settings s;
  s.eps = 0;
  const auto c = adam::prepare<double>(options_of<plain_options::adam>(s), 1);
  for (const double g : {1e-100, 3.0, -7e50}) {
    scalar<double> p = 5.0, state[2] = {0.0, 0.0};
    leanopt::rules::adam_formula<false>::apply(c, p, scalar<double>(g), state);
    EXPECT_NEAR(p.v, 5 - std::copysign(s.lr, g), 1e-15) << g;
  }
}

TEST(Adam, ZeroGradientsMoveNothing) {
  const auto c = adam::prepare<float>(options_of<plain_options::adam>({}), 1);
  scalar<float> p = 0.1f, state[2] = {0.0f, 0.0f};
  leanopt::rules::adam_formula<false>::apply(c, p, scalar<float>(0.0f), state);
  EXPECT_EQ(p.v, 0.1f);
  EXPECT_EQ(state[0].v, 0);
  EXPECT_EQ(state[1].v, 0);
}

TEST(AdamW, DecayOfZeroGradientsIsExact) {  // keep is one rounding of 1 - lr wd
  settings s;
  s.lr = 0.1;
  s.weight_decay = 0.3;
  const auto c = adamw::prepare<double>(options_of<plain_options::adamw>(s), 7);
  EXPECT_EQ(c.keep, double(1 - real(0.1) * real(0.3)));
  scalar<double> p = 1.0, state[2] = {0.0, 0.0};
  leanopt::rules::adam_formula<false>::apply(c, p, scalar<double>(0.0), state);
  EXPECT_EQ(p.v, c.keep);
}

TEST(Adam, CorrectionsStayAccurateForever) {
  settings s;
  for (const std::int64_t step :
       {std::int64_t(1), std::int64_t(1000), std::int64_t(1000000), std::int64_t(1) << 40}) {
    const auto c = adam::prepare<double>(options_of<plain_options::adam>(s), step);
    const real correction1 = 1 - std::pow(real(s.beta1), real(step));
    const real correction2 = 1 - std::pow(real(s.beta2), real(step));
    // 1 - beta loses up to log2(1 / (1 - beta)) bits of the power: 10 of 53 for 0.999 at step 1.
    EXPECT_NEAR(double(c.step / (s.lr / correction1)), 1, 0x1p-43) << step;
    EXPECT_NEAR(double(c.inv_root_correction2 * std::sqrt(correction2)), 1, 0x1p-43) << step;
  }
}

TEST(Adam, FormulaSpeaksOfTheSlotsThatTheRuleNames) {
  using formula = leanopt::rules::adam_formula<true>;
  ASSERT_EQ(formula::slot_count, 3);
  EXPECT_STREQ(formula::slots[0].name, "exp_avg");
  EXPECT_STREQ(formula::slots[1].name, "exp_avg_sq");
  EXPECT_STREQ(formula::slots[2].name, "max_exp_avg_sq");
  EXPECT_EQ(formula::slots[0].range, leanopt::values::any);
  EXPECT_EQ(formula::slots[1].range, leanopt::values::non_negative);
  EXPECT_EQ(formula::slots[2].range, leanopt::values::non_negative);
  const plain_options::adam o;
  EXPECT_STREQ(o.contradiction([](const char*) { return false; }, true), "");
  plain_options::adam amsgrad;
  amsgrad.amsgrad(true);
  EXPECT_STRNE(amsgrad.contradiction([](const char*) { return false; }, true), "");
  EXPECT_STREQ(amsgrad.contradiction([](const char*) { return false; }, false), "");
}

}  // namespace
