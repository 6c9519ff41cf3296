// Runs of the CPU kernels on made-up tensors, without LibTorch: what the tests of equal bits and
// the program that is compiled with many flags have in common. Inputs are bit patterns and
// coefficients come from the rules, so nothing here computes in floating point.
#pragma once

#include <leanopt/engine/cpu.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>
#include <leanopt/weights/plain.hpp>

#include "tests/support/patterns.hpp"
#include "tests/support/plain_options.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace kernel_runs {

using leanopt::cpu::level;
using leanopt::formats::full;
using leanopt::formats::log8;
using leanopt::rules::adafactor;
using leanopt::rules::adafactor_formula;
using leanopt::rules::adam_formula;
using leanopt::weights::plain;

template <class T>
inline constexpr leanopt::number number_of = sizeof(T) == 8 ? leanopt::number::float64
                                                            : leanopt::number::float32;

/// How a formula is run: its coefficients in a step, and its inputs if it has some.
template <class Formula, class T>
struct driver;

template <bool Amsgrad, class T>
struct driver<adam_formula<Amsgrad>, T> {
  driver(std::size_t, std::uint64_t) {}
  static auto coeffs(int step) {
    plain_options::adamw o;
    o.lr(0.01).weight_decay(0.1);
    return leanopt::rules::adamw::prepare<T>(o, step);
  }
  leanopt::no_inputs inputs() const { return {}; }
};

template <bool First_moment, class T>
struct driver<adafactor_formula<First_moment>, T> {
  static constexpr std::size_t columns = 37;  // rows end inside registers and blocks

  driver(std::size_t n, std::uint64_t seed) {
    patterns::source random(seed);
    for (std::size_t r = 0; r <= n / columns; ++r)
      row.push_back(random.positive<T>(patterns::kind::normal));
    for (std::size_t c = 0; c < columns; ++c)
      column.push_back(random.positive<T>(patterns::kind::normal));
  }
  static auto coeffs(int step) {
    plain_options::adafactor o;
    o.beta1(0.9).weight_decay(0.1);
    return adafactor::finish<T>(o, 0.0625, step);  // the second step on is clipped
  }
  auto inputs() const {
    leanopt::rules::inverse_roots<T> in;
    in.row = row.data();
    in.column = column.data();
    in.rows = row.size();
    in.columns = columns;
    in.limit = 1;
    return in;
  }
  std::vector<T> row, column;
};

/// The state of one tensor, apart from its parameter.
template <class Formula, class Format, class T>
struct state {
  static constexpr int count = Formula::slot_count, room = count ? count : 1;
  using stored = typename Format::template stored<T>;
  std::vector<stored> slots[room];
  std::vector<std::uint16_t> headers[room];

  explicit state(std::size_t n) {
    for (int k = 0; k < count; ++k) {
      slots[k].resize(n);
      if (Format::block) headers[k].resize(n / std::size_t(std::max(Format::block, 1)) + 1);
    }
  }
  void point(leanopt::cpu::tensor_step& t) {
    for (int k = 0; k < count; ++k) {
      t.slots[k] = slots[k].data();
      t.headers[k] = headers[k].data();
    }
  }
  void add_to(patterns::digest& d) const {
    for (int k = 0; k < count; ++k) {
      d.add(slots[k]);
      d.add(headers[k]);
    }
  }
};

/// Ranges of elements, in the order in which they are stepped; each begins at a multiple of 256.
using ranges = std::vector<std::pair<std::size_t, std::size_t>>;

/// One step of operands of any type and layout.
template <class Formula, class Format, class T>
void step(level l, int number, const leanopt::operand& p, const leanopt::operand& g, std::size_t n,
          const driver<Formula, T>& d, state<Formula, Format, T>& s, const ranges& parts) {
  leanopt::cpu::tensor_step t;
  t.p = p;
  t.g = g;
  t.elements = n;
  t.key = leanopt::random_key(1, std::uint64_t(number), n);
  s.point(t);
  const leanopt::cpu::float_environment guard;
  for (const auto& [first, last] : parts)
    leanopt::cpu::step<Formula, Format, T, plain>(l, t, d.coeffs(number), d.inputs(), first, last);
}

/// Some steps of a contiguous tensor of n elements; the digest of parameter, codes and headers.
template <class Formula, class Format, class T>
std::uint64_t run(level l, std::size_t n, patterns::kind kind, int steps, const ranges& parts) {
  patterns::source random(n * 31 + std::uint64_t(kind));
  std::vector<T> p = random.numbers<T>(n, patterns::kind::normal);
  const driver<Formula, T> d(n, n);
  state<Formula, Format, T> s(n);
  for (int i = 1; i <= steps; ++i) {
    std::vector<T> g = random.numbers<T>(n, kind);
    step<Formula, Format, T>(l, i, {p.data(), number_of<T>, {}}, {g.data(), number_of<T>, {}}, n, d,
                             s, parts);
  }
  patterns::digest result;
  result.add(p);
  s.add_to(result);
  return result.value();
}
template <class Formula, class Format, class T>
std::uint64_t run(level l, std::size_t n, patterns::kind kind, int steps) {
  return run<Formula, Format, T>(l, n, kind, steps, {{0, n}});
}

/// A parameter and gradients of 16 bits.
template <class Formula, class Format>
std::uint64_t run_16_bits(level l, std::size_t n, leanopt::number type, int steps) {
  patterns::source random(n);
  std::vector<std::uint16_t> p(n), g(n);
  const auto fill = [&](std::vector<std::uint16_t>& x) {
    for (auto& one : x) {
      const auto word = std::uint16_t(random.word());
      // The exponents 0 to 7/8 of the largest: subnormal numbers too, neither Inf nor NaN.
      const bool is_bfloat16 = type == leanopt::number::bfloat16;
      const std::uint16_t exponent = is_bfloat16 ? 0x7f80 : 0x7c00;
      one = std::uint16_t((word & ~exponent) | (is_bfloat16 ? 0x3f80 - (random.below(16) << 7)
                                                            : random.below(26) << 10));
    }
  };
  fill(p);
  const driver<Formula, float> d(n, n);
  state<Formula, Format, float> s(n);
  for (int i = 1; i <= steps; ++i) {
    fill(g);
    step<Formula, Format, float>(l, i, {p.data(), type, {}}, {g.data(), type, {}}, n, d, s,
                                 {{0, n}});
  }
  patterns::digest result;
  result.add(p);
  s.add_to(result);
  return result.value();
}

// ---- tensor rules -------------------------------------------------------------------------------

struct matrices {
  std::size_t batch, rows, columns;
  bool vector = false;
};

/// Work units on one thread, in order or in reverse, one by one.
struct in_order {
  template <class F>
  void operator()(std::size_t count, F f) const {
    if (count) f(std::size_t(0), count);
  }
};
struct in_reverse {
  template <class F>
  void operator()(std::size_t count, F f) const {
    for (std::size_t i = count; i-- > 0;) f(i, i + 1);
  }
};

/// Some whole steps of Adafactor; the digest of parameter, moments and factors.
template <class Format, class T, class For = in_order>
std::uint64_t run_adafactor(level l, const matrices& m, bool hugging_face, patterns::kind kind,
                            int steps, For for_units = {}) {
  using formula = adafactor_formula<true>;
  using passes_of = leanopt::cpu::matrix_passes<adafactor, T, plain>;
  const std::size_t n = m.batch * m.rows * m.columns;
  plain_options::adafactor o;
  if (hugging_face) o = plain_options::adafactor::hugging_face();
  o.beta1(0.9).weight_decay(0.1);
  patterns::source random(n * 7 + m.columns);
  std::vector<T> p = random.numbers<T>(n, patterns::kind::normal);
  std::vector<T> row(m.batch * m.rows), column(m.batch * m.columns), variance(m.vector ? n : 0);
  state<formula, Format, T> s(n);
  patterns::digest result;
  for (int i = 1; i <= steps; ++i) {
    std::vector<T> g = random.numbers<T>(n, kind);
    leanopt::cpu::matrix_step t;
    t.p = {p.data(), number_of<T>, {}};
    t.g = {g.data(), number_of<T>, {}};
    t.elements = n;
    t.key = leanopt::random_key(1, std::uint64_t(i), n);
    s.point(t);
    t.batch = m.batch;
    t.rows = m.rows;
    t.columns = m.columns;
    if (m.vector) {
      t.variance = variance.data();
    } else {
      t.row = row.data();
      t.column = column.data();
    }
    std::vector<double> scratch(passes_of::scratch_bytes(t) / sizeof(double) + 1);
    passes_of passes(l, t, adafactor::prepare<T>(o, i, std::numeric_limits<T>::epsilon()),
                     reinterpret_cast<char*>(scratch.data()));
    const double rms = passes.root_mean_square_of_parameter(for_units);
    passes.track(for_units);
    const double rms_of_update = passes.root_mean_square_of_update(for_units);
    const auto c = adafactor::finish<T>(o, adafactor::rate(o, i, rms), rms_of_update);
    passes.template apply<formula, Format>(c, for_units);
    result.add(&rms, 1);
    result.add(&rms_of_update, 1);
  }
  result.add(p);
  result.add(row);
  result.add(column);
  result.add(variance);
  s.add_to(result);
  return result.value();
}

}  // namespace kernel_runs
