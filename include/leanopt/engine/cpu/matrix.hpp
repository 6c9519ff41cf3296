// The steps of a tensor rule: sums over a matrix in a fixed order, then an elementwise step that
// takes its factors from them.
#pragma once

#include <leanopt/engine/cpu/elementwise.hpp>
#include <leanopt/weights/plain.hpp>

#include <algorithm>
#include <cmath>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::cpu {

namespace detail {

/// Sum of f(i, n)^2 over n <= 256 numbers, in the fixed order of sixteen_sums; f gives a register
/// of the numbers from i on, of which n count.
template <class V, class F>
LEANOPT_INLINE typename lane_traits<V>::number sum_of_squares(std::size_t n, F f) {
  using sums = sixteen_sums<V>;
  constexpr std::size_t N = lane_traits<V>::count;
  sums s;
  std::size_t i = 0;
  for (; i + sums::count <= n; i += sums::count)
    s.add([&](int k) LEANOPT_LAMBDA {
      const V x = f(i + k, N);
      return x * x;
    });
  if (i < n)
    s.add([&](int k) LEANOPT_LAMBDA {
      const std::size_t at = i + k, left = at < n ? n - at : 0;
      const V x = f(at, left < N ? left : N);
      return x * x;
    });
  return s.total();
}

template <class T>
struct square_sum {
  template <int Width>
  LEANOPT_INLINE static double run(const T* x, std::size_t n) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    return sum_of_squares<V>(
        n, [&](std::size_t at, std::size_t m) LEANOPT_LAMBDA { return L::load_some(x + at, m); });
  }
};
/// The same of parameters and of their updates before they are clipped, stage by stage.
template <class T, class Inputs>
struct update_sums {
  struct result {
    double parameter = 0, update = 0;
  };
  template <int Width, class View>
  LEANOPT_INLINE static result run(const View& view, std::size_t first, std::size_t n,
                                   const Inputs& in) {
    using V = lanes_of<Width, T>;
    const View x = view;  // a local copy, as in stream
    alignas(64) T input[stage];
    result sums;
    for (std::size_t i = 0; i < n; i += stage) {
      const std::size_t m = std::min(stage, n - i);
      if (n > stage) {  // else these may be copies in L1
        prefetch(x.p + i + 2 * stage);
        prefetch(x.g + i + 2 * stage);
      }
      sums.parameter += sum_of_squares<V>(m, [&](std::size_t at, std::size_t some) LEANOPT_LAMBDA {
        return x.template load_p<V>(i + at, some);
      });
      with_inputs<V>(in, first + i, m, input, [&](auto get) LEANOPT_LAMBDA {
        sums.update += sum_of_squares<V>(m, [&](std::size_t at, std::size_t some) LEANOPT_LAMBDA {
          return x.template load_g<V>(i + at, some) * get(at, some);
        });
      });
    }
    return sums;
  }
};
/// Sums of the squares of gradients along `rows` rows of n columns, added to row[] and column[].
template <class T>
struct matrix_sums {
  template <int Width, class View>
  LEANOPT_INLINE static void run(const View& x, std::size_t rows, std::size_t stride, std::size_t n,
                                 double* row, T* column) {
    constexpr std::size_t together = 4;  // column sums are read and written once for so many rows
    std::size_t r = 0;
    for (; r + together <= rows; r += together) add<Width, together>(x, r, stride, n, row, column);
    for (; r < rows; ++r) add<Width, 1>(x, r, stride, n, row, column);
  }

 private:
  template <int Width, int Rows, class View>
  LEANOPT_INLINE static void add(const View& view, std::size_t first, std::size_t stride,
                                 std::size_t n, double* row, T* column) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    constexpr std::size_t N = L::count, count = sixteen_sums<V>::count;
    const View x = view;  // a local copy, as in stream
    for (std::size_t at = 0; at < n; at += stage) {
      const std::size_t m = std::min(stage, n - at), full = m / count * count;
      sixteen_sums<V> sums[Rows];
      const auto add_at = [&](std::size_t i, std::size_t k, std::size_t some) LEANOPT_LAMBDA {
        V in_column = L::load_some(column + at + i, some);
        LEANOPT_UNROLL
        for (int r = 0; r < Rows; ++r) {
          const V g = x.template load_g<V>((first + r) * stride + at + i, some), square = g * g;
          sums[r].part[k] = sums[r].part[k] + square;
          in_column = in_column + square;
        }
        L::store_some(column + at + i, in_column, some);
      };
      for (std::size_t i = 0; i < full; i += count) LEANOPT_UNROLL
      for (std::size_t k = 0; k < count / N; ++k) add_at(i + k * N, k, N);
      for (std::size_t i = full; i < m; i += N) add_at(i, (i - full) / N, std::min(N, m - i));
      for (int r = 0; r < Rows; ++r) row[first + r] += sums[r].total();
    }
  }
};
template <class Rule, class T>
struct track_variance {
  template <int Width>
  LEANOPT_INLINE static void run(const typename Rule::template reductions<T>& c, const T* g, T* v,
                                 std::size_t n) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    constexpr std::size_t N = L::count;
    for (std::size_t i = 0; i < n; i += N) {
      const std::size_t m = std::min(N, n - i);
      const V x = L::load_some(g + i, m);
      L::store_some(v + i, Rule::track(c, L::load_some(v + i, m), x * x), m);
    }
  }
};

}  // namespace detail

/// Root of the mean of sums per unit, added in one order whatever the number of threads.
inline double root_mean(const double* sums, std::size_t elements) {
  const float_environment guard;
  double sum = 0;
  for (std::size_t u = 0; u < units_of(elements); ++u) sum += sums[u];
  return std::sqrt(sum / double(elements));
}
/// Root of the mean square of a tensor; `sums` has one number per unit.
template <class T, class Weights, class For>
double root_mean_square(level l, const operand& x, std::size_t elements, double* sums,
                        For for_units) {
  for_units(units_of(elements), [&](std::size_t begin, std::size_t end) {
    const float_environment guard;
    detail::stage_of<T, Weights> numbers(l, x, false);
    for (std::size_t u = begin; u < end; ++u) {
      sums[u] = 0;
      detail::each_stage(
          u * unit, std::min(elements, (u + 1) * unit), [&](std::size_t i, std::size_t n) {
            sums[u] +=
                detail::launch<detail::square_sum<T>, detail::widest<T>>(l, numbers.read(i, n), n);
          });
    }
  });
  return root_mean(sums, elements);
}

// ---- steps of a tensor rule ---------------------------------------------------------------------

/// A tensor as a batch of matrices, or as one row of elements with a variance each.
struct matrix_step : tensor_step {
  std::size_t batch = 1, rows = 1, columns = 1;
  void* row = nullptr;       ///< [batch, rows]
  void* column = nullptr;    ///< [batch, columns]
  void* variance = nullptr;  ///< [elements], instead of both

  matrix_step() = default;
  /// The work for a tensor of these sizes, without its memory.
  matrix_step(const std::int64_t* sizes, std::size_t rank) {
    elements = 1;
    for (std::size_t d = 0; d < rank; ++d) elements *= std::size_t(sizes[d]);
    if (rank < 2 || elements == 0) return;
    rows = std::size_t(sizes[rank - 2]);
    columns = std::size_t(sizes[rank - 1]);
    batch = elements / (rows * columns);
  }
};

/// The three passes of a tensor rule: row and column sums; RMS of the parameter and of the update;
/// apply. Sums are taken in an order that the shape alone decides.
template <class Rule, class T, class Weights>
class matrix_passes {
 public:
  using reductions = typename Rule::template reductions<T>;

  /// @cost of scratch: one number per row and per column, partial column sums where a matrix has
  /// more than 64 rows, and two doubles per 4096 elements.
  static std::size_t scratch_bytes(const matrix_step& t) { return scratch_bytes(t, !t.variance); }
  static std::size_t scratch_bytes(const matrix_step& t, bool factored) {
    std::size_t bytes = 2 * sizeof(double) * units_of(t.elements);
    if (factored) bytes += sizeof(T) * (t.batch * (t.rows + t.columns) + partials(t) * t.columns);
    return bytes;
  }

  /// `scratch` is aligned for double and belongs to this call alone.
  matrix_passes(level l, const matrix_step& t, const reductions& c, char* scratch)
      : level_(l), t_(t), c_(c) {
    sums_ = reinterpret_cast<double*>(scratch);
    row_root_ = reinterpret_cast<T*>(sums_ + 2 * units_of(t.elements));
    column_root_ = row_root_ + t.batch * t.rows;
    partial_ = column_root_ + t.batch * t.columns;
    inputs_.limit = c.limit;
    if (t.variance) {
      inputs_.variance = static_cast<const T*>(t.variance);
    } else {
      inputs_.row = row_root_;
      inputs_.column = column_root_;
      inputs_.rows = t.rows;
      inputs_.columns = t.columns;
    }
  }

  /// Moves the second moments on.
  template <class For>
  void track(For for_units) {
    if (t_.variance) {
      for_units(units_of(t_.elements), [&](std::size_t begin, std::size_t end) {
        const float_environment guard;
        detail::stage_of<T, weights::plain> gradient(level_, t_.g, skips());
        detail::each_stage(
            begin * unit, std::min(t_.elements, end * unit), [&](std::size_t i, std::size_t n) {
              const T* g = gradient.read(i, n);
              const bool* kept = gradient.marks();
              T *v = static_cast<T*>(t_.variance) + i, before[stage];
              if (kept) std::copy_n(v, n, before);
              detail::launch<detail::track_variance<Rule, T>, level::avx2>(level_, c_, g, v, n);
              for (std::size_t j = 0; kept && j < n; ++j)
                if (kept[j]) v[j] = before[j];
            });
      });
      return;
    }
    for_units(t_.batch * chunks(t_), [&](std::size_t begin, std::size_t end) {
      const float_environment guard;
      for (std::size_t q = begin; q < end; ++q) sum_chunk(q);
    });
    for_units(t_.batch, [&](std::size_t begin, std::size_t end) {
      const float_environment guard;
      for (std::size_t b = begin; b < end; ++b) finish_matrix(b);
    });
  }

  struct root_mean_squares_t {
    double parameter, update;
  };
  /// Of the parameter and of the update, before it is clipped.
  template <class For>
  root_mean_squares_t root_mean_squares(For for_units) {
    using kernel = detail::update_sums<T, inputs>;
    const auto sums_of = [&](const auto& x, std::size_t i, std::size_t n) {
      return detail::launch<kernel, detail::widest<T>, std::decay_t<decltype(x)>::least>(
          level_, x, i, n, inputs_);
    };
    const std::size_t n = t_.elements;
    double* const updates = sums_ + units_of(n);
    for_units(units_of(n), [&](std::size_t begin, std::size_t end) {
      const float_environment guard;
      detail::stage_of<T, Weights> parameter(level_, t_.p, false);
      detail::stage_of<T, weights::plain> gradient(level_, t_.g, skips());
      for (std::size_t u = begin; u < end; ++u) {
        const std::size_t first = u * unit, last = std::min(n, first + unit);
        typename kernel::result sums;
        std::size_t done = 0;
        if (detail::in_place<T>(t_)) {
          done = last - first;
          sums = sums_of(array_view<T>::of(t_, first), first, done);
        } else if constexpr (std::is_same_v<T, float>) {
          if (detail::in_lane(level_, t_)) {
            done = (last - first) / stage * stage;
            sums = sums_of(bfloat16_view<Weights>::of(t_, first), first, done);
          }
        }
        detail::each_stage(first + done, last, [&](std::size_t i, std::size_t m) {
          const auto some = sums_of(array_view<T>{parameter.read(i, m), gradient.read(i, m)}, i, m);
          sums.parameter += some.parameter;
          sums.update += some.update;
        });
        sums_[u] = sums.parameter;
        updates[u] = sums.update;
      }
    });
    return {root_mean(sums_, n), root_mean(updates, n)};
  }

  template <class Formula, class Format, class For>
  void apply(const typename Formula::template coeffs<T>& c, For for_units) {
    for_units(units_of(t_.elements), [&](std::size_t begin, std::size_t end) {
      const float_environment guard;
      step<Formula, Format, T, Weights>(level_, t_, c, inputs_, begin * unit,
                                        std::min(t_.elements, end * unit));
    });
  }

 private:
  using inputs = typename Rule::template formula<true>::template inputs<T>;
  using number = scalar<T>;
  static constexpr std::size_t chunk_rows = cut::rows, tile = 4096;
  static_assert(tile % stage == 0, "leanopt: rows are summed stage by stage");

  static std::size_t chunks(const matrix_step& t) { return (t.rows + chunk_rows - 1) / chunk_rows; }
  static std::size_t partials(const matrix_step& t) {
    return chunks(t) > 1 ? t.batch * chunks(t) : 0;
  }
  static number mean(double sum, std::size_t n) { return T(sum / double(n)); }
  /// Whether elements whose gradient is not finite are left out of all sums.
  bool skips() const { return t_.skipped != nullptr; }

  void set_column(std::size_t at, double sum) {
    T& moment = static_cast<T*>(t_.column)[at];
    moment = Rule::track(c_, number(moment), mean(sum, t_.rows)).v;
    column_root_[at] = Rule::column_root(number(moment)).v;
  }

  void sum_chunk(std::size_t q) {
    const std::size_t per_matrix = chunks(t_), b = q / per_matrix;
    const std::size_t from = q % per_matrix * chunk_rows;
    const std::size_t rows = std::min(chunk_rows, t_.rows - from);
    const std::size_t first = (b * t_.rows + from) * t_.columns;
    double row_sums[chunk_rows] = {};
    T column_sums[tile];
    for (std::size_t c = 0; c < t_.columns; c += tile) {
      const std::size_t n = std::min(tile, t_.columns - c);
      std::fill_n(column_sums, n, T(0));
      sum_tile(first + c, rows, n, row_sums, column_sums);
      if (per_matrix > 1)
        std::copy_n(column_sums, n, partial_ + q * t_.columns + c);
      else
        for (std::size_t j = 0; j < n; ++j) set_column(b * t_.columns + c + j, column_sums[j]);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      T& moment = static_cast<T*>(t_.row)[b * t_.rows + from + r];
      moment = Rule::track(c_, number(moment), mean(row_sums[r], t_.columns)).v;
    }
  }

  void sum_tile(std::size_t first, std::size_t rows, std::size_t n, double* row_sums,
                T* column_sums) {
    const auto add = [&](const auto& x, std::size_t some, std::size_t stride, double* of_rows) {
      detail::launch<detail::matrix_sums<T>, detail::widest<T>, std::decay_t<decltype(x)>::least>(
          level_, x, some, stride, n, of_rows, column_sums);
    };
    if (is_array<T>(t_.g) && !skips())
      return add(array_view<T>::of(t_, first), rows, t_.columns, row_sums);
    if constexpr (std::is_same_v<T, float>)
      if (detail::in_lane(level_, t_.g) && !skips() && n % sixteen_sums<number>::count == 0)
        return add(bfloat16_view<weights::plain>::of(t_, first), rows, t_.columns, row_sums);
    alignas(64) T copy[tile];
    const std::size_t together = n == t_.columns ? tile / n : 1;  // whole rows are one run
    for (std::size_t r = 0; r < rows; r += together) {
      const std::size_t some = std::min(together, rows - r);
      read<T, weights::plain>(level_, t_.g, first + r * t_.columns, some * n, copy);
      if (skips())
        for (std::size_t i = 0; i < some * n; ++i)
          if (detail::gradient_check<T>::is_bad(copy[i])) copy[i] = 0;
      add(array_view<T>{nullptr, copy}, some, n, row_sums + r);
    }
  }

  void finish_matrix(std::size_t b) {
    const std::size_t per_matrix = chunks(t_);
    if (per_matrix > 1)
      for (std::size_t j = 0; j < t_.columns; ++j) {
        double sum = 0;
        for (std::size_t q = b * per_matrix; q < (b + 1) * per_matrix; ++q)
          sum += double(partial_[q * t_.columns + j]);
        set_column(b * t_.columns + j, sum);
      }
    const T* moments = static_cast<const T*>(t_.row) + b * t_.rows;
    double sum = 0;
    for (std::size_t r = 0; r < t_.rows; ++r) sum += double(moments[r]);
    const number of_rows = mean(sum, t_.rows);
    for (std::size_t r = 0; r < t_.rows; ++r)
      row_root_[b * t_.rows + r] = Rule::row_root(c_, of_rows, number(moments[r])).v;
  }

  level level_;
  const matrix_step& t_;
  reductions c_;
  inputs inputs_;
  double* sums_;
  T *row_root_, *column_root_, *partial_;
};

}  // namespace leanopt::cpu
LEANOPT_EXACT_END
