// Sums in a fixed order: of all gradients for their norm, and of 256 numbers in the order of
// sixteen_sums, for which sixteen threads have one of its sums each.
#pragma once

#include <leanopt/engine/cuda/elementwise.cuh>

#include <cmath>

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// The sum over groups of `Threads` neighbouring threads, by halves; in all of them.
template <int Threads, class T>
__device__ __forceinline__ T sum_of_threads(T x) {
  LEANOPT_UNROLL
  for (int half = Threads / 2; half; half /= 2)
    x = leanopt::detail::add(x, __shfl_xor_sync(all_lanes, x, half));
  return x;
}

/// Adds x[0], x[1], ... one after the other in double, in all threads of the warp.
template <class F>
__device__ __forceinline__ double sum_in_order(std::uint64_t n, F x) {
  double sum = 0;
  for (std::uint64_t first = 0; first < n; first += warp_threads) {
    const std::uint64_t i = first + lane_of_thread();
    const double mine = i < n ? x(i) : 0;
    for (int j = 0; j < warp_threads; ++j) {
      const double next = __shfl_sync(all_lanes, mine, j);
      if (first + unsigned(j) < n) sum = leanopt::detail::add(sum, next);
    }
  }
  return sum;
}

// ---- the norm -----------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ double add_squares(double sum, const tensor& t, const void* gradients,
                                              const stage& e) {
  const numbers_of_stage<T> g(gradients, t.g, weights_kind::plain);
  const bool straight =
      t.g.is_run() && is_aligned(gradients, int(bytes_of(t.g.type))) && e.is_full();
  const pack<T, 8> x = straight ? g.load_straight(e) : g.load_each(e);
  LEANOPT_UNROLL
  for (int i = 0; i < 8; ++i) sum = leanopt::detail::fused(double(x.v[i]), double(x.v[i]), sum);
  return sum;
}

/// A sum per unit, by one warp each.
template <class = void>
__global__ void __launch_bounds__(block_threads, 4) squares_kernel(work_list list, double* sums) {
  const std::uint64_t warps = std::uint64_t(gridDim.x) * block_warps;
  for (std::uint64_t u = std::uint64_t(blockIdx.x) * block_warps + warp_of_thread(); u < list.units;
       u += warps) {
    const std::uint32_t index = list.tensor_of_unit[list.first + u];
    const tensor& t = list.tensors[index];
    const void* gradients = list.gradients[index];
    const std::uint64_t begin = (list.first + u - t.first_unit) * unit;
    double sum = 0;
    LEANOPT_ROLL
    for (std::uint64_t at = begin; at < begin + unit && at < t.elements; at += together) {
      const stage e{at, t.elements};
      if (t.g.type == number::float64)
        sum = add_squares<double>(sum, t, gradients, e);
      else
        sum = add_squares<float>(sum, t, gradients, e);
    }
    sum = sum_of_threads<warp_threads>(sum);
    if (lane_of_thread() == 0) sums[u] = sum;
  }
}

template <class = void>
__global__ void __launch_bounds__(block_threads)
    norm_kernel(const double* sums, std::uint64_t units, norm_result* result, double most,
                device_scalars scalars) {
  double sum = 0;
  for (std::uint64_t u = threadIdx.x; u < units; u += blockDim.x)
    sum = leanopt::detail::add(sum, sums[u]);
  sum = sum_of_threads<warp_threads>(sum);
  auto* of_warps = reinterpret_cast<double*>(dynamic_shared);
  if (lane_of_thread() == 0) of_warps[threadIdx.x / warp_threads] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (int w = 0; w < block_warps; ++w) total = leanopt::detail::add(total, of_warps[w]);
  const double scale = scalars.inv_scale ? *scalars.inv_scale : 1.0;
  const double norm = leanopt::detail::multiply(leanopt::detail::root(total), scale);
  const double clip = leanopt::detail::quotient(most, norm);
  const bool finite = norm - norm == 0;
  result->norm = norm;
  result->clip = clip < 1 ? clip : 1.0;
  result->found_inf = !finite || is_called_off(scalars) ? 1.0f : 0.0f;
}

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
