// Bytes per parameter of a rule's slots in a format, known at compile time.
#pragma once

#include <leanopt/core/slot.hpp>

namespace leanopt {

/// Bytes per parameter of the numbers that `Rule` keeps for each element, without headers: 8 for
/// AdamW in full precision, 2 for AdamW8bit.
template <class Rule, class Format>
constexpr double code_bytes() {
  double bytes = 0;
  for (const slot_spec& s : Rule::moments)
    if (s.shape == extent::element) bytes += Format::bytes_per_value;
  return bytes;
}

}  // namespace leanopt
