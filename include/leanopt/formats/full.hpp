// Full precision: float32, and float64 for float64 parameters. No block, no header.
#pragma once

#include <leanopt/config.hpp>

namespace leanopt::formats {

struct full {
  static constexpr const char* name = "full";
  static constexpr int block = 0;  ///< values are independent: the engine streams
  static constexpr bool compressed = false, random = false;
  template <class T>
  using stored = T;
  using header = void;
};

}  // namespace leanopt::formats
