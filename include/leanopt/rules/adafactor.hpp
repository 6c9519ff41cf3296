// Adafactor: the second moment of a matrix kept as row and column means. For G of n x m, step t:
//   R = R + w (mean_cols(G^2) + e1 - R),  C = C + w (mean_rows(G^2) + e1 - C),  w = t^decay
//   x_ij = sqrt(mean(R)) / sqrt(R_i C_j);  with V per element for vectors: x_i = 1/sqrt(V_i)
//   U = min(x, limit) G;  U = scale U, scale = rate / max(1, RMS(U)/d)
//   M = M + (1-b1)(U-M) if there is a first moment;  p = keep p - M (or U)
// Shazeer and Stern 2018, factored over the last two dimensions, one RMS for the whole tensor, in
// two published forms. torch.optim's: e1 = 0, floors mean(R) >= eps1 and x <= 1/eps1 instead, rate
// max(eps2, RMS(p)) min(lr, 1/sqrt(t)), keep 1 - lr wd. Hugging Face's: e1 = eps1 and no floor,
// rate lr or min(1e-2, 1/sqrt(t)), times max(eps2, RMS(p)) if asked, keep 1 - rate wd.
#pragma once

#include <leanopt/core/option.hpp>
#include <leanopt/core/power.hpp>
#include <leanopt/core/slot.hpp>
#include <leanopt/core/work.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::rules {

/// x of the file's head per element: the outer product of what rows and columns hold, or the
/// inverse root of a variance. Row and column vectors of a batch of matrices stand one after the
/// other.
template <class T>
struct inverse_roots {
  static constexpr bool present = true;
  const T* row = nullptr;
  const T* column = nullptr;
  std::size_t rows = 1, columns = 1;
  const T* variance = nullptr;  ///< of every element, instead of rows and columns
  T limit = 0;

  template <class V>
  LEANOPT_HD V of_factors(const V& row_factor, const V& column_factor) const {
    return min(V(limit), row_factor * column_factor);
  }
  template <class V>
  LEANOPT_HD V of_variance(const V& v) const {
    return min(V(limit), divide(V(T(1)), sqrt(v)));
  }

  struct row_t {
    T factor;
    const T* columns = nullptr;  ///< where the factors of the columns stand
    LEANOPT_HD explicit operator bool() const { return columns != nullptr; }
  };
  /// The row of n elements from `first` on, if it is one.
  LEANOPT_HD row_t row_of(std::size_t first, std::size_t n) const {
    if (variance) return {};
    const std::size_t r = first / columns, c = first % columns;
    if (n > columns - c) return {};
    return {row[r], column + r / rows * columns + c};
  }
  /// out[0 ... n) for the elements from `first` on.
  template <class V>
  LEANOPT_HD void fill(T* out, std::size_t first, std::size_t n) const {
    if (variance) {
      segment<V>(out, variance + first, n,
                 [this](const auto& v) LEANOPT_LAMBDA { return this->of_variance(v); });
      return;
    }
    std::size_t r = first / columns, c = first % columns;
    for (std::size_t i = 0; i < n; ++r, c = 0) {
      const std::size_t left = n - i, count = left < columns - c ? left : columns - c;
      const T factor = row[r];
      segment<V>(out + i, column + r / rows * columns + c, count,
                 [this, factor](const auto& v) LEANOPT_LAMBDA {
                   using W = std::decay_t<decltype(v)>;
                   return this->of_factors(W(factor), v);
                 });
      i += count;
    }
  }

 private:
  template <class V, class F>
  LEANOPT_HD void segment(T* out, const T* from, std::size_t n, F f) const {
    using L = lane_traits<V>;
    using S = lane_traits<scalar<T>>;
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count) L::store(out + i, f(L::load(from + i)));
    for (; i < n; ++i) S::store(out + i, f(S::load(from + i)));
  }
};

template <class T>
struct adafactor_coeffs {
  T scale, one_minus_beta1, keep;
};

/// The elementwise pass that ends a step.
template <bool First_moment>
struct adafactor_formula {
  template <class T>
  using inputs = inverse_roots<T>;
  static constexpr int slot_count = First_moment ? 1 : 0;
  static constexpr slot_spec slots[1] = {{"exp_avg", values::any}};

  template <class T>
  using coeffs = adafactor_coeffs<T>;

  template <class V, class T>
  LEANOPT_HD static void apply(const coeffs<T>& c, V& p, const V& g, V* s, const V& x) {
    if constexpr (First_moment) {
      advance(c, p, g, s, x);
      move(c, p, s);
    } else {
      p = fma(p, V(c.keep), -update(c, g, x));
    }
  }
  /// Its halves where there is a first moment: first that, then from it the parameter.
  template <class V, class T>
  LEANOPT_HD static void advance(const coeffs<T>& c, const V&, const V& g, V* s, const V& x) {
    s[0] = fma(update(c, g, x) - s[0], V(c.one_minus_beta1), s[0]);
  }
  template <class V, class T>
  LEANOPT_HD static void move(const coeffs<T>& c, V& p, const V* s) {
    p = fma(p, V(c.keep), -s[0]);
  }

 private:
  template <class V, class T>
  LEANOPT_HD static V update(const coeffs<T>& c, const V& g, const V& x) {
    return V(c.scale) * (g * x);
  }
};

struct adafactor {
  static constexpr const char* name = "adafactor";
  static constexpr bool elementwise = false;
  static constexpr slot_spec moments[4] = {{"exp_avg", values::any},
                                           {"row_var", values::non_negative, extent::row},
                                           {"col_var", values::non_negative, extent::column},
                                           {"variance", values::non_negative}};
  template <bool First_moment>
  using formula = adafactor_formula<First_moment>;
  template <class T>
  using coeffs = adafactor_coeffs<T>;

  /// The fields of both forms; those of the other form are refused when an optimizer is built or
  /// steps.
  template <class Self, class Parent>
  class fields : public Parent {
   public:
    using epsilons = std::tuple<std::optional<double>, double>;
    LEANOPT_OPTION(double, lr) = 1e-2;
    LEANOPT_OPTION(epsilons, eps) = {std::nullopt, 1e-3};
    LEANOPT_OPTION(double, weight_decay) = 0;
    // torch.optim's form
    LEANOPT_OPTION(double, beta2_decay) = -0.8;
    LEANOPT_OPTION(double, d) = 1;
    LEANOPT_OPTION(bool, maximize) = false;
    // Hugging Face's form
    LEANOPT_OPTION(bool, is_hugging_face) = false;
    LEANOPT_OPTION(double, clip_threshold) = 1;
    LEANOPT_OPTION(double, decay_rate) = -0.8;
    LEANOPT_OPTION(std::optional<double>, beta1) = std::nullopt;
    LEANOPT_OPTION(bool, scale_parameter) = true;
    LEANOPT_OPTION(bool, relative_step) = true;
    LEANOPT_OPTION(bool, warmup_init) = false;

   public:
    /// Hugging Face's form with its defaults: lr unset, eps (1e-30, 1e-3), relative steps.
    static Self hugging_face() {
      Self self;
      self.is_hugging_face(
          true);  // by the setter: a group that names its form does not inherit one
      static_cast<fields&>(self).eps_ = {1e-30, 1e-3};
      return self;
    }
    /// What an untouched group of the same form looks like.
    Self initial() const { return is_hugging_face_ ? hugging_face() : Self(); }
    /// There is only a first moment to compress.
    void adapt_to_compression() {
      is_hugging_face_ = true;
      eps_ = {1e-30, 1e-3};
      beta1_ = 0.9;
    }

    fields_list all() {
      fields_list list;
      list.add({"lr", not_negative, lr_});
      list.add({"eps", not_negative, eps_});
      list.add({"weight_decay", not_negative, weight_decay_});
      list.add({"beta2_decay", not_positive, beta2_decay_});
      list.add({"d", one_or_more, d_});
      list.add({"maximize", any_value, maximize_});
      list.add({"is_hugging_face", any_value, is_hugging_face_});
      list.add({"clip_threshold", positive, clip_threshold_});
      list.add({"decay_rate", not_positive, decay_rate_});
      list.add({"beta1", below_one, beta1_});
      list.add({"scale_parameter", any_value, scale_parameter_});
      list.add({"relative_step", any_value, relative_step_});
      list.add({"warmup_init", any_value, warmup_init_});
      return list;
    }

    /// Why these options contradict each other; empty when they do not. `given(name)` says whether
    /// the user gave that field.
    template <class Given>
    const char* contradiction(Given given, bool compressed) const {
      if (compressed && !beta1_)
        return "a compressed format keeps nothing but the first moment: set beta1, or use the "
               "class in "
               "full precision";
      if (!is_hugging_face_) {
        if (given("clip_threshold") || given("decay_rate") || given("beta1") ||
            given("scale_parameter") || given("relative_step") || given("warmup_init"))
          return "clip_threshold, decay_rate, beta1, scale_parameter, relative_step and "
                 "warmup_init "
                 "belong to AdafactorOptions::hugging_face(); torch.optim's form has d and "
                 "beta2_decay";
        return "";
      }
      if (given("beta2_decay") || given("d") || given("maximize"))
        return "beta2_decay, d and maximize belong to torch.optim's form, AdafactorOptions(); "
               "Hugging "
               "Face's has decay_rate and clip_threshold";
      if (given("lr") && relative_step_)
        return "lr and relative_step exclude each other: leave lr unset or add "
               "relative_step(false)";
      if (warmup_init_ && !relative_step_) return "warmup_init needs relative_step";
      if (!given("lr") && !relative_step_)
        return "relative_step is off and lr is unset: give one of them";
      if (std::get<0>(eps_) == 0.0)
        return "eps: the first must be above 0, because a gradient of zeros would divide 0 by 0";
      return "";
    }
  };

  static constexpr range not_positive{-INFINITY, std::numeric_limits<double>::min(), false};
  static constexpr range one_or_more{1, INFINITY, false};

  /// Whether these options take the long formula.
  template <class Options>
  static bool is_long(const Options& o) {
    return o.beta1().has_value();
  }

  /// What the reductions of a step need; `epsilon` is that of the parameter's type.
  template <class T>
  struct reductions {
    T weight;      ///< w
    T added;       ///< e1
    T mean_floor;  ///< of mean(R)
    T limit;       ///< of x
  };
  template <class T>
  using prepared = reductions<T>;
  template <class T, class Options>
  LEANOPT_HD_CALL static prepared<T> prepare(const Options& o, std::int64_t step, double epsilon) {
    const double decay = o.is_hugging_face() ? o.decay_rate() : o.beta2_decay();
    const T weight = T(real_power(double(step), decay));
    [[maybe_unused]] const auto [first, second] = o.eps();
    const double eps1 = first.value_or(o.is_hugging_face() ? 1e-30 : epsilon);
    if (o.is_hugging_face()) return {weight, T(eps1), T(0), largest<T>};
    return {weight, T(0), T(eps1), eps1 > 0 && 1 / eps1 < largest<T> ? T(1 / eps1) : largest<T>};
  }
  template <class T>
  static constexpr T largest = std::numeric_limits<T>::max();

  /// The moving average of a mean of squares.
  template <class V, class T>
  LEANOPT_HD static V track(const reductions<T>& c, const V& old, const V& mean) {
    return fma((mean + V(c.added)) - old, V(c.weight), old);
  }
  template <class V, class T>
  LEANOPT_HD static V row_root(const reductions<T>& c, const V& mean_of_rows, const V& row) {
    return divide(sqrt(max(V(c.mean_floor), mean_of_rows)), sqrt(row));
  }
  template <class V>
  LEANOPT_HD static V column_root(const V& column) {
    return divide(V(typename lane_traits<V>::number(1)), sqrt(column));
  }

  /// The rate of a step before clipping, scaling by the parameter's RMS included.
  template <class Options>
  LEANOPT_HD_CALL static double rate(const Options& o, std::int64_t step, double rms_of_parameter) {
    double rho = o.lr();
    const double root = 1 / std::sqrt(double(step));
    if (!o.is_hugging_face()) {
      rho = root < rho ? root : rho;
    } else if (o.relative_step()) {
      const double most = o.warmup_init() ? 1e-6 * double(step) : 1e-2;
      rho = root < most ? root : most;
    }
    [[maybe_unused]] const auto [eps1, eps2] = o.eps();
    const bool scaled = !o.is_hugging_face() || o.scale_parameter();
    return scaled ? (rms_of_parameter < eps2 ? eps2 : rms_of_parameter) * rho : rho;
  }
  /// Whether the state keeps the RMS of the parameter, as Hugging Face's does.
  template <class Options>
  static bool keeps_rms(const Options& o) {
    return o.is_hugging_face();
  }

  /// What Python's class of the same form calls a slot.
  template <class Options>
  static const char* python_key(const Options& o, const char* slot) {
    if (!o.is_hugging_face()) return slot;
    const auto is = [&](int k) { return slot == moments[k].name; };
    return is(1) ? "exp_avg_sq_row" : is(2) ? "exp_avg_sq_col" : is(3) ? "exp_avg_sq" : slot;
  }

  /// The coefficients of the last pass.
  template <class T, class Options>
  LEANOPT_HD_CALL static adafactor_coeffs<T> finish(const Options& o, double rate,
                                                    double rms_of_update) {
    const double d = o.is_hugging_face() ? o.clip_threshold() : o.d();
    const double ratio = rms_of_update / d, clip = ratio < 1 ? 1 : ratio;  // NaN stays NaN
    const double shrinking = o.is_hugging_face() ? rate : o.lr();
    return {T((o.maximize() ? -rate : rate) / clip), T(1 - o.beta1().value_or(0)),
            T(std::fma(-shrinking, o.weight_decay(), 1.0))};
  }
};

}  // namespace leanopt::rules
LEANOPT_EXACT_END
