// Block-wise quantization of one tensor, on its own, by any compressed format.
#pragma once

#include <leanopt/engine/dispatch.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/lt.h>

namespace leanopt {

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
cpu::piece<float, Format, 1> piece_of(const quantized<Format>& q, std::uint64_t key) {
  cpu::piece<float, Format, 1> t{nullptr, nullptr, {}, {}, std::size_t(q.codes.numel()), 0, key};
  using stored = typename Format::template stored<float>;
  t.slots[0] = static_cast<stored*>(q.codes.data_ptr());
  if constexpr (cpu::detail::has_headers<Format>)
    t.headers[0] = static_cast<typename Format::header*>(q.headers.data_ptr());
  return t;
}
template <class Format>
void check_quantized(const quantized<Format>& q) {
  constexpr auto codes = engine::code_type<Format>;
  TORCH_CHECK(q.codes.defined() && q.codes.scalar_type() == codes && q.codes.is_contiguous() &&
                  q.codes.is_cpu(),
              "leanopt: dequantize_blockwise: codes of ", Format::name, " are contiguous, of type ",
              codes, ", on the CPU");
  if constexpr (cpu::detail::has_headers<Format>) {
    constexpr auto type = engine::header_type<Format>;
    const std::int64_t blocks = (q.codes.numel() + Format::block - 1) / Format::block;
    TORCH_CHECK(q.headers.defined() && q.headers.scalar_type() == type &&
                    q.headers.is_contiguous() && q.headers.is_cpu() && q.headers.numel() == blocks,
                "leanopt: dequantize_blockwise: ", q.codes.numel(), " codes of ", Format::name,
                " have ", blocks, " headers of type ", type);
  }
}
}  // namespace detail

/// Codes of `x`, block by block of its values in row-major order, a short last block of its own.
/// `range` is values::non_negative for second moments. Formats that round stochastically take their
/// random bits from `seed`. @throws for a tensor that is no strided floating-point tensor on the
/// CPU, or has negative values in a non-negative range. Values that are not finite: as the format
/// says. @cost a float32 copy of what is not contiguous float32.
template <class Format>
quantized<Format> quantize_blockwise(const at::Tensor& x, Format, values range = values::any,
                                     std::uint64_t seed = 0) {
  static_assert(Format::compressed, "leanopt: quantize_blockwise needs a compressed format");
  TORCH_CHECK(x.defined() && x.is_floating_point() && x.layout() == at::kStrided && x.is_cpu(),
              "leanopt: quantize_blockwise takes strided floating-point tensors on the CPU");
  const at::Tensor from = x.detach().to(at::kFloat).add(0.0f).contiguous();  // no -0
  TORCH_CHECK(
      range == values::any || !from.lt(0).any().item<bool>(),
      "leanopt: quantize_blockwise: negative values in a non-negative range; use values::any");
  quantized<Format> q;
  q.range = range;
  q.codes = at::empty(x.sizes(), from.options().dtype(engine::code_type<Format>));
  if constexpr (cpu::detail::has_headers<Format>)
    q.headers = at::empty({(x.numel() + Format::block - 1) / Format::block},
                          from.options().dtype(engine::header_type<Format>));
  const float* values_[] = {static_cast<const float*>(from.data_ptr())};
  detail::with_range(range, [&](auto formula) {
    using Formula = decltype(formula);
    cpu::encode<Formula, Format>(engine::level_from_environment(),
                                 detail::piece_of<Formula>(q, random_key(seed, 0, 0)), values_);
  });
  return q;
}

/// The float32 values behind codes. @throws when codes and headers do not fit each other.
template <class Format>
at::Tensor dequantize_blockwise(const quantized<Format>& q) {
  detail::check_quantized(q);
  at::Tensor x = at::empty(q.codes.sizes(), q.codes.options().dtype(at::kFloat));
  float* values_[] = {static_cast<float*>(x.data_ptr())};
  detail::with_range(q.range, [&](auto formula) {
    using Formula = decltype(formula);
    cpu::decode<Formula, Format>(engine::level_from_environment(), detail::piece_of<Formula>(q, 0),
                                 values_);
  });
  return x;
}

}  // namespace leanopt
