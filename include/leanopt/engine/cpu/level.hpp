// The instruction sets: kernels are templates over the width of the lanes, forced into an entry
// point for each set, of which launch() picks one at run time. No flag of the consumer's build is
// needed.
#pragma once

#include <leanopt/core/lane.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt::cpu {

/// The instruction sets, in LibTorch's order and under its names (see level_from_environment());
/// the last one, which permutes bytes, has the name of the one before it.
enum class level { scalar, avx2, avx512, avx512vbmi };
constexpr const char* name_of(level l) {
  return l >= level::avx512 ? "avx512" : l == level::avx2 ? "avx2" : "default";
}

inline level best_level() {
#if LEANOPT_LANES_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#if LEANOPT_PERMUTES_BYTES
    return __builtin_cpu_supports("avx512vbmi") ? level::avx512vbmi : level::avx512;
#else
    return level::avx512;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return level::avx2;
#endif
  return level::scalar;
}

/// Round to nearest and no flush to zero while it lives: -ffast-math at the link and
/// at::set_flush_denormal change both for a thread.
class float_environment {
#if defined(__x86_64__)
 public:
  float_environment() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~float_environment() { __builtin_ia32_ldmxcsr(saved_); }
  float_environment(const float_environment&) = delete;
  float_environment& operator=(const float_environment&) = delete;

 private:
  unsigned saved_;
#endif
};

namespace detail {

/// The Width of kernels that permute the bytes of four registers of 16 floats together.
constexpr int permuting = 64;
/// Lanes of T in a register that holds `Width` floats; one number where Width is 1.
template <int Width, class T>
using lanes_of = lanes<T, Width == 1 ? 1 : (Width == permuting ? 16 : Width) * 4 / int(sizeof(T))>;

template <class Kernel, class... A>
[[gnu::noinline]] auto enter_scalar(const A&... args) {
  return Kernel::template run<1>(args...);
}
#if LEANOPT_LANES_X86
template <class Kernel, class... A>
[[gnu::noinline, gnu::target("avx2,fma")]] auto enter_avx2(const A&... args) {
  return Kernel::template run<8>(args...);
}
template <class Kernel, class... A>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] auto enter_avx512(
    const A&... args) {
  return Kernel::template run<16>(args...);
}
#if LEANOPT_PERMUTES_BYTES
template <class Kernel, class... A>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]] auto
enter_avx512vbmi(const A&... args) {
  return Kernel::template run<permuting>(args...);
}
#endif
#endif

/// What a kernel for numbers of type T is compiled for at most: float64 moves so many bytes that
/// 512 bits gain nothing, and each level costs every consumer's compiler.
template <class T>
constexpr level widest = sizeof(T) == 8 ? level::avx2 : level::avx512;

/// Runs Kernel::run<Width>(args...) with the width of `l`, at most Widest's. @pre l is Least or
/// more.
template <class Kernel, level Widest, level Least = level::scalar, class... A>
auto launch([[maybe_unused]] level l, const A&... args) {
#if LEANOPT_PERMUTES_BYTES
  if constexpr (Widest == level::avx512vbmi)
    if (l == level::avx512vbmi) return enter_avx512vbmi<Kernel>(args...);
#endif
#if LEANOPT_LANES_X86
  if constexpr (Widest >= level::avx512)
    if (l >= level::avx512) return enter_avx512<Kernel>(args...);
  if constexpr (Least >= level::avx2) {
    return enter_avx2<Kernel>(args...);
  } else {
    if constexpr (Widest >= level::avx2)
      if (l >= level::avx2) return enter_avx2<Kernel>(args...);
    return enter_scalar<Kernel>(args...);
  }
#else
  return enter_scalar<Kernel>(args...);
#endif
}

}  // namespace detail

}  // namespace leanopt::cpu
LEANOPT_EXACT_END
