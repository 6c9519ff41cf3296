// What kernels step: parameters and gradients in place, converted in the lane, or on their way
// through L1; and the moments that go with them.
#pragma once

#include <leanopt/core/work.hpp>
#include <leanopt/engine/cpu/numbers.hpp>
#include <leanopt/weights/plain.hpp>

#include <algorithm>
#include <cstdint>

LEANOPT_EXACT_BEGIN
namespace leanopt::cpu {

/// What a step of one tensor needs. Slots and headers are contiguous, in the order of the operands.
struct tensor_step {
  operand p, g;
  void* slots[3] = {};
  void* headers[3] = {};
  std::size_t elements = 0;
  std::uint64_t key = 0;
  /// Where there is one, elements whose gradient is not finite stay as they are and are counted.
  std::int64_t* skipped = nullptr;
};

/// The parameters and gradients that a kernel steps together. Of the numbers from i on that a
/// register takes, n count; the others read as 0 (times the factor, which is finite).
template <class T>
struct array_view {
  using number = T;
  static constexpr bool converts = false;
  static constexpr level least = level::scalar;  ///< of the kernels that take it
  T* p = nullptr;
  const T* g = nullptr;
  T factor = 1;                ///< of all gradients
  const bool* kept = nullptr;  ///< elements whose moments stay as they are, if there are any

  /// From element i of a tensor on.
  static array_view of(const tensor_step& t, std::size_t i) {
    return {static_cast<T*>(t.p.data) + i, static_cast<const T*>(t.g.data) + i, T(t.g.factor)};
  }
  LEANOPT_INLINE array_view from(std::size_t i) const { return {p + i, g + i, factor}; }
  /// Where kernels put parameters: in `room` if they are yet to be converted.
  LEANOPT_INLINE T* target(float*) const { return p; }

  template <class V>
  LEANOPT_INLINE V load_p(std::size_t i, std::size_t n = lane_traits<V>::count) const {
    return lane_traits<V>::load_some(p + i, n);
  }
  template <class V>
  LEANOPT_INLINE V load_g(std::size_t i, std::size_t n = lane_traits<V>::count) const {
    return lane_traits<V>::load_some(g + i, n) * V(factor);
  }
  /// Puts whole registers of gradients times the factor in `room`, for load_multiplied_g(): in a
  /// loop that is full already a multiplication costs even where the factor is 1, and this does
  /// not.
  template <class V>
  LEANOPT_INLINE void multiply(std::size_t n, T* room) {
    if (factor == 1) return;
    for (std::size_t i = 0; i < n; i += lane_traits<V>::count)
      lane_traits<V>::store(room + i, load_g<V>(i));
    g = room;
    factor = 1;
  }
  template <class V>
  LEANOPT_INLINE V load_multiplied_g(std::size_t i) const {
    return lane_traits<V>::load(g + i);
  }
};
/// The same of bfloat16 numbers, converted in the lane: whole registers of them.
template <class Weights>
struct bfloat16_view {
  using number = float;
  static constexpr bool converts = true;
  static constexpr level least = level::avx2;
  std::uint16_t* p = nullptr;
  const std::uint16_t* g = nullptr;
  float factor = 1;
  typename Weights::residual* rest = nullptr;

  static bfloat16_view of(const tensor_step& t, std::size_t i) {
    return {static_cast<std::uint16_t*>(t.p.data) + i,
            static_cast<const std::uint16_t*>(t.g.data) + i, float(t.g.factor),
            detail::residual_at<Weights>(t.p, i)};
  }
  LEANOPT_INLINE bfloat16_view from(std::size_t i) const {
    return {p + i, g + i, factor, detail::advanced(rest, i)};
  }
  LEANOPT_INLINE float* target(float* room) const { return room; }

  template <class V>
  LEANOPT_INLINE V load_p(std::size_t i, std::size_t = 0) const {
    return Weights::template read<bfloat16_bits, V>(lane_traits<V>::load_words(p + i),
                                                    detail::load_residual<V>(rest, i));
  }
  template <class V>
  LEANOPT_INLINE V load_g(std::size_t i, std::size_t = 0) const {
    return bfloat16_bits::widen<V>(lane_traits<V>::load_words(g + i)) * V(factor);
  }
  template <class V>
  LEANOPT_INLINE void multiply(std::size_t, float*) {}  // load_multiplied_g() does
  template <class V>
  LEANOPT_INLINE V load_multiplied_g(std::size_t i) const {
    return load_g<V>(i);
  }
  /// n parameters from float32, of which the first is element `first` of the tensor.
  template <class V>
  LEANOPT_INLINE void write(std::uint64_t key, std::size_t first, std::size_t n,
                            const float* from) const {
    detail::narrow<bfloat16_bits, Weights>::template convert<V>(
        from, p, rest, 0, n, detail::weight_word<Weights::random>(key, first),
        std::uint32_t(first % stage));
  }
};

namespace detail {
/// Whether x is a run of bfloat16 numbers, which are converted in the lane.
inline bool in_lane(level l, const operand& x) {
  return l >= bfloat16_view<weights::plain>::least && x.is_run() && x.type == number::bfloat16;
}
/// Whether the numbers of a tensor are, those of whole stages.
inline bool in_lane(level l, const tensor_step& t) {
  return !t.skipped && in_lane(l, t.p) && in_lane(l, t.g);
}
/// Whether parameters and gradients are stepped where they are.
template <class T>
bool in_place(const tensor_step& t) {
  return !t.skipped && is_array<T>(t.p) && is_array<T>(t.g);
}
}  // namespace detail

/// How a kernel gets at parameters and gradients that it cannot step where they are, or must check:
/// a stage or less at a time.
template <class T>
class passage {
 public:
  /// Of elements [first, first + n).
  virtual array_view<T> open(std::size_t first, std::size_t n) = 0;
  /// Of what was opened first and is still open: two at most are.
  virtual void close() = 0;

 protected:
  ~passage() = default;
};

/// The moments of a part of one tensor as a format stores them. `first` is the index of the part's
/// first element in the tensor, a multiple of the format's block; all pointers stand there already.
template <class T, class Format, int Slots>
struct stored_moments {
  typename Format::template stored<T>* slots[Slots ? Slots : 1] = {};
  typename Format::header* headers[Slots ? Slots : 1] = {};
  std::size_t elements = 0;
  std::size_t first = 0;
  std::uint64_t key = 0;
};
/// A part of one tensor; whole stages where its numbers are converted.
template <class View, class Format, int Slots>
struct piece : stored_moments<typename View::number, Format, Slots> {
  using view = View;
  View numbers;
  passage<typename View::number>* through = nullptr;  ///< to numbers that are not stepped in place

  LEANOPT_INLINE bool in_place() const { return View::converts || through == nullptr; }
  /// Of n elements from the part's element i on; a stage or less where it is not in place.
  LEANOPT_INLINE View open(std::size_t i, std::size_t n) const {
    if constexpr (!View::converts)
      if (through) return through->open(this->first + i, n);
    return numbers.from(i);
  }
  LEANOPT_INLINE void close() const {
    if (!in_place()) through->close();
  }
};

namespace detail {

/// Reads and writes the numbers of one tensor that are not stepped in place, and leaves out
/// gradients that are not finite where the step wants that.
template <class T, class Weights, class Square>
class staged final : public passage<T> {
 public:
  staged(level l, const tensor_step& t) : level_(l), t_(t), rooms_{{l, t}, {l, t}} {}

  array_view<T> open(std::size_t first, std::size_t n) override {
    room& r = rooms_[opened_++ % 2];
    r.first = first;
    r.n = n;
    r.at = r.p.read(first, n);
    const T* g = r.g.read(first, n);
    if (__builtin_expect(r.g.bad() != 0, 0)) {
      __atomic_fetch_add(t_.skipped, r.g.bad(), __ATOMIC_RELAXED);
      std::copy_n(r.at, n, r.before);
    }
    return {r.at, g, 1, r.g.marks()};
  }
  void close() override {
    const room& r = rooms_[closed_++ % 2];
    if (const bool* kept = r.g.marks())
      for (std::size_t i = 0; i < r.n; ++i)
        if (kept[i]) r.at[i] = r.before[i];
    if (r.p.is_copied()) write<T, Weights>(level_, t_.p, r.first, r.n, r.at, t_.key);
  }

 private:
  struct room {
    room(level l, const tensor_step& t) : p(l, t.p, false), g(l, t.g, t.skipped != nullptr) {}
    stage_of<T, Weights> p;
    stage_of<T, weights::plain, Square> g;
    T before[stage], *at;
    std::size_t first, n;
  };
  level level_;
  const tensor_step& t_;
  unsigned opened_ = 0, closed_ = 0;
  room rooms_[2];
};

}  // namespace detail

}  // namespace leanopt::cpu
LEANOPT_EXACT_END
