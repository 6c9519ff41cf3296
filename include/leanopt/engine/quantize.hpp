// Block-wise quantization of one tensor, on its own, by any compressed format; and codes of several
// slots at once, on whatever device they are.
#pragma once

#include <leanopt/engine/device.hpp>
#include <leanopt/engine/dispatch.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/lt.h>

namespace leanopt {

namespace engine {

#ifdef LEANOPT_WITH_CUDA
/// f(codes, stream) with codes on a device as the kernels see them. Formats with tables send them
/// each time.
template <class Format, int Slots, class F>
void with_coded(const cpu::stored_moments<float, Format, Slots>& t, at::Device device, F f) {
  const c10::DeviceGuard guard(device);
  cuda::coded c;
  for (int k = 0; k < Slots; ++k) {
    c.slots[k] = t.slots[k];
    if constexpr (has_headers<Format>) c.headers[k] = t.headers[k];
  }
  c.elements = t.elements;
  c.key = t.key;
  at::Tensor tables;
  using books = typename tables_of<Format>::type;
  if constexpr (!std::is_void_v<books>) {
    auto* all = const_cast<books*>(&books::shared());
    tables = at::from_blob(all, {std::int64_t(sizeof *all)}, at::kByte).to(device);
    c.tables = tables.data_ptr();
  }
  check_cuda(f(c, cuda::current_stream(device.index())));
}
#endif

/// Codes of float32 numbers, a tensor per slot of the formula, all on one device and contiguous.
template <class Formula, class Format>
void encode(const cpu::stored_moments<float, Format, Formula::slot_count>& t,
            const std::vector<at::Tensor>& numbers) {
  const float* from[3] = {};
  for (std::size_t k = 0; k < numbers.size(); ++k)
    from[k] = static_cast<const float*>(numbers[k].data_ptr());
#ifdef LEANOPT_WITH_CUDA
  if (!numbers[0].is_cpu())
    return with_coded<Format, Formula::slot_count>(
        t, numbers[0].device(), [&](const cuda::coded& c, cuda::stream s) {
          return cuda::encode<Formula, Format>(c, from, s);
        });
#endif
  cpu::encode<Formula, Format>(level_from_environment(), t, from);
}
/// The inverse.
template <class Formula, class Format>
void decode(const cpu::stored_moments<float, Format, Formula::slot_count>& t,
            const std::vector<at::Tensor>& numbers) {
  float* to[3] = {};
  for (std::size_t k = 0; k < numbers.size(); ++k)
    to[k] = static_cast<float*>(numbers[k].data_ptr());
#ifdef LEANOPT_WITH_CUDA
  if (!numbers[0].is_cpu())
    return with_coded<Format, Formula::slot_count>(t, numbers[0].device(),
                                                   [&](const cuda::coded& c, cuda::stream s) {
                                                     return cuda::decode<Formula, Format>(c, to, s);
                                                   });
#endif
  cpu::decode<Formula, Format>(level_from_environment(), t, to);
}

}  // namespace engine

/// A tensor as codes. `codes` has its shape, in row-major order; `headers` one number per block,
/// and is undefined where the format has none.
template <class Format>
struct quantized {
  at::Tensor codes, headers;
  values range = values::any;
};

namespace detail {
template <class F>
void with_range(values range, F f) {
  range == values::any ? f(one_slot<values::any>{}) : f(one_slot<values::non_negative>{});
}
template <class Formula, class Format>
cpu::stored_moments<float, Format, 1> moments_of(const quantized<Format>& q, std::uint64_t key) {
  cpu::stored_moments<float, Format, 1> t{{}, {}, std::size_t(q.codes.numel()), 0, key};
  using stored = typename Format::template stored<float>;
  t.slots[0] = static_cast<stored*>(q.codes.data_ptr());
  if constexpr (has_headers<Format>)
    t.headers[0] = static_cast<typename Format::header*>(q.headers.data_ptr());
  return t;
}
template <class Format>
void check_quantized(const quantized<Format>& q) {
  constexpr auto codes = engine::code_type<Format>;
  TORCH_CHECK(q.codes.defined() && q.codes.scalar_type() == codes && q.codes.is_contiguous() &&
                  engine::can_step_on(q.codes.device()),
              "leanopt: dequantize_blockwise: codes of ", Format::name, " are contiguous, of type ",
              codes, ", on the CPU, or on a CUDA device in a program that links leanopt::cuda");
  if constexpr (has_headers<Format>) {
    constexpr auto type = engine::header_type<Format>;
    const std::int64_t blocks = (q.codes.numel() + Format::block - 1) / Format::block;
    TORCH_CHECK(q.headers.defined() && q.headers.scalar_type() == type &&
                    q.headers.is_contiguous() && q.headers.device() == q.codes.device() &&
                    q.headers.numel() == blocks,
                "leanopt: dequantize_blockwise: ", q.codes.numel(), " codes of ", Format::name,
                " have ", blocks, " headers of type ", type, " beside them");
  }
}
}  // namespace detail

/// Codes of `x`, block by block of its values in row-major order, a short last block of its own.
/// `range` is values::non_negative for second moments. Formats that round stochastically take their
/// random bits from `seed`. On a CUDA device the bits are the CPU's, and a non-negative range or a
/// format with tables (dynamic8) waits for it. @throws for a tensor that is no strided
/// floating-point tensor on the CPU or, in a program that links leanopt::cuda, on a CUDA device, or
/// has negative values in a non-negative range. Values that are not finite: as the format says.
/// @cost a float32 copy.
template <class Format>
quantized<Format> quantize_blockwise(const at::Tensor& x, Format, values range = values::any,
                                     std::uint64_t seed = 0) {
  static_assert(Format::compressed, "leanopt: quantize_blockwise needs a compressed format");
  TORCH_CHECK(
      x.defined() && x.is_floating_point() && x.layout() == at::kStrided &&
          engine::can_step_on(x.device()),
      "leanopt: quantize_blockwise takes strided floating-point tensors on the CPU, or on a "
      "CUDA device in a program that links leanopt::cuda");
  const at::Tensor from = x.detach().to(at::kFloat).add(0.0f).contiguous();  // no -0
  TORCH_CHECK(
      range == values::any || !from.lt(0).any().item<bool>(),
      "leanopt: quantize_blockwise: negative values in a non-negative range; use values::any");
  quantized<Format> q;
  q.range = range;
  q.codes = at::empty(x.sizes(), from.options().dtype(engine::code_type<Format>));
  if constexpr (has_headers<Format>)
    q.headers = at::empty({(x.numel() + Format::block - 1) / Format::block},
                          from.options().dtype(engine::header_type<Format>));
  detail::with_range(range, [&](auto formula) {
    using Formula = decltype(formula);
    engine::encode<Formula, Format>(detail::moments_of<Formula>(q, random_key(seed, 0, 0)), {from});
  });
  return q;
}

/// The float32 values behind codes, on their device. @throws when codes and headers do not fit each
/// other, or are where this program cannot step. A format with tables waits for a CUDA device.
template <class Format>
at::Tensor dequantize_blockwise(const quantized<Format>& q) {
  detail::check_quantized(q);
  at::Tensor x = at::empty(q.codes.sizes(), q.codes.options().dtype(at::kFloat));
  detail::with_range(q.range, [&](auto formula) {
    using Formula = decltype(formula);
    engine::decode<Formula, Format>(detail::moments_of<Formula>(q, 0), {x});
  });
  return x;
}

}  // namespace leanopt
