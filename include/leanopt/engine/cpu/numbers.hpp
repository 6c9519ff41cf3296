// Numbers of any type and layout, read and written stage by stage; and those that are not finite.
#pragma once

#include <leanopt/core/number.hpp>
#include <leanopt/core/random.hpp>
#include <leanopt/core/work.hpp>
#include <leanopt/engine/cpu/level.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::cpu {

/// Values that pass through L1 together.
constexpr std::size_t stage = cut::stage;
/// Values that one thread takes at a time.
constexpr std::size_t unit = cut::unit;
using leanopt::units_of;

namespace detail {

/// Residual bits of split weights, extended with their sign; 0 where there are none.
template <class V, class Residual>
LEANOPT_INLINE ints<V> load_residual([[maybe_unused]] const Residual* rest,
                                     [[maybe_unused]] std::size_t i) {
  using L = lane_traits<V>;
  using I = ints<V>;
  if constexpr (std::is_same_v<Residual, std::int8_t>) {
    return L::load_bytes(rest + i);
  } else if constexpr (std::is_same_v<Residual, std::int16_t>) {
    const I x = L::load_words(reinterpret_cast<const std::uint16_t*>(rest + i));
    return x - ((x & I(0x8000u)) << 1);
  } else {
    return I(0u);
  }
}

template <class Bits, class Weights>
struct widen {
  template <int Width>
  LEANOPT_INLINE static void run(const std::uint16_t* from, const typename Weights::residual* rest,
                                 float* to, std::size_t n) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    using S = scalar<float>;
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count)
      L::store(to + i,
               Weights::template read<Bits, V>(L::load_words(from + i), load_residual<V>(rest, i)));
    for (; i < n; ++i)
      to[i] = Weights::template read<Bits, S>(from[i], load_residual<S>(rest, i)).v;
  }
};

/// The random word of the weights from element `first` on, in its stage.
template <bool Random>
LEANOPT_INLINE std::uint32_t weight_word(std::uint64_t key, std::size_t first) {
  return Random ? random_word(key, first / stage, weight_stream) : 0;
}

/// What a pointer to residual bits becomes i elements on.
template <class Residual>
LEANOPT_INLINE Residual* advanced(Residual* rest, [[maybe_unused]] std::size_t i) {
  if constexpr (std::is_void_v<Residual>)
    return rest;
  else
    return rest + i;
}

/// `word` and `first` start the random bits.
template <class Bits, class Weights>
struct narrow {
  using residual = typename Weights::residual;

  template <int Width>
  LEANOPT_INLINE static void run(const float* from, std::uint16_t* to, residual* rest,
                                 std::size_t n, std::uint32_t word, std::uint32_t first) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    constexpr std::size_t together = L::count * L::group;
    const std::size_t full = n / together * together;
    convert<V>(from, to, rest, 0, full, word, first);
    convert<scalar<float>>(from, to, rest, full, n, word, first);
  }
  /// The same for elements [begin, end), whole groups of registers.
  template <class V>
  LEANOPT_INLINE static void convert(const float* from, std::uint16_t* to,
                                     [[maybe_unused]] residual* rest, std::size_t begin,
                                     std::size_t end, std::uint32_t word, std::uint32_t first) {
    using L = lane_traits<V>;
    constexpr int G = L::group;
    lattice<V> draw(word, first + std::uint32_t(begin));
    for (std::size_t i = begin; i < end; i += L::count * G) {
      ints<V> low[G];
#pragma GCC unroll 4
      for (int k = 0; k < G; ++k) {
        const std::size_t at = i + std::size_t(k) * L::count;
        low[k] = ints<V>(0u);
        L::store_words(to + at,
                       Weights::template write<Bits, V>(L::load(from + at), draw.next(), low[k]));
        if constexpr (std::is_same_v<residual, std::int16_t>)
          L::store_words(reinterpret_cast<std::uint16_t*>(rest + at), low[k]);
      }
      if constexpr (std::is_same_v<residual, std::int8_t>)
        L::store_bytes(reinterpret_cast<std::uint8_t*>(rest + i), low);
    }
  }
};

template <class T>
struct multiply {
  template <int Width>
  LEANOPT_INLINE static void run(T* x, std::size_t n, T factor) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    using S = scalar<T>;
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count) L::store(x + i, L::load(x + i) * V(factor));
    for (; i < n; ++i) x[i] = (S(x[i]) * S(factor)).v;
  }
};

/// f(Bits{}) for a type of 16 bits.
template <class Weights, class F>
void with_bits(number type, F f) {
  if constexpr (Weights::takes_float16)
    if (type == number::float16) return f(float16_bits{});
  f(bfloat16_bits{});
}
/// The residual bits from element i on.
template <class Weights>
auto residual_at([[maybe_unused]] const operand& x, [[maybe_unused]] std::size_t i) {
  using residual = typename Weights::residual;
  return advanced(static_cast<residual*>(x.residual), i);
}

}  // namespace detail

/// Elements [first, first + n) as T. @pre x.type is float64 where T is double, and not so for
/// float.
template <class T, class Weights>
void read(level l, const operand& x, std::size_t first, std::size_t n, T* out) {
  each_run(x.shape, first, n,
           [&](std::size_t i, std::int64_t at, std::size_t count, std::int64_t step) {
             T* to = out + (i - first);
             if (bytes_of(x.type) == sizeof(T)) {
               const T* from = static_cast<const T*>(x.data) + at;
               for (std::size_t k = 0; k < count; ++k) to[k] = from[std::int64_t(k) * step];
             } else if constexpr (std::is_same_v<T, float>) {
               const auto* from = static_cast<const std::uint16_t*>(x.data) + at;
               std::uint16_t row[stage];
               for (std::size_t done = 0, m; done < count; done += m) {
                 m = std::min(stage, count - done);
                 if (step != 1)
                   for (std::size_t k = 0; k < m; ++k) row[k] = from[std::int64_t(done + k) * step];
                 const std::uint16_t* words = step == 1 ? from + done : row;
                 detail::with_bits<Weights>(x.type, [&](auto bits) {
                   detail::launch<detail::widen<decltype(bits), Weights>, level::avx512>(
                       l, words, detail::residual_at<Weights>(x, i + done), to + done, m);
                 });
               }
             }
           });
  if (x.factor != 1) detail::launch<detail::multiply<T>, detail::widest<T>>(l, out, n, T(x.factor));
}

/// The inverse of read(), of elements of one stage.
template <class T, class Weights>
void write(level l, const operand& x, std::size_t first, std::size_t n, const T* in,
           std::uint64_t key) {
  const std::uint32_t word = detail::weight_word<Weights::random>(key, first);
  each_run(x.shape, first, n,
           [&](std::size_t i, std::int64_t at, std::size_t count, std::int64_t step) {
             const T* from = in + (i - first);
             if (bytes_of(x.type) == sizeof(T)) {
               T* to = static_cast<T*>(x.data) + at;
               for (std::size_t k = 0; k < count; ++k) to[std::int64_t(k) * step] = from[k];
             } else if constexpr (std::is_same_v<T, float>) {
               auto* to = static_cast<std::uint16_t*>(x.data) + at;
               std::uint16_t row[stage];
               for (std::size_t done = 0, m; done < count; done += m) {
                 m = std::min(stage, count - done);
                 std::uint16_t* words = step == 1 ? to + done : row;
                 detail::with_bits<Weights>(x.type, [&](auto bits) {
                   detail::launch<detail::narrow<decltype(bits), Weights>, level::avx512>(
                       l, from + done, words, detail::residual_at<Weights>(x, i + done), m, word,
                       std::uint32_t((i + done) % stage));
                 });
                 if (step != 1)
                   for (std::size_t k = 0; k < m; ++k) to[std::int64_t(done + k) * step] = row[k];
               }
             }
           });
}

/// Whether the numbers of x stand in memory as an array of T.
template <class T>
bool is_array(const operand& x) {
  return x.is_run() && x.type == (sizeof(T) == 8 ? number::float64 : number::float32);
}

namespace detail {

/// Asks for a stage of numbers: passes that do little else per number wait for memory otherwise.
template <class T>
LEANOPT_INLINE void prefetch(const T* x) {
  for (std::size_t i = 0; i < stage; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

/// Finds what nonfinite::skip_element leaves out, where squares are kept as numbers of type Square.
template <class T, class Square = T>
struct gradient_check {
  static bool is_bad(T x) { return has_infinite_square<Square>(x); }

  /// Whether any of n numbers is bad.
  template <int Width>
  LEANOPT_INLINE static bool run(const T* x, std::size_t n) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    const V limit = infinite_square_from<Square, T>();
    V largest = V(T(0));
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count) {
      const V value = L::load(x + i);
      largest = max(largest, if_nan(value, limit, max(value, -value)));
    }
    T all[L::count];
    L::store(all, largest);
    bool bad = false;
    for (const T one : all) bad |= is_bad(one);
    for (; i < n; ++i) bad |= is_bad(x[i]);
    return bad;
  }
  /// Clears bad numbers and marks them; returns how many there were.
  static std::int64_t clear(T* x, std::size_t n, bool* marks) {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
      marks[i] = is_bad(x[i]);
      count += marks[i];
      if (marks[i]) x[i] = 0;
    }
    return count;
  }
};
template <class Square, class T>
bool has_bad(level l, const T* x, std::size_t n) {
  return launch<gradient_check<T, Square>, widest<T>>(l, x, n);
}

/// The numbers of a stage of x as an array of T. Where `skips`, those that are not finite are 0 and
/// marked.
template <class T, class Weights, class Square = T>
class stage_of {
 public:
  stage_of(level l, const operand& x, bool skips) : level_(l), x_(x), skips_(skips) {}
  /// Of elements [i, i + n), until the next call.
  T* read(std::size_t i, std::size_t n) {
    T* numbers = static_cast<T*>(x_.data) + i;
    if (!is_copied()) {
      if (n == stage) prefetch(numbers + 2 * stage);
    } else {
      cpu::read<T, Weights>(level_, x_, i, n, copy_);
      numbers = copy_;
    }
    bad_ = skips_ && has_bad<Square>(level_, numbers, n) ? leave_out(numbers, n) : 0;
    return __builtin_expect(bad_ != 0, 0) ? copy_ : numbers;
  }
  /// Whether read() gives a copy, bad numbers or not.
  bool is_copied() const { return copied_; }
  /// How many numbers are not finite.
  std::int64_t bad() const { return bad_; }
  /// Of all numbers of a stage; null where each is finite.
  const bool* marks() const { return bad_ ? marks_ : nullptr; }

 private:
  [[gnu::noinline, gnu::cold]] std::int64_t leave_out(const T* numbers, std::size_t n) {
    if (numbers != copy_) std::copy_n(numbers, n, copy_);
    std::fill(marks_ + n, marks_ + stage, false);
    return gradient_check<T, Square>::clear(copy_, n, marks_);
  }

  level level_;
  const operand& x_;
  bool skips_;
  const bool copied_ = !is_array<T>(x_) || x_.factor != 1;
  std::int64_t bad_ = 0;
  alignas(64) T copy_[stage];
  bool marks_[stage];
};
/// f(i, n) for stages of elements [first, last).
template <class F>
void each_stage(std::size_t first, std::size_t last, F f) {
  for (std::size_t i = first; i < last; i += stage) f(i, std::min(stage, last - i));
}

}  // namespace detail

}  // namespace leanopt::cpu
LEANOPT_EXACT_END
