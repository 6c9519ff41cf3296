// Adafactor in four launches over all matrices of a step: sums of rows and columns; their moving
// averages and what they make of them; the root mean square of the update; and the elementwise
// step. Each sum is taken in the order of the CPU engine: of 256 numbers in sixteen, by sixteen
// threads; these one after the other. No sum is atomic.
#pragma once

#include <leanopt/engine/cuda/list.cuh>
#include <leanopt/engine/cuda/sums.cuh>
#include <leanopt/rules/adafactor.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

constexpr int half_threads = 16, per_thread = 16;  ///< of 256 numbers
__device__ __forceinline__ unsigned thread_of_half() { return threadIdx.x % half_threads; }
__device__ __forceinline__ unsigned half_of_warp() { return lane_of_thread() / half_threads; }

/// Numbers q * 16 + thread_of_half() of up to 256 from `first` on; zeros for those from n on. Each
/// half of the warp has its own.
template <class T>
__device__ __forceinline__ void read_half(const void* data, const operand& o, weights_kind kind,
                                          std::uint64_t first, std::uint64_t n,
                                          T (&x)[per_thread]) {
  const unsigned s = thread_of_half();
  const bool is_bfloat16 = o.type == number::bfloat16 &&
                           (kind == weights_kind::plain || kind == weights_kind::stochastic);
  if (o.is_run() && bytes_of(o.type) == sizeof(T)) {
    const T* from = static_cast<const T*>(global(data)) + first + s;
    LEANOPT_UNROLL
    for (int q = 0; q < per_thread; ++q) x[q] = q * 16u + s < n ? from[q * 16] : T(0);
  } else if (sizeof(T) == 4 && o.is_run() && is_bfloat16) {
    const auto* from = static_cast<const std::uint16_t*>(global(data)) + first + s;
    std::uint32_t word[per_thread];
    LEANOPT_UNROLL
    for (int q = 0; q < per_thread; ++q) word[q] = q * 16u + s < n ? from[q * 16] : 0;
    LEANOPT_UNROLL
    for (int q = 0; q < per_thread; ++q) x[q] = T(bfloat16_bits::widen<scalar<float>>(word[q]).v);
  } else {
    T* copy = staging_of_warp<T>() + half_of_warp() * together;
    LEANOPT_ROLL
    for (unsigned i = s; i < together; i += half_threads)
      copy[i] = i < n ? read_number<T>(data, o, kind, first + i) : T(0);
    __syncwarp();
    LEANOPT_UNROLL
    for (int q = 0; q < per_thread; ++q) x[q] = copy[q * 16u + s];
    __syncwarp();
  }
}

/// Gradients of a tensor as its sums take them.
template <class T>
struct gradients_of_tensor {
  const tensor& t;
  const void* data;
  T factor;

  __device__ __forceinline__ T seen(T g) const {
    if (factor != T(1)) g = leanopt::detail::multiply(g, factor);
    return t.skipped && has_infinite_square<T>(g) ? T(0) : g;
  }
  __device__ __forceinline__ void read(std::uint64_t first, std::uint64_t n,
                                       T (&x)[per_thread]) const {
    read_half<T>(data, t.g, weights_kind::plain, first, n, x);
    LEANOPT_UNROLL
    for (int q = 0; q < per_thread; ++q) x[q] = seen(x[q]);
  }
  __device__ __forceinline__ T at(std::uint64_t i) const {
    const T g = read_number<T>(data, t.g, weights_kind::plain, i);
    return factor != T(1) ? leanopt::detail::multiply(g, factor) : g;
  }
};

template <class T>
__device__ __forceinline__ T sum_of_squares(const T (&x)[per_thread]) {
  T sum = 0;
  LEANOPT_UNROLL
  for (int q = 0; q < per_thread; ++q)
    sum = leanopt::detail::add(sum, leanopt::detail::multiply(x[q], x[q]));
  return sum_of_threads<half_threads>(sum);
}
/// The sum of what read(first, n, x) gives for each 256 of a unit, in both halves of the warp.
template <class T, class Read>
__device__ __forceinline__ double sum_of_unit(std::uint64_t begin, std::uint64_t elements,
                                              Read read) {
  double sum = 0;
  LEANOPT_ROLL
  for (std::uint64_t at = begin; at < begin + unit && at < elements; at += 2 * together) {
    const std::uint64_t first = at + half_of_warp() * together;
    const std::uint64_t n = first < elements ? elements - first : 0;
    T x[per_thread];
    read(first, n, x);
    const T total = sum_of_squares(x);
    sum = leanopt::detail::add(sum, double(__shfl_sync(all_lanes, total, 0)));
    sum = leanopt::detail::add(sum, double(__shfl_sync(all_lanes, total, half_threads)));
  }
  return sum;
}

template <class T>
__device__ __forceinline__ T mean(double sum, std::uint64_t n) {
  return T(sum / double(n));
}

// ---- sums ---------------------------------------------------------------------------------------

/// 64 rows of two times 256 columns.
template <class T>
__device__ __forceinline__ void sum_tile(const matrix& m, const gradients_of_tensor<T>& g,
                                         std::uint64_t tile) {
  const std::uint64_t pairs = (m.stages() + 1) / 2, chunks = m.chunks();
  const std::uint64_t stage = tile % pairs * 2 + half_of_warp(), chunk = tile / pairs % chunks;
  const std::uint64_t b = tile / pairs / chunks, column = stage * together;
  const std::uint64_t n = column < m.columns ? m.columns - column : 0;
  const std::uint64_t from = chunk * matrix::chunk_rows;
  const std::uint64_t to = from + matrix::chunk_rows < m.rows ? from + matrix::chunk_rows : m.rows;
  T sums[per_thread];
  LEANOPT_UNROLL
  for (int q = 0; q < per_thread; ++q) sums[q] = 0;
  LEANOPT_ROLL
  for (std::uint64_t r = b * m.rows + from; r < b * m.rows + to; ++r) {
    T x[per_thread];
    g.read(r * m.columns + column, n, x);
    LEANOPT_UNROLL
    for (int q = 0; q < per_thread; ++q)
      sums[q] = leanopt::detail::add(sums[q], leanopt::detail::multiply(x[q], x[q]));
    const T total = sum_of_squares(x);
    if (n && thread_of_half() == 0) m.row_sums<T>()[r * m.stages() + stage] = total;
  }
  T* out = m.column_sums<T>() + (b * chunks + chunk) * m.columns + column;
  LEANOPT_UNROLL
  for (int q = 0; q < per_thread; ++q) {
    const unsigned c = q * 16u + thread_of_half();
    if (c < n) out[c] = sums[q];
  }
}
template <class T>
__device__ __forceinline__ void track_variance(const matrix& m,
                                               const rules::adafactor::reductions<T>& c,
                                               const gradients_of_tensor<T>& g, std::uint64_t u) {
  using number = scalar<T>;
  T* v = static_cast<T*>(m.variance);
  for (std::uint64_t i = u * unit + lane_of_thread(); i < (u + 1) * unit && i < m.elements();
       i += warp_threads) {
    const T x = g.at(i);
    if (g.t.skipped && has_infinite_square<T>(x)) continue;
    v[i] = rules::adafactor::track(c, number(v[i]), number(x) * number(x)).v;
  }
}
template <class T>
__global__ void __launch_bounds__(block_threads, blocks_per_processor<T>)
    sums_kernel(matrix_list<T> all, device_scalars scalars) {
  if (is_called_off(scalars)) return;
  const T factor = gradient_factor<T>(scalars);
  const std::uint64_t warps = std::uint64_t(gridDim.x) * block_warps, units = all.list.units;
  for (std::uint64_t w = std::uint64_t(blockIdx.x) * block_warps + warp_of_thread();
       w < units + all.tiles; w += warps) {
    if (w < units) {
      const unsigned i = all.list.tensor_of_unit[w];
      const tensor& t = all.list.tensors[i];
      const std::uint64_t u = w - t.first_unit;
      const double sum = sum_of_unit<T>(
          u * unit, t.elements, [&](std::uint64_t first, std::uint64_t n, T(&x)[per_thread]) {
            read_half<T>(t.p.data, t.p, t.weights, first, n, x);
          });
      if (lane_of_thread() == 0) all.matrices[i].sums(0)[u] = sum;
    } else {
      const std::uint64_t tile = w - units;
      const unsigned i = owner_of(all.matrices, all.count, &matrix::first_tile, tile);
      const matrix& m = all.matrices[i];
      const gradients_of_tensor<T> g{all.list.tensors[i], all.list.gradients[i], factor};
      if (m.variance)
        track_variance(m, all.groups[m.group].coeffs, g, tile - m.first_tile);
      else
        sum_tile(m, g, tile - m.first_tile);
    }
  }
}

// ---- moving averages ----------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void finish_columns(const matrix& m,
                                               const rules::adafactor::reductions<T>& c,
                                               std::uint64_t at) {
  using number = scalar<T>;
  if (at >= m.batch * m.columns) return;
  const std::uint64_t b = at / m.columns, column = at % m.columns, chunks = m.chunks();
  const T* sums = m.column_sums<T>() + b * chunks * m.columns + column;
  double sum = 0;
  for (std::uint64_t q = 0; q < chunks; ++q)
    sum = leanopt::detail::add(sum, double(sums[q * m.columns]));
  T& moment = static_cast<T*>(m.column)[at];
  moment = rules::adafactor::track(c, number(moment), number(mean<T>(sum, m.rows))).v;
  m.column_root<T>()[at] = rules::adafactor::column_root(number(moment)).v;
}
/// The rows of matrix b, by this warp or, where they are many, by all warps of the block.
template <class T>
__device__ __forceinline__ void finish_rows(const matrix& m,
                                            const rules::adafactor::reductions<T>& c,
                                            std::uint64_t b, bool by_block) {
  using number = scalar<T>;
  const unsigned threads = by_block ? block_threads : warp_threads, first = threadIdx.x % threads;
  const std::uint64_t stages = m.stages();
  T* moments = static_cast<T*>(m.row) + b * m.rows;
  for (std::uint64_t r = first; r < m.rows; r += threads) {
    const T* sums = m.row_sums<T>() + (b * m.rows + r) * stages;
    double sum = 0;
    for (std::uint64_t s = 0; s < stages; ++s) sum = leanopt::detail::add(sum, double(sums[s]));
    moments[r] = rules::adafactor::track(c, number(moments[r]), number(mean<T>(sum, m.columns))).v;
  }
  if (by_block)
    __syncthreads();
  else
    __syncwarp();
  const number of_rows =
      mean<T>(sum_in_order(m.rows, [&](std::uint64_t r) { return double(moments[r]); }), m.rows);
  for (std::uint64_t r = first; r < m.rows; r += threads)
    m.row_root<T>()[b * m.rows + r] = rules::adafactor::row_root(c, of_rows, number(moments[r])).v;
}
template <class T>
__global__ void __launch_bounds__(block_threads)
    averages_kernel(matrix_list<T> all, device_scalars scalars) {
  if (is_called_off(scalars)) return;
  for (std::uint64_t w = blockIdx.x; w < all.column_blocks + all.row_blocks; w += gridDim.x) {
    if (w < all.column_blocks) {
      const matrix& m = all.matrices[owner_of(all.matrices, all.count, &matrix::first_columns, w)];
      finish_columns(m, all.groups[m.group].coeffs,
                     (w - m.first_columns) * block_threads + threadIdx.x);
    } else {
      const std::uint64_t u = w - all.column_blocks;
      const matrix& m = all.matrices[owner_of(all.matrices, all.count, &matrix::first_rows, u)];
      const bool by_block = m.is_tall();
      const std::uint64_t b = by_block
                                  ? u - m.first_rows
                                  : (u - m.first_rows) * block_warps + threadIdx.x / warp_threads;
      if (b < m.batch) finish_rows(m, all.groups[m.group].coeffs, b, by_block);
    }
  }
}

// ---- the root mean square of the update ---------------------------------------------------------

template <class T>
__device__ __forceinline__ rules::inverse_roots<T> inputs_of(const matrix& m, T limit) {
  rules::inverse_roots<T> in;
  in.limit = limit;
  in.variance = static_cast<const T*>(m.variance);
  in.row = m.row_root<T>();
  in.column = m.column_root<T>();
  in.rows = m.rows;
  in.columns = m.columns;
  return in;
}
template <class T>
__device__ __forceinline__ void finish_step(const matrix_list<T>& all, unsigned i) {
  matrix& m = all.matrices[i];
  const adafactor_group<T>& group = all.groups[m.group];
  const std::uint64_t units = units_of(m.elements());
  const auto root_mean = [&](int which) {
    const double* sums = m.sums(which);
    const double sum = sum_in_order(units, [&](std::uint64_t u) { return __ldcg(sums + u); });
    return leanopt::detail::root(sum / double(m.elements()));
  };
  const double of_parameter = root_mean(0), of_update = root_mean(1);
  if (lane_of_thread() != 0) return;
  const double rate = rules::adafactor::rate(group.options, group.step, of_parameter);
  if (m.rms) *static_cast<T*>(m.rms) = T(of_parameter);
  all.coeffs[i] = {rules::adafactor::finish<T>(group.options, rate, of_update), group.key};
  all.inputs[i] = inputs_of<T>(m, group.coeffs.limit);
  m.arrived = 0;
}
/// The warp that comes last of a matrix adds up what all have left.
template <class T>
__global__ void __launch_bounds__(block_threads, blocks_per_processor<T>)
    update_kernel(matrix_list<T> all, device_scalars scalars) {
  if (is_called_off(scalars)) return;
  const T factor = gradient_factor<T>(scalars);
  const std::uint64_t warps = std::uint64_t(gridDim.x) * block_warps;
  for (std::uint64_t w = std::uint64_t(blockIdx.x) * block_warps + warp_of_thread();
       w < all.list.units; w += warps) {
    const unsigned i = all.list.tensor_of_unit[w];
    const tensor& t = all.list.tensors[i];
    matrix& m = all.matrices[i];
    const gradients_of_tensor<T> g{t, all.list.gradients[i], factor};
    const auto in = inputs_of<T>(m, all.groups[m.group].coeffs.limit);
    const std::uint64_t u = w - t.first_unit;
    const double sum = sum_of_unit<T>(
        u * unit, t.elements, [&](std::uint64_t first, std::uint64_t n, T(&x)[per_thread]) {
          T inputs[per_thread];
          g.read(first, n, x);
          read_inputs<per_thread, half_threads>(in, first + thread_of_half(),
                                                first + (n < together ? n : together), inputs);
          LEANOPT_UNROLL
          for (int q = 0; q < per_thread; ++q) x[q] = leanopt::detail::multiply(x[q], inputs[q]);
        });
    unsigned before = 0;
    if (lane_of_thread() == 0) {
      m.sums(1)[u] = sum;
      __threadfence();
      before = atomicAdd(&m.arrived, 1u);
    }
    if (__shfl_sync(all_lanes, before, 0) + 1 == units_of(t.elements)) {
      __threadfence();
      finish_step(all, i);
    }
  }
}

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
