// How a rule or a format declares its options, with the standard library only. A class of fields
// takes the class that users name (`Self`, which the setters return) and what it extends
// (`Parent`). It has one macro line per field, and one per field in `all`, a list from which save,
// load, compare, print, range checks and inheritance are made, once for every class of options.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>

namespace leanopt {

/// What a step does about an element of a gradient that is not finite, or whose square is not.
enum class nonfinite : std::int64_t {
  propagate,     ///< its parameter becomes as visibly wrong as in LibTorch's classes
  skip_element,  ///< its parameter and its moments stay as they are
  skip_step,     ///< nothing changes, no step is counted
};

/// The values that an option may have: low <= x < high, or low < x < high where `open`.
struct range {
  double low, high;
  bool open;
  bool contains(double x) const { return (open ? low < x : low <= x) && x < high; }
};
inline constexpr range any_value{-INFINITY, INFINITY, false};
inline constexpr range not_negative{0, INFINITY, false};
inline constexpr range positive{0, INFINITY, true};
inline constexpr range below_one{0, 1, false};

/// A field of an object of options: its name, its range and where its value is. The types are those
/// of the constructors.
class field {
 public:
  using pair = std::tuple<double, double>;
  using optional = std::optional<double>;
  using optional_pair = std::tuple<std::optional<double>, double>;
  enum class kind { real, integer, flag, choice, optional, pair, optional_pair };

  field() = default;  // without values: each step makes lists, which begin with `most` of them
  field(const char* name, range r, double& v) : field(name, r, kind::real, &v) {}
  field(const char* name, range r, std::int64_t& v) : field(name, r, kind::integer, &v) {}
  field(const char* name, range r, bool& v) : field(name, r, kind::flag, &v) {}
  field(const char* name, range r, nonfinite& v) : field(name, r, kind::choice, &v) {}
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
      case kind::choice: return f(as<nonfinite>());
      case kind::optional: return f(as<optional>());
      case kind::pair: return f(as<pair>());
      case kind::optional_pair: break;
    }
    return f(as<optional_pair>());
  }

 private:
  field(const char* name_, range r, kind k, void* v) : name(name_), allowed(r), type(k), value(v) {}
};

/// The fields of one object: a list without memory of its own, since steps look at options.
class fields_list {
 public:
  static constexpr std::size_t most = 24;
  void add(const field& f) { items_[size_++] = f; }
  std::size_t size() const { return size_; }
  const field& operator[](std::size_t i) const { return items_[i]; }
  const field* begin() const { return items_; }
  const field* end() const { return items_ + size_; }

 private:
  field items_[most];
  std::size_t size_ = 0;
};

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
