// Lane values: the closed list of operations that a rule or a format may use. lanes<T, N> is N
// numbers in one SIMD register, or one number (N = 1, host and device). Every operation is one
// correctly rounded IEEE operation or integer arithmetic and is never merged with another, so all
// N give the same bits: a * b + c is two operations everywhere, fma(a, b, c) is one everywhere.
//
// Everything is always inlined and takes references: the functions have no target attribute of
// their own and become AVX2 or AVX-512 code inside the engine's entry points. The odd spellings
// below (broadcast by a loop, builtins where a generic form exists, no memcpy of vectors) are those
// that g++ 12 turns into one instruction; each innocent form costs a factor of 2 to 6.
#pragma once

#include <leanopt/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) && !defined(__CUDACC__)
#if (defined(__clang__) && __clang_major__ >= 17) || (!defined(__clang__) && __GNUC__ >= 12)
#define LEANOPT_LANES_X86 1
#include <immintrin.h>  // g++ declares its builtins here
#if !defined(__clang__)
#define LEANOPT_PERMUTES_BYTES 1
#endif
#else
#warning "leanopt: vector lanes need g++ 12 or clang 17; this compiler takes the scalar path"
#endif
#endif

LEANOPT_EXACT_BEGIN
namespace leanopt {

template <class To, class From>
LEANOPT_HD To bit_cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "leanopt: bit_cast between types of one size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
LEANOPT_HD std::uint32_t bits(float x) { return bit_cast<std::uint32_t>(x); }
LEANOPT_HD float real(std::uint32_t x) { return bit_cast<float>(x); }
LEANOPT_HD std::uint32_t max(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
LEANOPT_HD std::uint32_t min(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
/// a > b ? x : y, lane by lane.
LEANOPT_HD std::uint32_t if_above(std::uint32_t a, std::uint32_t b, std::uint32_t x,
                                  std::uint32_t y) {
  return a > b ? x : y;
}

/// A table of 128 or 256 numbers in four planes of their bytes: how 64 numbers are looked up at
/// a time.
template <int Count>
struct byte_planes {
  alignas(64) std::uint8_t plane[4][Count];
  /// number(i) is the number at index i.
  template <class F>
  explicit byte_planes(F number) {
    for (int k = 0; k < 4; ++k)
      for (int i = 0; i < Count; ++i) plane[k][i] = std::uint8_t(number(i) >> 8 * k);
  }
};

template <class T, int N>
struct lanes;
template <class V>
struct lane_traits;
/// The 32-bit unsigned integers that go with float lanes.
template <class V>
using ints = typename lane_traits<V>::ints;

// ---- one number --------------------------------------------------------------------------------

namespace detail {
#if defined(__CUDA_ARCH__)
LEANOPT_HD float add(float a, float b) { return __fadd_rn(a, b); }
LEANOPT_HD float subtract(float a, float b) { return __fsub_rn(a, b); }
LEANOPT_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
LEANOPT_HD float quotient(float a, float b) { return __fdiv_rn(a, b); }
LEANOPT_HD float root(float a) { return __fsqrt_rn(a); }
LEANOPT_HD float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LEANOPT_HD double add(double a, double b) { return __dadd_rn(a, b); }
LEANOPT_HD double subtract(double a, double b) { return __dsub_rn(a, b); }
LEANOPT_HD double multiply(double a, double b) { return __dmul_rn(a, b); }
LEANOPT_HD double quotient(double a, double b) { return __ddiv_rn(a, b); }
LEANOPT_HD double root(double a) { return __dsqrt_rn(a); }
LEANOPT_HD double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
#else
template <class T>
LEANOPT_HD T add(T a, T b) {
  return a + b;
}
template <class T>
LEANOPT_HD T subtract(T a, T b) {
  return a - b;
}
template <class T>
LEANOPT_HD T multiply(T a, T b) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  return a * b;
}
template <class T>
LEANOPT_HD T quotient(T a, T b) {
  return a / b;
}
LEANOPT_HD float root(float a) { return __builtin_sqrtf(a); }
LEANOPT_HD double root(double a) { return __builtin_sqrt(a); }
LEANOPT_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LEANOPT_HD double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif
}  // namespace detail

template <class T>
struct lanes<T, 1> {
  T v;
  lanes() = default;
  LEANOPT_HD lanes(T x) : v(x) {}
  LEANOPT_HD friend lanes operator+(const lanes& a, const lanes& b) {
    return detail::add(a.v, b.v);
  }
  LEANOPT_HD friend lanes operator-(const lanes& a, const lanes& b) {
    return detail::subtract(a.v, b.v);
  }
  LEANOPT_HD friend lanes operator*(const lanes& a, const lanes& b) {
    return detail::multiply(a.v, b.v);
  }
  LEANOPT_HD friend lanes operator-(const lanes& a) { return -a.v; }
  LEANOPT_HD friend lanes divide(const lanes& a, const lanes& b) {
    return detail::quotient(a.v, b.v);
  }
  LEANOPT_HD friend lanes sqrt(const lanes& a) { return detail::root(a.v); }
  LEANOPT_HD friend lanes fma(const lanes& a, const lanes& b, const lanes& c) {
    return detail::fused(a.v, b.v, c.v);
  }
  /// a > b ? a : b and a < b ? a : b: where one is NaN, both give b.
  LEANOPT_HD friend lanes max(const lanes& a, const lanes& b) { return a.v > b.v ? a.v : b.v; }
  LEANOPT_HD friend lanes min(const lanes& a, const lanes& b) { return a.v < b.v ? a.v : b.v; }
  /// a where x is NaN, else b.
  LEANOPT_HD friend lanes if_nan(const lanes& x, const lanes& a, const lanes& b) {
    return x.v != x.v ? a.v : b.v;
  }
};
template <class T>
using scalar = lanes<T, 1>;
LEANOPT_HD std::uint32_t bits(const scalar<float>& x) { return bits(x.v); }
LEANOPT_HD scalar<float> abs(const scalar<float>& x) { return __builtin_fabsf(x.v); }
LEANOPT_HD std::uint32_t reduce_max(std::uint32_t a) { return a; }
LEANOPT_HD std::uint32_t reduce_min(std::uint32_t a) { return a; }

namespace detail {
template <class T>
struct scalar_traits {
  using number = T;
  using ints = std::uint32_t;
  static constexpr int count = 1;
  static constexpr int group = 1;         ///< how many registers store_bytes() takes at a time
  static constexpr bool narrows = false;  ///< whether there are narrow(), signs(), ones()
  LEANOPT_HD static ints iota() { return 0; }
  /// Whether x is true for all that take the same branch.
  LEANOPT_HD static bool everywhere(bool x) { return x; }
  template <class Memory>
  LEANOPT_HD static lanes<T, 1> load(const Memory* p) {
    return static_cast<T>(*p);
  }
  template <class Memory>
  LEANOPT_HD static void store(Memory* p, const lanes<T, 1>& x) {
    *p = static_cast<Memory>(x.v);
  }
  /// The same for the first n lanes of a register, n <= count; the others read as 0.
  LEANOPT_HD static lanes<T, 1> load_some(const T* p, std::size_t n) { return n ? *p : T(0); }
  LEANOPT_HD static void store_some(T* p, const lanes<T, 1>& x, std::size_t n) {
    if (n) *p = x.v;
  }
  /// std::uint8_t is extended with zeros, std::int8_t with its sign.
  template <class Byte>
  LEANOPT_HD static ints load_bytes(const Byte* p) {
    return static_cast<ints>(*p);
  }
  LEANOPT_HD static void store_bytes(std::uint8_t* p, const ints (&x)[1]) {
    *p = static_cast<std::uint8_t>(x[0]);
  }
  LEANOPT_HD static ints load_words(const std::uint16_t* p) { return *p; }
  /// table[index], lane by lane.
  LEANOPT_HD static ints look_up(const std::uint32_t* table, const ints& index) {
    return table[index];
  }
  LEANOPT_HD static void store_words(std::uint16_t* p, const ints& x) {
    *p = static_cast<std::uint16_t>(x);
  }
};
}  // namespace detail
template <>
struct lane_traits<lanes<float, 1>> : detail::scalar_traits<float> {};
template <>
struct lane_traits<lanes<double, 1>> : detail::scalar_traits<double> {};

#if LEANOPT_LANES_X86
// ---- N numbers ---------------------------------------------------------------------------------
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

template <class T, int N>
struct lanes {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));
  type v;

  lanes() = default;
  LEANOPT_INLINE lanes(const type& x) : v(x) {}
  LEANOPT_INLINE lanes(T x) {  // broadcast
#if defined(__clang__)
    for (int i = 0; i < N; ++i) v[i] = x;
#else  // -O3 unrolls that loop into N inserts
    typedef T low __attribute__((vector_size(16)));
    typedef float v4sf __attribute__((vector_size(16)));
    typedef double v2df __attribute__((vector_size(16)));
    typedef int v4si __attribute__((vector_size(16)));
    typedef int v16si __attribute__((vector_size(64)));
    const low one{x};
    if constexpr (std::is_same_v<T, float> && N == 8)
      v = __builtin_ia32_vbroadcastss_ps256((v4sf)one);
    else if constexpr (std::is_same_v<T, float>)
      v = __builtin_ia32_broadcastss512((v4sf)one, type{}, -1);
    else if constexpr (std::is_same_v<T, double> && N == 4)
      v = __builtin_ia32_vbroadcastsd_pd256((v2df)one);
    else if constexpr (std::is_same_v<T, double>)
      v = __builtin_ia32_broadcastsd512((v2df)one, type{}, -1);
    else if constexpr (N == 8)
      v = (type)__builtin_ia32_pbroadcastd256((v4si)one);
    else
      v = (type)__builtin_ia32_pbroadcastd512((v4si)one, v16si{}, -1);
#endif
  }

  LEANOPT_INLINE friend lanes operator+(const lanes& a, const lanes& b) { return a.v + b.v; }
  LEANOPT_INLINE friend lanes operator-(const lanes& a, const lanes& b) { return a.v - b.v; }
  LEANOPT_INLINE friend lanes operator*(const lanes& a, const lanes& b) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    return a.v * b.v;
  }
  LEANOPT_INLINE friend lanes operator-(const lanes& a) { return -a.v; }
  LEANOPT_INLINE friend lanes operator&(const lanes& a, const lanes& b) { return a.v & b.v; }
  LEANOPT_INLINE friend lanes operator|(const lanes& a, const lanes& b) { return a.v | b.v; }
  // A count per lane is one operation where a count in a register of its own is two.
  LEANOPT_INLINE friend lanes operator<<(const lanes& a, int s) {
    if (__builtin_constant_p(s)) return a.v << s;
    return a.v << lanes(T(s)).v;
  }
  LEANOPT_INLINE friend lanes operator>>(const lanes& a, int s) {
    if (__builtin_constant_p(s)) return a.v >> s;
    return a.v >> lanes(T(s)).v;
  }
  LEANOPT_INLINE friend lanes max(const lanes& a, const lanes& b) { return a.v > b.v ? a.v : b.v; }
  LEANOPT_INLINE friend lanes min(const lanes& a, const lanes& b) { return a.v < b.v ? a.v : b.v; }
  LEANOPT_INLINE friend lanes if_above(const lanes& a, const lanes& b, const lanes& x,
                                       const lanes& y) {
    return a.v > b.v ? x.v : y.v;
  }
  LEANOPT_INLINE friend lanes if_nan(const lanes& x, const lanes& a, const lanes& b) {
    return x.v != x.v ? a.v : b.v;
  }
  LEANOPT_INLINE friend lanes divide(const lanes& a, const lanes& b) { return a.v / b.v; }
#if defined(__clang__)
  LEANOPT_INLINE friend lanes fma(const lanes& a, const lanes& b, const lanes& c) {
    return __builtin_elementwise_fma(a.v, b.v, c.v);
  }
  LEANOPT_INLINE friend lanes sqrt(const lanes& a) { return __builtin_elementwise_sqrt(a.v); }
#else
  LEANOPT_INLINE friend lanes fma(const lanes& a, const lanes& b, const lanes& c) {
    if constexpr (sizeof(T) == 4 && N == 8) return __builtin_ia32_vfmaddps256(a.v, b.v, c.v);
    if constexpr (sizeof(T) == 4 && N == 16)
      return __builtin_ia32_vfmaddps512_mask(a.v, b.v, c.v, -1, 4);
    if constexpr (sizeof(T) == 8 && N == 4) return __builtin_ia32_vfmaddpd256(a.v, b.v, c.v);
    if constexpr (sizeof(T) == 8 && N == 8)
      return __builtin_ia32_vfmaddpd512_mask(a.v, b.v, c.v, -1, 4);
  }
  LEANOPT_INLINE friend lanes sqrt(const lanes& a) {
    if constexpr (sizeof(T) == 4 && N == 8) return __builtin_ia32_sqrtps256(a.v);
    if constexpr (sizeof(T) == 4 && N == 16) return __builtin_ia32_sqrtps512_mask(a.v, a.v, -1, 4);
    if constexpr (sizeof(T) == 8 && N == 4) return __builtin_ia32_sqrtpd256(a.v);
    if constexpr (sizeof(T) == 8 && N == 8) return __builtin_ia32_sqrtpd512_mask(a.v, a.v, -1, 4);
  }
#endif
};

template <int N>
LEANOPT_INLINE lanes<std::uint32_t, N> bits(const lanes<float, N>& x) {
  return (typename lanes<std::uint32_t, N>::type)x.v;
}
template <int N>
LEANOPT_INLINE lanes<float, N> real(const lanes<std::uint32_t, N>& x) {
  return (typename lanes<float, N>::type)x.v;
}
template <int N>
LEANOPT_INLINE lanes<float, N> abs(const lanes<float, N>& x) {
  return real(bits(x) & lanes<std::uint32_t, N>(0x7fffffffu));
}

namespace detail {
template <int H, int N, std::size_t... I>
LEANOPT_INLINE lanes<std::uint32_t, N> swap_halves(const lanes<std::uint32_t, N>& x,
                                                   std::index_sequence<I...>) {
  return __builtin_shufflevector(x.v, x.v, (I ^ H)...);
}
template <int H, int N, class F>
LEANOPT_INLINE std::uint32_t reduce(const lanes<std::uint32_t, N>& x, F f) {
  if constexpr (H == 0)
    return x.v[0];
  else
    return reduce<H / 2>(f(x, swap_halves<H>(x, std::make_index_sequence<N>{})), f);
}
}  // namespace detail
template <int N>
LEANOPT_INLINE std::uint32_t reduce_max(const lanes<std::uint32_t, N>& x) {
  return detail::reduce<N / 2>(
      x, [](const auto& a, const auto& b) LEANOPT_LAMBDA { return max(a, b); });
}
template <int N>
LEANOPT_INLINE std::uint32_t reduce_min(const lanes<std::uint32_t, N>& x) {
  return detail::reduce<N / 2>(
      x, [](const auto& a, const auto& b) LEANOPT_LAMBDA { return min(a, b); });
}

namespace detail {
/// What float and double lanes share: loads and stores of their own type, at any alignment.
template <class T, int N>
struct own_memory {
  using number = T;
  static constexpr int count = N;
  LEANOPT_INLINE static lanes<T, N> load(const T* p) {
    using L = lanes<T, N>;
    const typename L::type x =  // a copy: no aligned reference to p may escape
        *reinterpret_cast<const typename L::unaligned*>(p);
    return x;
  }
  LEANOPT_INLINE static void store(T* p, const lanes<T, N>& x) {
    *reinterpret_cast<typename lanes<T, N>::unaligned*>(p) = x.v;
  }

  // The first n lanes, n <= N; the others read as 0 and their memory is not touched.
#if defined(__clang__)
  LEANOPT_INLINE static lanes<T, N> load_some(const T* p, std::size_t n) {
    if (n == N) return own_memory::load(p);
    typename lanes<T, N>::type x{};
    for (std::size_t i = 0; i < n; ++i) x[i] = p[i];
    return x;
  }
  LEANOPT_INLINE static void store_some(T* p, const lanes<T, N>& x, std::size_t n) {
    if (n == N) return own_memory::store(p, x);
    for (std::size_t i = 0; i < n; ++i) p[i] = x.v[i];
  }
#else
  LEANOPT_INLINE static lanes<T, N> load_some(const T* p, std::size_t n) {
    using type = typename lanes<T, N>::type;
    if (n == N) return own_memory::load(p);
    if constexpr (sizeof(T) * N == 64 && sizeof(T) == 4)
      return __builtin_ia32_loadups512_mask(p, type{}, std::uint16_t((1u << n) - 1));
    if constexpr (sizeof(T) * N == 64 && sizeof(T) == 8)
      return __builtin_ia32_loadupd512_mask(p, type{}, std::uint8_t((1u << n) - 1));
    if constexpr (sizeof(T) * N == 32 && sizeof(T) == 4)
      return __builtin_ia32_maskloadps256(reinterpret_cast<const type*>(p), mask(n).v);
    if constexpr (sizeof(T) * N == 32 && sizeof(T) == 8)
      return __builtin_ia32_maskloadpd256(reinterpret_cast<const type*>(p), mask(n).v);
  }
  LEANOPT_INLINE static void store_some(T* p, const lanes<T, N>& x, std::size_t n) {
    using type = typename lanes<T, N>::type;
    if (n == N) return own_memory::store(p, x);
    if constexpr (sizeof(T) * N == 64 && sizeof(T) == 4)
      __builtin_ia32_storeups512_mask(p, x.v, std::uint16_t((1u << n) - 1));
    if constexpr (sizeof(T) * N == 64 && sizeof(T) == 8)
      __builtin_ia32_storeupd512_mask(p, x.v, std::uint8_t((1u << n) - 1));
    if constexpr (sizeof(T) * N == 32 && sizeof(T) == 4)
      __builtin_ia32_maskstoreps256(reinterpret_cast<type*>(p), mask(n).v, x.v);
    if constexpr (sizeof(T) * N == 32 && sizeof(T) == 8)
      __builtin_ia32_maskstorepd256(reinterpret_cast<type*>(p), mask(n).v, x.v);
  }

 private:
  typedef std::conditional_t<sizeof(T) == 4, int, long long> word;
  typedef word words __attribute__((vector_size(N * sizeof(T))));
  /// All bits of the first n lanes.
  struct mask {
    words v;
    LEANOPT_INLINE explicit mask(std::size_t n) {
      words index;
      for (int i = 0; i < N; ++i) index[i] = i;
      v = index < (words{} + word(n));
    }
  };
#endif
};
}  // namespace detail

template <int N>
struct lane_traits<lanes<double, N>> : detail::own_memory<double, N> {
  using detail::own_memory<double, N>::load;
  using detail::own_memory<double, N>::store;
  using narrow = lanes<float, N>;
  LEANOPT_INLINE static lanes<double, N> load(const float* p) {
    const typename narrow::type x = *reinterpret_cast<const typename narrow::unaligned*>(p);
#if defined(__clang__)
    return __builtin_convertvector(x, typename lanes<double, N>::type);
#else
    if constexpr (N == 4) return __builtin_ia32_cvtps2pd256(x);
    if constexpr (N == 8)
      return __builtin_ia32_cvtps2pd512_mask(x, typename lanes<double, N>::type{}, -1, 4);
#endif
  }
  LEANOPT_INLINE static void store(float* p, const lanes<double, N>& x) {
    typename narrow::type y;
#if defined(__clang__)
    y = __builtin_convertvector(x.v, typename narrow::type);
#else
    if constexpr (N == 4) y = __builtin_ia32_cvtpd2ps256(x.v);
    if constexpr (N == 8) y = __builtin_ia32_cvtpd2ps512_mask(x.v, typename narrow::type{}, -1, 4);
#endif
    *reinterpret_cast<typename narrow::unaligned*>(p) = y;
  }
};

namespace detail {
/// The bytes of four registers in one, in the order in which packing leaves them, and what else
/// is cheaper there than number by number.
template <int N>
struct packing {
  static constexpr bool narrows = false;
};
#if !defined(__clang__)
template <>
struct packing<8> {
  static constexpr bool narrows = true;
  using packed = lanes<std::uint8_t, 32>;
  using four_ints = const lanes<std::uint32_t, 8> (&)[4];
  using four_floats = const lanes<float, 8> (&)[4];

  /// x - less. @pre x is below 2^16, x - less below 256.
  LEANOPT_INLINE static packed narrow(four_ints x, std::uint32_t less) {
    const v16hi twice = (v16hi)lanes<std::uint32_t, 8>(less << 16 | less).v;
    const v16hi a = __builtin_ia32_packusdw256((v8si)x[0].v, (v8si)x[1].v) - twice;
    const v16hi b = __builtin_ia32_packusdw256((v8si)x[2].v, (v8si)x[3].v) - twice;
    return (packed::type)__builtin_ia32_packuswb256(a, b);
  }
  /// 128 where the sign is set, else 0.
  LEANOPT_INLINE static packed signs(four_floats x) {
    const auto all = (v8si)__builtin_ia32_packsswb256(words(x[0], x[1]), words(x[2], x[3]));
    return (packed::type)(all & (v8si)lanes<std::uint32_t, 8>(0x80808080u).v);
  }
  /// 1 where x is above 0. @pre None is below.
  LEANOPT_INLINE static packed ones(four_floats x) {
    const auto all = (v32qi)__builtin_ia32_packuswb256(words(x[0], x[1]), words(x[2], x[3]));
    return (packed::type)__builtin_ia32_pminub256(all,
                                                  (v32qi)lanes<std::uint32_t, 8>(0x01010101u).v);
  }
  LEANOPT_INLINE static void store_packed(std::uint8_t* p, const packed& x) {
    const v8si y = __builtin_ia32_permvarsi256((v8si)x.v, v8si{0, 4, 1, 5, 2, 6, 3, 7});
    std::memcpy(p, &y, 32);
  }

 private:
  typedef int v8si __attribute__((vector_size(32)));
  typedef short v16hi __attribute__((vector_size(32)));
  typedef char v32qi __attribute__((vector_size(32)));
  /// Two registers as integers of 16 bits, which keep their sign and whether they are zero. A
  /// struct, because a function that returns a register of its own is warned of.
  struct words {
    v16hi v;
    LEANOPT_INLINE words(const lanes<float, 8>& a, const lanes<float, 8>& b)
        : v(__builtin_ia32_packssdw256((v8si)a.v, (v8si)b.v)) {}
    LEANOPT_INLINE operator const v16hi&() const { return v; }
  };
};
#endif
#if LEANOPT_PERMUTES_BYTES
/// For processors that permute bytes (AVX-512 VBMI).
template <>
struct packing<16> {
  static constexpr bool narrows = false;
  using packed = lanes<std::uint8_t, 64>;
  using ints = lanes<std::uint32_t, 16>;

  LEANOPT_INLINE static packed load_packed(const std::uint8_t* p) {
    v16si x;
    std::memcpy(&x, p, 64);
    return reordered(x);
  }
  LEANOPT_INLINE static void store_packed(std::uint8_t* p, const packed& x) {
    const packed y = reordered((v16si)x.v);
    std::memcpy(p, &y.v, 64);
  }
  /// Numbers below 256.
  LEANOPT_INLINE static packed pack(const ints (&x)[4]) {
    const v32hi a = __builtin_ia32_packusdw512_mask(v16si(x[0].v), v16si(x[1].v), v32hi{}, -1);
    const v32hi b = __builtin_ia32_packusdw512_mask(v16si(x[2].v), v16si(x[3].v), v32hi{}, -1);
    return (packed::type)__builtin_ia32_packuswb512_mask(a, b, v64qi{}, -1);
  }
  /// The numbers of a table at index % Count, in the order in which the indices were packed.
  template <int Count>
  LEANOPT_INLINE static void look_up_packed(const byte_planes<Count>& table, const packed& index,
                                            ints (&x)[4]) {
    const v64qi at = (v64qi)index.v;
    v64qi part[4];
    LEANOPT_UNROLL
    for (int k = 0; k < 4; ++k) {
      const v64qi* from = reinterpret_cast<const v64qi*>(table.plane[k]);
      part[k] = __builtin_ia32_vpermt2varqi512_mask(at, from[0], from[1], -1);
      if constexpr (Count == 256)
        part[k] = __builtin_ia32_blendmb_512_mask(
            part[k], __builtin_ia32_vpermt2varqi512_mask(at, from[2], from[3], -1),
            __builtin_ia32_cvtb2mask512(at));
    }
    const v32hi a = (v32hi)__builtin_ia32_punpcklbw512_mask(part[0], part[1], v64qi{}, -1);
    const v32hi b = (v32hi)__builtin_ia32_punpcklbw512_mask(part[2], part[3], v64qi{}, -1);
    const v32hi c = (v32hi)__builtin_ia32_punpckhbw512_mask(part[0], part[1], v64qi{}, -1);
    const v32hi d = (v32hi)__builtin_ia32_punpckhbw512_mask(part[2], part[3], v64qi{}, -1);
    using type = ints::type;
    x[0].v = (type)__builtin_ia32_punpcklwd512_mask(a, b, v32hi{}, -1);
    x[1].v = (type)__builtin_ia32_punpckhwd512_mask(a, b, v32hi{}, -1);
    x[2].v = (type)__builtin_ia32_punpcklwd512_mask(c, d, v32hi{}, -1);
    x[3].v = (type)__builtin_ia32_punpckhwd512_mask(c, d, v32hi{}, -1);
  }
  /// table[index % 16], lane by lane.
  LEANOPT_INLINE static lanes<float, 16> pick(const float (&table)[16], const ints& index) {
    return __builtin_ia32_permvarsf512_mask(own_memory<float, 16>::load(table).v, (v16si)index.v,
                                            lanes<float, 16>::type{}, -1);
  }
  LEANOPT_INLINE static lanes<float, 16> to_numbers(const ints& x) {
    return __builtin_ia32_cvtdq2ps512_mask((v16si)x.v, lanes<float, 16>::type{}, -1, 4);
  }
  /// The whole part of x.
  LEANOPT_INLINE static ints to_ints(const lanes<float, 16>& x) {
    return (ints::type)__builtin_ia32_cvttps2dq512_mask(x.v, v16si{}, -1, 4);
  }

 private:
  typedef char v64qi __attribute__((vector_size(64), may_alias));
  typedef short v32hi __attribute__((vector_size(64)));
  typedef int v16si __attribute__((vector_size(64)));
  /// Between the packed order and that of memory.
  LEANOPT_INLINE static packed reordered(const v16si& x) {
    const v16si order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return (packed::type)__builtin_ia32_permvarsi512_mask(x, order, v16si{}, -1);
  }
};
#endif
}  // namespace detail

template <int N>
struct lane_traits<lanes<float, N>> : detail::own_memory<float, N>, detail::packing<N> {
  using ints = lanes<std::uint32_t, N>;
  static constexpr int group = 32 / N;
  LEANOPT_INLINE static ints iota() {
    ints x;
    for (int i = 0; i < N; ++i) x.v[i] = i;
    return x;
  }
  LEANOPT_INLINE static bool everywhere(bool x) { return x; }

  /// N bytes: std::uint8_t is extended with zeros, std::int8_t with its sign.
  template <class Byte>
  LEANOPT_INLINE static ints load_bytes(const Byte* p) {
    using type = typename ints::type;
#if defined(__clang__)
    typedef Byte bytes __attribute__((vector_size(N)));
    typedef decltype(+Byte()) wide __attribute__((vector_size(N * 4)));
    bytes b;
    std::memcpy(&b, p, N);
    return (type) __builtin_convertvector(b, wide);
#else
    typedef char v16qi __attribute__((vector_size(16)));
    typedef long long v2di __attribute__((vector_size(16)));
    typedef int v16si __attribute__((vector_size(64)));
    constexpr bool is_signed = Byte(-1) < 0;
    v2di b{};
    if constexpr (N == 8) {
      long long low;  // 8 bytes through a 16-byte memcpy would fail to forward from the store
      std::memcpy(&low, p, 8);
      b[0] = low;
      return is_signed ? (type)__builtin_ia32_pmovsxbd256((v16qi)b)
                       : (type)__builtin_ia32_pmovzxbd256((v16qi)b);
    } else {
      std::memcpy(&b, p, 16);
      return is_signed ? (type)__builtin_ia32_pmovsxbd512_mask((v16qi)b, v16si{}, -1)
                       : (type)__builtin_ia32_pmovzxbd512_mask((v16qi)b, v16si{}, -1);
    }
#endif
  }

  /// 32 numbers, each below 256.
  LEANOPT_INLINE static void store_bytes(std::uint8_t* p, const ints (&x)[group]) {
#if defined(__clang__)
    typedef std::uint8_t bytes __attribute__((vector_size(N)));
    for (int i = 0; i < group; ++i) {
      const bytes b = __builtin_convertvector(x[i].v, bytes);
      std::memcpy(p + i * N, &b, N);
    }
#else
    if constexpr (N == 8) {
      typedef int v8si __attribute__((vector_size(32)));
      typedef short v16hi __attribute__((vector_size(32)));
      const v16hi a = __builtin_ia32_packusdw256(v8si(x[0].v), v8si(x[1].v));
      const v16hi b = __builtin_ia32_packusdw256(v8si(x[2].v), v8si(x[3].v));
      const v8si r = __builtin_ia32_permvarsi256(v8si(__builtin_ia32_packuswb256(a, b)),
                                                 v8si{0, 4, 1, 5, 2, 6, 3, 7});
      std::memcpy(p, &r, 32);
    } else {
      typedef int v16si __attribute__((vector_size(64)));
      typedef char v16qi __attribute__((vector_size(16)));
      for (int i = 0; i < group; ++i) {
        const v16qi b = __builtin_ia32_pmovdb512_mask(v16si(x[i].v), v16qi{}, -1);
        std::memcpy(p + 16 * i, &b, 16);
      }
    }
#endif
  }

  /// N numbers of 16 bits, extended with zeros.
  LEANOPT_INLINE static ints load_words(const std::uint16_t* p) {
    using type = typename ints::type;
    typedef std::uint16_t words __attribute__((vector_size(N * 2)));
    typedef std::uint16_t unaligned __attribute__((vector_size(N * 2), aligned(2), may_alias));
    const words w = *reinterpret_cast<const unaligned*>(p);
#if defined(__clang__)
    return __builtin_convertvector(w, type);
#else
    typedef short v8hi __attribute__((vector_size(16)));
    typedef short v16hi __attribute__((vector_size(32)));
    typedef int v16si __attribute__((vector_size(64)));
    if constexpr (N == 8)
      return (type)__builtin_ia32_pmovzxwd256((v8hi)w);
    else
      return (type)__builtin_ia32_pmovzxwd512_mask((v16hi)w, v16si{}, -1);
#endif
  }

  /// table[index], lane by lane.
  LEANOPT_INLINE static ints look_up(const std::uint32_t* table, const ints& index) {
    using type = typename ints::type;
#if defined(__clang__)
    type x;
    for (int i = 0; i < N; ++i) x[i] = table[index.v[i]];
    return x;
#else
    typedef int v8si __attribute__((vector_size(32)));
    typedef int v16si __attribute__((vector_size(64)));
    const int* from = reinterpret_cast<const int*>(table);
    if constexpr (N == 8)
      return (type)__builtin_ia32_gathersiv8si(v8si{}, from, (v8si)index.v, v8si{} - 1, 4);
    else
      return (type)__builtin_ia32_gathersiv16si(v16si{}, from, (v16si)index.v, -1, 4);
#endif
  }

  /// N numbers, each below 65536.
  LEANOPT_INLINE static void store_words(std::uint16_t* p, const ints& x) {
    typedef std::uint16_t words __attribute__((vector_size(N * 2)));
    typedef std::uint16_t unaligned __attribute__((vector_size(N * 2), aligned(2), may_alias));
    words w;
#if defined(__clang__)
    w = __builtin_convertvector(x.v, words);
#else
    typedef int v8si __attribute__((vector_size(32)));
    typedef int v16si __attribute__((vector_size(64)));
    typedef short v16hi __attribute__((vector_size(32)));
    typedef long long v4di __attribute__((vector_size(32)));
    typedef long long v2di __attribute__((vector_size(16)));
    if constexpr (N == 8) {
      const v4di both = (v4di)__builtin_ia32_packusdw256(v8si(x.v), v8si(x.v));
      w = (words)v2di{both[0], both[2]};
    } else {
      w = (words)__builtin_ia32_pmovdw512_mask(v16si(x.v), v16hi{}, -1);
    }
#endif
    *reinterpret_cast<unaligned*>(p) = w;
  }
};
#pragma GCC diagnostic pop
#endif  // LEANOPT_LANES_X86

/// Sums of numbers in one fixed order for every N: sixteen partial sums, element i in sum i % 16,
/// which a tree of halves folds into one.
template <class V>
struct sixteen_sums {
  using L = lane_traits<V>;
  using T = typename L::number;
  static constexpr int count = 16;
  V part[count / L::count];

  LEANOPT_INLINE sixteen_sums() {
    LEANOPT_UNROLL
    for (int k = 0; k < count / L::count; ++k) part[k] = V(T(0));
  }
  /// Adds f(i) for i = 0, N, 2N, ... below 16; f gives the numbers i to i + N - 1.
  template <class F>
  LEANOPT_INLINE void add(F f) {
    LEANOPT_UNROLL
    for (int k = 0; k < count / L::count; ++k) part[k] = part[k] + f(k * L::count);
  }
  LEANOPT_INLINE T total() const {
    constexpr int N = L::count;
    V sums[count / N];
    LEANOPT_UNROLL
    for (int k = 0; k < count / N; ++k) sums[k] = part[k];
    LEANOPT_UNROLL
    for (int half = count / N / 2; half; half /= 2) LEANOPT_UNROLL
    for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
    scalar<T> x[N];
    T memory[N];
    L::store(memory, sums[0]);
    LEANOPT_UNROLL
    for (int i = 0; i < N; ++i) x[i] = memory[i];
    LEANOPT_UNROLL
    for (int half = N / 2; half; half /= 2) LEANOPT_UNROLL
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
    return x[0].v;
  }
};

}  // namespace leanopt
LEANOPT_EXACT_END
