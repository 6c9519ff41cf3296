// Numbers made of bit patterns, and digests of results. Everything here is integer arithmetic, so
// that the flags with which a test is compiled cannot change its inputs: a generator that computes
// in floating point feeds other numbers to the program that is compiled with -ffast-math.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace patterns {

template <class To, class From>
To cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "patterns of one size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

/// The bits that are compared: isnan() is a constant under -ffast-math, so NaN is told by its bits
/// and becomes one pattern, because its sign and payload are no part of any promise.
inline std::uint32_t comparable(float x) {
  const auto b = cast<std::uint32_t>(x);
  return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : b;
}
inline std::uint64_t comparable(double x) {
  const auto b = cast<std::uint64_t>(x);
  return (b << 1) > 0xffe0000000000000u ? 0x7ff8000000000000u : b;
}
template <class T>
std::enable_if_t<std::is_integral_v<T>, T> comparable(T x) {
  return x;
}

enum class kind {
  normal,      ///< magnitudes from 2^-12 to 2
  octaves,     ///< over 80 octaves, from 2^-60 to 2^20
  subnormal,   ///< below the smallest normal number
  non_finite,  ///< normal, one in 64 infinite and one in 64 NaN
};
inline constexpr kind all_kinds[] = {kind::normal, kind::octaves, kind::subnormal,
                                     kind::non_finite};

/// A stream of pseudorandom words (xorshift64*, Vigna 2016) and of numbers made of them.
class source {
 public:
  explicit source(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {
    for (int i = 0; i < 8; ++i) word();
  }
  std::uint64_t word() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  std::uint32_t below(std::uint32_t n) { return std::uint32_t((word() >> 32) * n >> 32); }

  /// A finite number of the kind's magnitudes, of any sign.
  template <class T>
  T number(kind k) {
    if (k == kind::non_finite) {
      const std::uint32_t dice = below(64);
      if (dice < 2) return assemble<T>(below(2), all_ones<T>, dice ? ~std::uint64_t(0) : 0);
      k = kind::normal;
    }
    const int exponent = k == kind::normal    ? int(below(13)) - 12
                         : k == kind::octaves ? int(below(80)) - 60
                                              : -bias<T>;
    const std::uint32_t sign = below(2);  // one draw per statement: arguments have no order
    return assemble<T>(sign, std::uint64_t(bias<T> + exponent), word());
  }
  template <class T>
  T positive(kind k) {
    const T x = number<T>(k);
    return x < 0 ? -x : x;
  }
  template <class T>
  std::vector<T> numbers(std::size_t n, kind k) {
    std::vector<T> x(n);
    for (T& one : x) one = number<T>(k);
    return x;
  }

 private:
  template <class T>
  static constexpr int bias = sizeof(T) == 4 ? 127 : 1023;
  template <class T>
  static constexpr std::uint64_t all_ones = sizeof(T) == 4 ? 0xff : 0x7ff;

  template <class T>
  static T assemble(std::uint64_t sign, std::uint64_t exponent, std::uint64_t mantissa) {
    if constexpr (sizeof(T) == 4)
      return cast<float>(std::uint32_t(sign << 31 | exponent << 23 | (mantissa & 0x7fffffu)));
    else
      return cast<double>(sign << 63 | exponent << 52 | (mantissa & 0xfffffffffffffu));
  }

  std::uint64_t state_;
};

/// FNV-1a over numbers.
class digest {
 public:
  template <class T>
  void add(const T* x, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      const auto value = comparable(x[i]);
      for (std::size_t b = 0; b < sizeof value; ++b) {
        value_ ^= (std::uint64_t(value) >> (8 * b)) & 0xff;
        value_ *= 0x100000001b3u;
      }
    }
  }
  template <class T>
  void add(const std::vector<T>& x) {
    add(x.data(), x.size());
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace patterns
