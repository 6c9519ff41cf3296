// The elementwise step: every warp takes 1024 elements of one tensor, 256 at a time, eight per
// thread in registers from the first load to the last store. What a block needs once, its headers'
// scales and the words that begin its random bits, is made once and shared by shuffles; no thread
// waits for another warp.
#pragma once

#include <leanopt/core/slot.hpp>
#include <leanopt/engine/cuda/memory.cuh>
#include <leanopt/rules/adafactor.hpp>

#include <type_traits>

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// 256s of a work unit that one warp takes.
constexpr int stages_of_warp = 4;
constexpr int warps_of_unit = int(unit) / (stages_of_warp * together);

/// What multiplies the gradients of a step.
template <class T>
__device__ __forceinline__ T gradient_factor(const device_scalars& s) {
  const double inv_scale = s.inv_scale ? *s.inv_scale : 1.0, clip = s.clip ? *s.clip : 1.0;
  return T(leanopt::detail::multiply(inv_scale, clip));
}
__device__ __forceinline__ bool is_called_off(const device_scalars& s) {
  return s.found_inf && *s.found_inf != 0;
}

/// f(Weights{}, Bits{}) for a parameter of 16 bits.
template <class F>
__device__ __forceinline__ void with_weights(weights_kind kind, number type, F f) {
  if (kind == weights_kind::stochastic)
    f(weights::stochastic{}, bfloat16_bits{});
  else if (kind == weights_kind::split24)
    f(weights::split24{}, bfloat16_bits{});
  else if (kind == weights_kind::split32)
    f(weights::split32{}, bfloat16_bits{});
  else if (type == number::float16)
    f(weights::plain{}, float16_bits{});
  else
    f(weights::plain{}, bfloat16_bits{});
}

/// Element i of a parameter or gradient whose numbers begin at `data`.
template <class T>
__device__ __forceinline__ T read_number(const void* data, const operand& o, weights_kind kind,
                                         std::uint64_t i) {
  const std::int64_t at = offset_of(o.shape, i);
  if (bytes_of(o.type) == sizeof(T)) return static_cast<const T*>(global(data))[at];
  T result = 0;
  if constexpr (sizeof(T) == 4) {
    const std::uint32_t word = static_cast<const std::uint16_t*>(global(data))[at];
    with_weights(kind, o.type, [&](auto weights, auto bits) LEANOPT_LAMBDA {
      using W = decltype(weights);
      std::uint32_t low = 0;
      if constexpr (!std::is_void_v<typename W::residual>)
        low = std::uint32_t(static_cast<const typename W::residual*>(global(o.residual))[i]);
      result = W::template read<decltype(bits), scalar<float>>(word, low).v;
    });
  }
  return result;
}
/// The inverse; `random` are the bits of a rounding.
template <class T>
__device__ __forceinline__ void write_number(void* data, const operand& o, weights_kind kind,
                                             std::uint64_t i, T x, std::uint32_t random) {
  const std::int64_t at = offset_of(o.shape, i);
  if (bytes_of(o.type) == sizeof(T)) {
    static_cast<T*>(global(data))[at] = x;
  } else if constexpr (sizeof(T) == 4) {
    with_weights(kind, o.type, [&](auto weights, auto bits) LEANOPT_LAMBDA {
      using W = decltype(weights);
      std::uint32_t low = 0;
      static_cast<std::uint16_t*>(global(data))[at] = std::uint16_t(
          W::template write<decltype(bits), scalar<float>>(scalar<float>(x), random, low));
      if constexpr (!std::is_void_v<typename W::residual>)
        static_cast<typename W::residual*>(global(o.residual))[i] = typename W::residual(low);
    });
  }
}

/// The numbers of a parameter or gradient in a stage. What is rarely needed stays in the table.
template <class T>
struct numbers_of_stage {
  void* data;
  number type;
  weights_kind weights;
  const operand& rest;

  __device__ __forceinline__ numbers_of_stage(const void* from, const operand& o, weights_kind kind)
      : data(const_cast<void*>(from)), type(o.type), weights(kind), rest(o) {}

  /// Whether it has the type in which the rule computes.
  __device__ __forceinline__ bool is_whole() const {
    return sizeof(T) == 8 || type == number::float32;
  }

  // A full stage of an aligned run.

  __device__ __forceinline__ pack<T, 8> load_whole(const stage& e) const {
    raw<sizeof(T)> x;
    load_quads<sizeof(T)>(static_cast<const char*>(global(data)) + e.first * sizeof(T), x.w);
    return numbers(x);
  }
  __device__ __forceinline__ pack<T, 8> load_straight(const stage& e) const {
    if (is_whole()) return load_whole(e);
    pack<T, 8> result(T(0));
    if constexpr (sizeof(T) == 4) {
      raw<2> x;
      load_quads<2>(static_cast<const char*>(global(data)) + e.first * 2, x.w);
      const words<8> halves = x.template numbers<std::uint16_t>();
      with_weights(weights, type, [&](auto kind, auto bits) LEANOPT_LAMBDA {
        using W = decltype(kind);
        words<8> low(0u);
        if constexpr (!std::is_void_v<typename W::residual>) {
          raw<sizeof(typename W::residual)> residual;
          load_quads<sizeof(typename W::residual)>(
              static_cast<const typename W::residual*>(global(rest.residual)) + e.first,
              residual.w);
          low = residual.template numbers<typename W::residual>();
        }
        result = W::template read<decltype(bits), pack<float, 8>>(halves, low);
      });
    }
    return result;
  }
  /// `random` is a word that begins the weights' random bits.
  __device__ __forceinline__ void store_straight(const pack<T, 8>& p, const stage& e,
                                                 std::uint32_t random) const {
    if (is_whole())
      return store_quads<sizeof(T)>(static_cast<char*>(global(data)) + e.first * sizeof(T),
                                    raw_of(p).w);
    if constexpr (sizeof(T) == 4) {
      const auto draw = lattice<pack<float, 8>>(random).next();
      with_weights(weights, type, [&](auto kind, auto bits) LEANOPT_LAMBDA {
        using W = decltype(kind);
        words<8> low(0u);
        raw<2> x;
        x.template set<std::uint16_t>(
            W::template write<decltype(bits), pack<float, 8>>(p, draw, low));
        store_quads<2>(static_cast<char*>(global(data)) + e.first * 2, x.w);
        if constexpr (!std::is_void_v<typename W::residual>) {
          using residual_t = typename W::residual;
          raw<sizeof(residual_t)> residual;
          residual.template set<std::make_unsigned_t<residual_t>>(low);
          store_quads<sizeof(residual_t)>(static_cast<residual_t*>(global(rest.residual)) + e.first,
                                          residual.w);
        }
      });
    }
  }

  // Any other, through shared memory.

  __device__ __forceinline__ pack<T, 8> load_each(const stage& e) const {
    auto* copy = static_cast<T*>(staging());
    LEANOPT_ROLL
    for (unsigned i = lane_of_thread(); i < together; i += warp_threads)
      copy[i] = e.first + i < e.elements ? read_number<T>(data, rest, weights, e.first + i) : T(0);
    __syncwarp();
    raw<sizeof(T)> x;
    load_quads<sizeof(T)>(copy, x.w);
    __syncwarp();
    return numbers(x);
  }
  __device__ __forceinline__ void store_each(const pack<T, 8>& p, const stage& e,
                                             std::uint32_t random) const {
    auto* copy = static_cast<T*>(staging());
    store_quads<sizeof(T)>(copy, raw_of(p).w);
    __syncwarp();
    LEANOPT_ROLL
    for (unsigned i = lane_of_thread(); i < together && e.first + i < e.elements; i += warp_threads)
      write_number<T>(data, rest, weights, e.first + i, copy[i],
                      lattice<scalar<float>>(random, i).next());
    __syncwarp();
  }
};

// ---- formats ------------------------------------------------------------------------------------

/// Shared memory for a format's tables, behind that of staging.
template <class Format>
constexpr std::size_t table_bytes = [] {
  if constexpr (has_tables<Format>)
    return sizeof(typename tables_of<Format>::type);
  else
    return std::size_t(0);
}();
template <class Format>
constexpr std::size_t shared_bytes = staging_bytes + table_bytes<Format>;

/// The tables of a format where all threads of the block can read them fast. Waits for the block.
template <class Format>
__device__ __forceinline__ const typename tables_of<Format>::type* shared_tables(const void* from) {
  if constexpr (has_tables<Format>) {
    auto* memory = reinterpret_cast<std::uint32_t*>(dynamic_shared) + staging_bytes / 4;
    for (unsigned i = threadIdx.x; i < table_bytes<Format> / 4; i += blockDim.x)
      memory[i] = static_cast<const std::uint32_t*>(from)[i];
    __syncthreads();
    return reinterpret_cast<const typename tables_of<Format>::type*>(memory);
  } else {
    return nullptr;
  }
}

/// How the 256 values of a warp are in blocks of a format. A pack lies in one block.
template <class Format>
struct block_layout {
  static constexpr int block = Format::block ? Format::block : together;
  static constexpr int width = block == together ? 8 : quad;  ///< values of a pack
  static constexpr int packs = 8 / width;                     ///< of a thread
  static constexpr int threads = block / width;               ///< of a block
  static constexpr int blocks = together / block;             ///< of the 256
  using V = pack<float, width, threads>;

  /// Which of the blocks pack h of this thread is in.
  __device__ __forceinline__ static unsigned block_of(int h) {
    return unsigned(h) * (blocks / 2) + lane_of_thread() / threads;
  }
  template <class T>
  LEANOPT_HD static pack<T, width, threads> part(const pack<T, 8>& x, int h) {
    return pack<T, width, threads>::of([&](int i) LEANOPT_LAMBDA { return x.v[h * width + i]; });
  }
  template <class T>
  LEANOPT_HD static void set_part(pack<T, 8>& x, int h, const pack<T, width, threads>& y) {
    LEANOPT_UNROLL
    for (int i = 0; i < width; ++i) x.v[h * width + i] = y.v[i];
  }
};

/// The words that begin the random bits of some blocks, one per thread: made by all threads at
/// once, read by shuffles.
template <class Format>
class random_words {
  using layout = block_layout<Format>;
  static constexpr int streams = 4;

 public:
  /// Of the stages that a warp takes from number `first` on, or of that one alone.
  __device__ __forceinline__ random_words(std::uint64_t key, std::uint64_t first) {
    const int stream = int(lane_of_thread()) % streams;
    const bool of_weights = !of_all_stages && stream == weight_stream;
    const std::uint64_t block = first * (of_weights ? 1 : layout::blocks);
    word_ = random_word(key, of_weights ? block : block + lane_of_thread() / streams, stream);
  }
  /// Whether they are for all stages of a warp, or else for one.
  static constexpr bool of_all_stages = layout::blocks == 1;

  __device__ __forceinline__ std::uint32_t of_slot(int turn, int slot, int h) const {
    const unsigned block = of_all_stages ? unsigned(turn) : layout::block_of(h);
    return __shfl_sync(all_lanes, word_, int(block) * streams + slot);
  }
  __device__ __forceinline__ std::uint32_t of_weights(int turn) const {
    return __shfl_sync(all_lanes, word_, (of_all_stages ? turn * streams : 0) + weight_stream);
  }

 private:
  std::uint32_t word_;
};

/// Where the state of a tensor is.
template <class Format>
struct slot_pointers {
  void* const* slots;
  void* const* headers;
  const typename tables_of<Format>::type* tables;
};

/// The slots of 256 values of a tensor in a compressed format.
template <class Formula, class Format>
class coded_slots {
 public:
  static constexpr int S = Formula::slot_count;
  using layout = block_layout<Format>;
  using stored = typename Format::template stored<float>;
  using header = typename Format::header;
  using V = typename layout::V;
  using moments = pack<float, 8>[S];

  __device__ __forceinline__ coded_slots(const slot_pointers<Format>& at, const stage& e,
                                         bool straight)
      : at_(at), e_(e), straight_(straight) {}

  __device__ __forceinline__ void load() {
    each<S>([&](auto k) LEANOPT_LAMBDA {
      cuda::load<sizeof(stored)>(at_.slots[k], {}, e_, straight_, codes_[k].w);
      if constexpr (has_headers<Format>) {
        LEANOPT_UNROLL
        for (int h = 0; h < layout::packs; ++h)
          open_[k][h] = is_there(h) ? static_cast<const header*>(global(at_.headers[k]))[block(h)]
                                    : header(0);
      }
    });
  }
  /// The moments behind the codes that load() found; those behind the end are 0.
  __device__ __forceinline__ void decode(moments& m) const {
    each<S>([&](auto k) LEANOPT_LAMBDA {
      constexpr values range = Formula::slots[k].range;
      const words<8> codes = codes_[k].template numbers<typename Format::template code<range>>();
      LEANOPT_UNROLL
      for (int h = 0; h < layout::packs; ++h)
        layout::set_part(m[k], h,
                         Format::template decode<range, V>(open(k, h), layout::part(codes, h)));
      if (!straight_) {
        LEANOPT_UNROLL
        for (int i = 0; i < 8; ++i)
          if (!e_.has(i)) m[k].v[i] = 0;
      }
    });
  }

  /// Encodes moments. Elements of which the block cannot hold a moment are marked in the result,
  /// bit by bit, and stored as 0, or as the block's largest where they have no sign, as on the CPU.
  template <class Words>
  __device__ __forceinline__ unsigned store(moments& m, const Words& random, int turn) {
    unsigned large = 0;
    if constexpr (has_headers<Format>) {
      range found[S][layout::packs];
      find(m, 0, found);
      bool any = false;
      each<S>([&](auto k) LEANOPT_LAMBDA {
        LEANOPT_UNROLL
        for (int h = 0; h < layout::packs; ++h)
          any |= is_large<Formula::slots[k].range>(found[k][h].largest, Format::large);
      });
      if (layout::blocks > 1) any = __any_sync(all_lanes, any);
      if (any) large = repair(m, found);  // the warp as one
      close(found);
    }
    each<S>([&](auto k) LEANOPT_LAMBDA {
      words<8> codes;
      LEANOPT_UNROLL
      for (int h = 0; h < layout::packs; ++h) {
        typename lane_traits<V>::ints draw(0u);
        if constexpr (Format::random) draw = lattice<V>(random.of_slot(turn, k, h)).next();
        layout::set_part(codes, h,
                         Format::template encode<Formula::slots[k].range, V>(
                             scale_[k][h], layout::part(m[k], h), draw));
      }
      raw<sizeof(stored)> x;
      x.template set<stored, Format::code_byte>(codes);
      cuda::store<sizeof(stored)>(at_.slots[k], {}, e_, straight_, x.w);
    });
    return large;
  }

 private:
  template <class F, bool = has_headers<F>>
  struct types {
    using range = typename F::template range<scalar<float>>;
    using header = typename F::header;
  };
  template <class F>
  struct types<F, false> {
    using range = no_inputs;
    using header = char;
  };
  using range = typename types<Format>::range;
  using scale = typename Format::scale;

  __device__ __forceinline__ std::uint64_t block(int h) const {
    return e_.first / layout::block + layout::block_of(h);
  }
  __device__ __forceinline__ bool is_there(int h) const {
    return layout::blocks == 1 || block(h) * layout::block < e_.elements;
  }
  __device__ __forceinline__ scale open([[maybe_unused]] int k, [[maybe_unused]] int h) const {
    if constexpr (has_tables<Format>)
      return Format::open(open_[k][h], at_.tables);
    else if constexpr (has_headers<Format>)
      return Format::open(open_[k][h]);
    else
      return {};
  }

  /// The statistics of each block, without the elements marked in `left_out`.
  __device__ __forceinline__ void find(const moments& m, unsigned left_out,
                                       range (&found)[S][layout::packs]) const {
    each<S>([&](auto k) LEANOPT_LAMBDA {
      constexpr values signs = Formula::slots[k].range;
      LEANOPT_UNROLL
      for (int h = 0; h < layout::packs; ++h) {
        typename Format::template range<V> mine;
        const V x = layout::part(m[k], h);
        mine.template add<signs>(V::of([&](int i) LEANOPT_LAMBDA {
          return left_out >> (h * layout::width + i) & 1 ? 0.0f : x.v[i];  // zeros do not count
        }));
        found[k][h] = mine.reduced();
      }
    });
  }
  __device__ unsigned repair(moments& m, range (&found)[S][layout::packs]) const {
    unsigned large = 0;
    each<S>([&](auto k) LEANOPT_LAMBDA {
      LEANOPT_UNROLL
      for (int i = 0; i < 8; ++i)
        large |=
            unsigned(is_large<Formula::slots[k].range>(leanopt::bits(m[k].v[i]), Format::large))
            << i;
    });
    find(m, large, found);
    each<S>([&](auto k) LEANOPT_LAMBDA {
      LEANOPT_UNROLL
      for (int i = 0; i < 8; ++i)
        if (large >> i & 1)
          m[k].v[i] = Formula::slots[k].range == values::any
                          ? 0.0f
                          : leanopt::real(found[k][i / layout::width].largest);
    });
    return large;
  }
  /// Scales and headers.
  __device__ __forceinline__ void close(const range (&found)[S][layout::packs]) {
    LEANOPT_UNROLL
    for (int h = 0; h < layout::packs; ++h) {
      range of_block[S];
      scale now[S];
      each<S>([&](auto k) LEANOPT_LAMBDA { of_block[k] = found[k][h]; });
      if constexpr (has_tables<Format>)
        Format::template fit<Formula>(of_block, now, at_.tables);
      else
        Format::template fit<Formula>(of_block, now);
      each<S>([&](auto k) LEANOPT_LAMBDA {
        scale_[k][h] = now[k];
        if (lane_of_thread() % layout::threads == 0 && is_there(h))
          static_cast<header*>(global(at_.headers[k]))[block(h)] = Format::close(now[k]);
      });
    }
  }

  slot_pointers<Format> at_;
  stage e_;
  bool straight_;
  raw<sizeof(stored)> codes_[S];
  typename types<Format>::header open_[S][layout::packs];
  scale scale_[S][layout::packs];
};

// ---- inputs
// ---------------------------------------------------------------------------------------

/// x of elements first + q * Stride for q = 0 ... Count - 1, of those below `elements`; else 0.
template <int Count, int Stride, class T>
__device__ __forceinline__ void read_inputs(const rules::inverse_roots<T>& in, std::uint64_t first,
                                            std::uint64_t elements, T (&x)[Count]) {
  using number = scalar<T>;
  if (in.variance) {
    LEANOPT_UNROLL
    for (int q = 0; q < Count; ++q) {
      const std::uint64_t i = first + std::uint64_t(q) * Stride;
      x[q] = i < elements ? in.of_variance(number(in.variance[i])).v : T(0);
    }
    return;
  }
  std::uint64_t r = first / in.columns, c = first - r * in.columns;
  LEANOPT_UNROLL
  for (int q = 0; q < Count; ++q) {
    x[q] = first + std::uint64_t(q) * Stride < elements
               ? in.of_factors(number(in.row[r]), number(in.column[r / in.rows * in.columns + c])).v
               : T(0);
    for (c += Stride; c >= in.columns; c -= in.columns) ++r;
  }
}

// ---- the step -----------------------------------------------------------------------------------

/// Whether all that is read and written eight elements at a time may be.
template <class Formula, class Format, class T>
__device__ __forceinline__ bool is_straight(const tensor& t, const void* gradients) {
  const auto width = [](const operand& o) { return int(bytes_of(o.type)); };
  bool straight = t.p.is_run() && t.g.is_run() && is_aligned(t.p.data, width(t.p)) &&
                  is_aligned(gradients, width(t.g));
  if (t.weights == weights_kind::split24) straight &= is_aligned(t.p.residual, 1);
  if (t.weights == weights_kind::split32) straight &= is_aligned(t.p.residual, 2);
  for (int k = 0; k < Formula::slot_count; ++k)
    straight &= is_aligned(t.slots[k], sizeof(typename Format::template stored<T>));
  return straight;
}

/// 256 elements of a tensor.
template <class Formula, class Format, class T>
class stage_step {
  static constexpr int S = Formula::slot_count;
  static constexpr bool is_full = Format::block == 0;
  using coeffs = typename Formula::template coeffs<T>;
  using inputs = typename Formula::template inputs<T>;
  using tables = typename tables_of<Format>::type;
  using moment = std::conditional_t<is_full, T, float>;
  using square = std::conditional_t<Format::compressed && keeps_squares<Formula>(), float, T>;
  using moments = pack<moment, 8>[S ? S : 1];

 public:
  __device__ __forceinline__ stage_step(const tensor& t, const void* gradients, const coeffs& c,
                                        T factor, const inputs& in, const tables* of_format)
      : p_(t.p.data, t.p, t.weights),
        g_(gradients, t.g, weights_kind::plain),
        elements_(t.elements),
        rare_(t),
        c_(c),
        factor_(factor),
        in_(in),
        tables_(of_format),
        is_straight_(!t.skipped && is_straight<Formula, Format, T>(t, gradients)) {
    each<S>([&](auto k) LEANOPT_LAMBDA {
      slots_[k] = t.slots[k];
      headers_[k] = t.headers[k];
    });
  }

  /// The stage that begins at element `first`; its random bits are those of turn `turn`.
  template <class Words>
  __device__ __forceinline__ void run(std::uint64_t first, const Words& random, int turn) {
    const stage e{first, elements_};
    if (is_straight_ && e.is_full())
      run<true>(e, random, turn);
    else
      run<false>(e, random, turn);
  }

 private:
  /// Straight: a full stage of aligned runs, of which no element is left out.
  template <bool Straight, class Words>
  __device__ __forceinline__ void run(const stage& e, const Words& random, int turn) {
    slots_type state({slots_, headers_, tables_}, e, Straight);
    state.load();
    pack<T, 8> p, g;
    unsigned bad = 0;
    if constexpr (Straight) {
      if (p_.is_whole() && g_.is_whole()) {
        p = p_.load_whole(e);
        g = g_.load_whole(e);
      } else {
        p = p_.load_straight(e);
        g = g_.load_straight(e);
      }
    } else {
      p = p_.load_each(e);
      g = g_.load_each(e);
    }
    if (factor_ != T(1)) g = g * pack<T, 8>(factor_);
    const bool skips = !Straight && rare_.skipped;
    if (skips) bad = leave_out_bad(g);
    moments m;
    state.decode(m);
    apply(e, p, g, m);
    if (skips) state.restore(bad, m);
    const unsigned large = state.store(m, random, turn);
    if (large) set_where(large, p, pack<T, 8>(T(leanopt::real(0x7fc00000u))));  // NaN
    std::uint32_t word = 0;
    if (draws(p_.weights)) word = random.of_weights(turn);
    if constexpr (Straight) {
      p_.store_straight(p, e, word);
    } else {
      if (skips) set_where(bad, p, p_.load_each(e));
      p_.store_each(p, e, word);
    }
  }

  /// Clears gradients that are not finite, or whose squares are not, and marks them.
  __device__ __forceinline__ unsigned leave_out_bad(pack<T, 8>& g) const {
    unsigned bad = 0;
    LEANOPT_UNROLL
    for (int i = 0; i < 8; ++i) bad |= unsigned(has_infinite_square<square>(g.v[i])) << i;
    if (bad) {
      set_where(bad, g, pack<T, 8>(T(0)));
      atomicAdd(reinterpret_cast<unsigned long long*>(rare_.skipped),
                (unsigned long long)(__popc(bad)));
    }
    return bad;
  }
  template <class U>
  __device__ __forceinline__ static void set_where(unsigned marks, pack<U, 8>& x,
                                                   const pack<U, 8>& y) {
    LEANOPT_UNROLL
    for (int i = 0; i < 8; ++i)
      if (marks >> i & 1) x.v[i] = y.v[i];
  }

  /// The rule, for as many numbers at a time as registers are good for.
  __device__ __forceinline__ void apply(const stage& e, pack<T, 8>& p, const pack<T, 8>& g,
                                        moments& m) const {
    constexpr int N = sizeof(T) == 8 ? quad : 8;
    using V = pack<T, N>;
    LEANOPT_UNROLL
    for (int at = 0; at < 8; at += N) {
      V w = slice<N>(p, at), gradient = slice<N>(g, at), s[S ? S : 1];
      if constexpr (!is_full) gradient = if_nan(w, w, gradient);  // as on the CPU
      each<S>([&](auto k) LEANOPT_LAMBDA { s[k] = convert<T>(slice<N>(m[k], at)); });
      if constexpr (inputs::present)
        Formula::apply(c_, w, gradient, s, input<N>(e, at));
      else
        Formula::apply(c_, w, gradient, s);
      each<S>([&](auto k) LEANOPT_LAMBDA { set_slice(m[k], at, convert<moment>(s[k])); });
      set_slice(p, at, w);
    }
  }
  template <int N, class U>
  __device__ __forceinline__ static pack<U, N> slice(const pack<U, 8>& x, int at) {
    return pack<U, N>::of([&](int i) LEANOPT_LAMBDA { return x.v[at + i]; });
  }
  template <int N, class U>
  __device__ __forceinline__ static void set_slice(pack<U, 8>& x, int at, const pack<U, N>& y) {
    LEANOPT_UNROLL
    for (int i = 0; i < N; ++i) x.v[at + i] = y.v[i];
  }
  template <int N>
  __device__ __forceinline__ pack<T, N> input(const stage& e, int at) const {
    pack<T, N> x;
    LEANOPT_UNROLL
    for (int i = 0; i < N; i += quad) {
      T four[quad];
      read_inputs<quad, 1>(in_, e.at(at + i), e.elements, four);
      LEANOPT_UNROLL
      for (int j = 0; j < quad; ++j) x.v[i + j] = four[j];
    }
    return x;
  }
  __device__ __forceinline__ static bool draws(weights_kind kind) {
    return kind == weights_kind::stochastic || kind == weights_kind::split24;
  }

  /// State in full precision, with the members of coded_slots.
  struct full_slots {
    void* const* slots;
    stage e;
    bool straight;
    raw<sizeof(moment)> x[S ? S : 1];

    __device__ __forceinline__ full_slots(const slot_pointers<Format>& at, const stage& e_,
                                          bool straight_)
        : slots(at.slots), e(e_), straight(straight_) {}
    __device__ __forceinline__ void load() {
      each<S>([&](auto k) LEANOPT_LAMBDA {
        cuda::load<sizeof(moment)>(slots[k], {}, e, straight, x[k].w);
      });
    }
    __device__ __forceinline__ void decode(moments& m) const {
      each<S>([&](auto k) LEANOPT_LAMBDA { m[k] = numbers(x[k]); });
    }
    template <class Words>
    __device__ __forceinline__ unsigned store(moments& m, const Words&, int) {
      each<S>([&](auto k) LEANOPT_LAMBDA {
        cuda::store<sizeof(moment)>(slots[k], {}, e, straight, raw_of(m[k]).w);
      });
      return 0;
    }
  };
  template <class F, bool = F::block == 0>
  struct slots_of {
    using type = full_slots;
  };
  template <class F>
  struct slots_of<F, false> {
    using type = coded_slots<Formula, F>;
  };
  struct slots_type : slots_of<Format>::type {
    __device__ __forceinline__ slots_type(const slot_pointers<Format>& at, const stage& e,
                                          bool straight)
        : slots_of<Format>::type(at, e, straight) {}
    /// Puts back moments from memory, where store() has not replaced them yet.
    __device__ __forceinline__ void restore(unsigned marks, moments& m) {
      this->load();
      moments before;
      this->decode(before);
      each<S>([&](auto k) LEANOPT_LAMBDA { set_where(marks, m[k], before[k]); });
    }
  };

  numbers_of_stage<T> p_, g_;
  void *slots_[S ? S : 1], *headers_[S ? S : 1];
  std::uint64_t elements_;
  const tensor& rare_;  ///< what stays in memory until it is needed
  const coeffs& c_;
  T factor_;
  const inputs& in_;
  const tables* tables_;
  bool is_straight_;
};

/// What fits a processor's registers at least.
template <class T>
constexpr int blocks_per_processor = sizeof(T) == 8 ? 1 : 2;

/// `in` has an entry per tensor, where the formula has inputs.
template <class Formula, class Format, class T>
__global__ void __launch_bounds__(block_threads, blocks_per_processor<T>)
    step_kernel(work_list list, const group_step<typename Formula::template coeffs<T>>* groups,
                device_scalars scalars, const typename Formula::template inputs<T>* in) {
  using inputs = typename Formula::template inputs<T>;
  using random = random_words<Format>;
  if (is_called_off(scalars)) return;
  const auto* tables = shared_tables<Format>(list.tables);
  const T factor = gradient_factor<T>(scalars);
  const std::uint64_t warps = std::uint64_t(gridDim.x) * block_warps;
  for (std::uint64_t w = std::uint64_t(blockIdx.x) * block_warps + warp_of_thread();
       w < list.units * warps_of_unit; w += warps) {
    const std::uint64_t u = list.first + w / warps_of_unit;
    const std::uint32_t index = list.tensor_of_unit[u];
    const tensor& t = list.tensors[index];
    const std::uint64_t stages = (t.elements + together - 1) / together;
    const std::uint64_t first =
        (u - t.first_unit) * (unit / together) + w % warps_of_unit * stages_of_warp;
    if (first >= stages) continue;
    const auto group = groups[t.group];
    const std::uint64_t key = random_key(group.key, t.ordinal);
    inputs here{};
    if constexpr (inputs::present) here = in[index];
    stage_step<Formula, Format, T> step(t, list.gradients[index], group.coeffs, factor, here,
                                        tables);
    random words(key, first);
    LEANOPT_ROLL
    for (int s = 0; s < stages_of_warp && first + s < stages; ++s) {
      if (s && !random::of_all_stages) words = random(key, first + s);
      step.run((first + s) * together, words, s);
    }
  }
}

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
