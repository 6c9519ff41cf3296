// How a rule or a format declares its options, with the standard library only. A class of fields
// takes the class that users name (`Self`, which the setters return) and what it extends
// (`Parent`). It has one macro line per field, and one per field in `all`, a list from which save,
// load, compare, print, range checks and inheritance are made, once for every class of options.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace leanopt {

/// The values that an option may have: low <= x < high, or low < x < high where `open`.
struct range {
  double low, high;
  bool open = false;
  bool contains(double x) const { return (open ? low < x : low <= x) && x < high; }
};
inline constexpr range any_value{-INFINITY, INFINITY};
inline constexpr range not_negative{0, INFINITY};
inline constexpr range positive{0, INFINITY, true};
inline constexpr range below_one{0, 1};

/// A field of an object of options: its name, its range and where its value is. The types are those
/// of the constructors.
class field {
 public:
  using pair = std::tuple<double, double>;
  using optional = std::optional<double>;
  using optional_pair = std::tuple<std::optional<double>, double>;
  enum class kind { real, integer, flag, optional, pair, optional_pair };

  field(const char* name, range r, double& v) : field(name, r, kind::real, &v) {}
  field(const char* name, range r, std::int64_t& v) : field(name, r, kind::integer, &v) {}
  field(const char* name, range r, bool& v) : field(name, r, kind::flag, &v) {}
  field(const char* name, range r, optional& v) : field(name, r, kind::optional, &v) {}
  field(const char* name, range r, pair& v) : field(name, r, kind::pair, &v) {}
  field(const char* name, range r, optional_pair& v) : field(name, r, kind::optional_pair, &v) {}

  const char* name;
  range allowed;
  kind type;
  void* value;

  template <class T>
  T& as() const {
    return *static_cast<T*>(value);
  }
  /// Calls f(value) with the value's own type.
  template <class F>
  auto visit(F f) const {
    switch (type) {
      case kind::real: return f(as<double>());
      case kind::integer: return f(as<std::int64_t>());
      case kind::flag: return f(as<bool>());
      case kind::optional: return f(as<optional>());
      case kind::pair: return f(as<pair>());
      case kind::optional_pair: break;
    }
    return f(as<optional_pair>());
  }

 private:
  field(const char* name_, range r, kind k, void* v) : name(name_), allowed(r), type(k), value(v) {}
};
using fields_list = std::vector<field>;

}  // namespace leanopt

/// A field with its own storage; ends like a data member: LEANOPT_OPTION(double, decay) = 0.8;
#define LEANOPT_OPTION(T, name)             \
 public:                                    \
  Self& name(const T& value) {              \
    name##_ = value;                        \
    return this->mark(&name##_);            \
  }                                         \
  const T& name() const { return name##_; } \
  T& name() { return name##_; }             \
                                            \
 private:                                   \
  T name##_

/// A field that `Parent`, LibTorch's class, holds already: the same setter, which returns Self and
/// not LibTorch's class.
#define LEANOPT_STOCK_OPTION(T, name)              \
 public:                                           \
  Self& name(const T& value) {                     \
    Parent::name() = value;                        \
    return this->mark(&Parent::name());            \
  }                                                \
  const T& name() const { return Parent::name(); } \
  T& name() { return Parent::name(); }
