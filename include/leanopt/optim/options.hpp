// Options of every optimizer: fluent setters that return the class the user named, the virtual
// functions LibTorch calls, and one meaning of a group's options: a field that was set wins, one
// that was not inherits the optimizer's default. Set means that its setter was called, or that its
// value differs from the constructor's (it came through `o.betas() = ...` or through LibTorch's
// class).
//
// A class of options is one chain of single inheritance, from LibTorch's class to the one users
// name:
//   torch::optim::AdamWOptions <- settings <- rule's fields <- storage's fields <- options<...>
// Each link names its fields once, in `all`; save, load, compare, print, range checks and
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

#include <limits>
#include <ostream>
#include <sstream>
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

// ---- what can be done with a list of fields, whatever class it is of ---------------------------

inline bool contains(const range& r, double v) { return r.contains(v); }
inline bool contains(const range& r, nonfinite v) { return r.contains(double(v)); }
inline bool contains(const range& r, const std::optional<double>& v) {
  return !v || r.contains(*v);
}
template <class A, class B>
bool contains(const range& r, const std::tuple<A, B>& v) {
  return contains(r, std::get<0>(v)) && contains(r, std::get<1>(v));
}
inline void print(std::ostream& out, double v) { out << v; }
inline void print(std::ostream& out, nonfinite v) {
  out << (v == nonfinite::propagate      ? "propagate"
          : v == nonfinite::skip_element ? "skip_element"
          : v == nonfinite::skip_step    ? "skip_step"
                                         : "unknown");
}
inline void print(std::ostream& out, const std::optional<double>& v) {
  v ? out << *v : out << "unset";
}
template <class A, class B>
void print(std::ostream& out, const std::tuple<A, B>& v) {
  print(out << '(', std::get<0>(v));
  print(out << ", ", std::get<1>(v));
  out << ')';
}

inline std::ostream& operator<<(std::ostream& out, const field& f) {
  out << f.name << '=';
  f.visit([&](const auto& v) { print(out, v); });
  return out;
}
inline bool equal(const field& a, const field& b) {
  return a.visit([&](const auto& v) { return v == b.as<std::decay_t<decltype(v)>>(); });
}
inline void copy(const field& from, const field& to) {
  from.visit([&](const auto& v) { to.as<std::decay_t<decltype(v)>>() = v; });
}

// LibTorch's archives hold no unset optional; NaN, which is no value of any option, stands for it.
inline double number_of(const std::optional<double>& v) {
  return v.value_or(std::numeric_limits<double>::quiet_NaN());
}
inline std::optional<double> optional_of(double v) {  // by bits: under -ffast-math no v is NaN
  const bool is_nan = (bit_cast<std::uint64_t>(v) & ~(1ull << 63)) > 0x7ff0000000000000ull;
  return is_nan ? std::nullopt : std::optional<double>(v);
}
inline void write(torch::serialize::OutputArchive& archive, const fields_list& fields) {
  for (const field& f : fields) {
    torch::IValue value;
    switch (f.type) {
      case field::kind::real: value = f.as<double>(); break;
      case field::kind::integer: value = f.as<std::int64_t>(); break;
      case field::kind::flag: value = f.as<bool>(); break;
      case field::kind::choice: value = std::int64_t(f.as<nonfinite>()); break;
      case field::kind::optional: value = number_of(f.as<field::optional>()); break;
      case field::kind::pair: value = f.as<field::pair>(); break;
      case field::kind::optional_pair: {
        const auto& [first, second] = f.as<field::optional_pair>();
        value = std::make_tuple(number_of(first), second);
      }
    }
    archive.write(f.name, value);
  }
}
/// Returns a bit per field that the archive has; the others keep their values.
inline std::uint64_t read(torch::serialize::InputArchive& archive, const fields_list& fields) {
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const field& f = fields[i];
    torch::IValue value;
    if (!archive.try_read(f.name, value)) continue;
    found |= std::uint64_t(1) << i;
    switch (f.type) {
      case field::kind::real: f.as<double>() = value.toDouble(); break;
      case field::kind::integer: f.as<std::int64_t>() = value.toInt(); break;
      case field::kind::flag: f.as<bool>() = value.toBool(); break;
      case field::kind::choice: f.as<nonfinite>() = nonfinite(value.toInt()); break;
      case field::kind::optional: f.as<field::optional>() = optional_of(value.toDouble()); break;
      case field::kind::pair: f.as<field::pair>() = value.to<field::pair>(); break;
      case field::kind::optional_pair: {
        const auto [first, second] = value.to<field::pair>();
        f.as<field::optional_pair>() = {optional_of(first), second};
      }
    }
  }
  return found;
}
inline void check(const fields_list& fields, const std::string& where) {
  for (const field& f : fields) {
    if (f.visit([&](const auto& v) { return contains(f.allowed, v); })) continue;
    std::ostringstream text;
    text << f;
    TORCH_CHECK(false, "leanopt: ", where, ": ", text.str(), " is outside ", f.allowed);
  }
}
/// The position of the field that `wanted` finds, as a bit; 0 where there is none.
template <class Wanted>
std::uint64_t bit_of(const fields_list& fields, Wanted wanted) {
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (wanted(fields[i])) return std::uint64_t(1) << i;
  return 0;
}
/// A bit per field that was set: its setter was called, or its value is not the initial one.
inline std::uint64_t set_bits(const fields_list& fields, const fields_list& initial,
                              std::uint64_t marked) {
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (!equal(fields[i], initial[i])) marked |= std::uint64_t(1) << i;
  return marked;
}
/// Fields whose bit is off take their value from `defaults`.
inline void inherit(const fields_list& fields, const fields_list& defaults, std::uint64_t set) {
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (!(set >> i & 1)) copy(defaults[i], fields[i]);
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
    write(archive, all_of(self()));
    archive.write(set_key, torch::IValue(std::int64_t(set_)));
  }
  /// A field that the archive lacks keeps its value: LibTorch's archives lack ours.
  void serialize(torch::serialize::InputArchive& archive) override {
    set_ |= read(archive, all_of(self()));
    torch::IValue value;
    if (archive.try_read(set_key, value)) set_ = std::uint64_t(value.toInt());
    complete_ = true;
  }

  /// A bit per field that differs, in the order of `all`, in which the rate is first.
  friend std::uint64_t differences(const Self& a, const Self& b) {
    return set_bits(all_of(a), all_of(b), 0);
  }
  friend bool operator==(const Self& a, const Self& b) { return differences(a, b) == 0; }
  friend bool operator!=(const Self& a, const Self& b) { return !(a == b); }
  friend std::ostream& operator<<(std::ostream& out, const Self& o) {
    const char* separator = "";
    for (const field& f : all_of(o)) {
      out << separator << f;
      separator = " ";
    }
    return out;
  }

  /// Whether the user gave the field `name`.
  bool given(const std::string& name) const {
    const Self initial = self().initial();
    const auto fields = all_of(self());
    return (set_bits(fields, all_of(initial), set_) &
            bit_of(fields, [&](const field& f) { return name == f.name; })) != 0;
  }

  /// @throws when a value is out of range or fields contradict each other; `where` begins the
  /// message.
  void check(const std::string& where, bool compressed) const {
    detail::check(all_of(self()), where);
    const std::string clash =
        self().contradiction([&](const char* name) { return given(name); }, compressed);
    TORCH_CHECK(clash.empty(), "leanopt: ", where, ": ", clash);
  }

  /// Fields that were not set take their value from `defaults`. A group that has inherited is
  /// complete, and stays so when it is copied into another optimizer.
  Self& inherit(const Self& defaults) {
    if (complete_) return self();
    const Self initial = self().initial();
    set_ = set_bits(all_of(self()), all_of(initial), set_);
    detail::inherit(all_of(self()), all_of(defaults), set_);
    set_ |= defaults.set_;
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
  Self& mark(const void* value) {
    set_ |= bit_of(all_of(self()), [&](const field& f) { return f.value == value; });
    return self();
  }

 private:
  static constexpr const char* set_key = "leanopt_set";
  /// The list is the same for reading and writing, so that each class has one.
  static fields_list all_of(const Self& o) { return const_cast<Self&>(o).all(); }
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  std::uint64_t set_ = 0;  ///< a bit per field, in the order of `all`
  bool complete_ = false;
};

// ---- what the storage adds to a rule's fields ---------------------------------------------------

/// How many elements a tensor has at least whose moments are compressed.
template <class Self, class Parent>
class threshold_fields : public Parent {
  LEANOPT_OPTION(std::int64_t, min_compressed_elements) = 4096;

 public:
  fields_list all() {
    fields_list list = Parent::all();
    list.add({"min_compressed_elements", not_negative, min_compressed_elements_});
    return list;
  }
};
/// The seed of the random bits with which moments or weights are rounded.
template <class Self, class Parent>
class seed_fields : public Parent {
  LEANOPT_OPTION(std::int64_t, seed) = 0;

 public:
  fields_list all() {
    fields_list list = Parent::all();
    list.add({"seed", any_value, seed_});
    return list;
  }
};
/// What a step does about gradients that are not finite.
template <class Self, class Parent>
class nonfinite_fields : public Parent {
  LEANOPT_OPTION(leanopt::nonfinite, nonfinite) = leanopt::nonfinite::propagate;

 public:
  fields_list all() {
    fields_list list = Parent::all();
    list.add({"nonfinite", range{0, 3, false}, nonfinite_});
    return list;
  }
};

template <class Self, class Rule>
using rule_fields =
    typename Rule::template fields<Self, settings<Self, typename stock<Rule>::options>>;
template <class Self, class Rule, class Format>
using format_fields =
    std::conditional_t<Format::compressed, threshold_fields<Self, rule_fields<Self, Rule>>,
                       rule_fields<Self, Rule>>;
template <class Self, class Rule, class Format, class Weights>
using options_base =
    nonfinite_fields<Self, std::conditional_t<Format::random || Weights::random,
                                              seed_fields<Self, format_fields<Self, Rule, Format>>,
                                              format_fields<Self, Rule, Format>>>;

}  // namespace detail

/// The options of optimizer<Rule, Format, Weights>.
template <class Rule, class Format, class Weights>
class options final
    : public detail::options_base<options<Rule, Format, Weights>, Rule, Format, Weights> {
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
