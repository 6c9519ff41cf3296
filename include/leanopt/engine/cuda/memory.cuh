// Memory and registers: what a thread reads and writes of the 256 elements that its warp works on.
// Where the operands are runs that are aligned, four elements at a time; what is strided, not
// aligned or the end of a tensor passes through shared memory, element by element.
#pragma once

#include <leanopt/core/number.hpp>
#include <leanopt/core/work.hpp>
#include <leanopt/engine/cuda/pack.cuh>
#include <leanopt/engine/cuda_api.hpp>

#include <cstddef>
#include <cstdint>

extern __shared__ uint4 dynamic_shared[];

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// Eight numbers of `Width` bytes as they stand in memory, one after the other in 32-bit words.
template <int Width>
struct raw {
  static constexpr int quad_words = Width, count = 2 * quad_words;
  std::uint32_t w[count];

  /// Number i of 1 or 2 bytes, extended with zeros or with its sign.
  template <class Number>
  LEANOPT_HD std::uint32_t number(int i) const {
    constexpr int per_word = 4 / sizeof(Number);
    const std::uint32_t word = w[i / per_word];
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(Number) == 1) {  // one instruction, where shifts and masks are two
      constexpr bool is_signed = Number(-1) < 0;
      const unsigned byte = unsigned(i % per_word);
      const unsigned selector = is_signed ? (8 | byte) * 0x1110 | byte : 0x4440 | byte;
      std::uint32_t x;
      asm("prmt.b32 %0, %1, 0, %2;" : "=r"(x) : "r"(word), "r"(selector));
      return x;
    }
#endif
    return std::uint32_t(Number(word >> (i % per_word * 8 * int(sizeof(Number)))));
  }
  template <class Number>
  LEANOPT_HD words<8> numbers() const {
    return words<8>::of([&](int i) LEANOPT_LAMBDA { return number<Number>(i); });
  }
  /// The inverse, for numbers of 2 bytes that fit, or of 1 that are byte `Byte` of x.
  template <class Number, int Byte = 0>
  __device__ __forceinline__ void set(const words<8>& x) {
    constexpr int per_word = 4 / sizeof(Number);
    LEANOPT_UNROLL
    for (int k = 0; k < 8 / per_word; ++k) {
      const std::uint32_t* from = x.v + k * per_word;
      if constexpr (per_word == 4) {
        constexpr unsigned selector = (Byte + 4) << 4 | Byte;
        w[k] = __byte_perm(__byte_perm(from[0], from[1], selector),
                           __byte_perm(from[2], from[3], selector), 0x5410);
      } else {
        w[k] = from[0] + (from[1] << 16);
      }
    }
  }
};
LEANOPT_HD pack<float, 8> numbers(const raw<4>& x) {
  return pack<float, 8>::of([&](int i) LEANOPT_LAMBDA { return leanopt::real(x.w[i]); });
}
LEANOPT_HD raw<4> raw_of(const pack<float, 8>& x) {
  raw<4> r;
  LEANOPT_UNROLL
  for (int i = 0; i < 8; ++i) r.w[i] = leanopt::bits(x.v[i]);
  return r;
}
LEANOPT_HD pack<double, 8> numbers(const raw<8>& x) {
  return pack<double, 8>::of([&](int i) LEANOPT_LAMBDA {
    return bit_cast<double>(std::uint64_t(x.w[2 * i + 1]) << 32 | x.w[2 * i]);
  });
}
LEANOPT_HD raw<8> raw_of(const pack<double, 8>& x) {
  raw<8> r;
  LEANOPT_UNROLL
  for (int i = 0; i < 8; ++i) {
    const auto b = bit_cast<std::uint64_t>(x.v[i]);
    r.w[2 * i] = std::uint32_t(b);
    r.w[2 * i + 1] = std::uint32_t(b >> 32);
  }
  return r;
}

/// 256 elements of a tensor, from `first` on, of which those below `elements` are there.
struct stage {
  std::uint64_t first, elements;

  __device__ __forceinline__ std::uint64_t of_thread() const {
    return first + lane_of_thread() * quad;
  }
  /// Element i of this thread.
  __device__ __forceinline__ std::uint64_t at(int i) const {
    return of_thread() + std::uint64_t(place(i));
  }
  __device__ __forceinline__ bool has(int i) const { return at(i) < elements; }
  __device__ __forceinline__ bool is_full() const { return first + together <= elements; }
};

/// Where element i of a walk over `s` stands.
__device__ __forceinline__ std::int64_t offset_of(const strided& s, std::uint64_t i) {
  if (s.rank == 0) return std::int64_t(i);
  std::int64_t offset = 0;
  LEANOPT_ROLL
  for (int d = s.rank - 1; d >= 0; --d) {
    const auto size = std::uint64_t(s.sizes[d]);
    offset += std::int64_t(i % size) * s.strides[d];
    i /= size;
  }
  return offset;
}

namespace detail {

// What one access takes: at most 16 bytes of a quad.
template <int Bytes>
struct access;
template <>
struct __attribute__((may_alias)) access<4> {
  std::uint32_t w[1];
};
template <>
struct __attribute__((may_alias, aligned(8))) access<8> {
  std::uint32_t w[2];
};
template <>
struct __attribute__((may_alias, aligned(16))) access<16> {
  std::uint32_t w[4];
};
template <int Width>
using access_of = access < Width* quad<16 ? Width * quad : 16>;

/// The bytes of an unsigned number in memory.
template <int Width>
struct cell;
template <>
struct cell<1> {
  using type = std::uint8_t;
};
template <>
struct cell<2> {
  using type = std::uint16_t __attribute__((may_alias));
};
template <>
struct cell<4> {
  using type = std::uint32_t __attribute__((may_alias));
};
template <>
struct cell<8> {
  using type = std::uint64_t __attribute__((may_alias));
};

}  // namespace detail

/// What a table points to is global memory: the compiler cannot know, and would ask at each access.
template <class P>
__device__ __forceinline__ P* global(P* p) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

/// The words of both quads of this thread in 256 numbers at `from`, which are aligned.
template <int Width>
__device__ __forceinline__ void load_quads(const void* from, std::uint32_t* w) {
  using part = detail::access_of<Width>;
  constexpr int parts = Width * quad / int(sizeof(part)), size = sizeof(part) / 4;
  LEANOPT_UNROLL
  for (int q = 0; q < 2; ++q) {
    const auto* p = static_cast<const part*>(from) + (q * warp_threads + lane_of_thread()) * parts;
    LEANOPT_UNROLL
    for (int k = 0; k < parts; ++k) {
      const part x = p[k];
      LEANOPT_UNROLL
      for (int j = 0; j < size; ++j) w[q * Width + k * size + j] = x.w[j];
    }
  }
}
template <int Width>
__device__ __forceinline__ void store_quads(void* to, const std::uint32_t* w) {
  using part = detail::access_of<Width>;
  constexpr int parts = Width * quad / int(sizeof(part)), size = sizeof(part) / 4;
  LEANOPT_UNROLL
  for (int q = 0; q < 2; ++q) {
    auto* p = static_cast<part*>(to) + (q * warp_threads + lane_of_thread()) * parts;
    LEANOPT_UNROLL
    for (int k = 0; k < parts; ++k) {
      part x;
      LEANOPT_UNROLL
      for (int j = 0; j < size; ++j) x.w[j] = w[q * Width + k * size + j];
      p[k] = x;
    }
  }
}

/// Shared memory of a warp through which what is not straight passes: 256 numbers.
constexpr std::size_t staging_bytes = std::size_t(block_warps) * together * sizeof(double);
__device__ __forceinline__ void* staging() {
  return reinterpret_cast<char*>(dynamic_shared) +
         threadIdx.x / warp_threads * (together * sizeof(double));
}

/// As much twice, for tensor rules.
template <class T>
__device__ __forceinline__ T* staging_of_warp() {
  return reinterpret_cast<T*>(dynamic_shared) + threadIdx.x / warp_threads * (2 * together);
}

/// The words of this thread's eight numbers of a stage; zeros for elements that are not there.
/// `straight`, the same in all threads of the warp: a full stage of an aligned run.
template <int Width>
__device__ __forceinline__ void load(const void* from, const strided& shape, const stage& e,
                                     bool straight, std::uint32_t* w) {
  if (straight)
    return load_quads<Width>(static_cast<const char*>(global(from)) + e.first * Width, w);
  using cell = typename detail::cell<Width>::type;
  auto* copy = static_cast<cell*>(staging());
  LEANOPT_ROLL
  for (unsigned i = lane_of_thread(); i < together; i += warp_threads)
    copy[i] = e.first + i < e.elements
                  ? static_cast<const cell*>(global(from))[offset_of(shape, e.first + i)]
                  : cell(0);
  __syncwarp();
  load_quads<Width>(copy, w);
  __syncwarp();
}
template <int Width>
__device__ __forceinline__ void store(void* to, const strided& shape, const stage& e, bool straight,
                                      const std::uint32_t* w) {
  if (straight) return store_quads<Width>(static_cast<char*>(global(to)) + e.first * Width, w);
  using cell = typename detail::cell<Width>::type;
  auto* copy = static_cast<cell*>(staging());
  store_quads<Width>(copy, w);
  __syncwarp();
  LEANOPT_ROLL
  for (unsigned i = lane_of_thread(); i < together && e.first + i < e.elements; i += warp_threads)
    static_cast<cell*>(global(to))[offset_of(shape, e.first + i)] = copy[i];
  __syncwarp();
}

/// Whether quads of `width` bytes from `data` on may be read at once.
__device__ __forceinline__ bool is_aligned(const void* data, int width) {
  const int bytes = width * quad < 16 ? width * quad : 16;
  return reinterpret_cast<std::uintptr_t>(data) % unsigned(bytes) == 0;
}

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
