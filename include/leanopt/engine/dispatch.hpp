// From tensors to engines: threads, the instruction set, the types that are only known at run time.
// Everything below it works on raw pointers.
#pragma once

#include <leanopt/engine/cpu.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>
#include <leanopt/weights/plain.hpp>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

namespace leanopt::engine {

/// f(begin, end) for ranges that make up [0, count), on LibTorch's threads. at::parallel_for is a
/// header template and runs serially in a program compiled without OpenMP; an iteration over a tensor
/// of one byte per unit runs inside LibTorch, whatever the flags of this program.
template <class F>
void for_units(std::size_t count, std::size_t grain, F f) {
  if (count == 0) return;
  if (count <= grain || at::get_num_threads() == 1) return f(std::size_t(0), count);
  at::Tensor bytes = at::empty({std::int64_t(count)}, at::kByte);
  const char* base = static_cast<const char*>(bytes.data_ptr());
  at::TensorIterator::nullary_op(bytes).for_each(
      [&](char** data, const std::int64_t*, std::int64_t inner, std::int64_t outer) {
        const auto begin = std::size_t(data[0] - base);
        f(begin, begin + std::size_t(inner * outer));
      },
      std::int64_t(grain));
}
/// The same on the calling thread.
struct serially {
  template <class F>
  void operator()(std::size_t count, F f) const {
    if (count) f(std::size_t(0), count);
  }
};

/// The instruction set that ATEN_CPU_CAPABILITY names (default, avx2, avx512), or else the best.
/// Read once. @throws when the name is unknown or this processor lacks it.
inline cpu::level level_from_environment() {
  static const cpu::level chosen = [] {
    const char* variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string wanted = variable ? variable : "";
    const cpu::level best = cpu::best_level();
    if (wanted.empty()) return best;
    for (cpu::level l : {cpu::level::scalar, cpu::level::avx2, cpu::level::avx512}) {
      if (wanted != cpu::name_of(l)) continue;
      TORCH_CHECK(l <= best, "leanopt: ATEN_CPU_CAPABILITY=", wanted,
                  " is more than this processor and compiler have (", cpu::name_of(best), ")");
      return l;
    }
    TORCH_CHECK(false, "leanopt: ATEN_CPU_CAPABILITY=", wanted,
                " is unknown: use default, avx2 or avx512, or unset it");
  }();
  return chosen;
}

/// f(T{}) with the type in which a parameter of type `type` is computed.
template <class F>
void with_arithmetic(at::ScalarType type, F f) {
  c10::toRealValueType(type) == at::kDouble ? f(double()) : f(float());
}
inline number number_of(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kDouble: return number::float64;
    case at::kBFloat16: return number::bfloat16;
    case at::kHalf: return number::float16;
    default: return number::float32;
  }
}

/// Tensors as operands; owns the sizes and strides of those that are no run in memory.
class operands {
 public:
  /// `x` in the order in which `order`, a dense tensor of the same sizes, stands in memory.
  /// Complex numbers are pairs of reals.
  operand in_order_of(const at::Tensor& order, const at::Tensor& x) {
    if (x.is_complex()) return make(at::view_as_real(order), at::view_as_real(x));
    return make(order, x);
  }
  /// `x` in its logical, row-major order.
  operand in_logical_order(const at::Tensor& x) {
    std::vector<std::int64_t> dims(x.dim());
    std::iota(dims.begin(), dims.end(), 0);
    return make(x, dims);
  }
  void clear() { shapes_.clear(); }

 private:
  operand make(const at::Tensor& order, const at::Tensor& x) {
    std::vector<std::int64_t> dims(x.dim());
    std::iota(dims.begin(), dims.end(), 0);
    std::stable_sort(dims.begin(), dims.end(), [&](std::int64_t a, std::int64_t b) {
      return order.stride(a) > order.stride(b);
    });
    return make(x, dims);
  }
  operand make(const at::Tensor& x, const std::vector<std::int64_t>& dims) {
    operand result{x.data_ptr(), number_of(x.scalar_type()), {}};
    std::vector<std::int64_t> sizes, strides;
    for (std::int64_t d : dims) {
      if (x.size(d) == 1) continue;
      if (!sizes.empty() && strides.back() == x.size(d) * x.stride(d)) {  // one run with the one before
        sizes.back() *= x.size(d);
        strides.back() = x.stride(d);
      } else {
        sizes.push_back(x.size(d));
        strides.push_back(x.stride(d));
      }
    }
    if (sizes.empty() || (sizes.size() == 1 && strides[0] == 1)) return result;
    result.shape.rank = int(sizes.size());
    result.shape.sizes = shapes_.emplace_back(std::move(sizes)).data();
    result.shape.strides = shapes_.emplace_back(std::move(strides)).data();
    return result;
  }
  std::deque<std::vector<std::int64_t>> shapes_;
};

/// The steps of an elementwise rule over all tensors, as one list of units.
template <class Rule, class Weights>
class elementwise_work {
 public:
  operands shapes;

  /// `slots` counts the slots that hold something; `options` outlives run().
  template <class Format, class Options>
  void add(const cpu::tensor_step& t, int slots, at::ScalarType type, const Options& options,
           std::int64_t step) {
    with_arithmetic(type, [&](auto zero) {
      using T = decltype(zero);
      const void* c = prepared(options, step, zero);
      const auto with_formula = [&](auto formula) {
        jobs_.push_back({t, c, &run_job<decltype(formula), Format, T>, units_});
      };
      if constexpr (Format::compressed)
        with_formula(typename Rule::template formula<false>{});
      else if (slots == Rule::template formula<true>::slot_count)
        with_formula(typename Rule::template formula<true>{});
      else
        with_formula(typename Rule::template formula<false>{});
    });
    units_ += cpu::units_of(t.elements);
  }

  void run(cpu::level l) const {
    for_units(units_, grain, [&](std::size_t begin, std::size_t end) {
      const cpu::float_environment guard;
      auto job = std::upper_bound(jobs_.begin(), jobs_.end(), begin,
                                  [](std::size_t u, const job_t& j) { return u < j.first_unit; });
      for (--job; begin < end; ++job) {
        const std::size_t units = cpu::units_of(job->work.elements);
        const std::size_t last = std::min(end - job->first_unit, units);
        job->run(l, job->work, job->coeffs, (begin - job->first_unit) * cpu::unit,
                 std::min(last * cpu::unit, job->work.elements));
        begin = job->first_unit + last;
      }
    });
  }

 private:
  static constexpr std::size_t grain = 4;  // units that one thread takes at least

  struct job_t {
    cpu::tensor_step work;
    const void* coeffs;
    void (*run)(cpu::level, const cpu::tensor_step&, const void*, std::size_t, std::size_t);
    std::size_t first_unit;
  };

  template <class Formula, class Format, class T>
  static void run_job(cpu::level l, const cpu::tensor_step& t, const void* c, std::size_t first,
                      std::size_t last) {
    cpu::step<Formula, Format, T, Weights>(
        l, t, *static_cast<const typename Formula::template coeffs<T>*>(c), {}, first, last);
  }

  /// Coefficients depend on a group's options and a parameter's step, so neighbours share them.
  template <class Options, class T>
  const void* prepared(const Options& o, std::int64_t step, T) {
    if (&o != options_ || step != step_) {
      options_ = &o;
      step_ = step;
      float_ = &floats_.emplace_back(Rule::template prepare<float>(o, step));
      double_ = &doubles_.emplace_back(Rule::template prepare<double>(o, step));
    }
    if constexpr (std::is_same_v<T, double>)
      return double_;
    else
      return float_;
  }
  template <class T>
  using coeffs = typename Rule::template formula<false>::template coeffs<T>;
  std::deque<coeffs<float>> floats_;
  std::deque<coeffs<double>> doubles_;
  const void* options_ = nullptr;
  std::int64_t step_ = 0;
  const void* float_ = nullptr;
  const void* double_ = nullptr;

  std::vector<job_t> jobs_;
  std::size_t units_ = 0;
};

/// Memory that the passes of a tensor rule reuse from step to step, one part per thread.
using scratch_memory = std::vector<std::vector<double>>;

/// The steps of a tensor rule: large tensors one after the other with all threads, then the small
/// ones, each by one thread, so that its passes find it in the cache.
template <class Rule, class Weights>
class tensor_work {
 public:
  operands shapes;

  /// `first_moment` says in which format the formula's slot is kept; `rms` may be null.
  template <class Format, class Options>
  void add(const cpu::matrix_step& t, bool first_moment, at::ScalarType type,
           const Options& options, std::int64_t step, float* rms) {
    with_arithmetic(type, [&](auto zero) {
      using T = decltype(zero);
      const double epsilon = epsilon_of(type);
      auto& list = t.elements >= split ? large_ : small_;
      list.push_back({t, &options, step, epsilon, rms, first_moment,
                      &run_one<Format, T, Options, pooled>, &run_one<Format, T, Options, serially>,
                      cpu::matrix_passes<Rule, T, Weights>::scratch_bytes(t)});
    });
  }

  void run(cpu::level l, scratch_memory& scratch) const {
    const std::size_t workers =
        std::min(small_.size(), std::size_t(std::max(at::get_num_threads(), 1)));
    scratch.resize(std::max({scratch.size(), workers, std::size_t(1)}));
    grow(scratch[0], large_);
    for (std::size_t w = 0; w < workers; ++w) grow(scratch[w], small_);
    for (const job_t& j : large_) j.run_pooled(l, j, scratch[0].data());
    std::atomic<std::size_t> next{0};  // any thread may take any tensor: the results do not depend on it
    for_units(workers, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t w = begin; w < end; ++w)
        for (std::size_t i; (i = next++) < small_.size();)
          small_[i].run_serially(l, small_[i], scratch[w].data());
    });
  }

 private:
  static constexpr std::size_t split = std::size_t(4) << 20;  // below, two threads share no matrix
  struct pooled {
    template <class F>
    void operator()(std::size_t count, F f) const {
      for_units(count, 4, f);
    }
  };

  struct job_t {
    cpu::matrix_step work;
    const void* options;
    std::int64_t step;
    double epsilon;
    float* rms;
    bool first_moment;
    void (*run_pooled)(cpu::level, const job_t&, double*);
    void (*run_serially)(cpu::level, const job_t&, double*);
    std::size_t scratch_bytes;
  };

  static double epsilon_of(at::ScalarType type) {
    switch (type) {
      case at::kDouble: return std::numeric_limits<double>::epsilon();
      case at::kBFloat16: return 0x1p-7;
      case at::kHalf: return 0x1p-10;
      default: return std::numeric_limits<float>::epsilon();
    }
  }
  static void grow(std::vector<double>& memory, const std::vector<job_t>& jobs) {
    std::size_t bytes = 0;
    for (const job_t& j : jobs) bytes = std::max(bytes, j.scratch_bytes);
    if (memory.size() * sizeof(double) < bytes) memory.resize(bytes / sizeof(double) + 1);
  }

  template <class Format, class T, class Options, class For>
  static void run_one(cpu::level l, const job_t& j, double* scratch) {
    const auto& o = *static_cast<const Options*>(j.options);
    cpu::matrix_passes<Rule, T, Weights> passes(
        l, j.work, Rule::template prepare<T>(o, j.step, j.epsilon),
        reinterpret_cast<char*>(scratch));
    const For for_units{};
    const double rms_of_parameter = passes.root_mean_square_of_parameter(for_units);
    if (j.rms) *j.rms = float(rms_of_parameter);
    passes.track(for_units);
    const double rms_of_update = passes.root_mean_square_of_update(for_units);
    const double rate = Rule::rate(o, j.step, rms_of_parameter);
    const auto c = Rule::template finish<T>(o, rate, rms_of_update);
    if (j.first_moment)
      passes.template apply<typename Rule::template formula<true>, Format>(c, for_units);
    else
      passes.template apply<typename Rule::template formula<false>, formats::full>(c, for_units);
  }

  std::vector<job_t> large_, small_;
};

}  // namespace leanopt::engine
