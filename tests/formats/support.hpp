// Numbers as a format stores them, without a rule: whole tensors of one slot through the engine, at
// every instruction set, and single codes. Without LibTorch.
#pragma once

#include <leanopt/engine/cpu.hpp>

#include "tests/support/patterns.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

namespace format_runs {

using leanopt::scalar;
using leanopt::values;
using leanopt::cpu::level;

template <class T>
struct no_coeffs {};

/// A rule that remembers one value: its step moves what is remembered into the parameter and the
/// gradient into its place, or adds it to it where the parameter was 0 and not 1. So the path of
/// a step can be tested, which has more instruction sets than cpu::encode.
LEANOPT_EXACT_BEGIN
template <values Range>
struct exchange {
  template <class T>
  using inputs = leanopt::no_inputs;
  template <class T>
  using coeffs = no_coeffs<T>;
  static constexpr int slot_count = 1;
  static constexpr leanopt::slot_spec slots[] = {{"value", Range}};

  template <class V, class T>
  LEANOPT_HD static void apply(const no_coeffs<T>&, V& p, const V& gradient, V* s) {
    const V before = s[0];
    s[0] = gradient + (before - p * before);
    p = before;
  }
};
LEANOPT_EXACT_END

// ---- whole tensors ------------------------------------------------------------------------------

constexpr std::uint8_t untouched = 0xa5;
constexpr std::size_t room = 256;  ///< behind the codes, so that a write past them shows

/// The codes and headers of a tensor, and what lies behind them: all bytes `fill` at first.
template <class Format>
struct encoded {
  using code = typename Format::template stored<float>;
  static constexpr bool has_headers = !std::is_void_v<typename Format::header>;
  using header = std::conditional_t<has_headers, typename Format::header, std::uint8_t>;

  std::size_t elements;
  std::vector<code> codes;
  std::vector<header> headers;

  explicit encoded(std::size_t n, std::uint8_t fill = untouched)
      : elements(n), codes(n + room), headers(blocks() + 2) {
    std::memset(codes.data(), fill, codes.size() * sizeof(code));
    std::memset(headers.data(), fill, headers.size() * sizeof(header));
  }
  /// Fresh memory, but for what lies behind.
  void clear() {
    std::fill_n(codes.begin(), elements, code(0));
    if (has_headers) std::fill_n(headers.begin(), blocks(), header(0));
  }
  std::size_t blocks() const {
    return (elements + std::size_t(Format::block) - 1) / std::size_t(Format::block);
  }
  leanopt::cpu::stored_moments<float, Format, 1> moments(std::uint64_t key) {
    return {{codes.data()}, {headers.data()}, elements, 0, key};
  }
  friend bool operator==(const encoded& a, const encoded& b) {
    return a.codes == b.codes && a.headers == b.headers;
  }
};

template <class Format, values Range>
encoded<Format> encode(level l, const std::vector<float>& x, std::uint64_t key,
                       std::uint8_t fill = untouched) {
  encoded<Format> e(x.size(), fill);
  const float* all[] = {x.data()};
  leanopt::cpu::encode<exchange<Range>, Format>(l, e.moments(key), all);
  return e;
}
template <class Format, values Range>
std::vector<float> decode(level l, encoded<Format> e) {
  std::vector<float> x(e.elements);
  float* all[] = {x.data()};
  leanopt::cpu::decode<exchange<Range>, Format>(l, e.moments(0), all);
  return x;
}
/// Stores x, or adds it to what is stored, in a step. Returns what was stored.
template <class Format, values Range>
std::vector<float> step(level l, encoded<Format>& e, const std::vector<float>& x, std::uint64_t key,
                        bool adds = false) {
  std::vector<float> before(e.elements, adds ? 0.0f : 1.0f);
  leanopt::cpu::tensor_step t;
  t.p.data = before.data();
  t.g.data = const_cast<float*>(x.data());
  t.slots[0] = e.codes.data();
  t.headers[0] = e.headers.data();
  t.elements = e.elements;
  t.key = key;
  const leanopt::cpu::float_environment guard;
  leanopt::cpu::step<exchange<Range>, Format, float, leanopt::weights::plain>(l, t, {}, {}, 0,
                                                                              e.elements);
  return before;
}

inline std::vector<float> part(const std::vector<float>& x, std::size_t first, std::size_t n) {
  return {x.begin() + std::ptrdiff_t(first),
          x.begin() + std::ptrdiff_t(std::min(x.size(), first + n))};
}

// ---- single codes -------------------------------------------------------------------------------

/// How a block with these values and `smallest` is stored.
template <class Format, values Range>
typename Format::scale scale_of(const std::vector<float>& block, float smallest = 0) {
  typename Format::scale s[1];
  if constexpr (leanopt::has_headers<Format>) {
    typename Format::template range<scalar<float>> found[1];
    found[0].template add<Range>(scalar<float>(smallest));
    for (const float x : block) found[0].template add<Range>(scalar<float>(x));
    Format::template fit<exchange<Range>>(found, s);
  }
  return s[0];
}

template <class Format>
constexpr std::uint32_t code_count = sizeof(typename Format::template stored<float>) == 1 ? 256
                                                                                          : 65536;

template <class Format, values Range>
float decode(const typename Format::scale& s, std::uint32_t code) {
  using in_memory = typename Format::template code<Range>;
  const auto extended = static_cast<std::uint32_t>(in_memory(code));
  return Format::template decode<Range, scalar<float>>(s, extended).v;
}
/// As the engine encodes a value that is in range of the block.
template <class Format, values Range>
std::uint32_t encode(const typename Format::scale& s, float x, std::uint32_t random) {
  return Format::template encode<Range, scalar<float>>(s, scalar<float>(x), random) >>
         8 * Format::code_byte;
}

/// The nearest bfloat16 number to a finite one, of two the even.
inline float nearest_bfloat16(float x) {
  const auto b = patterns::cast<std::uint32_t>(x);
  const std::uint32_t low = b & 0xffffu, below = b & 0xffff0000u;
  const bool up = low > 0x8000u || (low == 0x8000u && (below & 0x10000u) != 0);
  return patterns::cast<float>(below + (up ? 0x10000u : 0));
}

}  // namespace format_runs
