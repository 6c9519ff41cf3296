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
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace leanopt::engine {

/// A function of a range of units, f(begin, end), without its type. Refers to the function.
class unit_function {
 public:
  template <class F>
  unit_function(const F& f)
      : object_(&f), call_([](const void* object, std::size_t begin, std::size_t end) {
          (*static_cast<const F*>(object))(begin, end);
        }) {}
  void operator()(std::size_t begin, std::size_t end) const { call_(object_, begin, end); }

 private:
  const void* object_;
  void (*call_)(const void*, std::size_t, std::size_t);
};

/// f(begin, end) for ranges that make up [0, count), on LibTorch's threads, each of which takes
/// `grain` units at least. at::parallel_for is a header template and runs serially in a program
/// compiled without OpenMP; an iteration over a tensor of one byte per unit runs inside LibTorch,
/// whatever the flags of this program. The bytes are never touched: they need no memory.
inline void for_units(std::size_t count, std::size_t grain, unit_function f) {
  if (count == 0) return;
  if (count <= grain || at::get_num_threads() == 1) return f(0, count);
  static char first_byte = 0;
  const char* base = &first_byte;
  at::Tensor bytes = at::from_blob(&first_byte, {std::int64_t(count)}, at::kByte);
  at::TensorIterator::nullary_op(bytes).for_each(
      [&](char** data, const std::int64_t*, std::int64_t inner, std::int64_t outer) {
        const auto begin = std::size_t(data[0] - base);
        f(begin, begin + std::size_t(inner * outer));
      },
      std::int64_t(grain));
}
/// What runs the passes of one tensor: all threads, or the calling one.
struct unit_loop {
  bool pooled = false;
  void operator()(std::size_t count, unit_function f) const {
    if (pooled)
      for_units(count, 4, f);
    else if (count)
      f(0, count);
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
    const bool known = wanted == "default" || wanted == "avx2" || wanted == "avx512";
    TORCH_CHECK(known, "leanopt: ATEN_CPU_CAPABILITY=", wanted,
                " is unknown: use default, avx2 or avx512, or unset it");
    const cpu::level l = wanted == "avx512" ? cpu::level::avx512
                         : wanted == "avx2" ? cpu::level::avx2
                                            : cpu::level::scalar;
    TORCH_CHECK(l <= best, "leanopt: ATEN_CPU_CAPABILITY=", wanted,
                " is more than this processor and compiler have (", cpu::name_of(best), ")");
    return l;
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

/// The types of the tensors that hold a format's codes, and its headers if it has some.
template <class Format>
constexpr at::ScalarType code_type = sizeof(typename Format::template stored<float>) == 2
                                         ? at::kBFloat16
                                         : at::kByte;
template <class Format>
constexpr at::ScalarType header_type =
    std::is_void_v<typename Format::header>          ? at::ScalarType::Undefined
    : std::is_same_v<typename Format::header, float> ? at::kFloat
                                                     : at::kShort;

/// Tensors as operands; owns the sizes and strides of those that are no run in memory.
class operands {
 public:
  void clear() { shapes_.clear(); }
  /// `x` in the order in which `order`, a dense tensor of the same sizes, stands in memory.
  /// Complex numbers are pairs of reals.
  operand in_order_of(const at::Tensor& order, const at::Tensor& x) {
    if (x.is_complex()) return make(at::view_as_real(order), at::view_as_real(x));
    return make(order, x);
  }
  /// `x` in its logical, row-major order.
  operand in_logical_order(const at::Tensor& x) { return make(x, dims_of(x)); }

 private:
  static std::vector<std::int64_t> dims_of(const at::Tensor& x) {
    std::vector<std::int64_t> dims(x.dim());
    std::iota(dims.begin(), dims.end(), 0);
    return dims;
  }
  operand make(const at::Tensor& order, const at::Tensor& x) {
    std::vector<std::int64_t> dims = dims_of(x);
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
      if (!sizes.empty() &&
          strides.back() == x.size(d) * x.stride(d)) {  // one run with the one before
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
  std::vector<std::vector<std::int64_t>> shapes_;  // whose data stay where they are
};

/// Whether a number of x is not finite, or so large that its square is not, in float32 if
/// `float_squares`. @cost one pass; on a device a wait, and temporaries of the size of x.
inline bool has_bad_number(const at::Tensor& x, double factor, bool float_squares) {
  if (!x.is_cpu()) {
    const bool wide = c10::toRealValueType(x.scalar_type()) == at::kDouble;
    const double limit = wide && !float_squares ? infinite_square_from<double, double>()
                                                : infinite_square_from<float, double>();
    const at::Tensor all =
        (x.is_complex() ? at::view_as_real(x) : x).to(wide ? at::kDouble : at::kFloat);
    return !all.mul(factor).abs().lt(limit).all().item<bool>();
  }
  std::atomic<bool> found{false};
  operands shapes;
  operand all = shapes.in_order_of(x, x);
  all.factor = factor;
  const auto elements = std::size_t(x.numel()) * (x.is_complex() ? 2 : 1);
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    for_units(cpu::units_of(elements), 4, [&](std::size_t begin, std::size_t end) {
      const cpu::float_environment guard;
      const auto look = [&](auto square) {
        cpu::detail::stage_of<T, weights::plain, decltype(square)> numbers(level_from_environment(),
                                                                           all, true);
        cpu::detail::each_stage(begin * cpu::unit, std::min(elements, end * cpu::unit),
                                [&](std::size_t i, std::size_t n) {
                                  numbers.read(i, n);
                                  if (numbers.marks()) found = true;
                                });
      };
      float_squares ? look(float()) : look(T());
    });
  });
  return found;
}

/// The steps of an elementwise rule over all tensors, as one list of units.
class elementwise_work {
 public:
  using function = void (*)(cpu::level, const cpu::tensor_step&, const void* coeffs,
                            std::size_t first, std::size_t last);
  void clear() {
    jobs_.clear();
    units_ = elements_ = 0;
  }
  /// All are used until run() returns.
  void add(const cpu::tensor_step& t, const void* coeffs, function f) {
    jobs_.push_back({&t, coeffs, f, units_});
    units_ += cpu::units_of(t.elements);
    elements_ += t.elements;
  }

  void run(cpu::level l) const {
    if (units_ == 0) return;
    // A thread gets as much as waking it is worth, 16 Ki elements; to begin a tensor costs as 256.
    constexpr std::size_t worth = 16 << 10;
    const std::size_t grain = units_ * worth / (elements_ + 256 * jobs_.size()) + 1;
    for_units(units_, std::max<std::size_t>(grain, 4), [&](std::size_t begin, std::size_t end) {
      const cpu::float_environment guard;
      auto job = std::upper_bound(jobs_.begin(), jobs_.end(), begin,
                                  [](std::size_t u, const job_t& j) { return u < j.first_unit; });
      for (--job; begin < end; ++job) {
        const cpu::tensor_step& t = *job->work;
        const std::size_t last = std::min(end - job->first_unit, cpu::units_of(t.elements));
        job->run(l, t, job->coeffs, (begin - job->first_unit) * cpu::unit,
                 std::min(last * cpu::unit, t.elements));
        begin = job->first_unit + last;
      }
    });
  }

 private:
  struct job_t {
    const cpu::tensor_step* work;
    const void* coeffs;
    function run;
    std::size_t first_unit;
  };
  std::vector<job_t> jobs_;
  std::size_t units_ = 0, elements_ = 0;
};

/// The compiled step of a format for a rule's long or short formula, in the arithmetic of `type`.
template <class Rule, class Format, class Weights>
elementwise_work::function elementwise_function(at::ScalarType type, bool is_long) {
  elementwise_work::function result = nullptr;
  with_arithmetic(type, [&](auto zero) {
    using T = decltype(zero);
    const auto compiled = [](auto formula) -> elementwise_work::function {
      using Formula = decltype(formula);
      return [](cpu::level l, const cpu::tensor_step& t, const void* c, std::size_t first,
                std::size_t last) {
        cpu::step<Formula, Format, T, Weights>(
            l, t, *static_cast<const typename Formula::template coeffs<T>*>(c), {}, first, last);
      };
    };
    if constexpr (!Format::compressed)
      if (is_long) {
        result = compiled(typename Rule::template formula<true>{});
        return;
      }
    result = compiled(typename Rule::template formula<false>{});
  });
  return result;
}

/// Memory that the passes of a tensor rule reuse from step to step, one part per thread.
using scratch_memory = std::vector<std::vector<double>>;

/// A step of a tensor rule of one tensor.
struct tensor_job {
  cpu::matrix_step work;
  const void* options = nullptr;
  const void* coeffs = nullptr;  ///< what the rule prepared for the step
  std::int64_t step = 0;
  double epsilon = 0;   ///< of the parameter's type
  void* rms = nullptr;  ///< where the parameter's root mean square is kept, if it is
  bool first_moment = false;
  std::size_t scratch_bytes = 0;
  void (*run)(cpu::level, const tensor_job&, double* scratch, unit_loop) = nullptr;
};

/// What scratch memory the tensors of a step need that are stepped together.
class scratch_plan {
 public:
  static bool is_large(std::size_t elements) { return elements >= split; }
  void add(std::size_t elements, std::size_t bytes) {
    std::size_t& most = is_large(elements) ? large_ : small_;
    most = std::max(most, bytes);
    if (!is_large(elements)) ++small_tensors_;
  }
  std::size_t workers() const {
    return std::min(small_tensors_, std::size_t(std::max(at::get_num_threads(), 1)));
  }
  /// How many threads have scratch; large tensors use the first's.
  std::size_t threads() const { return std::max<std::size_t>(workers(), 1); }
  /// What thread w needs.
  std::size_t doubles(std::size_t w) const {
    const std::size_t bytes = std::max(w < workers() ? small_ : 0, w == 0 ? large_ : 0);
    return (bytes + sizeof(double) - 1) / sizeof(double);
  }

 private:
  static constexpr std::size_t split = std::size_t(4) << 20;  // below, two threads share no matrix
  std::size_t large_ = 0, small_ = 0, small_tensors_ = 0;
};

/// The steps of a tensor rule: large tensors one after the other with all threads, then the small
/// ones, each by one thread, so that its passes find it in the cache.
class tensor_work {
 public:
  void clear() {
    plan_ = {};
    large_.clear();
    small_.clear();
  }
  /// `job` is used until run() returns.
  void add(const tensor_job& job) {
    plan_.add(job.work.elements, job.scratch_bytes);
    (scratch_plan::is_large(job.work.elements) ? large_ : small_).push_back(&job);
  }

  void run(cpu::level l, scratch_memory& scratch) const {
    // All memory before the first change: a step that throws changes nothing.
    const std::size_t threads = plan_.threads();
    if (scratch.size() < threads) scratch.resize(threads);
    for (std::size_t w = 0; w < threads; ++w)
      if (const std::size_t n = plan_.doubles(w); scratch[w].size() < n)
        scratch[w] = std::vector<double>(n);
    for (const tensor_job* j : large_) j->run(l, *j, scratch[0].data(), unit_loop{true});
    std::atomic<std::size_t> next{
        0};  // any thread may take any tensor: the results do not depend on it
    for_units(plan_.workers(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t w = begin; w < end; ++w)
        for (std::size_t i; (i = next++) < small_.size();)
          small_[i]->run(l, *small_[i], scratch[w].data(), unit_loop{false});
    });
  }

 private:
  scratch_plan plan_;
  std::vector<const tensor_job*> large_, small_;
};

/// What torch.finfo calls the eps of a parameter's type.
inline double epsilon_of(at::ScalarType type) {
  return type == at::kBFloat16 ? 0x1p-7
         : type == at::kHalf   ? 0x1p-10
         : type == at::kDouble ? std::numeric_limits<double>::epsilon()
                               : double(std::numeric_limits<float>::epsilon());
}

/// Sets what depends on the parameter's type: the compiled step and its scratch.
template <class Rule, class Format, class Weights, class Options>
void set_function(tensor_job& job, at::ScalarType type) {
  with_arithmetic(type, [&](auto zero) {
    using T = decltype(zero);
    using passes = cpu::matrix_passes<Rule, T, Weights>;
    job.scratch_bytes = passes::scratch_bytes(job.work);
    job.run = [](cpu::level l, const tensor_job& j, double* scratch, unit_loop for_units) {
      const auto& o = *static_cast<const Options*>(j.options);
      passes all(l, j.work, *static_cast<const typename Rule::template prepared<T>*>(j.coeffs),
                 reinterpret_cast<char*>(scratch));
      all.track(for_units);
      const auto rms = all.root_mean_squares(for_units);
      if (j.rms) *static_cast<T*>(j.rms) = T(rms.parameter);
      const double rate = Rule::rate(o, j.step, rms.parameter);
      const auto c = Rule::template finish<T>(o, rate, rms.update);
      if (j.first_moment)
        all.template apply<typename Rule::template formula<true>, Format>(c, for_units);
      else
        all.template apply<typename Rule::template formula<false>, formats::full>(c, for_units);
    };
  });
}

}  // namespace leanopt::engine
