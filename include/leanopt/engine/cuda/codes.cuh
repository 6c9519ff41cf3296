// Codes alone: a tensor's numbers in a format and back, without a step.
#pragma once

#include <leanopt/engine/cuda/elementwise.cuh>

LEANOPT_EXACT_BEGIN
namespace leanopt::cuda {

/// Arrays of numbers, one per slot.
struct number_arrays {
  float* of_slot[3];
};

/// f(state, stage, straight) for the stages of this warp.
template <class Formula, class Format, class F>
__device__ __forceinline__ void each_coded_stage(const coded& t, F f) {
  const auto* tables = shared_tables<Format>(t.tables);
  bool aligned = true;
  for (int k = 0; k < Formula::slot_count; ++k)
    aligned &= is_aligned(t.slots[k], sizeof(typename Format::template stored<float>));
  const std::uint64_t warps = std::uint64_t(gridDim.x) * block_warps;
  for (std::uint64_t w = std::uint64_t(blockIdx.x) * block_warps + warp_of_thread();
       w * together < t.elements; w += warps) {
    const stage e{w * together, t.elements};
    coded_slots<Formula, Format> state({t.slots, t.headers, tables}, e, aligned && e.is_full());
    f(state, e, w);
  }
}

template <class Formula, class Format>
__global__ void __launch_bounds__(block_threads) encode_kernel(coded t, number_arrays arrays) {
  constexpr int S = Formula::slot_count;
  each_coded_stage<Formula, Format>(t, [&](auto& state, const stage& e, std::uint64_t w) {
    pack<float, 8> moments[S];
    each<S>([&](auto k) {
      raw<4> x;
      const float* from = arrays.of_slot[k];
      load<4>(from, {}, e, is_aligned(from, 4) && e.is_full(), x.w);
      moments[k] = numbers(x);
    });
    state.store(moments, random_words<Format>(t.key, w), 0);
  });
}
template <class Formula, class Format>
__global__ void __launch_bounds__(block_threads) decode_kernel(coded t, number_arrays arrays) {
  constexpr int S = Formula::slot_count;
  each_coded_stage<Formula, Format>(t, [&](auto& state, const stage& e, std::uint64_t) {
    pack<float, 8> moments[S];
    state.load();
    state.decode(moments);
    each<S>([&](auto k) {
      float* to = arrays.of_slot[k];
      store<4>(to, {}, e, is_aligned(to, 4) && e.is_full(), raw_of(moments[k]).w);
    });
  });
}

}  // namespace leanopt::cuda
LEANOPT_EXACT_END
