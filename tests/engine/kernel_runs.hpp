// Steps of the CPU engine on made-up tensors, without LibTorch: what the batteries over all pairs,
// the tests of equal bits and the program that is compiled with many flags have in common. Inputs
// are bit patterns and coefficients come from the rules, so nothing here computes in floating
// point.
#pragma once

#include <leanopt/engine/cpu.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>

#include "tests/support/patterns.hpp"
#include "tests/support/plain_options.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace kernel_runs {

using leanopt::number;
using leanopt::cpu::level;

// ---- numbers in memory --------------------------------------------------------------------------

constexpr std::uint64_t infinity_of(number type) {
  return type == number::float64    ? 0x7ff0000000000000u
         : type == number::float32  ? 0x7f800000u
         : type == number::bfloat16 ? 0x7f80u
                                    : 0x7c00u;
}

/// Numbers of any type, or integers, by their bits.
class array {
 public:
  array() = default;
  array(const char* name, std::size_t n, std::size_t width, std::uint64_t infinity = 0)
      : name_(name), width_(width), infinity_(infinity), memory_(n * width) {}
  array(const char* name, std::size_t n, number type)
      : array(name, n, leanopt::bytes_of(type), infinity_of(type)) {}

  const char* name() const { return name_; }
  std::size_t width() const { return width_; }
  std::size_t size() const { return width_ ? memory_.size() / width_ : 0; }
  template <class T = void>
  T* data() {
    return reinterpret_cast<T*>(memory_.data());
  }
  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(memory_.data());
  }
  std::uint64_t operator[](std::size_t i) const {
    std::uint64_t x = 0;
    std::memcpy(&x, memory_.data() + i * width_, width_);
    return x;
  }
  void set(std::size_t i, std::uint64_t x) { std::memcpy(memory_.data() + i * width_, &x, width_); }

  /// The bits that are compared: the sign and the payload of NaN are no part of any promise.
  std::uint64_t comparable(std::size_t i) const {
    const std::uint64_t x = (*this)[i], sign = std::uint64_t(1) << (8 * width_ - 1);
    return infinity_ && (x & ~sign) > infinity_ ? infinity_ + 1 : x;
  }

 private:
  const char* name_ = "";
  std::size_t width_ = 0;
  std::uint64_t infinity_ = 0;  ///< its bits, of numbers that have one
  std::vector<unsigned char> memory_;
};

/// A number of a type and a kind, as bits.
inline std::uint64_t number_of(number type, patterns::kind kind, patterns::source& random) {
  if (type == number::float64) return patterns::cast<std::uint64_t>(random.number<double>(kind));
  const auto x = patterns::cast<std::uint32_t>(random.number<float>(kind));
  if (type == number::float32) return x;
  if (type == number::bfloat16) return x >> 16;
  const std::uint32_t exponent = x >> 23 & 0xff;  // float16 has fewer of them
  return (x >> 16 & 0x8000u) | (x >> 13 & 0x3ffu) | (exponent == 0xff ? 0x1f : exponent % 16) << 10;
}

/// The order in which a tensor's numbers stand in memory, with gaps: sizes and strides in elements,
/// outermost first.
struct layout {
  std::vector<std::int64_t> sizes, strides;
  std::size_t room;  ///< elements that its memory spans

  std::size_t offset(std::size_t i) const {
    std::size_t at = 0;
    for (std::size_t d = sizes.size(); d-- > 0; i /= std::size_t(sizes[d]))
      at += i % std::size_t(sizes[d]) * std::size_t(strides[d]);
    return at;
  }
  leanopt::strided shape() const { return {int(sizes.size()), sizes.data(), strides.data()}; }
};

// ---- tensors ------------------------------------------------------------------------------------

/// A batch of matrices, or a vector.
struct shape {
  std::size_t batch, rows, columns;
  bool is_vector = false;
  std::size_t elements() const { return batch * rows * columns; }
  std::string text() const {
    std::ostringstream s;
    s << batch << 'x' << rows << 'x' << columns << (is_vector ? ", a vector" : "");
    return s.str();
  }
};

/// A parameter with its gradient and its state.
struct tensor {
  kernel_runs::shape shape;
  number type = number::float32;  ///< of parameter and gradient
  const layout *p_layout = nullptr, *g_layout = nullptr;
  array p, residual, g, slots[3], headers[3], row, column, variance;
  double factor = 1;   ///< of the gradients
  bool skips = false;  ///< nonfinite::skip_element
  std::int64_t skipped = 0;

  std::size_t elements() const { return shape.elements(); }
  std::size_t p_at(std::size_t i) const { return p_layout ? p_layout->offset(i) : i; }
  std::size_t g_at(std::size_t i) const { return g_layout ? g_layout->offset(i) : i; }
  /// f(array) for the state.
  template <class F>
  void each_state(F f) const {
    f(residual);
    for (const array& x : slots) f(x);
    for (const array& x : headers) f(x);
    f(row);
    f(column);
    f(variance);
  }
  void set_gradient(patterns::kind kind, patterns::source& random) {
    for (std::size_t i = 0; i < g.size(); ++i) g.set(i, number_of(type, kind, random));
  }
  /// The same numbers one after the other.
  tensor as_run() const {
    tensor t = *this;
    t.p_layout = t.g_layout = nullptr;
    t.p = array(p.name(), elements(), type);
    t.g = array(g.name(), elements(), type);
    for (std::size_t i = 0; i < elements(); ++i) {
      t.p.set(i, p[p_at(i)]);
      t.g.set(i, g[g_at(i)]);
    }
    return t;
  }
};

/// Where two tensors differ first, or nothing. Gaps between the numbers of a parameter count for
/// nothing.
inline std::string difference(const tensor& a, const tensor& b) {
  std::ostringstream s;
  s << std::hex;
  for (std::size_t i = 0; i < a.elements(); ++i) {
    const std::uint64_t x = a.p.comparable(a.p_at(i)), y = b.p.comparable(b.p_at(i));
    if (x == y) continue;
    s << "p[" << std::dec << i << std::hex << "] is " << x << " and " << y;
    return s.str();
  }
  std::vector<const array*> others;
  b.each_state([&](const array& x) { others.push_back(&x); });
  std::size_t k = 0;
  a.each_state([&](const array& x) {
    const array& other = *others[k++];
    for (std::size_t i = 0; i < x.size() && s.tellp() == 0; ++i)
      if (x.comparable(i) != other.comparable(i))
        s << x.name() << '[' << std::dec << i << std::hex << "] is " << x.comparable(i) << " and "
          << other.comparable(i);
  });
  if (s.tellp() == 0 && a.skipped != b.skipped)
    s << std::dec << a.skipped << " elements were skipped, and " << b.skipped;
  return s.str();
}

inline std::uint64_t digest_of(const tensor& t) {
  patterns::digest all;
  const auto add = [&](const array& x) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::uint64_t bits = x.comparable(i);
      all.add(&bits, 1);
    }
  };
  add(t.p);
  t.each_state(add);
  return all.value();
}

// ---- steps --------------------------------------------------------------------------------------

/// A rule with options under which every term of the short or the long one of its formulas counts.
template <class Rule, bool Long>
struct way {
  using rule = Rule;
  using formula = typename Rule::template formula<Long>;
  static std::string name() { return std::string(Rule::name) + (Long ? "_long" : ""); }
  static plain_options::of<Rule> options() {
    plain_options::of<Rule> o;
    o.lr(0.01).weight_decay(0.1);
    return o;
  }
};
template <bool Decoupled>
struct way<leanopt::rules::adam_rule<Decoupled>, true> {
  using rule = leanopt::rules::adam_rule<Decoupled>;
  using formula = typename rule::template formula<true>;
  static std::string name() { return std::string(rule::name) + "_amsgrad"; }
  static plain_options::of<rule> options() {
    return plain_options::of<rule>(way<rule, false>::options()).amsgrad(true);
  }
};
/// The short formula in torch.optim's form, the long one in Hugging Face's.
template <>
struct way<leanopt::rules::adafactor, true> {
  using rule = leanopt::rules::adafactor;
  using formula = rule::formula<true>;
  static std::string name() { return "adafactor_hugging_face"; }
  static plain_options::of<rule> options() {
    return plain_options::of<rule>::hugging_face().beta1(0.9).weight_decay(0.1);
  }
};
/// The formula that goes with a format. A compressed one takes the short formula of an elementwise
/// rule, and the long one of a tensor rule, which else has nothing to compress.
template <class Rule>
using compressed_way = way<Rule, !Rule::elementwise>;

/// A tensor with random numbers in its parameter and its residual bits, and fresh state.
template <class Formula, class Format, class Weights>
tensor fresh(number type, const shape& s, patterns::source& random,
             const layout* p_layout = nullptr, const layout* g_layout = nullptr) {
  tensor t;
  t.shape = s;
  t.type = type;
  t.p_layout = p_layout;
  t.g_layout = g_layout;
  const std::size_t n = s.elements();
  t.p = array("p", p_layout ? p_layout->room : n, type);
  t.g = array("g", g_layout ? g_layout->room : n, type);
  for (std::size_t i = 0; i < t.p.size(); ++i)
    t.p.set(i, number_of(type, patterns::kind::normal, random));
  using residual = typename Weights::residual;
  if constexpr (!std::is_void_v<residual>)
    if (type == number::bfloat16) {
      t.residual = array("residual", n, sizeof(residual));
      for (std::size_t i = 0; i < n; ++i) t.residual.set(i, random.word());
    }
  const number wide = type == number::float64 ? number::float64 : number::float32;
  for (int k = 0; k < Formula::slot_count; ++k) {
    const char* name = Formula::slots[k].name;
    if constexpr (Format::block == 0)
      t.slots[k] = array(name, n, wide);
    else if constexpr (sizeof(typename Format::template stored<float>) == 2)
      t.slots[k] = array(name, n, number::bfloat16);
    else
      t.slots[k] = array(name, n, 1);
    if constexpr (!std::is_void_v<typename Format::header>)
      t.headers[k] =
          array("header", (n + Format::block - 1) / Format::block, sizeof(typename Format::header));
  }
  t.row = array("row_var", s.is_vector ? 0 : s.batch * s.rows, wide);
  t.column = array("col_var", s.is_vector ? 0 : s.batch * s.columns, wide);
  t.variance = array("variance", s.is_vector ? n : 0, wide);
  return t;
}

/// Whether a step is done as a whole, or in its smallest parts from the last to the first.
enum class cut { whole, parts };

struct unit_loop {
  cut how;
  template <class F>
  void operator()(std::size_t count, F f) const {
    if (how == cut::whole && count) f(std::size_t(0), count);
    if (how == cut::parts)
      for (std::size_t i = count; i-- > 0;) f(i, i + 1);
  }
};

/// The raw work of a step.
inline leanopt::cpu::matrix_step work_of(tensor& x, int step_number) {
  leanopt::cpu::matrix_step t;
  t.p = {x.p.data(), x.type, {}, x.residual.data()};
  t.g = {x.g.data(), x.type, {}, nullptr, x.factor};
  if (x.p_layout) t.p.shape = x.p_layout->shape();
  if (x.g_layout) t.g.shape = x.g_layout->shape();
  for (int k = 0; k < 3; ++k) {
    t.slots[k] = x.slots[k].data();
    t.headers[k] = x.headers[k].data();
  }
  t.elements = x.elements();
  t.key = leanopt::random_key(1, std::uint64_t(step_number), t.elements);
  t.skipped = x.skips ? &x.skipped : nullptr;
  t.batch = x.shape.batch;
  t.rows = x.shape.rows;
  t.columns = x.shape.columns;
  if (x.shape.is_vector) {
    t.variance = x.variance.data();
  } else {
    t.row = x.row.data();
    t.column = x.column.data();
  }
  return t;
}

/// The distance of 1 from the next number.
constexpr double epsilon_of(number type) {
  return type == number::float64    ? 0x1p-52
         : type == number::float32  ? 0x1p-23
         : type == number::bfloat16 ? 0x1p-7
                                    : 0x1p-10;
}
/// The passes of a tensor rule up to the last one, for which last(passes, coefficients) is called.
template <class Rule, class Weights, class T, class F>
void passes_of(level l, const plain_options::of<Rule>& o, int step_number, double epsilon,
               tensor& x, cut how, F last) {
  using passes_t = leanopt::cpu::matrix_passes<Rule, T, Weights>;
  const leanopt::cpu::matrix_step t = work_of(x, step_number);
  std::vector<double> scratch(passes_t::scratch_bytes(t) / sizeof(double) + 1);
  passes_t passes(l, t, Rule::template prepare<T>(o, step_number, epsilon),
                  reinterpret_cast<char*>(scratch.data()));
  const unit_loop for_units{how};
  passes.track(for_units);
  const auto rms = passes.root_mean_squares(for_units);
  const double rate = Rule::rate(o, step_number, rms.parameter);
  last(passes, Rule::template finish<T>(o, rate, rms.update));
}

/// One step of a tensor whose type is computed in T; `step_number` counts from 1.
template <class Way, class Format, class Weights, class T>
void step_in(level l, const plain_options::of<typename Way::rule>& o, int step_number, tensor& x,
             cut how) {
  using rule = typename Way::rule;
  using formula = typename Way::formula;
  if constexpr (rule::elementwise) {
    const leanopt::cpu::float_environment guard;
    const leanopt::cpu::tensor_step t = work_of(x, step_number);
    const auto c = rule::template prepare<T>(o, step_number);
    const std::size_t part = how == cut::whole ? t.elements : leanopt::cpu::stage;
    const std::size_t last = (t.elements - 1) / part * part;
    for (std::size_t first = last;; first -= part) {
      leanopt::cpu::step<formula, Format, T, Weights>(l, t, c, {}, first,
                                                      std::min(t.elements, first + part));
      if (first == 0) break;
    }
  } else {
    passes_of<rule, Weights, T>(l, o, step_number, epsilon_of(x.type), x, how,
                                [&](auto& passes, const auto& c) {
                                  passes.template apply<formula, Format>(c, unit_loop{how});
                                });
  }
}
template <class Way, class Format, class Weights>
void step(level l, const plain_options::of<typename Way::rule>& o, int step_number, tensor& x,
          cut how = cut::whole) {
  x.type == number::float64 ? step_in<Way, Format, Weights, double>(l, o, step_number, x, how)
                            : step_in<Way, Format, Weights, float>(l, o, step_number, x, how);
}

/// The digest of some steps of a tensor whose type is computed in T.
template <class Way, class Format, class Weights, class T>
std::uint64_t run(level l, number type, const shape& s, patterns::kind kind, int steps,
                  cut how = cut::whole) {
  patterns::source random(s.elements() * 31 + s.columns + std::uint64_t(kind));
  tensor t = fresh<typename Way::formula, Format, Weights>(type, s, random);
  const auto o = Way::options();
  for (int i = 1; i <= steps; ++i) {
    t.set_gradient(kind, random);
    step_in<Way, Format, Weights, T>(l, o, i, t, how);
  }
  return digest_of(t);
}

}  // namespace kernel_runs
