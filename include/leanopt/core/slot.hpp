// Slots: what a rule remembers per parameter.
#pragma once

#include <leanopt/config.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

LEANOPT_EXACT_BEGIN
namespace leanopt {

enum class values { any, non_negative };

/// Whether a block of codes cannot hold a number, given as bits: NaN, what is at least `limit` (as
/// bits, Inf at most), and what is negative in a slot that has no sign.
template <values Range>
LEANOPT_HD constexpr bool is_large(std::uint32_t x, std::uint32_t limit) {
  return (Range == values::any ? x & 0x7fffffffu : x) >= limit;
}

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

/// Whether a slot of a formula has a square per element.
template <class Formula>
LEANOPT_HD constexpr bool keeps_squares() {
  for (int k = 0; k < Formula::slot_count; ++k)
    if (Formula::slots[k].range == values::non_negative) return true;
  return false;
}

/// The tables of a format: what it calls books, or void.
template <class Format, class = void>
struct tables_of {
  using type = void;
};
template <class Format>
struct tables_of<Format, std::void_t<typename Format::books>> {
  using type = typename Format::books;
};
template <class Format>
constexpr bool has_headers = !std::is_void_v<typename Format::header>;
template <class Format>
constexpr bool has_tables = !std::is_void_v<typename tables_of<Format>::type>;

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
