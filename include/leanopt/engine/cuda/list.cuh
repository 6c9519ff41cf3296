// What keeps the lists of a step up to date in the device's memory.
#pragma once

#include <leanopt/engine/cuda/elementwise.cuh>
#include <leanopt/engine/cuda_api.hpp>

namespace leanopt::cuda {

/// Which of the items, in the order of their first units, work unit u belongs to.
template <class Item>
__device__ __forceinline__ unsigned owner_of(const Item* all, unsigned count,
                                             std::uint64_t Item::*first, std::uint64_t u) {
  unsigned low = 0, high = count;  // the last that begins at u or before
  while (high - low > 1) {
    const unsigned middle = low + (high - low) / 2;
    (all[middle].*first <= u ? low : high) = middle;
  }
  return low;
}

/// As much as a launch of any device can have as parameters, with a pointer and a size.
struct parcel {
  static constexpr std::size_t most = 4064;
  std::uint32_t words[most / 4];
};
template <class = void>
__global__ void __launch_bounds__(block_threads)
    send_kernel(std::uint32_t* to, unsigned count, const __grid_constant__ parcel from) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = from.words[i];
}

template <class = void>
__global__ void __launch_bounds__(block_threads)
    units_kernel(const tensor* tensors, unsigned count, std::uint32_t* tensor_of_unit,
                 std::uint64_t units) {
  const std::uint64_t threads = std::uint64_t(gridDim.x) * blockDim.x;
  for (std::uint64_t u = std::uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; u < units;
       u += threads) {
    tensor_of_unit[u] = owner_of(tensors, count, &tensor::first_unit, u);
  }
}

template <class Rule, class T>
__global__ void __launch_bounds__(block_threads)
    prepare_kernel(const counted_group<Rule>* groups, group<Rule, T>* result, std::uint32_t count,
                   device_scalars scalars) {
  if (is_called_off(scalars)) return;
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const counted_group<Rule>& g = groups[i];
    constants_of<Rule> options = g.options;
    if (g.lr) options.lr(*g.lr);
    result[i] = group_of<Rule, T>(options, g.seed, ++*g.step, g.epsilon);
  }
}

/// What flushing of small numbers, or an approximate division or root, would get wrong. The numbers
/// come from outside, so that the compiler computes nothing.
template <class = void>
__global__ void __launch_bounds__(block_threads)
    arithmetic_kernel(std::uint32_t* result, float a, float b, float c) {
  if (threadIdx.x) return;
  const scalar<float> x(a), y(b), z(c);
  const bool small = (x * y).v != 0;  // 2^-145
  const bool quotient = bits(divide(scalar<float>(1.0f), z)) == 0x3eaaaaabu;
  const bool root = bits(sqrt(z)) == 0x3fddb3d7u;
  *result = small && quotient && root;
}

}  // namespace leanopt::cuda
