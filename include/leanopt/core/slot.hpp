// Slots: what a rule remembers per parameter.
#pragma once

#include <leanopt/config.hpp>

#include <cstddef>
#include <utility>

LEANOPT_EXACT_BEGIN
namespace leanopt {

enum class values { any, non_negative };
/// Per element of the parameter, per row or column of its last two dimensions, or one in all.
enum class extent { element, row, column, one };

struct slot_spec {
  const char* name;  ///< the checkpoint's name
  values range = values::any;
  extent shape = extent::element;

  /// Whether a parameter of `rank` dimensions can have this slot.
  constexpr bool fits(int rank) const {
    return rank > 1 || shape == extent::element || shape == extent::one;
  }
  /// Whether the slot of a parameter of `rank` dimensions has a row per row (index 0) of it.
  constexpr bool has_rows(int rank) const {
    return shape == extent::element  ? rank > 0
           : shape == extent::row    ? true
           : shape == extent::column ? rank > 2
                                     : false;
  }
};

/// A compile-time integer (std::integral_constant converts on the host only).
template <int K>
struct index {
  LEANOPT_HD constexpr operator int() const { return K; }
};
namespace detail {
template <class F, std::size_t... K>
LEANOPT_HD void each(F& f, std::index_sequence<K...>) {
  (f(index<int(K)>{}), ...);
}
}  // namespace detail
/// f(0), f(1), ... with compile-time constants: registers can only be indexed by constants.
template <int Count, class F>
LEANOPT_HD void each(F f) {
  detail::each(f, std::make_index_sequence<Count>{});
}

}  // namespace leanopt
LEANOPT_EXACT_END
