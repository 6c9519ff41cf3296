// How a rule or a format declares its options, with the standard library only. A class of fields
// takes the class that users name (`Self`, which the setters return) and what it extends (`Parent`).
// It has one macro line per field, and one per field in `each`, a visitor of any number of objects in
// step, from which save, load, compare, print, range checks and inheritance are made.
#pragma once

#include <cmath>

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

}  // namespace leanopt

/// A field with its own storage; ends like a data member: LEANOPT_OPTION(double, decay) = 0.8;
#define LEANOPT_OPTION(T, name)              \
 public:                                     \
  Self& name(const T& value) {               \
    name##_ = value;                         \
    return this->mark(name##_);              \
  }                                          \
  const T& name() const { return name##_; }  \
  T& name() { return name##_; }              \
                                             \
 private:                                    \
  T name##_

/// A field that `Parent`, LibTorch's class, holds already: the same setter, which returns Self and
/// not LibTorch's class.
#define LEANOPT_STOCK_OPTION(T, name)               \
 public:                                            \
  Self& name(const T& value) {                      \
    Parent::name() = value;                         \
    return this->mark(Parent::name());              \
  }                                                 \
  const T& name() const { return Parent::name(); }  \
  T& name() { return Parent::name(); }
