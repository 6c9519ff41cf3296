// Adam and AdamW.
//   m = m + (1-b1)(g-m);  v = b2 v + (1-b2) g^2;  w = max(w, v) with AMSGrad, else v
//   p = (1 - lr wd) p - lr/(1-b1^t) m / (sqrt(w)/sqrt(1-b2^t) + eps)
// Adam adds wd p to g instead of shrinking p. Kingma and Ba 2015, Loshchilov and Hutter 2019,
// Reddi, Kale and Kumar 2018; the order of operations is that of torch.optim.
#pragma once

#include <leanopt/core/option.hpp>
#include <leanopt/core/power.hpp>
#include <leanopt/core/slot.hpp>
#include <leanopt/core/work.hpp>

#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::rules {

template <class T>
struct adam_coeffs {
  T sign, decay, one_minus_beta1, beta2, one_minus_beta2, step, inv_root_correction2, eps, keep;
};

/// The formula of both: Adam has keep = 1, AdamW has decay = 0.
template <bool Amsgrad>
struct adam_formula {
  template <class T>
  using inputs = no_inputs;
  static constexpr int slot_count = Amsgrad ? 3 : 2;
  static constexpr slot_spec slots[3] = {{"exp_avg", values::any},
                                         {"exp_avg_sq", values::non_negative},
                                         {"max_exp_avg_sq", values::non_negative}};

  template <class T>
  using coeffs = adam_coeffs<T>;

  template <class V, class T>
  LEANOPT_HD static void apply(const coeffs<T>& c, V& p, const V& g, V* s) {
    advance(c, p, g, s);
    move(c, p, s);
  }
  /// Its halves: first the moments, then from them the parameter.
  template <class V, class T>
  LEANOPT_HD static void advance(const coeffs<T>& c, const V& p, const V& gradient, V* s) {
    V &m = s[0], &v = s[1];
    V g = gradient;  // where it is maximized, of the other sign: as is its decay
    // Not where decay is 0, which would make NaN of Inf. By its bits: in a loop a comparison of
    // numbers costs four instructions.
    using word = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
    if (bit_cast<word>(c.decay) != 0) g = fma(p, V(c.decay), g);
    m = fma(fma(g, V(c.sign), -m), V(c.one_minus_beta1), m);
    v = fma(v, V(c.beta2), V(c.one_minus_beta2) * g * g);
    if constexpr (Amsgrad) s[2] = max(s[2], v);
  }
  template <class V, class T>
  LEANOPT_HD static void move(const coeffs<T>& c, V& p, const V* s) {
    const V root = sqrt(s[slot_count - 1]);
    const V denominator = fma(root, V(c.inv_root_correction2), V(c.eps));
    p = fma(p, V(c.keep), -divide(V(c.step) * s[0], denominator));
  }
};

template <bool Decoupled>
struct adam_rule {
  static constexpr const char* name = Decoupled ? "adamw" : "adam";
  static constexpr bool elementwise = true;
  template <bool Amsgrad>
  using formula = adam_formula<Amsgrad>;
  template <class T>
  using coeffs = adam_coeffs<T>;

  template <class Self, class Parent>
  class fields : public Parent {
   public:
    using betas_t = std::tuple<double, double>;
    LEANOPT_STOCK_OPTION(double, lr)
    LEANOPT_STOCK_OPTION(betas_t, betas)
    LEANOPT_STOCK_OPTION(double, eps)
    LEANOPT_STOCK_OPTION(double, weight_decay)
    LEANOPT_STOCK_OPTION(bool, amsgrad)
    LEANOPT_OPTION(bool, maximize) = false;

   public:
    fields_list all() {
      fields_list list;
      list.add({"lr", not_negative, lr()});
      list.add({"betas", below_one, betas()});
      list.add({"eps", not_negative, eps()});
      list.add({"weight_decay", not_negative, weight_decay()});
      list.add({"amsgrad", any_value, amsgrad()});
      list.add({"maximize", any_value, maximize_});
      return list;
    }

    template <class Given>
    const char* contradiction(Given, bool compressed) const {
      return compressed && amsgrad()
                 ? "amsgrad is kept in full precision only: set amsgrad(false) or use the class "
                   "without 8bit in its name"
                 : "";
    }
  };

  /// Whether these options take the long formula.
  template <class Options>
  static bool is_long(const Options& o) {
    return o.amsgrad();
  }

  template <class T>
  using prepared = coeffs<T>;
  /// Powers and products in double; `step` counts from 1.
  template <class T, class Options>
  LEANOPT_HD_CALL static prepared<T> prepare(const Options& o, std::int64_t step) {
    const auto [beta1, beta2] = o.betas();
    const double correction1 = correction(beta1, step), correction2 = correction(beta2, step);
    const double added = Decoupled ? 0 : o.weight_decay();
    return {T(o.maximize() ? -1 : 1),
            T(o.maximize() ? 0 - added : added),  // never -0
            T(1 - beta1),
            T(beta2),
            T(1 - beta2),
            T(o.lr() / correction1),
            T(1 / std::sqrt(correction2)),
            T(o.eps()),
            T(Decoupled ? std::fma(-o.lr(), o.weight_decay(), 1.0) : 1)};
  }

 private:
  /// 1 - beta^n: 1 where the power, at most e^(-(1 - beta) n), is less than half an ulp of that.
  LEANOPT_HD_CALL static double correction(double beta, std::int64_t n) {
    return (1 - beta) * double(n) > 42 ? 1.0 : 1 - power(beta, n);
  }
};

using adam = adam_rule<false>;
using adamw = adam_rule<true>;

}  // namespace leanopt::rules
LEANOPT_EXACT_END
