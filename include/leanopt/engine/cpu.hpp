// The CPU engine: fused loops over blocks of a tensor, staged in L1, without LibTorch. One text for
// every instruction set: kernels are templates over the width of the lanes, forced into three entry
// points, of which launch() picks one at run time. No flag of the consumer's build is needed.
#pragma once

#include <leanopt/core/random.hpp>
#include <leanopt/core/slot.hpp>
#include <leanopt/core/work.hpp>
#include <leanopt/weights/plain.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::cpu {

/// The instruction sets, in LibTorch's order and under its names (see level_from_environment());
/// the last one, which permutes bytes, has the name of the one before it.
enum class level { scalar, avx2, avx512, avx512vbmi };
constexpr const char* name_of(level l) {
  return l >= level::avx512 ? "avx512" : l == level::avx2 ? "avx2" : "default";
}

inline level best_level() {
#if LEANOPT_LANES_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#if LEANOPT_PERMUTES_BYTES
    return __builtin_cpu_supports("avx512vbmi") ? level::avx512vbmi : level::avx512;
#else
    return level::avx512;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return level::avx2;
#endif
  return level::scalar;
}

/// Round to nearest and no flush to zero while it lives: -ffast-math at the link and
/// at::set_flush_denormal change both for a thread.
class float_environment {
#if defined(__x86_64__)
 public:
  float_environment() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~float_environment() { __builtin_ia32_ldmxcsr(saved_); }
  float_environment(const float_environment&) = delete;
  float_environment& operator=(const float_environment&) = delete;

 private:
  unsigned saved_;
#endif
};

namespace detail {

/// The Width of kernels that permute the bytes of four registers of 16 floats together.
constexpr int permuting = 64;
/// Lanes of T in a register that holds `Width` floats; one number where Width is 1.
template <int Width, class T>
using lanes_of = lanes<T, Width == 1 ? 1 : (Width == permuting ? 16 : Width) * 4 / int(sizeof(T))>;

template <class Kernel, class... A>
[[gnu::noinline]] auto enter_scalar(const A&... args) {
  return Kernel::template run<1>(args...);
}
#if LEANOPT_LANES_X86
template <class Kernel, class... A>
[[gnu::noinline, gnu::target("avx2,fma")]] auto enter_avx2(const A&... args) {
  return Kernel::template run<8>(args...);
}
template <class Kernel, class... A>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] auto enter_avx512(
    const A&... args) {
  return Kernel::template run<16>(args...);
}
#if LEANOPT_PERMUTES_BYTES
template <class Kernel, class... A>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]] auto
enter_avx512vbmi(const A&... args) {
  return Kernel::template run<permuting>(args...);
}
#endif
#endif

/// What a kernel for numbers of type T is compiled for at most: float64 moves so many bytes that
/// 512 bits gain nothing, and each level costs every consumer's compiler.
template <class T>
constexpr level widest = sizeof(T) == 8 ? level::avx2 : level::avx512;

/// Runs Kernel::run<Width>(args...) with the width of `l`, at most Widest's.
template <class Kernel, level Widest, class... A>
auto launch(level l, const A&... args) {
#if LEANOPT_PERMUTES_BYTES
  if constexpr (Widest == level::avx512vbmi)
    if (l == level::avx512vbmi) return enter_avx512vbmi<Kernel>(args...);
#endif
#if LEANOPT_LANES_X86
  if constexpr (Widest >= level::avx512)
    if (l >= level::avx512) return enter_avx512<Kernel>(args...);
  if constexpr (Widest != level::scalar)
    if (l != level::scalar) return enter_avx2<Kernel>(args...);
#endif
  (void)l;
  return enter_scalar<Kernel>(args...);
}

}  // namespace detail

// ---- numbers of any type and layout -------------------------------------------------------------

/// Values that pass through L1 together.
constexpr std::size_t stage = cut::stage;

namespace detail {

/// Residual bits of split weights, extended with their sign; 0 where there are none.
template <class V, class Residual>
LEANOPT_INLINE ints<V> load_residual([[maybe_unused]] const Residual* rest,
                                     [[maybe_unused]] std::size_t i) {
  using L = lane_traits<V>;
  using I = ints<V>;
  if constexpr (std::is_same_v<Residual, std::int8_t>) {
    return L::load_bytes(rest + i);
  } else if constexpr (std::is_same_v<Residual, std::int16_t>) {
    const I x = L::load_words(reinterpret_cast<const std::uint16_t*>(rest + i));
    return x - ((x & I(0x8000u)) << 1);
  } else {
    return I(0u);
  }
}

template <class Bits, class Weights>
struct widen {
  template <int Width>
  LEANOPT_INLINE static void run(const std::uint16_t* from, const typename Weights::residual* rest,
                                 float* to, std::size_t n) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    using S = scalar<float>;
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count)
      L::store(to + i,
               Weights::template read<Bits, V>(L::load_words(from + i), load_residual<V>(rest, i)));
    for (; i < n; ++i)
      to[i] = Weights::template read<Bits, S>(from[i], load_residual<S>(rest, i)).v;
  }
};

/// The random word of the weights from element `first` on, in its stage.
template <bool Random>
LEANOPT_INLINE std::uint32_t weight_word(std::uint64_t key, std::size_t first) {
  return Random ? random_word(key, first / stage, weight_stream) : 0;
}

/// What a pointer to residual bits becomes i elements on.
template <class Residual>
LEANOPT_INLINE Residual* advanced(Residual* rest, [[maybe_unused]] std::size_t i) {
  if constexpr (std::is_void_v<Residual>)
    return rest;
  else
    return rest + i;
}

/// `word` and `first` start the random bits.
template <class Bits, class Weights>
struct narrow {
  using residual = typename Weights::residual;

  template <int Width>
  LEANOPT_INLINE static void run(const float* from, std::uint16_t* to, residual* rest,
                                 std::size_t n, std::uint32_t word, std::uint32_t first) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    constexpr std::size_t together = L::count * L::group;
    const std::size_t full = n / together * together;
    convert<V>(from, to, rest, 0, full, word, first);
    convert<scalar<float>>(from, to, rest, full, n, word, first);
  }
  /// The same for elements [begin, end), whole groups of registers.
  template <class V>
  LEANOPT_INLINE static void convert(const float* from, std::uint16_t* to,
                                     [[maybe_unused]] residual* rest, std::size_t begin,
                                     std::size_t end, std::uint32_t word, std::uint32_t first) {
    using L = lane_traits<V>;
    constexpr int G = L::group;
    lattice<V> draw(word, first + std::uint32_t(begin));
    for (std::size_t i = begin; i < end; i += L::count * G) {
      ints<V> low[G];
#pragma GCC unroll 4
      for (int k = 0; k < G; ++k) {
        const std::size_t at = i + std::size_t(k) * L::count;
        low[k] = ints<V>(0u);
        L::store_words(to + at,
                       Weights::template write<Bits, V>(L::load(from + at), draw.next(), low[k]));
        if constexpr (std::is_same_v<residual, std::int16_t>)
          L::store_words(reinterpret_cast<std::uint16_t*>(rest + at), low[k]);
      }
      if constexpr (std::is_same_v<residual, std::int8_t>)
        L::store_bytes(reinterpret_cast<std::uint8_t*>(rest + i), low);
    }
  }
};

template <class T>
struct multiply {
  template <int Width>
  LEANOPT_INLINE static void run(T* x, std::size_t n, T factor) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    using S = scalar<T>;
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count) L::store(x + i, L::load(x + i) * V(factor));
    for (; i < n; ++i) x[i] = (S(x[i]) * S(factor)).v;
  }
};

/// f(Bits{}) for a type of 16 bits.
template <class Weights, class F>
void with_bits(number type, F f) {
  if constexpr (Weights::takes_float16)
    if (type == number::float16) return f(float16_bits{});
  f(bfloat16_bits{});
}
/// The residual bits from element i on.
template <class Weights>
auto residual_at([[maybe_unused]] const operand& x, [[maybe_unused]] std::size_t i) {
  using residual = typename Weights::residual;
  return advanced(static_cast<residual*>(x.residual), i);
}

}  // namespace detail

/// Elements [first, first + n) as T. @pre x.type is float64 where T is double, and not so for
/// float.
template <class T, class Weights>
void read(level l, const operand& x, std::size_t first, std::size_t n, T* out) {
  each_run(x.shape, first, n,
           [&](std::size_t i, std::int64_t at, std::size_t count, std::int64_t step) {
             T* to = out + (i - first);
             if (bytes_of(x.type) == sizeof(T)) {
               const T* from = static_cast<const T*>(x.data) + at;
               for (std::size_t k = 0; k < count; ++k) to[k] = from[std::int64_t(k) * step];
             } else if constexpr (std::is_same_v<T, float>) {
               const auto* from = static_cast<const std::uint16_t*>(x.data) + at;
               std::uint16_t row[stage];
               for (std::size_t done = 0, m; done < count; done += m) {
                 m = std::min(stage, count - done);
                 if (step != 1)
                   for (std::size_t k = 0; k < m; ++k) row[k] = from[std::int64_t(done + k) * step];
                 const std::uint16_t* words = step == 1 ? from + done : row;
                 detail::with_bits<Weights>(x.type, [&](auto bits) {
                   detail::launch<detail::widen<decltype(bits), Weights>, level::avx512>(
                       l, words, detail::residual_at<Weights>(x, i + done), to + done, m);
                 });
               }
             }
           });
  if (x.factor != 1) detail::launch<detail::multiply<T>, detail::widest<T>>(l, out, n, T(x.factor));
}

/// The inverse of read(), of elements of one stage.
template <class T, class Weights>
void write(level l, const operand& x, std::size_t first, std::size_t n, const T* in,
           std::uint64_t key) {
  const std::uint32_t word = detail::weight_word<Weights::random>(key, first);
  each_run(x.shape, first, n,
           [&](std::size_t i, std::int64_t at, std::size_t count, std::int64_t step) {
             const T* from = in + (i - first);
             if (bytes_of(x.type) == sizeof(T)) {
               T* to = static_cast<T*>(x.data) + at;
               for (std::size_t k = 0; k < count; ++k) to[std::int64_t(k) * step] = from[k];
             } else if constexpr (std::is_same_v<T, float>) {
               auto* to = static_cast<std::uint16_t*>(x.data) + at;
               std::uint16_t row[stage];
               for (std::size_t done = 0, m; done < count; done += m) {
                 m = std::min(stage, count - done);
                 std::uint16_t* words = step == 1 ? to + done : row;
                 detail::with_bits<Weights>(x.type, [&](auto bits) {
                   detail::launch<detail::narrow<decltype(bits), Weights>, level::avx512>(
                       l, from + done, words, detail::residual_at<Weights>(x, i + done), m, word,
                       std::uint32_t((i + done) % stage));
                 });
                 if (step != 1)
                   for (std::size_t k = 0; k < m; ++k) to[std::int64_t(done + k) * step] = row[k];
               }
             }
           });
}

/// Whether the numbers of x stand in memory as an array of T.
template <class T>
bool is_array(const operand& x) {
  return x.is_run() && x.type == (sizeof(T) == 8 ? number::float64 : number::float32);
}

// ---- elementwise steps --------------------------------------------------------------------------

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
/// register takes, n count; the others read as 0.
template <class T>
struct array_view {
  using number = T;
  using word = T;
  static constexpr bool converts = false;
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
  /// Whole registers of gradients times the factor, in `room`, for load_multiplied_g(): a
  /// multiplication in a loop that is full already costs more than this where there is none.
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
  using word = std::uint16_t;
  static constexpr bool converts = true;
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
  LEANOPT_INLINE void multiply(std::size_t, float*) {}
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
  return l != level::scalar && x.is_run() && x.type == number::bfloat16;
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

/// Asks for a stage of numbers: passes that do little else per number wait for memory otherwise.
template <class T>
LEANOPT_INLINE void prefetch(const T* x) {
  for (std::size_t i = 0; i < stage; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

/// The formula, with the numbers at `input` where it has inputs.
template <class Formula, class T, class V>
LEANOPT_INLINE void apply(const typename Formula::template coeffs<T>& c, V& p, const V& g, V* s,
                          const T* input) {
  if constexpr (Formula::template inputs<T>::present)
    Formula::apply(c, p, g, s, lane_traits<V>::load(input));
  else
    Formula::apply(c, p, g, s);
}
/// Whether it comes in halves: advance(), which moves the moments, and move(), which from them
/// moves the parameter.
template <class Formula, class T, class = void>
constexpr bool has_halves = false;
template <class Formula, class T>
constexpr bool has_halves<Formula, T,
                          std::void_t<decltype(Formula::move(
                              std::declval<typename Formula::template coeffs<T>>(),
                              std::declval<scalar<T>&>(), std::declval<const scalar<T>*>()))>> =
    true;
template <class Formula, class T, class V>
LEANOPT_INLINE void advance(const typename Formula::template coeffs<T>& c, const V& p, const V& g,
                            V* s, const T* input) {
  if constexpr (Formula::template inputs<T>::present)
    Formula::advance(c, p, g, s, lane_traits<V>::load(input));
  else
    Formula::advance(c, p, g, s);
}

/// f(input) for a stage of n elements; input(j, some) gives the inputs from element j on, of which
/// `some` count. Those of a full stage in one row are computed on the way, others before, in
/// `room`.
template <class V, class T, class Inputs, class F>
LEANOPT_INLINE void with_inputs(const Inputs& in, std::size_t first, std::size_t n, T* room, F f) {
  using L = lane_traits<V>;
  if (n == stage)  // there are no lanes without a number, which could be NaN
    if (const auto row = in.row_of(first, n)) {
      const V factor(row.factor);
      return f([&](std::size_t j, std::size_t some) LEANOPT_LAMBDA {
        return in.of_factors(factor, L::load_some(row.columns + j, some));
      });
    }
  in.template fill<V>(room, first, n);
  f([&](std::size_t j, std::size_t some) LEANOPT_LAMBDA { return L::load_some(room + j, some); });
}

/// Formats without blocks.
template <class Formula, class T>
struct stream {
  static constexpr int S = Formula::slot_count;
  using inputs = typename Formula::template inputs<T>;

  template <int Width, class Piece>
  LEANOPT_INLINE static void run(const typename Formula::template coeffs<T>& coeffs,
                                 const Piece& piece_, const inputs& in) {
    using View = typename Piece::view;
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    constexpr std::size_t N = L::count;
    const auto c = coeffs;  // local copies: no store in the loop can change them, so the broadcasts
    const auto t = piece_;  // are hoisted
    const std::size_t chunk =
        inputs::present || View::converts || !t.in_place() ? stage : t.elements;
    for (std::size_t at = 0; at < t.elements; at += chunk) {
      const std::size_t m = std::min(chunk, t.elements - at), full = m - m % N;
      const View x = t.open(at, m);
      alignas(64) float room[View::converts ? stage : 1];
      T before[View::converts || !S ? 1 : S][stage];
      if constexpr (!View::converts)
        if (__builtin_expect(x.kept != nullptr, 0))
          for (int k = 0; k < S; ++k) std::copy_n(t.slots[k] + at, m, before[k]);
      // apply(p, g, moments, j, n) is the formula with its inputs from element j on.
      const auto step = [&](auto apply) LEANOPT_LAMBDA {
        T* const to = x.target(room);
        const auto move = [&](std::size_t j, std::size_t n) LEANOPT_LAMBDA {
          const std::size_t i = at + j;
          V p = x.template load_p<V>(j, n), moments[S ? S : 1];
          each<S>([&](auto k) LEANOPT_LAMBDA { moments[k] = L::load_some(t.slots[k] + i, n); });
          apply(p, x.template load_g<V>(j, n), moments, j, n);
          each<S>([&](auto k) LEANOPT_LAMBDA { L::store_some(t.slots[k] + i, moments[k], n); });
          L::store_some(to + j, p, n);
        };
        for (std::size_t j = 0; j < full; j += N) move(j, N);
        if (const std::size_t rest = m - full) move(full, rest);
      };
      if (inputs::present && m == stage && t.in_place()) {
        prefetch(x.p + 2 * stage);
        prefetch(x.g + 2 * stage);
      }
      apply_to_stage<V>(c, in, t.first + at, m, step);
      if constexpr (View::converts)
        x.template write<V>(t.key, t.first + at, m, room);
      else if (__builtin_expect(x.kept != nullptr, 0))
        for (int k = 0; k < S; ++k)
          for (std::size_t j = 0; j < m; ++j)
            if (x.kept[j]) t.slots[k][at + j] = before[k][j];
      t.close();
    }
  }

 private:
  /// step(apply), where apply(p, g, moments, j, n) is the formula with its n inputs from element j
  /// of the stage on.
  template <class V, class Step>
  LEANOPT_INLINE static void apply_to_stage(const typename Formula::template coeffs<T>& c,
                                            [[maybe_unused]] const inputs& in,
                                            [[maybe_unused]] std::size_t first,
                                            [[maybe_unused]] std::size_t n, Step step) {
    if constexpr (inputs::present) {
      alignas(64) T room[stage];
      with_inputs<V>(in, first, n, room, [&](auto get) LEANOPT_LAMBDA {
        step([&](V& p, const V& g, V* s, std::size_t j, std::size_t some)
                 LEANOPT_LAMBDA { Formula::apply(c, p, g, s, get(j, some)); });
      });
    } else {
      step([&](V& p, const V& g, V* s, std::size_t, std::size_t)
               LEANOPT_LAMBDA { Formula::apply(c, p, g, s); });
    }
  }
};

template <class Format>
constexpr bool has_headers = !std::is_void_v<typename Format::header>;
/// The statistics of a block's moments; none where values are stored each on their own.
template <class Format, class V, bool = has_headers<Format>>
struct range_type {
  using type = typename Format::template range<V>;
};
struct no_range {
  template <values, class V>
  LEANOPT_INLINE void add(const V&) {}
  LEANOPT_INLINE no_range reduced() const { return {}; }
};
template <class Format, class V>
struct range_type<Format, V, false> {
  using type = no_range;
};

/// Formats with blocks: decode, apply, statistics, header, encode.
template <class Formula, class Format, class T>
struct blocks {
  static constexpr int S = Formula::slot_count, B = Format::block;
  using inputs = typename Formula::template inputs<T>;
  using coeffs = typename Formula::template coeffs<T>;
  using stored = typename Format::template stored<T>;
  using header = typename Format::header;
  using scale = typename Format::scale;
  template <class V>
  using range_of = typename range_type<Format, V>::type;
  using range = range_of<scalar<float>>;

  LEANOPT_INLINE static scale open([[maybe_unused]] const header* h) {
    if constexpr (has_headers<Format>)
      return Format::open(*h);
    else
      return {};
  }
  /// The header of the block that begins `i` elements on.
  LEANOPT_INLINE static header* header_at([[maybe_unused]] header* h,
                                          [[maybe_unused]] std::size_t i) {
    if constexpr (has_headers<Format>)
      return h + i / B;
    else
      return nullptr;
  }
  template <class V, values Range>
  LEANOPT_INLINE static V decode(const scale& s, const stored* from) {
    using L = lane_traits<V>;
    using code = typename Format::template code<Range>;
    if constexpr (sizeof(stored) == 1)
      return Format::template decode<Range, V>(s,
                                               L::load_bytes(reinterpret_cast<const code*>(from)));
    else
      return Format::template decode<Range, V>(s, L::load_words(from));
  }

  /// Elements of which the block cannot hold a moment: all their moments become 0, or the block's
  /// largest where they have no sign, because one of a gradient whose square overflows is finite
  /// still and would set the scale of its neighbours. The parameter becomes NaN, as visible as in
  /// full precision, where the moments would tell.
  [[gnu::noinline, gnu::cold]] static void repair(float (&moments)[S][B], T* p, range (&r)[S]) {
    bool large[B] = {};
    each<S>([&](auto k) {
      for (int j = 0; j < B; ++j)
        large[j] |= is_large<Formula::slots[k].range>(bits(moments[k][j]), Format::large);
    });
    each<S>([&](auto k) {
      constexpr values signs = Formula::slots[k].range;
      r[k] = {};
      for (int j = 0; j < B; ++j)
        if (!large[j]) r[k].template add<signs>(scalar<float>(moments[k][j]));
      const scalar<float> instead = signs == values::any ? 0.0f : real(r[k].largest);
      for (int j = 0; j < B; ++j)
        if (large[j]) moments[k][j] = instead.v;
      r[k].template add<signs>(instead);
    });
    for (int j = 0; p && j < B; ++j)
      if (large[j]) p[j] = std::numeric_limits<T>::quiet_NaN();
  }
  /// Whether parameters move after all moments of their block, where the formula comes in halves:
  /// two short loops overlap the latencies of roots and quotients with other work, which one long
  /// loop cannot. Not where moments are rounded from double to float in between.
  static constexpr bool moves_late = std::is_same_v<T, float> && has_halves<Formula, T>;

  /// A block on its way between functions of the same Width.
  template <int Width, class View>
  struct pending {
    alignas(64) float moments[S][B];
    range_of<lanes_of<Width, float>> ranges[S];
    View x;
    alignas(64) float room[View::converts ? B : 1];  ///< for parameters in float32
    stored* codes[S];                                ///< the old ones until encode()
    header* headers[S];
    std::size_t block;
    // From fit() on:
    scale now[S];
    std::uint32_t random[S];
    // written out: an implicit constructor would not be inlined into code for the instruction set
    LEANOPT_INLINE pending() {}
    LEANOPT_INLINE T* parameters() { return x.target(room); }
  };

  /// Moves the moments of a full block, of which n elements count, and the parameters that do not
  /// move late.
  template <int Width, class View>
  LEANOPT_INLINE static void step(const coeffs& c, const inputs& in, std::size_t n,
                                  pending<Width, View>& next) {
    using F = lanes_of<Width, float>;
    using L = lane_traits<F>;
    using V = lanes_of<Width, T>;
    using D = lane_traits<V>;
    constexpr int N = L::count;
    float(&moments)[S][B] = next.moments;
    const View x = next.x;  // local copies, as in run()
    const stored* codes[S];
    alignas(64) T input[inputs::present ? B : 1] = {};
    if constexpr (inputs::present) in.template fill<V>(input, next.block * B, n);
    scale old[S];
    range_of<F> ranges[S];
    each<S>([&](auto k) LEANOPT_LAMBDA {
      codes[k] = next.codes[k];
      old[k] = open(next.headers[k]);
    });
    if constexpr (Width == permuting)
      each<S>([&](auto k) LEANOPT_LAMBDA {
        for (int j = 0; j < B; j += 4 * N) {
          F s[4];
          Format::template decode<Formula::slots[k].range, F>(old[k], L::load_packed(codes[k] + j),
                                                              s);
          LEANOPT_UNROLL
          for (int i = 0; i < 4; ++i) L::store(moments[k] + j + i * N, s[i]);
        }
      });

#pragma GCC unroll 4
    for (int j = 0; j < B; j += N) {
      F s[S];
      each<S>([&](auto k) LEANOPT_LAMBDA {
        if constexpr (Width == permuting)
          s[k] = L::load(moments[k] + j);
        else
          s[k] = decode<F, Formula::slots[k].range>(old[k], codes[k] + j);
      });
      if constexpr (moves_late) {
        const F w = x.template load_p<F>(j);
        if constexpr (View::converts) L::store(next.room + j, w);
        // a lost parameter has no say in headers
        const F gradient = fma(w, F(0), x.template load_multiplied_g<F>(j));
        advance<Formula, T, F>(c, w, gradient, s, input + (inputs::present ? j : 0));
        each<S>([&](auto k) LEANOPT_LAMBDA { L::store(moments[k] + j, s[k]); });
      } else {  // widen the moments, compute in double, round them to float
        each<S>([&](auto k) LEANOPT_LAMBDA { L::store(moments[k] + j, s[k]); });
        for (int h = j; h < j + N; h += D::count) {
          V w = x.template load_p<V>(h), wide[S];
          each<S>([&](auto k) LEANOPT_LAMBDA { wide[k] = D::load(moments[k] + h); });
          const V gradient = fma(w, V(0), x.template load_multiplied_g<V>(h));
          apply<Formula, T, V>(c, w, gradient, wide, input + (inputs::present ? h : 0));
          D::store(x.p + h, w);
          each<S>([&](auto k) LEANOPT_LAMBDA { D::store(moments[k] + h, wide[k]); });
        }
        each<S>([&](auto k) LEANOPT_LAMBDA { s[k] = L::load(moments[k] + j); });
      }
      each<S>([&](auto k)
                  LEANOPT_LAMBDA { ranges[k].template add<Formula::slots[k].range>(s[k]); });
    }
    each<S>([&](auto k) LEANOPT_LAMBDA { next.ranges[k] = ranges[k]; });
  }
  /// Puts back the moments of the elements that a step leaves alone.
  template <int Width, class View>
  [[gnu::noinline, gnu::cold]] static void restore(pending<Width, View>& next, range (&r)[S]) {
    each<S>([&](auto k) {
      constexpr values signs = Formula::slots[k].range;
      const scale old = open(next.headers[k]);
      r[k] = {};
      for (int j = 0; j < B; ++j) {
        float& moment = next.moments[k][j];
        if (next.x.kept[j]) moment = decode<scalar<float>, signs>(old, next.codes[k] + j).v;
        r[k].template add<signs>(scalar<float>(moment));
      }
    });
  }
  /// The parameters from j to j + m of a block.
  template <int Width, class View>
  LEANOPT_INLINE static void move(const coeffs& c, pending<Width, View>& x, int j, int m) {
    using F = lanes_of<Width, float>;
    using L = lane_traits<F>;
    if constexpr (moves_late) {
      T* const p = x.parameters();
#pragma GCC unroll 4
      for (int i = j; i < j + m; i += L::count) {
        F s[S], w = L::load(p + i);
        each<S>([&](auto k) LEANOPT_LAMBDA { s[k] = L::load(x.moments[k] + i); });
        Formula::move(c, w, s);
        L::store(p + i, w);
      }
    }
  }
  /// Scales and headers of a block from the ranges of its moments.
  template <int Width, class View>
  LEANOPT_INLINE static void fit(std::uint64_t key, pending<Width, View>& next) {
    range found[S];
    each<S>([&](auto k) LEANOPT_LAMBDA { found[k] = next.ranges[k].reduced(); });
    if constexpr (!View::converts)
      if (__builtin_expect(next.x.kept != nullptr, 0)) restore(next, found);
    if constexpr (has_headers<Format>) {
      bool large = false;
      each<S>([&](auto k) LEANOPT_LAMBDA {
        large |= is_large<Formula::slots[k].range>(found[k].largest, Format::large);
      });
      if (__builtin_expect(large, 0)) repair(next.moments, next.parameters(), found);
      Format::template fit<Formula>(found, next.now);
      each<S>([&](auto k) LEANOPT_LAMBDA { *next.headers[k] = Format::close(next.now[k]); });
    }
    if constexpr (Format::random)
      each<S>([&](auto k) LEANOPT_LAMBDA { next.random[k] = random_word(key, next.block, k); });
  }

  /// The codes of a block from its moments. before(j, m) is called on the way to the codes from j
  /// to j + m.
  template <int Width, class View, class Before>
  LEANOPT_INLINE static void encode(const pending<Width, View>& x, Before before) {
    using F = lanes_of<Width, float>;
    using L = lane_traits<F>;
    constexpr int N = L::count, G = Width == permuting ? 4 : L::group;
    scale now[S];  // local copies, as in run()
    lattice<F> draw[S];
    stored* codes[S];
    each<S>([&](auto k) LEANOPT_LAMBDA {
      now[k] = x.now[k];
      if constexpr (Format::random) draw[k] = lattice<F>(x.random[k]);
      codes[k] = x.codes[k];
    });
    for (int j = 0; j < B; j += N * G) {
      before(j, N * G);
      each<S>([&](auto k) LEANOPT_LAMBDA {
        if constexpr (Width == permuting || Format::template packs<F>) {
          F values[G];
          LEANOPT_UNROLL
          for (int i = 0; i < G; ++i) values[i] = L::load(x.moments[k] + j + i * N);
          typename L::packed code;
          Format::template encode<Formula::slots[k].range, F>(now[k], values, draw[k], code);
          L::store_packed(codes[k] + j, code);
        } else {
          ints<F> code[G];
#pragma GCC unroll 4
          for (int i = 0; i < G; ++i) {
            code[i] = Format::template encode<Formula::slots[k].range, F>(
                          now[k], L::load(x.moments[k] + j + i * N), draw[k].next()) >>
                      8 * Format::code_byte;
            if constexpr (sizeof(stored) == 2) L::store_words(codes[k] + j + i * N, code[i]);
          }
          if constexpr (sizeof(stored) == 1) L::store_bytes(codes[k] + j, code);
        }
      });
    }
  }

  [[gnu::noinline, gnu::cold]] static T* padded(const T* x, std::size_t n, T (&copy)[B]) {
    std::copy_n(x, n, copy);
    std::fill(copy + n, copy + B, T(0));
    return copy;
  }

  template <int Width, class Piece>
  LEANOPT_INLINE static void run(const coeffs& coeffs_, const Piece& piece_, const inputs& in) {
    using View = typename Piece::view;
    const auto c = coeffs_;
    const auto t = piece_;
    constexpr std::size_t ahead = Width == 1 ? 0 : 4 * B;  // four blocks, as measured
    // A block's moments move, then the one before it is finished, and only then is it fitted: so
    // nothing waits for the long way from its ranges to its scales.
    pending<Width, View> both[2], *next = both, *ready = both + 1;
    T last_p[B], last_g[B], *last_to = nullptr;
    stored last[S][B];
    for (std::size_t i = 0; i < t.elements + B; i += B) {
      if (i < t.elements) {
        const std::size_t n = std::min(t.elements - i, std::size_t(B));
        View& x = next->x;
        x = t.open(i, n);
        next->block = (t.first + i) / B;
        for (int k = 0; k < S; ++k) {
          next->codes[k] = t.slots[k] + i;
          next->headers[k] = header_at(t.headers[k], i);
        }
        if constexpr (!View::converts)
          if (n < B) {  // the last, short block: zeros enter no statistic
            last_to = x.p;
            x.p = padded(x.p, n, last_p);
            x.g = padded(x.g, n, last_g);
            each<S>([&](auto k) LEANOPT_LAMBDA {
              std::copy_n(next->codes[k], n, last[k]);
              std::fill(last[k] + n, last[k] + B, Format::template zero<Formula::slots[k].range>);
              next->codes[k] = last[k];
            });
          }
        alignas(64) T multiplied[View::converts ? 1 : B];
        x.template multiply<lanes_of<Width, T>>(B, multiplied);
        step(c, in, n, *next);
      }
      if (i > 0) {
        // What is not in place asks in vain, for what it has: better than a condition in the loop.
        const View asked = t.in_place() ? t.numbers.from(i + ahead) : ready->x;
        encode(*ready, [&](int j, int m) LEANOPT_LAMBDA {
          for (int z = 0; z < m; z += 64 / int(sizeof(typename View::word))) {
            __builtin_prefetch(asked.p + j + z);
            __builtin_prefetch(asked.g + j + z);
          }
          constexpr int line = 64 / int(sizeof(stored));
          each<S>([&](auto k) LEANOPT_LAMBDA {
            for (int z = j % line ? m : 0; z < m; z += line)
              __builtin_prefetch(t.slots[k] + i + ahead + j + z);
          });
          move(c, *ready, j, m);
        });
        if constexpr (View::converts)
          ready->x.template write<lanes_of<Width, float>>(t.key, ready->block * B, B, ready->room);
        if (last_to && i >= t.elements) std::copy_n(last_p, t.elements % B, last_to);
        t.close();
      }
      if (i < t.elements) fit(t.key, *next);
      std::swap(next, ready);
    }
    if (const std::size_t rest = t.elements % B)
      for (int k = 0; k < S; ++k) std::copy_n(last[k], rest, t.slots[k] + (t.elements - rest));
  }
};

/// Moments in full precision into the codes of a format, all slots of a block together.
template <class Formula, class Format>
struct encode_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const stored_moments<float, Format, Formula::slot_count>& t,
                                 const float* const* values) {
    using all = blocks<Formula, Format, float>;
    using F = lanes_of<Width, float>;
    constexpr int S = all::S, B = all::B;
    for (std::size_t i = 0; i < t.elements; i += B) {
      const std::size_t n = std::min(std::size_t(B), t.elements - i);
      typename all::template pending<Width, array_view<float>> x;  // without parameters
      typename all::stored copy[S][B];
      x.block = i / B;
      each<S>([&](auto k) LEANOPT_LAMBDA {
        std::copy_n(values[k] + i, n, x.moments[k]);
        std::fill(x.moments[k] + n, x.moments[k] + B, 0.0f);
        x.codes[k] = copy[k];
        x.headers[k] = all::header_at(t.headers[k], i);
        for (int j = 0; j < B; j += lane_traits<F>::count)
          x.ranges[k].template add<Formula::slots[k].range>(lane_traits<F>::load(x.moments[k] + j));
      });
      all::fit(t.key, x);
      all::encode(x, [](int, int) LEANOPT_LAMBDA {});
      for (int k = 0; k < S; ++k) std::copy_n(copy[k], n, t.slots[k] + i);
    }
  }
};
template <class Formula, class Format>
struct decode_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const stored_moments<float, Format, Formula::slot_count>& t,
                                 float* const* values) {
    using all = blocks<Formula, Format, float>;
    each<Formula::slot_count>([&](auto k) LEANOPT_LAMBDA {
      for (std::size_t i = 0; i < t.elements; i += all::B) {
        const auto s = all::open(all::header_at(t.headers[k], i));
        const std::size_t end = std::min(t.elements, i + all::B);
        for (std::size_t j = i; j < end; ++j)
          values[k][j] =
              all::template decode<scalar<float>, Formula::slots[k].range>(s, t.slots[k] + j).v;
      }
    });
  }
};

template <class Formula, class Format, class T>
struct step_kernel {
  /// Full precision waits for the divider and for memory, whatever the width; 512 bits are up to
  /// half as slow again where arrays begin at like offsets of their pages, as large ones do.
  static constexpr level most = Format::block == 0                     ? level::avx2
                                : has_tables<Format> && sizeof(T) == 4 ? level::avx512vbmi
                                                                       : widest<T>;

  /// Whether bfloat16 numbers are converted in the lane.
  static constexpr bool takes_bfloat16 =
      std::is_same_v<T, float> && (Format::block == 0 || has_halves<Formula, T>);

  template <int Width, class Piece, class Inputs>
  LEANOPT_INLINE static void run(const typename Formula::template coeffs<T>& c, const Piece& t,
                                 const Inputs& in) {
    if constexpr (Format::block == 0)
      stream<Formula, T>::template run<Width>(c, t, in);
    else
      blocks<Formula, Format, T>::template run<Width>(c, t, in);
  }
};

/// Finds what nonfinite::skip_element leaves out, where squares are kept as numbers of type Square.
template <class T, class Square = T>
struct gradient_check {
  static bool is_bad(T x) { return has_infinite_square<Square>(x); }

  /// Whether any of n numbers is bad.
  template <int Width>
  LEANOPT_INLINE static bool run(const T* x, std::size_t n) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    const V limit = infinite_square_from<Square, T>();
    V largest = V(T(0));
    std::size_t i = 0;
    for (; i + L::count <= n; i += L::count) {
      const V value = L::load(x + i);
      largest = max(largest, if_nan(value, limit, max(value, -value)));
    }
    T all[L::count];
    L::store(all, largest);
    bool bad = false;
    for (const T one : all) bad |= is_bad(one);
    for (; i < n; ++i) bad |= is_bad(x[i]);
    return bad;
  }
  /// Clears bad numbers and marks them; returns how many there were.
  static std::int64_t clear(T* x, std::size_t n, bool* marks) {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
      marks[i] = is_bad(x[i]);
      count += marks[i];
      if (marks[i]) x[i] = 0;
    }
    return count;
  }
};
template <class Square, class T>
bool has_bad(level l, const T* x, std::size_t n) {
  return launch<gradient_check<T, Square>, widest<T>>(l, x, n);
}

/// The numbers of a stage of x as an array of T. Where `skips`, those that are not finite are 0 and
/// marked.
template <class T, class Weights, class Square = T>
class stage_of {
 public:
  stage_of(level l, const operand& x, bool skips) : level_(l), x_(x), skips_(skips) {}
  /// Of elements [i, i + n), until the next call.
  T* read(std::size_t i, std::size_t n) {
    T* numbers = static_cast<T*>(x_.data) + i;
    if (!is_copied()) {
      if (n == stage) prefetch(numbers + 2 * stage);
    } else {
      cpu::read<T, Weights>(level_, x_, i, n, copy_);
      numbers = copy_;
    }
    bad_ = skips_ && has_bad<Square>(level_, numbers, n) ? leave_out(numbers, n) : 0;
    return __builtin_expect(bad_ != 0, 0) ? copy_ : numbers;
  }
  /// Whether read() gives a copy, bad numbers or not.
  bool is_copied() const { return copied_; }
  /// How many numbers are not finite.
  std::int64_t bad() const { return bad_; }
  /// Of all numbers of a stage; null where each is finite.
  const bool* marks() const { return bad_ ? marks_ : nullptr; }

 private:
  [[gnu::noinline, gnu::cold]] std::int64_t leave_out(const T* numbers, std::size_t n) {
    if (numbers != copy_) std::copy_n(numbers, n, copy_);
    std::fill(marks_ + n, marks_ + stage, false);
    return gradient_check<T, Square>::clear(copy_, n, marks_);
  }

  level level_;
  const operand& x_;
  bool skips_;
  const bool copied_ = !is_array<T>(x_) || x_.factor != 1;
  std::int64_t bad_ = 0;
  alignas(64) T copy_[stage];
  bool marks_[stage];
};

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

/// Elements [first, last) of an elementwise step; `first` is a multiple of `stage`. bfloat16
/// numbers are converted in the lane where whole stages are runs of them; what else is no array of
/// T passes through L1.
template <class Formula, class Format, class T, class Weights>
void step(level l, const tensor_step& t, const typename Formula::template coeffs<T>& c,
          const typename Formula::template inputs<T>& in, std::size_t first, std::size_t last) {
  constexpr int S = Formula::slot_count;
  using kernel = detail::step_kernel<Formula, Format, T>;
  // Elements [first, first + n).
  const auto run = [&](std::size_t n, auto view, passage<T>* through) {
    piece<decltype(view), Format, S> x{{{}, {}, n, first, t.key}, view, through};
    for (int k = 0; k < S; ++k) {
      x.slots[k] = static_cast<typename Format::template stored<T>*>(t.slots[k]) + first;
      if constexpr (detail::has_headers<Format>)
        x.headers[k] = static_cast<typename Format::header*>(t.headers[k]) + first / Format::block;
    }
    detail::launch<kernel, kernel::most>(l, c, x, in);
  };
  if constexpr (kernel::takes_bfloat16)
    if (const std::size_t n = (last - first) / stage * stage; n && detail::in_lane(l, t)) {
      run(n, bfloat16_view<Weights>::of(t, first), nullptr);
      first += n;
      if (first == last) return;
    }
  if (detail::in_place<T>(t)) return run(last - first, array_view<T>::of(t, first), nullptr);
  using square = std::conditional_t<Format::compressed && keeps_squares<Formula>(), float, T>;
  detail::staged<T, Weights, square> through(l, t);
  run(last - first, array_view<T>(), &through);
}

/// The moments of a whole tensor into its codes and headers, and back. `t` has no parameter here.
template <class Formula, class Format>
void encode(level l, const stored_moments<float, Format, Formula::slot_count>& t,
            const float* const* moments) {
  const float_environment guard;
  detail::launch<detail::encode_kernel<Formula, Format>, level::avx2>(l, t, moments);
}
template <class Formula, class Format>
void decode(level l, const stored_moments<float, Format, Formula::slot_count>& t,
            float* const* moments) {
  const float_environment guard;
  detail::launch<detail::decode_kernel<Formula, Format>, level::scalar>(l, t, moments);
}

// ---- sums ---------------------------------------------------------------------------------------

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

/// f(i, n) for stages of elements [first, last).
template <class F>
void each_stage(std::size_t first, std::size_t last, F f) {
  for (std::size_t i = first; i < last; i += stage) f(i, std::min(stage, last - i));
}

}  // namespace detail

constexpr std::size_t unit = cut::unit;
using leanopt::units_of;

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
      return detail::launch<kernel, detail::widest<T>>(level_, x, i, n, inputs_);
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
      detail::launch<detail::matrix_sums<T>, detail::widest<T>>(level_, x, some, stride, n, of_rows,
                                                                column_sums);
    };
    if (is_array<T>(t_.g) && !skips())
      return add(array_view<T>{nullptr, static_cast<const T*>(t_.g.data) + first, T(t_.g.factor)},
                 rows, t_.columns, row_sums);
    if constexpr (std::is_same_v<T, float>)
      if (detail::in_lane(level_, t_.g) && !skips() && n % sixteen_sums<number>::count == 0)
        return add(
            bfloat16_view<weights::plain>{
                nullptr, static_cast<const std::uint16_t*>(t_.g.data) + first, float(t_.g.factor)},
            rows, t_.columns, row_sums);
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
