// What the helpers of the training loop do to gradients, of any type and on any device, without
// making the host wait.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace leanopt {
namespace detail {

/// f(parameter, name) for all of an optimizer's parameters; name() is text for errors.
template <class F>
void for_each_parameter(const torch::optim::Optimizer& optimizer, F f) {
  const auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i)
    for (std::size_t j = 0; j < groups[i].params().size(); ++j)
      f(groups[i].params()[j], [i, j] { return c10::str("parameter ", j, " of group ", i); });
}

/// The real numbers of a tensor; those of a lazily conjugated one without its sign.
inline torch::Tensor real_view(const torch::Tensor& t) {
  return t.is_complex() ? at::view_as_real(t.is_conj() ? t.conj() : t) : t;
}

/// f(piece) for all elements of a tensor, in pieces of which a copy in another type is small.
template <class F>
void for_each_piece(const torch::Tensor& given, F f) {
  constexpr std::int64_t most = 1 << 20;
  const torch::Tensor t = real_view(given);
  if (!t.is_non_overlapping_and_dense()) return f(t);  // it has no flat view
  const torch::Tensor flat = t.as_strided({t.numel()}, {1});
  for (std::int64_t begin = 0; begin < t.numel(); begin += most)
    f(flat.narrow(0, begin, std::min(most, t.numel() - begin)));
}

inline bool is_wide(const torch::Tensor& g) {
  return c10::toRealValueType(g.scalar_type()) == at::kDouble;
}

/// Multiplies gradients by a scalar, in float32 or wider and with one rounding.
inline void multiply(const std::vector<torch::Tensor>& gradients, const torch::Tensor& factor) {
  const at::NoGradGuard no_grad;
  for (const auto& g : gradients) {
    const bool narrow = g.element_size() == 2;
    const torch::Tensor f = factor.to(g.device(), is_wide(g) ? at::kDouble : at::kFloat);
    for_each_piece(g, [&](torch::Tensor piece) {
      if (narrow)
        piece.copy_(piece.to(at::kFloat).mul_(f));
      else
        piece.mul_(f);
    });
  }
}

/// Sums of gradients of 16-bit parameters in float32.
class wide_sums {
 public:
  /// Moves such gradients of the optimizer's parameters here.
  void take(const torch::optim::Optimizer& optimizer) {
    const at::NoGradGuard no_grad;
    for_each_parameter(optimizer, [&](const torch::Tensor& p, auto) {
      torch::Tensor& g = p.mutable_grad();
      if (!g.defined() || g.layout() != at::kStrided || g.element_size() != 2) return;
      torch::Tensor& sum = sums_[p.unsafeGetTensorImpl()];
      sum.defined() ? sum.add_(g) : sum = g.to(at::kFloat);
      g.reset();
    });
  }
  /// Makes the sums the parameters' gradients, in float32 or rounded to the parameter's type.
  void give(const torch::optim::Optimizer& optimizer, bool rounded) {
    for_each_parameter(optimizer, [&](const torch::Tensor& p, auto) {
      const auto at = sums_.find(p.unsafeGetTensorImpl());
      if (at != sums_.end())
        p.mutable_grad() = rounded ? at->second.to(p.scalar_type()) : at->second;
    });
    sums_.clear();
  }
  void clear() { sums_.clear(); }

 private:
  std::unordered_map<const void*, torch::Tensor> sums_;
};

}  // namespace detail
}  // namespace leanopt
