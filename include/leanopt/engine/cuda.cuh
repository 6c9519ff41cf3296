// The CUDA engine: what engine/cuda_api.hpp declares. Compiled by nvcc, for which
// cmake/leanopt_cuda.cu lists the rules, formats and types; and by the tests under an emulator.
#pragma once

#include <leanopt/engine/cuda/adafactor.cuh>
#include <leanopt/engine/cuda/codes.cuh>
#include <leanopt/engine/cuda/elementwise.cuh>
#include <leanopt/engine/cuda/list.cuh>
#include <leanopt/engine/cuda/sums.cuh>
#include <leanopt/engine/cuda_api.hpp>

#include <algorithm>

namespace leanopt::cuda {

namespace detail {
/// Puts a kernel on a stream. @return a cudaError_t.
template <class... Parameter, class... Argument>
int launch(void (*kernel)(Parameter...), std::uint64_t blocks, std::size_t shared_bytes, stream s,
           const Argument&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(block_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = s;
  return cudaLaunchKernelEx(&config, kernel, Parameter(arguments)...);
}

/// How many blocks to launch for `work` of them: at most eight per multiprocessor. @return a
/// cudaError_t.
inline int blocks_for(std::uint64_t work, std::uint64_t* blocks) {
  int device = 0, processors = 0;
  int error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  constexpr std::uint64_t per_processor = 8;
  *blocks = std::min(work, std::uint64_t(processors) * per_processor);
  return error;
}
inline int blocks_for_warps(std::uint64_t work, std::uint64_t* blocks) {
  return blocks_for((work + block_warps - 1) / block_warps, blocks);
}
}  // namespace detail

template <class>
int is_capturing(stream s, bool* result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const int error = cudaStreamIsCapturing(s, &status);
  *result = status != cudaStreamCaptureStatusNone;
  return error;
}
template <class>
const char* text_of(int error) {
  return cudaGetErrorString(cudaError_t(error));
}
template <class>
int check_arithmetic(std::uint32_t* result, stream s) {
  return detail::launch(arithmetic_kernel<>, 1, 0, s, result, 0x1p-100f, 0x1p-45f, 3.0f);
}

template <class>
int send(void* to, const void* from, std::size_t bytes, stream s) {
  for (std::size_t i = 0; i < bytes; i += parcel::most) {
    const std::size_t n = std::min(parcel::most, bytes - i);
    parcel p;
    std::memcpy(p.words, static_cast<const char*>(from) + i, n);
    if (const int error = detail::launch(
            send_kernel<>, 1, 0, s, reinterpret_cast<std::uint32_t*>(static_cast<char*>(to) + i),
            unsigned(n / 4), p))
      return error;
  }
  return 0;
}

template <class>
int set_units(const work_list& list, std::size_t tensors, stream s) {
  if (list.units == 0) return 0;
  std::uint64_t blocks;
  if (const int error =
          detail::blocks_for((list.units + block_threads - 1) / block_threads, &blocks))
    return error;
  return detail::launch(units_kernel<>, blocks, 0, s, list.tensors, unsigned(tensors),
                        const_cast<std::uint32_t*>(list.tensor_of_unit), list.units);
}

namespace detail {
template <class Formula, class Format, class T>
int step(const work_list& list, const group_step<typename Formula::template coeffs<T>>* groups,
         const device_scalars& scalars, const typename Formula::template inputs<T>* in, stream s) {
  std::uint64_t blocks;
  if (const int error = blocks_for_warps(list.units * warps_of_unit, &blocks)) return error;
  return launch(step_kernel<Formula, Format, T>, blocks, shared_bytes<Format>, s, list, groups,
                scalars, in);
}
}  // namespace detail

template <class Formula, class Format, class T>
int step(const work_list& list, const group_step<typename Formula::template coeffs<T>>* groups,
         const device_scalars& scalars, stream s) {
  if (list.units == 0) return 0;
  return detail::step<Formula, Format, T>(list, groups, scalars, nullptr, s);
}

template <class Formula, class Format, class T>
int adafactor_step(const matrix_list<T>& all, const device_scalars& scalars, stream s) {
  if (all.list.units == 0) return 0;
  constexpr std::size_t staged = std::size_t(block_warps) * 2 * together * sizeof(T);
  std::uint64_t blocks;
  int error = detail::blocks_for_warps(all.list.units + all.tiles, &blocks);
  if (!error) error = detail::launch(sums_kernel<T>, blocks, staged, s, all, scalars);
  if (!error && all.column_blocks) {
    error = detail::blocks_for(all.column_blocks + all.row_blocks, &blocks);
    if (!error) error = detail::launch(averages_kernel<T>, blocks, 0, s, all, scalars);
  }
  if (!error) error = detail::blocks_for_warps(all.list.units, &blocks);
  if (!error) error = detail::launch(update_kernel<T>, blocks, staged, s, all, scalars);
  if (error) return error;
  return detail::step<Formula, Format, T>(all.list, all.coeffs, scalars, all.inputs, s);
}

template <class Rule, class T>
int prepare(const counted_group<Rule>* groups, group<Rule, T>* result, std::uint32_t count,
            const device_scalars& scalars, stream s) {
  return detail::launch(prepare_kernel<Rule, T>, 1, 0, s, groups, result, count, scalars);
}

template <class Formula, class Format>
int encode(const coded& t, const float* const (&numbers)[3], stream s) {
  if (t.elements == 0) return 0;
  number_arrays arrays{};
  for (int k = 0; k < Formula::slot_count; ++k) arrays.of_slot[k] = const_cast<float*>(numbers[k]);
  std::uint64_t blocks;
  if (const int error = detail::blocks_for_warps((t.elements + together - 1) / together, &blocks))
    return error;
  return detail::launch(encode_kernel<Formula, Format>, blocks, shared_bytes<Format>, s, t, arrays);
}
template <class Formula, class Format>
int decode(const coded& t, float* const (&numbers)[3], stream s) {
  if (t.elements == 0) return 0;
  number_arrays arrays{};
  for (int k = 0; k < Formula::slot_count; ++k) arrays.of_slot[k] = numbers[k];
  std::uint64_t blocks;
  if (const int error = detail::blocks_for_warps((t.elements + together - 1) / together, &blocks))
    return error;
  return detail::launch(decode_kernel<Formula, Format>, blocks, shared_bytes<Format>, s, t, arrays);
}

template <class>
int global_norm(const work_list& list, double* sums, norm_result* result, double most,
                const device_scalars& scalars, stream s) {
  if (list.units) {
    std::uint64_t blocks;
    if (const int error = detail::blocks_for_warps(list.units, &blocks)) return error;
    if (const int error = detail::launch(squares_kernel<>, blocks, staging_bytes, s, list, sums))
      return error;
  }
  return detail::launch(norm_kernel<>, 1, block_warps * sizeof(double), s,
                        static_cast<const double*>(sums), list.units, result, most, scalars);
}

}  // namespace leanopt::cuda
