// Powers with the same bits on every host and device, which std::pow does not promise: rounded from
// sums of two doubles (Dekker 1971), that is from twice the precision.
#pragma once

#include <leanopt/core/lane.hpp>

#include <cmath>
#include <cstdint>

LEANOPT_EXACT_BEGIN
namespace leanopt {
namespace detail {

/// high + low, |low| at most half a unit in the last place of high.
struct twofold {
  using number = scalar<double>;
  number high, low;

  /// a + b. @pre |a| >= |b|, or a is 0.
  LEANOPT_HD static twofold of(const number& a, const number& b) {
    const number sum = a + b;
    return {sum, b - (sum - a)};
  }
  LEANOPT_HD friend twofold operator+(const twofold& a, const twofold& b) {
    const number sum = a.high + b.high, of_b = sum - a.high;
    const number error = (a.high - (sum - of_b)) + (b.high - of_b);
    return of(sum, error + (a.low + b.low));
  }
  LEANOPT_HD friend twofold operator*(const twofold& a, const twofold& b) {
    const number p = a.high * b.high;
    return of(p, fma(a.high, b.high, -p) + (a.high * b.low + a.low * b.high));
  }
  LEANOPT_HD friend twofold operator/(const twofold& a, const twofold& b) {
    const number q = divide(a.high, b.high);
    const number rest = fma(-q, b.high, a.high) + (a.low - q * b.low);
    return of(q, divide(rest, b.high));
  }
};
LEANOPT_HD twofold exactly(double x) { return {x, 0.0}; }
LEANOPT_HD twofold log_of_2() { return {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56}; }

/// The sum of x^k / c(k) for k = 0 ... last: from k = `exact` on in double, being small enough.
template <class C>
LEANOPT_HD twofold series(const twofold& x, int last, int exact, C c) {
  using number = twofold::number;
  number tail = 0.0;
  LEANOPT_UNROLL
  for (int k = last; k >= exact; --k) tail = fma(tail, x.high, divide(number(1), number(c(k))));
  twofold sum = exactly(tail.v);
  LEANOPT_UNROLL
  for (int k = exact - 1; k >= 0; --k) sum = sum * x + exactly(1) / exactly(c(k));
  return sum;
}

/// log(x), off by 2^-72 of it. @pre x is positive and normal.
LEANOPT_HD_CALL inline twofold logarithm(double x) {
  constexpr std::uint64_t root_of_half = 0x3fe6a09e667f3bcd;
  const auto word = bit_cast<std::uint64_t>(x);
  const std::int64_t exponent = (std::int64_t(word) - std::int64_t(root_of_half)) >> 52;
  const double m = bit_cast<double>(word - (std::uint64_t(exponent) << 52));
  // log((1 + s) / (1 - s)) = 2 s (1 + s^2/3 + s^4/5 + ...)
  const twofold s = (exactly(m) + exactly(-1)) / (exactly(m) + exactly(1));
  const twofold sum = series(s * s, 13, 3, [](int k) { return 2.0 * k + 1; });
  return exactly(double(exponent)) * log_of_2() + exactly(2) * s * sum;
}

/// e^x for |x| < 0.35, off by 2^-62 of it.
LEANOPT_HD_CALL inline twofold exponential(const twofold& x) {
  return series(x, 16, 4, [](int k) {
    double factorial = 1;
    LEANOPT_UNROLL
    for (int i = 2; i <= k; ++i) factorial *= i;
    return factorial;
  });
}
LEANOPT_HD double power_of_2(std::int64_t n) {
  return bit_cast<double>(std::uint64_t(1023 + n) << 52);
}

}  // namespace detail

/// x^n by squaring, n >= 0: within an ulp of the true power.
LEANOPT_HD_CALL inline double power(double x, std::int64_t n) {
  detail::twofold result = detail::exactly(1), factor = detail::exactly(x);
  for (; n; n >>= 1, factor = factor * factor)
    if (n & 1) result = result * factor;
  return result.high.v;
}

/// x^y, off by at most 0.501 ulp where it is a normal number. @pre x is positive and normal.
LEANOPT_HD_CALL inline double real_power(double x, double y) {
  using namespace detail;
  using number = scalar<double>;
  if (x == 1 || y == 0) return 1;
  const twofold log_of_x = logarithm(x);
  const double about = (number(y) * log_of_x.high).v;
  if (!(about > -746 && about < 710)) return about < 0 ? 0 : about > 0 ? INFINITY : about;
  const twofold z = exactly(y) * log_of_x;
  const number half = about < 0 ? -0.5 : 0.5;
  const auto n = std::int64_t((z.high * number(0x1.71547652b82fep0) + half).v);  // of log2
  const twofold rest = z + exactly(double(-n)) * log_of_2();
  const number m = exponential(rest).high;
  return (m * number(power_of_2(n / 2)) * number(power_of_2(n - n / 2))).v;
}

}  // namespace leanopt
LEANOPT_EXACT_END
