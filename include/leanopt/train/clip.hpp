// The global norm of gradients and whether they are finite, as scalars on their device, and a step
// that uses them: no host waits for a device here, but where a comment says so.
#pragma once

#include <leanopt/optim/scalars.hpp>
#include <leanopt/train/release.hpp>

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace leanopt {

namespace detail {

/// Appends the gradient of `p` where it is defined and not empty. @throws for a sparse one.
template <class Name>
void append_gradient(std::vector<torch::Tensor>& gradients, const torch::Tensor& p,
                     const char* what, Name name) {
  const torch::Tensor& g = p.grad();
  if (!g.defined()) return;
  TORCH_CHECK(g.layout() == at::kStrided, "leanopt: ", what, ": the gradient of ", name(),
              " is not dense; make it dense (for embeddings: sparse(false))");
  if (g.numel() > 0) gradients.push_back(g);
}

/// The gradients of an optimizer that are defined and not empty. `what` is who asks.
/// @throws for sparse ones, and where gradients are released before all are there.
inline std::vector<torch::Tensor> gradients_of(const torch::optim::Optimizer& optimizer,
                                               const char* what) {
  refuse_release(optimizer, what);
  std::vector<torch::Tensor> gradients;
  for_each_parameter(optimizer, [&](const torch::Tensor& p, auto name) {
    append_gradient(gradients, p, what, name);
  });
  return gradients;
}

/// a * b, where an undefined factor is 1.
inline torch::Tensor product(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.mul(b.to(a.device()));
}

/// float32, which devices read, but where a gradient is float64.
inline at::ScalarType scalar_type(const std::vector<torch::Tensor>& gradients) {
  const bool wide = std::any_of(gradients.begin(), gradients.end(), is_wide);
  return wide ? at::kDouble : at::kFloat;
}

}  // namespace detail

/// The Euclidean norm of all elements of all tensors, a float64 scalar on the first one's device.
/// In double precision, so that no square overflows or vanishes (|x| from 1e-154 to 1e154) and long
/// sums stay exact; not finite where an element is not. @cost one pass; a copy of at most 8 MiB,
/// or of a tensor that has gaps.
inline torch::Tensor global_norm(const std::vector<torch::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<torch::Tensor> norms;
  for (const auto& t : tensors)
    if (t.defined() && t.numel() > 0)
      detail::for_each_piece(t, [&](const torch::Tensor& piece) {
        norms.push_back(at::linalg_vector_norm(piece, 2, c10::nullopt, false, at::kDouble)
                            .to(norms.empty() ? t.device() : norms[0].device()));
      });
  if (norms.empty()) return at::zeros({}, at::kDouble);
  return at::linalg_vector_norm(at::stack(norms), 2);
}

/// 1 on the first tensor's device where an element of any is not finite, else 0; float32. @cost one
/// pass that writes nothing.
inline torch::Tensor has_nonfinite(const std::vector<torch::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<torch::Tensor> parts;
  for (const auto& t : tensors)
    if (t.defined() && t.numel() > 0) parts.push_back(detail::real_view(t));
  if (parts.empty()) return at::zeros({}, at::kFloat);
  std::vector<torch::Tensor> largest =
      at::_foreach_norm(parts, std::numeric_limits<double>::infinity());
  for (auto& x : largest) x = x.to(parts[0].device(), at::kDouble);
  return at::stack(largest).isfinite().all().logical_not().to(at::kFloat);
}

/// What brings a norm down to `max_norm`: max_norm / norm, at most 1. @throws where max_norm is not
/// positive.
inline torch::Tensor clip_coefficient(const torch::Tensor& norm, double max_norm) {
  TORCH_CHECK(max_norm > 0, "leanopt: clip: max_norm is ", max_norm, "; it must be positive");
  return at::full_like(norm, max_norm).div(norm).clamp_max(1.0);
}

/// As torch::nn::utils::clip_grad_norm_, but without its 1e-6 in the denominator, for parameters of
/// any type and gradients of any size, and without waiting: rewrites their gradients so that the
/// global norm is at most `max_norm`, and returns the norm before. Where that is not finite, the
/// gradients stay as they are.
inline torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters,
                                     double max_norm) {
  std::vector<torch::Tensor> gradients;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(!dynamic_cast<detail::release_hook*>(detail::hook_of(parameters[i])),
                "leanopt: clip_grad_norm_ needs all gradients at once, but one is released in "
                "backward(); use either it or gradient_release");
    detail::append_gradient(gradients, parameters[i], "clip_grad_norm_",
                            [i] { return c10::str("parameter ", i); });
  }
  const torch::Tensor norm = global_norm(gradients);
  const torch::Tensor factor = clip_coefficient(norm, max_norm);
  detail::multiply(gradients, at::where(norm.isfinite(), factor, at::ones_like(factor)));
  return norm;
}

/// Adds to the scalars of the next step what clips the global norm of the optimizer's gradients to
/// `max_norm`, and leaves the step out where the norm is not finite. Other factors of `scalars`
/// come first. Gradients are not written. Returns the norm before clipping, float64.
inline torch::Tensor clip_grad_norm(const torch::optim::Optimizer& optimizer, double max_norm,
                                    step_scalars& scalars) {
  const at::NoGradGuard no_grad;
  const auto gradients = detail::gradients_of(optimizer, "clip_grad_norm");
  const torch::Tensor norm = detail::product(global_norm(gradients), scalars.inv_scale);
  scalars.clip = clip_coefficient(norm, max_norm).to(detail::scalar_type(gradients));
  const torch::Tensor bad = norm.isfinite().logical_not().to(at::kFloat);
  scalars.found_inf =
      scalars.found_inf.defined() ? bad.maximum(scalars.found_inf.to(bad.device())) : bad;
  return norm;
}

/// A step with scalars, of any optimizer. Ours read them where they are. For LibTorch's own the
/// gradients are rewritten, and the host waits for `found_inf` to leave the step out.
inline void step_with(torch::optim::Optimizer& optimizer, const step_scalars& scalars) {
  if (!set_step_scalars(optimizer, scalars)) {
    if (scalars.found_inf.defined() && scalars.found_inf.item<float>() != 0) return;
    const torch::Tensor factor = detail::product(scalars.inv_scale, scalars.clip);
    if (factor.defined()) detail::multiply(detail::gradients_of(optimizer, "step_with"), factor);
  }
  optimizer.step();
}

}  // namespace leanopt
