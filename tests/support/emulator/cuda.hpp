// What the text of a kernel needs to be compiled by a C++ compiler and run on the CPU: CUDA's
// words, built-in variables, intrinsics and the launch. Include it before a .cuh.
#pragma once

#if defined(__CUDACC__)
#error "the emulator replaces CUDA; nvcc has the real thing"
#endif

#include "tests/support/emulator/grid.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace emulator {

/// A built-in variable: `of` gives the grid's value when it is read.
template <dim3 (grid::*of)() const>
struct built_in {
  template <unsigned dim3::*part>
  struct coordinate {
    operator unsigned() const { return (grid::now().*of)().*part; }
  };
  coordinate<&dim3::x> x;
  coordinate<&dim3::y> y;
  coordinate<&dim3::z> z;
};

template <class T>
std::uint64_t pack(const T& value) {
  static_assert(sizeof(T) <= 8, "registers are exchanged up to 64 bits at a time");
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
T unpack(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

/// f(value, next) over what the lanes of `mask` bring.
template <class T, class F>
T reduce(unsigned mask, T value, const char* name, F f) {
  const std::uint64_t* all = grid::now().meet(mask, pack(value), name);
  bool first = true;
  for (unsigned l = 0; l < warp_size; ++l) {
    if (!(mask >> l & 1)) continue;
    value = first ? unpack<T>(all[l]) : f(value, unpack<T>(all[l]));
    first = false;
  }
  return value;
}
/// What lane `from` of `mask` brings; a lane outside would be read on a device, undefined.
template <class T>
T read_lane(unsigned mask, T value, unsigned from, const char* name) {
  const std::uint64_t* all = grid::now().meet(mask, pack(value), name);
  if (!(mask >> from & 1)) grid::now().fail("a shuffle reads a lane outside its mask");
  return unpack<T>(all[from]);
}

}  // namespace emulator

inline constexpr emulator::built_in<&emulator::grid::thread> threadIdx{};
inline constexpr emulator::built_in<&emulator::grid::block> blockIdx{};
inline constexpr emulator::built_in<&emulator::grid::threads> blockDim{};
inline constexpr emulator::built_in<&emulator::grid::blocks> gridDim{};

inline void __syncthreads() { emulator::grid::now().barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::grid::now().meet(mask, 0, "__syncwarp"); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const unsigned lane = emulator::grid::now().lane(), w = unsigned(width);
  return emulator::read_lane(mask, value, (lane & ~(w - 1)) | (unsigned(from) & (w - 1)),
                             "__shfl_sync");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int difference) {
  return emulator::read_lane(mask, value, emulator::grid::now().lane() ^ unsigned(difference),
                             "__shfl_xor_sync");
}
inline unsigned __ballot_sync(unsigned mask, int condition) {
  const unsigned mine = condition ? 1u << emulator::grid::now().lane() : 0;
  return emulator::reduce(mask, mine, "__ballot_sync",
                          [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int condition) {
  return emulator::reduce(mask, condition != 0, "__any_sync",
                          [](bool a, bool b) { return a || b; });
}
inline int __all_sync(unsigned mask, int condition) {
  return emulator::reduce(mask, condition != 0, "__all_sync",
                          [](bool a, bool b) { return a && b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return emulator::reduce(mask, value, "__reduce_max_sync",
                          [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return emulator::reduce(mask, value, "__reduce_min_sync",
                          [](unsigned a, unsigned b) { return std::min(a, b); });
}
template <class T>
T atomicAdd(T* to, T value) {
  static_assert(std::is_integral_v<T>, "sums of floating-point numbers would depend on the order");
  const T before = *to;
  *to = T(before + value);
  return before;
}
/// The seeds of the device: the nearest numbers, off by as much as the test says.
inline float approximate(double exact) {
  const auto x = static_cast<float>(exact);
  return emulator::unpack<float>(emulator::pack(x) + std::uint64_t(emulator::here().seed_error));
}
inline float approximate_reciprocal(float x) { return approximate(1 / double(x)); }
inline float approximate_reciprocal_root(float x) { return approximate(1 / std::sqrt(double(x))); }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
/// Four of the eight bytes of x and y, x's first; a digit of `selector` names each.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulator::here().processors;
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = emulator::here().graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid value";
}
/// Runs the kernel to its end, or records it in the graph that is being captured.
/// @throws emulator::fault
template <class... Parameter, class... Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameter...),
                               Argument&&... arguments) {
  static_assert((sizeof(Parameter) + ... + 0) <= 4096, "parameters of a launch: 4 KiB");
  ++emulator::here().launches;
  const std::tuple<std::decay_t<Parameter>...> copies(std::forward<Argument>(arguments)...);
  const auto run = [=, shape = *config] {
    emulator::grid(shape.gridDim, shape.blockDim, shape.dynamicSmemBytes, [&] {
      std::apply([&](const auto&... x) { kernel(x...); }, copies);
    }).run();
  };
  emulator::here().graph ? emulator::here().graph->push_back(run) : run();
  return cudaSuccess;
}
