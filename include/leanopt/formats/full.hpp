// Full precision: float32, and float64 for float64 parameters. No block, no header.
#pragma once

#include <leanopt/config.hpp>

namespace leanopt::formats {

struct full {
  static constexpr const char* name = "full";
  static constexpr int block = 0;  ///< values are independent: the engine streams
  static constexpr double bytes_per_value = 4;
  static constexpr bool compressed = false;
  template <class T>
  using stored = T;

  template <class Self, class Parent>
  using fields = Parent;
};

}  // namespace leanopt::formats
