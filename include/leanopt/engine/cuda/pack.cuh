// pack<T, N, Threads>: the numbers of a block of a format, N in the registers of each of `Threads`
// neighbouring threads of a warp. Rules, formats and weights take it for their V, as they take
// lanes<T, N> on the CPU: a kernel is their text, a reduction is one of shuffles, and what is rare
// is tested once for all N.
#pragma once

#include <leanopt/core/lane.hpp>
#include <leanopt/core/work.hpp>
#include <leanopt/engine/cuda/roots.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt {

namespace cuda {

constexpr unsigned all_lanes = ~0u;
constexpr int warp_threads = 32;
constexpr int block_threads = 256, block_warps = block_threads / warp_threads;

__device__ __forceinline__ unsigned lane_of_thread() { return threadIdx.x % warp_threads; }
/// By a shuffle, from which the compiler learns that it is the same in all threads of the warp.
__device__ __forceinline__ unsigned warp_of_thread() {
  return __shfl_sync(all_lanes, threadIdx.x / warp_threads, 0);
}

/// What a warp works on together: 256 numbers. A thread has four in a row and, in a pack of eight,
/// the four that are 128 further on, so that the threads of a warp read one run of memory at a
/// time.
constexpr int together = int(cut::stage), quad = 4;
/// The place of number i of a thread after its first.
LEANOPT_HD constexpr int place(int i) { return i / quad * (together / 2) + i % quad; }

template <class T, int N, int Threads = warp_threads>
struct pack {
  T v[N];

  pack() = default;
  LEANOPT_HD pack(T x) {
    LEANOPT_UNROLL
    for (int i = 0; i < N; ++i) v[i] = x;
  }
  /// Element i is f(i).
  template <class F>
  LEANOPT_HD static pack of(F f) {
    pack r;
    LEANOPT_UNROLL
    for (int i = 0; i < N; ++i) r.v[i] = f(i);
    return r;
  }

  LEANOPT_HD friend pack operator+(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return sum(a.v[i], b.v[i]); });
  }
  LEANOPT_HD friend pack operator-(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return difference(a.v[i], b.v[i]); });
  }
  LEANOPT_HD friend pack operator*(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return product(a.v[i], b.v[i]); });
  }
  LEANOPT_HD friend pack operator-(const pack& a) {
    return of([&](int i) LEANOPT_LAMBDA { return -a.v[i]; });
  }
  LEANOPT_HD friend pack operator&(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] & b.v[i]; });
  }
  LEANOPT_HD friend pack operator|(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] | b.v[i]; });
  }
  LEANOPT_HD friend pack operator<<(const pack& a, int s) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] << s; });
  }
  LEANOPT_HD friend pack operator>>(const pack& a, int s) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] >> s; });
  }
  LEANOPT_HD friend pack max(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  LEANOPT_HD friend pack min(const pack& a, const pack& b) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  LEANOPT_HD friend pack if_above(const pack& a, const pack& b, const pack& x, const pack& y) {
    return of([&](int i) LEANOPT_LAMBDA { return a.v[i] > b.v[i] ? x.v[i] : y.v[i]; });
  }
  /// All threads of the warp call it, as they do divide() and sqrt().
  __device__ __forceinline__ friend pack if_nan(const pack& x, const pack& a, const pack& b) {
    bool none = true;
    LEANOPT_UNROLL
    for (int i = 0; i < N; ++i) none &= x.v[i] == x.v[i];
    if (__all_sync(all_lanes, none)) return b;
    return of([&](int i) LEANOPT_LAMBDA { return x.v[i] != x.v[i] ? a.v[i] : b.v[i]; });
  }
  LEANOPT_HD friend pack fma(const pack& a, const pack& b, const pack& c) {
    return of([&](int i) LEANOPT_LAMBDA { return leanopt::detail::fused(a.v[i], b.v[i], c.v[i]); });
  }
  __device__ __forceinline__ friend pack divide(const pack& a, const pack& b) {
    if constexpr (sizeof(T) == 4) {
      using steps = refined_quotient;
      const auto size = [&](int i) LEANOPT_LAMBDA { return leanopt::bits(a.v[i]) & 0x7fffffffu; };
      const auto divisor = [&](int i) LEANOPT_LAMBDA { return leanopt::bits(b.v[i]); };
      if (is_between(divisor, steps::least, steps::most) &&
          is_zero_or_between(size, steps::least_dividend, steps::most_dividend))
        return of([&](int i) LEANOPT_LAMBDA { return steps::of(a.v[i], b.v[i]); });
    }
    return of([&](int i) LEANOPT_LAMBDA { return leanopt::detail::quotient(a.v[i], b.v[i]); });
  }
  __device__ __forceinline__ friend pack sqrt(const pack& a) {
    if constexpr (sizeof(T) == 4) {
      using steps = refined_root;
      const auto number = [&](int i) LEANOPT_LAMBDA { return leanopt::bits(a.v[i]); };
      if (is_zero_or_between(number, steps::least, steps::most))
        return of([&](int i) LEANOPT_LAMBDA { return steps::of(a.v[i]); });
    }
    return of([&](int i) LEANOPT_LAMBDA { return leanopt::detail::root(a.v[i]); });
  }

 private:
  /// Whether all f(i) of all threads of the warp are so. The sums and the order are those of the
  /// statistics of a format, which a compiler then makes once.
  template <class F>
  __device__ __forceinline__ static bool is_between(F f, std::uint32_t least, std::uint32_t most) {
    std::uint32_t low = f(0), high = f(0);
    LEANOPT_UNROLL
    for (int i = 1; i < N; ++i) {
      low = leanopt::min(low, f(i));
      high = leanopt::max(high, f(i));
    }
    return __all_sync(all_lanes, low >= least && high <= most);
  }
  template <class F>
  __device__ __forceinline__ static bool is_zero_or_between(F f, std::uint32_t least,
                                                            std::uint32_t most) {
    std::uint32_t low = f(0) - 1, high = f(0);  // 0 wraps around and is no smallest
    LEANOPT_UNROLL
    for (int i = 1; i < N; ++i) {
      low = leanopt::min(low, f(i) - 1);
      high = leanopt::max(high, f(i));
    }
    return __all_sync(all_lanes, low >= least - 1 && high <= most);
  }

  static constexpr bool is_integer = std::is_integral_v<T>;
  LEANOPT_HD static T sum(T a, T b) {
    if constexpr (is_integer)
      return a + b;
    else
      return leanopt::detail::add(a, b);
  }
  LEANOPT_HD static T difference(T a, T b) {
    if constexpr (is_integer)
      return a - b;
    else
      return leanopt::detail::subtract(a, b);
  }
  LEANOPT_HD static T product(T a, T b) {
    if constexpr (is_integer)
      return a * b;
    else
      return leanopt::detail::multiply(a, b);
  }
};

template <int N, int Threads = warp_threads>
using words = pack<std::uint32_t, N, Threads>;

template <int N, int Threads>
LEANOPT_HD words<N, Threads> bits(const pack<float, N, Threads>& x) {
  return words<N, Threads>::of([&](int i) LEANOPT_LAMBDA { return leanopt::bits(x.v[i]); });
}
template <int N, int Threads>
LEANOPT_HD pack<float, N, Threads> real(const words<N, Threads>& x) {
  return pack<float, N, Threads>::of([&](int i) LEANOPT_LAMBDA { return leanopt::real(x.v[i]); });
}
/// An operand's modifier on the device, not an operation.
template <int N, int Threads>
LEANOPT_HD pack<float, N, Threads> abs(const pack<float, N, Threads>& x) {
  return pack<float, N, Threads>::of([&](int i) LEANOPT_LAMBDA { return __builtin_fabsf(x.v[i]); });
}
template <class To, class From, int N, int Threads>
LEANOPT_HD pack<To, N, Threads> convert(const pack<From, N, Threads>& x) {
  return pack<To, N, Threads>::of([&](int i) LEANOPT_LAMBDA { return To(x.v[i]); });
}

/// The largest over groups of `Threads` neighbouring threads.
template <int Threads>
__device__ __forceinline__ std::uint32_t largest_of(std::uint32_t x) {
  LEANOPT_UNROLL
  for (int d = Threads / 2; d; d /= 2) x = leanopt::max(x, __shfl_xor_sync(all_lanes, x, d));
  return x;
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ std::uint32_t largest_of<warp_threads>(std::uint32_t x) {
  return __reduce_max_sync(all_lanes, x);
}
#endif
/// Over all numbers of a block, the same in all its threads. All threads of the warp call it.
template <int N, int Threads>
__device__ __forceinline__ std::uint32_t reduce_max(const words<N, Threads>& x) {
  std::uint32_t r = x.v[0];
  LEANOPT_UNROLL
  for (int i = 1; i < N; ++i) r = leanopt::max(r, x.v[i]);
  return largest_of<Threads>(r);
}
template <int N, int Threads>
__device__ __forceinline__ std::uint32_t reduce_min(const words<N, Threads>& x) {
  std::uint32_t r = x.v[0];
  LEANOPT_UNROLL
  for (int i = 1; i < N; ++i) r = leanopt::min(r, x.v[i]);
  return ~largest_of<Threads>(~r);
}

}  // namespace cuda

template <class T, int N, int Threads>
struct lane_traits<cuda::pack<T, N, Threads>> {
  using number = T;
  using ints = cuda::words<N, Threads>;
  static constexpr int count = N * Threads;
  /// The place of each number in its block.
  __device__ __forceinline__ static ints iota() {
    const std::uint32_t first = cuda::lane_of_thread() % Threads * cuda::quad;
    return ints::of([&](int i) LEANOPT_LAMBDA { return first + std::uint32_t(cuda::place(i)); });
  }
  /// The compiler learns that no threads of the warp part there. All of them call it.
  __device__ __forceinline__ static bool everywhere(bool x) {
    return __all_sync(cuda::all_lanes, x);
  }
  /// table[index], one by one.
  LEANOPT_HD static ints look_up(const std::uint32_t* table, const ints& index) {
    return ints::of([&](int i) LEANOPT_LAMBDA { return table[index.v[i]]; });
  }
};

}  // namespace leanopt
LEANOPT_EXACT_END
