// The work of a step as raw pointers and sizes: what the front hands to an engine.
#pragma once

#include <leanopt/core/lane.hpp>
#include <leanopt/core/number.hpp>
#include <leanopt/core/slot.hpp>

LEANOPT_EXACT_BEGIN
namespace leanopt {

/// How every engine cuts its work. Sums are taken unit by unit, stage by stage and so many rows at
/// a time, so that these are part of the promise of equal bits.
struct cut {
  static constexpr std::size_t unit = 4096;  ///< long enough to hide the cost of handing it out
  static constexpr std::size_t stage = 256;  ///< a multiple of every block
  static constexpr std::size_t rows = 64;
};
/// How many units there are of so many elements.
LEANOPT_HD constexpr std::size_t units_of(std::size_t elements) {
  return (elements + cut::unit - 1) / cut::unit;
}

/// The order in which a tensor's numbers stand in memory: sizes and strides in elements, outermost
/// dimension first, both owned by the caller.
struct strided {
  int rank = 0;
  const std::int64_t* sizes = nullptr;
  const std::int64_t* strides = nullptr;
};

/// The numbers of a parameter or a gradient. Element i is the i-th in the order of the walk over
/// `shape`; a tensor of rank 0 here (null sizes) is one run in memory.
struct operand {
  void* data = nullptr;
  number type = number::float32;
  strided shape;
  void* residual = nullptr;  ///< of split weights: one after the other in the order of the walk
  double factor = 1;         ///< what the numbers of a gradient are multiplied by as they are read
  LEANOPT_HD bool is_run() const { return shape.rank == 0; }
};

/// Calls f(i, offset, n, stride) for the runs of elements [first, first + count): elements
/// i to i + n - 1 stand at offset, offset + stride, ...
template <class F>
void each_run(const strided& s, std::size_t first, std::size_t count, F f) {
  if (s.rank == 0) return f(first, std::int64_t(first), count, std::int64_t(1));
  const int inner = s.rank - 1;
  const auto width = std::size_t(s.sizes[inner]);
  for (std::size_t i = first; i < first + count;) {
    const std::size_t column = i % width, left = first + count - i;
    const std::size_t n = left < width - column ? left : width - column;
    auto row = std::int64_t(i / width);
    std::int64_t offset = std::int64_t(column) * s.strides[inner];
    for (int d = inner - 1; d >= 0; row /= s.sizes[d], --d)
      offset += row % s.sizes[d] * s.strides[d];
    f(i, offset, n, s.strides[inner]);
    i += n;
  }
}

/// What a rule's formula needs per element besides the gradient: nothing.
struct no_inputs {
  static constexpr bool present = false;
};

/// A formula that remembers one value, for what is encoded on its own.
template <values Range>
struct one_slot {
  template <class T>
  using inputs = no_inputs;
  template <class T>
  struct coeffs {};
  static constexpr int slot_count = 1;
  static constexpr slot_spec slots[1] = {{"value", Range}};
};

}  // namespace leanopt
LEANOPT_EXACT_END
