// Options of every optimizer: fluent setters that return the class the user named, the virtual
// functions LibTorch calls, and one meaning of a group's options: a field that was set wins, one that
// was not inherits the optimizer's default. Set means that its setter was called, or that its value
// differs from the constructor's (it came through `o.betas() = ...` or through LibTorch's class).
//
// A class of options is one chain of single inheritance, from LibTorch's class to the one users name:
//   torch::optim::AdamWOptions <- settings <- rule's fields <- format's fields <- options<...>
// Each link names its fields once, in `each`; save, load, compare, print, range checks and
// inheritance are made from that.
#pragma once

#include <leanopt/core/option.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <ostream>
#include <string>

namespace leanopt {

/// LibTorch's classes of the same rule, where it has them.
template <class Rule>
struct stock {
  using options = torch::optim::OptimizerOptions;
  using state = void;
};
template <>
struct stock<rules::adam> {
  using options = torch::optim::AdamOptions;
  using state = torch::optim::AdamParamState;
};
template <>
struct stock<rules::adamw> {
  using options = torch::optim::AdamWOptions;
  using state = torch::optim::AdamWParamState;
};

inline std::ostream& operator<<(std::ostream& out, const range& r) {
  return out << (r.open ? '(' : '[') << r.low << ", " << r.high << ')';
}

namespace detail {

// What a field's type can do: be in a range, be printed, be an IValue. None of LibTorch's archives holds
// an unset optional; NaN, which is no value of any option, stands for it.
inline bool contains(const range& r, double v) { return r.contains(v); }
inline bool contains(const range& r, const std::optional<double>& v) {
  return !v || contains(r, *v);
}
template <class A, class B>
bool contains(const range& r, const std::tuple<A, B>& v) {
  return contains(r, std::get<0>(v)) && contains(r, std::get<1>(v));
}
inline void print(std::ostream& out, double v) { out << v; }
inline void print(std::ostream& out, const std::optional<double>& v) {
  v ? out << *v : out << "unset";
}
template <class A, class B>
void print(std::ostream& out, const std::tuple<A, B>& v) {
  print(out << '(', std::get<0>(v));
  print(out << ", ", std::get<1>(v));
  out << ')';
}
inline double plain_value(double v) { return v; }
inline std::int64_t plain_value(std::int64_t v) { return v; }
inline bool plain_value(bool v) { return v; }
inline double plain_value(const std::optional<double>& v) {
  return v.value_or(std::numeric_limits<double>::quiet_NaN());
}
template <class A, class B>
auto plain_value(const std::tuple<A, B>& v) {
  return std::make_tuple(plain_value(std::get<0>(v)), plain_value(std::get<1>(v)));
}
inline void set_plain(double& field, double v) { field = v; }
inline void set_plain(std::int64_t& field, std::int64_t v) { field = v; }
inline void set_plain(bool& field, bool v) { field = v; }
inline void set_plain(std::optional<double>& field, double v) {
  field = v == v ? std::optional<double>(v) : std::nullopt;
}
template <class A, class B, class C, class D>
void set_plain(std::tuple<A, B>& field, const std::tuple<C, D>& v) {
  set_plain(std::get<0>(field), std::get<0>(v));
  set_plain(std::get<1>(field), std::get<1>(v));
}

/// What all options share. `Self` is the class users name, `Stock` LibTorch's class, if it has one.
template <class Self, class Stock>
class settings : public Stock {
 public:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Self>(self());
  }
  double get_lr() const override { return self().lr(); }
  void set_lr(const double lr) override { self().lr(lr); }

  void serialize(torch::serialize::OutputArchive& archive) const override {
    visit([&](const char* name, const range&, auto& v) {
      archive.write(name, torch::IValue(plain_value(v)));
    }, self());
    archive.write(set_key, torch::IValue(std::int64_t(set_)));
  }
  /// A field that the archive lacks keeps its value: LibTorch's archives lack ours.
  void serialize(torch::serialize::InputArchive& archive) override {
    torch::IValue value;
    const bool ours = archive.try_read(set_key, value);
    const auto set = ours ? std::uint64_t(value.toInt()) : 0;
    std::uint64_t bit = 1;
    visit([&](const char* name, const range&, auto& v) {
      if (archive.try_read(name, value)) {
        set_plain(v, value.template to<decltype(plain_value(v))>());
        set_ |= bit;
      }
      bit <<= 1;
    }, self());
    if (ours) set_ = set;
    complete_ = true;
  }

  friend bool operator==(const Self& a, const Self& b) {
    bool equal = true;
    visit([&](const char*, const range&, auto& x, auto& y) { equal = equal && x == y; }, a, b);
    return equal;
  }
  friend bool operator!=(const Self& a, const Self& b) { return !(a == b); }
  friend std::ostream& operator<<(std::ostream& out, const Self& o) {
    const char* separator = "";
    visit([&](const char* name, const range&, auto& v) {
      print(out << separator << name << '=', v);
      separator = " ";
    }, o);
    return out;
  }

  /// Whether the user gave the field `wanted`.
  bool given(const std::string& wanted) const {
    const Self initial = self().initial();
    bool found = false;
    std::uint64_t bit = 1;
    visit([&](const char* name, const range&, auto& mine, auto& first) {
      if (wanted == name) found = (set_ & bit) || !(mine == first);
      bit <<= 1;
    }, self(), initial);
    return found;
  }

  /// @throws when a value is out of range or fields contradict each other; `where` begins the message.
  void check(const std::string& where, bool compressed) const {
    visit([&](const char* name, const range& r, auto& v) {
      if (contains(r, v)) return;
      std::ostringstream text;
      print(text << name << " = ", v);
      TORCH_CHECK(false, "leanopt: ", where, ": ", text.str(), " is outside ", r);
    }, self());
    const std::string clash = self().contradiction(
        [&](const char* name) { return given(name); }, compressed);
    TORCH_CHECK(clash.empty(), "leanopt: ", where, ": ", clash);
  }

  /// Fields that were not set take their value from `defaults`. A group that has inherited is
  /// complete, and stays so when it is copied into another optimizer.
  Self& inherit(const Self& defaults) {
    if (complete_) return self();
    const Self initial = self().initial();
    std::uint64_t bit = 1;
    visit([&](const char*, const range&, auto& mine, auto& theirs, auto& first) {
      if (!(set_ & bit) && mine == first) {
        mine = theirs;
        set_ |= defaults.set_ & bit;
      } else {
        set_ |= bit;
      }
      bit <<= 1;
    }, self(), defaults, initial);
    complete_ = true;
    return self();
  }
  /// As if no setter had been called: values from LibTorch's class only tell by being different.
  void forget() {
    set_ = 0;
    complete_ = false;
  }

  /// What an untouched object looks like, and what changes where moments are compressed.
  Self initial() const { return Self(); }
  void adapt_to_compression() {}

 protected:
  template <class T>
  Self& mark(const T& field) {
    std::uint64_t bit = 1;
    visit([&](const char*, const range&, auto& v) {
      if (static_cast<const void*>(&v) == static_cast<const void*>(&field)) set_ |= bit;
      bit <<= 1;
    }, self());
    return self();
  }

 private:
  static constexpr const char* set_key = "leanopt_set";
  template <class F, class... O>
  static void visit(F f, O&... o) {
    Self::each(f, o...);
  }
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  std::uint64_t set_ = 0;  ///< a bit per field, in the order of `each`
  bool complete_ = false;
};

template <class Self, class Rule, class Format>
using options_base = typename Format::template fields<
    Self, typename Rule::template fields<Self, settings<Self, typename stock<Rule>::options>>>;

}  // namespace detail

/// The options of optimizer<Rule, Format, Weights>.
template <class Rule, class Format, class Weights>
class options final
    : public detail::options_base<options<Rule, Format, Weights>, Rule, Format> {
 public:
  options() {
    if constexpr (Format::compressed) this->adapt_to_compression();
  }
  options(double lr) : options() { this->lr(lr); }
  /// From LibTorch's class of the same rule.
  template <class Stock,
            class = std::enable_if_t<std::is_same_v<Stock, typename stock<Rule>::options> &&
                                     !std::is_same_v<Stock, torch::optim::OptimizerOptions>>>
  options(const Stock& o) : options() {
    static_cast<Stock&>(*this) = o;
  }
};

namespace detail {
template <class Optimizer>
struct options_of {
  using type = typename Optimizer::Options;
};
template <>
struct options_of<torch::optim::Adagrad> {
  using type = torch::optim::AdagradOptions;
};
template <>
struct options_of<torch::optim::Adam> {
  using type = torch::optim::AdamOptions;
};
template <>
struct options_of<torch::optim::AdamW> {
  using type = torch::optim::AdamWOptions;
};
template <>
struct options_of<torch::optim::LBFGS> {
  using type = torch::optim::LBFGSOptions;
};
template <>
struct options_of<torch::optim::RMSprop> {
  using type = torch::optim::RMSpropOptions;
};
template <>
struct options_of<torch::optim::SGD> {
  using type = torch::optim::SGDOptions;
};
}  // namespace detail

/// The options of an optimizer of ours or of LibTorch's, so that one template takes both.
template <class Optimizer>
using options_of = typename detail::options_of<Optimizer>::type;

}  // namespace leanopt
