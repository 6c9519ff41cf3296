// The elementwise step: fused loops over the blocks of a tensor.
#pragma once

#include <leanopt/core/slot.hpp>
#include <leanopt/engine/cpu/operands.hpp>

#include <algorithm>
#include <limits>
#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::cpu {

namespace detail {

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
      const std::size_t m = View::converts ? stage : std::min(chunk, t.elements - at);
      const std::size_t full = m - m % N;
      const View x = t.open(at, m);
      alignas(64) float room[View::converts ? stage : 1];
      T before[View::converts || !S ? 1 : S][stage];
      if constexpr (!View::converts)
        if (__builtin_expect(x.kept != nullptr, 0))
          for (int k = 0; k < S; ++k) std::copy_n(t.slots[k] + at, m, before[k]);
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
        alignas(64) T multiplied[View::converts ? 1 : B];  // step() alone reads it
        x.template multiply<lanes_of<Width, T>>(B, multiplied);
        step(c, in, n, *next);
      }
      if (i > 0) {
        // What is not in place asks in vain, for what it has: better than a condition in the loop.
        const View asked = t.in_place() ? t.numbers.from(i + ahead) : ready->x;
        encode(*ready, [&](int j, int m) LEANOPT_LAMBDA {
          for (int z = 0; z < m; z += 64 / int(sizeof *asked.p)) {
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
      if constexpr (has_headers<Format>)
        x.headers[k] = static_cast<typename Format::header*>(t.headers[k]) + first / Format::block;
    }
    detail::launch<kernel, kernel::most, decltype(view)::least>(l, c, x, in);
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

/// The moments of a whole tensor into its codes and headers, and back.
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

}  // namespace leanopt::cpu
LEANOPT_EXACT_END
