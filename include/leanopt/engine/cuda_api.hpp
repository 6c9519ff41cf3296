// The CUDA engine as host code sees it, without CUDA: what the memory of a device has to hold, and
// functions that put work on a stream. They are templates that engine/cuda.cuh defines, for the
// rules, formats and types that cmake/leanopt_cuda.cu lists: where that is not linked, or lacks
// one, the linker says which. None of them waits for the device or allocates; those that return an
// int return a cudaError_t, 0 for success.
#pragma once

#include <leanopt/core/random.hpp>
#include <leanopt/core/slot.hpp>
#include <leanopt/core/work.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/weights/plain.hpp>
#include <leanopt/weights/split.hpp>
#include <leanopt/weights/stochastic.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

struct CUstream_st;

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// A stream of the CUDA runtime: its cudaStream_t.
using stream = CUstream_st*;

// ---- tensors ------------------------------------------------------------------------------------

/// How a parameter of 16 bits is read and written. What weights/ has, chosen per tensor at run
/// time: one kernel serves all.
enum class weights_kind : std::uint8_t { plain, stochastic, split24, split32 };
template <class Weights>
constexpr weights_kind kind_of =
    std::is_same_v<Weights, weights::stochastic> ? weights_kind::stochastic
    : std::is_same_v<Weights, weights::split24>  ? weights_kind::split24
    : std::is_same_v<Weights, weights::split32>  ? weights_kind::split32
                                                 : weights_kind::plain;

/// A tensor of a step, in the device's memory, as are all that it points to. Slots and headers are
/// contiguous, in the order of the operands. `g.data` and `g.factor` are unused: gradients move.
struct tensor {
  operand p, g;
  void* slots[3] = {};
  void* headers[3] = {};
  std::uint64_t elements = 0;
  std::uint64_t first_unit = 0;  ///< set by table
  std::uint64_t ordinal = 0;     ///< of its random bits
  /// Where there is one, elements whose gradient is not finite stay as they are and are counted.
  std::int64_t* skipped = nullptr;
  std::uint32_t group = 0;  ///< of its coefficients
  weights_kind weights = weights_kind::plain;
};

/// What the work of a step, as the engine of the CPU has it, says of a tensor.
template <class Work>
tensor tensor_of(const Work& work) {
  tensor t;
  t.p = work.p;
  t.g = work.g;
  for (int k = 0; k < 3; ++k) {
    t.slots[k] = work.slots[k];
    t.headers[k] = work.headers[k];
  }
  t.elements = work.elements;
  t.skipped = work.skipped;
  return t;
}

constexpr std::uint64_t unit = cut::unit;

/// What the tensors of a group have in common in one step of an elementwise rule.
template <class Coeffs>
struct group_step {
  Coeffs coeffs;
  std::uint64_t key;  ///< of the seed and the step
};

/// Scalars of a step in the device's memory, read when the step runs; null where there is none.
struct device_scalars {
  const double* inv_scale = nullptr;  ///< gradients are multiplied by the product of this
  const double* clip = nullptr;       ///< and this, rounded once
  const float* found_inf = nullptr;   ///< not 0: the step changes nothing
};

/// The tensors of one launch in the device's memory: see table.
struct work_list {
  const tensor* tensors = nullptr;
  const void* const* gradients = nullptr;         ///< of each tensor; given with each step
  const std::uint32_t* tensor_of_unit = nullptr;  ///< of each work unit
  std::uint64_t units = 0;
  std::uint64_t first = 0;  ///< the unit to begin with
  /// What a format with tables has, sent to the device once: see tables_of.
  const void* tables = nullptr;
};

/// Where what follows so many bytes of a device's memory begins: at a multiple of 16.
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

/// Tensors in the form in which a device needs them. Made when the list of tensors changes: what
/// moves from step to step, the gradients' pointers, stands elsewhere.
class table {
 public:
  void clear() {
    tensors_.clear();
    shapes_.clear();
    units_ = 0;
  }
  /// `t.p.shape` and `t.g.shape` are the host's; copied.
  void add(tensor t) {
    t.first_unit = units_;
    units_ += units_of(t.elements);
    keep(t.p.shape);
    keep(t.g.shape);
    tensors_.push_back(t);
  }
  std::size_t tensors() const { return tensors_.size(); }
  std::uint64_t units() const { return units_; }

  /// Memory of the device that it needs, aligned to 16 bytes.
  std::size_t bytes() const { return at_units() + units_ * sizeof(std::uint32_t); }
  /// The list, once image() has been sent to `memory` and set_units() was called; without
  /// gradients.
  work_list list_at(void* memory) const {
    char* m = static_cast<char*>(memory);
    return {reinterpret_cast<const tensor*>(m),
            nullptr,
            reinterpret_cast<const std::uint32_t*>(m + at_units()),
            units_,
            0,
            nullptr};
  }
  /// What is sent to `memory` before set_units().
  std::vector<char> image(void* memory) const {
    std::vector<char> bytes(at_units());
    const auto* shapes =
        reinterpret_cast<const std::int64_t*>(static_cast<char*>(memory) + at_shapes());
    std::size_t next = 0;
    const auto place = [&](strided& s) {
      if (s.rank == 0) return;
      s.sizes = shapes + next;
      s.strides = s.sizes + s.rank;
      next += 2 * std::size_t(s.rank);
    };
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      tensor t = tensors_[i];
      place(t.p.shape);
      place(t.g.shape);
      std::memcpy(bytes.data() + i * sizeof t, &t, sizeof t);
    }
    if (!shapes_.empty())
      std::memcpy(bytes.data() + at_shapes(), shapes_.data(),
                  shapes_.size() * sizeof(std::int64_t));
    return bytes;
  }

 private:
  void keep(const strided& s) {
    shapes_.insert(shapes_.end(), s.sizes, s.sizes + s.rank);
    shapes_.insert(shapes_.end(), s.strides, s.strides + s.rank);
  }
  std::size_t at_shapes() const { return tensors_.size() * sizeof(tensor); }
  std::size_t at_units() const {
    return aligned(at_shapes() + shapes_.size() * sizeof(std::int64_t));
  }

  std::vector<tensor> tensors_;
  std::vector<std::int64_t> shapes_;
  std::uint64_t units_ = 0;
};

// ---- work on a stream ---------------------------------------------------------------------------

/// The stream on which LibTorch puts work of a device now. @pre there is such a device. Defined by
/// cmake/leanopt_cuda.cpp.
stream current_stream(int device);
/// Whether work put on a stream is recorded in a graph, to be done later.
template <class = void>
int is_capturing(stream s, bool* result);
/// What an error means, in CUDA's words.
template <class = void>
const char* text_of(int error);
/// Sets `result`, in the device's memory, to 1 where its arithmetic is IEEE's, else to 0.
template <class = void>
int check_arithmetic(std::uint32_t* result, stream s);

/// Sends bytes to the device as parameters of launches, 4 KiB of them a time, so that `from` may
/// change at once and a captured graph sends what it was captured with. Both are aligned to 4 bytes
/// and `bytes` is a multiple of 4.
template <class = void>
int send(void* to, const void* from, std::size_t bytes, stream s);
/// Fills in which tensor each work unit belongs to, after the image of the table was sent.
template <class = void>
int set_units(const work_list& list, std::size_t tensors, stream s);

/// A step of an elementwise rule over all elements of a list, whose tensors have coefficients in
/// `groups`, in the device's memory. T is double for float64 parameters and gradients, else float.
template <class Formula, class Format, class T>
int step(const work_list& list, const group_step<typename Formula::template coeffs<T>>* groups,
         const device_scalars& scalars, stream s);

// ---- groups ------------------------------------------------------------------------------------

/// What kernels read of the options of Adam and AdamW; with their names, so that the rule takes it.
class adam_constants {
 public:
  adam_constants() = default;
  template <class Options>
  explicit adam_constants(const Options& o)
      : lr_(o.lr()), eps_(o.eps()), weight_decay_(o.weight_decay()), maximize_(o.maximize()) {
    const auto [beta1, beta2] = o.betas();
    betas_ = {beta1, beta2};
  }
  struct pair {
    double first, second;
  };
  LEANOPT_HD double lr() const { return lr_; }
  LEANOPT_HD void lr(double x) { lr_ = x; }
  LEANOPT_HD pair betas() const { return betas_; }
  LEANOPT_HD double eps() const { return eps_; }
  LEANOPT_HD double weight_decay() const { return weight_decay_; }
  LEANOPT_HD bool maximize() const { return maximize_; }

 private:
  double lr_, eps_, weight_decay_;
  pair betas_;
  bool maximize_;
};

/// What kernels read of the options of Adafactor; with their names, so that the rule takes it.
class adafactor_constants {
 public:
  adafactor_constants() = default;
  template <class Options>
  explicit adafactor_constants(const Options& o)
      : lr_(o.lr()),
        weight_decay_(o.weight_decay()),
        beta2_decay_(o.beta2_decay()),
        d_(o.d()),
        clip_threshold_(o.clip_threshold()),
        decay_rate_(o.decay_rate()),
        maximize_(o.maximize()),
        is_hugging_face_(o.is_hugging_face()),
        scale_parameter_(o.scale_parameter()),
        relative_step_(o.relative_step()),
        warmup_init_(o.warmup_init()) {
    const auto [eps1, eps2] = o.eps();
    eps_ = {eps1, eps2};
    beta1_ = o.beta1();
  }

  struct optional {
    double value;
    bool given;
    optional() = default;
    optional(const std::optional<double>& x) : value(x.value_or(0)), given(x.has_value()) {}
    LEANOPT_HD double value_or(double x) const { return given ? value : x; }
  };
  struct pair {
    optional first;
    double second;
  };
  LEANOPT_HD double lr() const { return lr_; }
  LEANOPT_HD void lr(double x) { lr_ = x; }
  LEANOPT_HD pair eps() const { return eps_; }
  LEANOPT_HD double weight_decay() const { return weight_decay_; }
  LEANOPT_HD double beta2_decay() const { return beta2_decay_; }
  LEANOPT_HD double d() const { return d_; }
  LEANOPT_HD double clip_threshold() const { return clip_threshold_; }
  LEANOPT_HD double decay_rate() const { return decay_rate_; }
  LEANOPT_HD optional beta1() const { return beta1_; }
  LEANOPT_HD bool maximize() const { return maximize_; }
  LEANOPT_HD bool is_hugging_face() const { return is_hugging_face_; }
  LEANOPT_HD bool scale_parameter() const { return scale_parameter_; }
  LEANOPT_HD bool relative_step() const { return relative_step_; }
  LEANOPT_HD bool warmup_init() const { return warmup_init_; }

 private:
  double lr_, weight_decay_, beta2_decay_, d_, clip_threshold_, decay_rate_;
  pair eps_;
  optional beta1_;
  bool maximize_, is_hugging_face_, scale_parameter_, relative_step_, warmup_init_;
};

/// What the matrices of a group have in common in one step.
template <class T>
struct adafactor_group {
  rules::adafactor::reductions<T> coeffs;
  adafactor_constants options;
  std::int64_t step;
  std::uint64_t key;
};
template <class Rule>
using constants_of = std::conditional_t<Rule::elementwise, adam_constants, adafactor_constants>;

namespace detail {
template <class Rule, class T, bool = Rule::elementwise>
struct group_of_rule {
  using type = group_step<typename Rule::template coeffs<T>>;
};
template <class Rule, class T>
struct group_of_rule<Rule, T, false> {
  using type = adafactor_group<T>;
};
}  // namespace detail
/// What the tensors of a group have in common in one step of a rule.
template <class Rule, class T>
using group = typename detail::group_of_rule<Rule, T>::type;

/// The same of options and a step. `epsilon` is that of the parameters' type.
template <class Rule, class T, class Options>
LEANOPT_HD group<Rule, T> group_of(const Options& o, std::uint64_t seed, std::int64_t step,
                                   double epsilon) {
  const std::uint64_t key = random_step_key(seed, std::uint64_t(step));
  if constexpr (Rule::elementwise)
    return {Rule::template prepare<T>(o, step), key};
  else
    return {Rule::template prepare<T>(o, step, epsilon), adafactor_constants(o), step, key};
}

/// A group whose number of steps, and its rate if it likes, are the device's. All in its memory.
template <class Rule>
struct counted_group {
  constants_of<Rule> options;
  const double* lr = nullptr;    ///< read by each step; null: that of the options
  std::int64_t* step = nullptr;  ///< how many steps were done; a step that is called off is none
  std::uint64_t seed = 0;
  double epsilon = 0;
};
/// Counts a step of each group and makes what the step that follows needs of it, with the bits of
/// group_of on the host.
template <class Rule, class T>
int prepare(const counted_group<Rule>* groups, group<Rule, T>* result, std::uint32_t count,
            const device_scalars& scalars, stream s);

// ---- codes alone --------------------------------------------------------------------------------

/// The slots of `Formula` in a format, on their own, in the device's memory.
struct coded {
  void* slots[3] = {};
  void* headers[3] = {};
  std::uint64_t elements = 0;
  std::uint64_t key = 0;  ///< of its random bits
  const void* tables = nullptr;
};
/// Numbers of float32 into codes and headers, and back. One array per slot, aligned or not.
template <class Formula, class Format>
int encode(const coded& t, const float* const (&numbers)[3], stream s);
template <class Formula, class Format>
int decode(const coded& t, float* const (&numbers)[3], stream s);

// ---- the global norm ----------------------------------------------------------------------------

struct norm_result {
  double norm;      ///< of all gradients, times inv_scale
  double clip;      ///< what brings it down to a norm of `most`: at most 1
  float found_inf;  ///< 1 where the norm is not finite, or it was found before, else 0
  float unused;
};
/// The Euclidean norm of the gradients of a list in double, added in an order that the list alone
/// decides. Of the scalars, inv_scale and found_inf are used. `sums` has a number per unit.
template <class = void>
int global_norm(const work_list& list, double* sums, norm_result* result, double most,
                const device_scalars& scalars, stream s);

// ---- Adafactor ----------------------------------------------------------------------------------

/// What a tensor rule has beside a tensor: a batch of matrices, or one row of elements with a
/// variance each. In the device's memory.
struct matrix {
  static constexpr std::uint64_t chunk_rows = cut::rows, stage = cut::stage;

  std::uint64_t batch = 1, rows = 1, columns = 1;
  void* row = nullptr;       ///< [batch, rows]
  void* column = nullptr;    ///< [batch, columns]
  void* variance = nullptr;  ///< [elements], instead of both
  void* rms = nullptr;       ///< where the parameter's root mean square is kept, if it is
  std::uint32_t group = 0;   ///< of its options

  std::uint32_t arrived = 0;  ///< units of the pass that is under way
  char* scratch = nullptr;    ///< set by matrix_table, as are those below
  std::uint64_t first_tile = 0, first_columns = 0, first_rows = 0;

  LEANOPT_HD std::uint64_t elements() const { return batch * rows * columns; }
  LEANOPT_HD std::uint64_t chunks() const { return (rows + chunk_rows - 1) / chunk_rows; }
  LEANOPT_HD std::uint64_t stages() const { return (columns + stage - 1) / stage; }
  /// Work of the passes. Matrices with few rows share a block of threads.
  LEANOPT_HD std::uint64_t tiles() const {
    return variance ? units_of(elements()) : batch * chunks() * ((stages() + 1) / 2);
  }
  LEANOPT_HD std::uint64_t column_blocks() const {
    return variance ? 0 : (batch * columns + 255) / 256;
  }
  LEANOPT_HD bool is_tall() const { return rows > 256; }
  LEANOPT_HD std::uint64_t row_blocks() const {
    return variance ? 0 : is_tall() ? batch : (batch + 7) / 8;
  }

  // Scratch: two sums in double per unit; a number per row and per column; a sum per 64 rows of a
  // column and per 256 columns of a row.
  template <class T>
  std::size_t scratch_bytes() const {
    const std::uint64_t numbers =
        variance ? 0
                 : batch * (rows + columns) + batch * chunks() * columns + batch * rows * stages();
    return std::size_t(2 * units_of(elements()) * sizeof(double) + aligned(numbers * sizeof(T)));
  }
  LEANOPT_HD double* sums(int which) const {
    return reinterpret_cast<double*>(scratch) + std::uint64_t(which) * units_of(elements());
  }
  template <class T>
  LEANOPT_HD T* row_root() const {
    return reinterpret_cast<T*>(sums(2));
  }
  template <class T>
  LEANOPT_HD T* column_root() const {
    return row_root<T>() + batch * rows;
  }
  template <class T>
  LEANOPT_HD T* column_sums() const {
    return column_root<T>() + batch * columns;
  }
  template <class T>
  LEANOPT_HD T* row_sums() const {
    return column_sums<T>() + batch * chunks() * columns;
  }
};

/// What the work of a step of a tensor rule says of a matrix, or of a vector as one row.
template <class Work>
matrix matrix_of(const Work& work) {
  matrix m;
  m.batch = work.batch;
  m.rows = work.rows;
  m.columns = work.row ? work.columns : work.elements;
  m.row = work.row;
  m.column = work.column;
  m.variance = work.variance;
  return m;
}

/// The matrices of a launch in the device's memory: see matrix_table.
template <class T>
struct matrix_list {
  work_list list;
  matrix* matrices = nullptr;
  const adafactor_group<T>* groups = nullptr;  ///< given with each step
  rules::inverse_roots<T>* inputs = nullptr;   ///< of the last pass
  group_step<rules::adafactor_coeffs<T>>* coeffs = nullptr;
  std::uint32_t count = 0;
  std::uint64_t tiles = 0, column_blocks = 0, row_blocks = 0;
};

/// As table, for a tensor rule: with what its passes leave to each other.
template <class T>
class matrix_table {
 public:
  void clear() { *this = {}; }
  /// `m.group` is that of the options; `t.group` is unused.
  void add(tensor t, matrix m) {
    t.group = std::uint32_t(matrices_.size());
    table_.add(t);
    m.first_tile = tiles_;
    m.first_columns = column_blocks_;
    m.first_rows = row_blocks_;
    if (m.elements()) {
      tiles_ += m.tiles();
      column_blocks_ += m.column_blocks();
      row_blocks_ += m.row_blocks();
    }
    offsets_.push_back(scratch_);
    scratch_ += m.scratch_bytes<T>();
    matrices_.push_back(m);
  }
  std::size_t tensors() const { return matrices_.size(); }
  /// As those of table.
  std::size_t bytes() const { return at_scratch() + scratch_; }
  std::vector<char> image(void* memory) const {
    std::vector<char> bytes = table_.image(memory);
    bytes.resize(at_matrices() + matrices_.size() * sizeof(matrix));
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      matrix m = matrices_[i];
      m.scratch = static_cast<char*>(memory) + at_scratch() + offsets_[i];
      std::memcpy(bytes.data() + at_matrices() + i * sizeof m, &m, sizeof m);
    }
    return bytes;
  }
  matrix_list<T> list_at(void* memory) const {
    char* m = static_cast<char*>(memory);
    return {table_.list_at(memory),
            reinterpret_cast<matrix*>(m + at_matrices()),
            nullptr,
            reinterpret_cast<rules::inverse_roots<T>*>(m + at_inputs()),
            reinterpret_cast<group_step<rules::adafactor_coeffs<T>>*>(m + at_coeffs()),
            std::uint32_t(matrices_.size()),
            tiles_,
            column_blocks_,
            row_blocks_};
  }

 private:
  std::size_t at_matrices() const { return aligned(table_.bytes()); }
  std::size_t at_inputs() const {
    return at_matrices() + aligned(matrices_.size() * sizeof(matrix));
  }
  std::size_t at_coeffs() const {
    return at_inputs() + aligned(matrices_.size() * sizeof(rules::inverse_roots<T>));
  }
  std::size_t at_scratch() const {
    return at_coeffs() + aligned(matrices_.size() * sizeof(group_step<rules::adafactor_coeffs<T>>));
  }

  table table_;
  std::vector<matrix> matrices_;
  std::vector<std::size_t> offsets_;
  std::size_t scratch_ = 0;
  std::uint64_t tiles_ = 0, column_blocks_ = 0, row_blocks_ = 0;
};

/// A step of Adafactor for all matrices of a list, with its short or long formula, in four
/// launches. Sums are taken in the order of the CPU engine, so that the bits are the same.
template <class Formula, class Format, class T>
int adafactor_step(const matrix_list<T>& list, const device_scalars& scalars, stream s);

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
