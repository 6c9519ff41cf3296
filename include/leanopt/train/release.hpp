// Gradient release: a parameter's step runs inside backward(), as soon as its gradient is complete,
// and frees it, so that gradients take the memory of a layer instead of the model's.
#pragma once

#include <leanopt/optim/scalars.hpp>
#include <leanopt/train/gradients.hpp>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <vector>

namespace leanopt {

namespace detail {

/// What the hooks of one gradient_release share.
struct releasing {
  torch::optim::Optimizer& optimizer;
  std::mutex mutex;

  void operator()(const torch::Tensor& p) {
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "leanopt: gradient_release: backward(create_graph = true) needs the gradients that "
                "are released; destroy the gradient_release before it");
    const std::unique_lock<std::mutex> alone(mutex, std::try_to_lock);
    TORCH_CHECK(alone.owns_lock(),
                "leanopt: gradient_release: two backward passes at once step the same optimizer; "
                "run one after the other");
    bool listed = false;
    for_each_parameter(optimizer, [&](const torch::Tensor& q, auto name) {
      listed = listed || q.is_same(p);
      TORCH_CHECK(q.is_same(p) || !q.grad().defined(), "leanopt: gradient_release: ", name(),
                  " has a gradient that was not released; it was added later or set by hand: "
                  "clear it, and make the gradient_release after the last group");
    });
    TORCH_CHECK(listed, "leanopt: gradient_release: a parameter of shape ", p.sizes(),
                " left the optimizer's groups, or the optimizer was moved; destroy the "
                "gradient_release before that");
    const auto* ours = dynamic_cast<training_hooks*>(&optimizer);
    TORCH_CHECK(!ours || !ours->has_step_scalars(),
                "leanopt: gradient_release: set_step_scalars() is for one step of all parameters; "
                "set_step_scalars({}) drops them");
    optimizer.step();
    // LibTorch's own write where autograd does not see it: a graph that still needs the weight of
    // before, as uses of p.detach() do, must fail.
    p.unsafeGetTensorImpl()->bump_version();
    p.mutable_grad().reset();
  }
};

struct release_hook : torch::autograd::PostAccumulateGradHook {
  explicit release_hook(std::shared_ptr<releasing> shared) : shared(std::move(shared)) {}
  void operator()(const torch::Tensor& p) override { (*shared)(p); }
  std::shared_ptr<releasing> shared;
};

/// Also that of a parameter which is frozen at present.
inline torch::autograd::PostAccumulateGradHook* hook_of(const torch::Tensor& p) {
  namespace impl = torch::autograd::impl;
  return impl::get_autograd_meta(p) ? impl::post_acc_grad_hooks(p).get() : nullptr;
}

/// @throws when gradients of the optimizer are released, which `what` cannot work with.
inline void refuse_release(const torch::optim::Optimizer& optimizer, const char* what) {
  for_each_parameter(optimizer, [&](const torch::Tensor& p, auto name) {
    TORCH_CHECK(!dynamic_cast<release_hook*>(hook_of(p)), "leanopt: ", what,
                " needs all gradients at once, but that of ", name(),
                " is released in backward(); use either it or gradient_release");
  });
}

}  // namespace detail

/// While it lives, backward() steps and frees each parameter of `optimizer`; step() and zero_grad()
/// find nothing left to do and may stay in the loop. Results are those of the ordinary step, bit
/// for bit, where the first pass reaches all parameters (else random bits of low-bit formats are
/// others). A rate must be set before backward(). Cannot be combined with gradient accumulation, a
/// global norm, GradScaler or nonfinite::skip_step, which need all gradients at once and refuse it.
/// Each backward() is a step, so a parameter must take part in one pass at a time, from one thread.
/// The optimizer must outlive it.
/// @throws where a parameter has a gradient or another hook already, or not all are on one device.
/// @cost gradients of the parameters between two steps instead of all; one call of step() per
/// parameter, which looks at the whole list.
class gradient_release {
 public:
  explicit gradient_release(torch::optim::Optimizer& optimizer) {
    std::vector<torch::Tensor> parameters;
    detail::for_each_parameter(optimizer, [&](const torch::Tensor& p, auto name) {
      if (!p.requires_grad()) return;
      TORCH_CHECK(!p.grad().defined(), "leanopt: gradient_release: ", name(),
                  " has a gradient already; call zero_grad() first");
      TORCH_CHECK(!detail::hook_of(p), "leanopt: gradient_release: ", name(),
                  " has a post-accumulate hook already; remove it first");
      // Each device has a thread of its own in backward().
      TORCH_CHECK(parameters.empty() || p.device() == parameters[0].device(),
                  "leanopt: gradient_release: ", name(), " is on ", p.device(),
                  ", others of this optimizer on ", parameters[0].device(),
                  "; use one optimizer per device");
      parameters.push_back(p);
    });
    if (auto* ours = dynamic_cast<training_hooks*>(&optimizer)) ours->prepare_single_steps();
    shared_.reset(new detail::releasing{optimizer, {}});
    parameters_ = std::move(parameters);
    for (const auto& p : parameters_)
      torch::autograd::impl::set_post_acc_grad_hooks(
          p, std::make_unique<detail::release_hook>(shared_));
  }
  gradient_release(const gradient_release&) = delete;
  gradient_release& operator=(const gradient_release&) = delete;
  ~gradient_release() {
    for (const auto& p : parameters_) {
      const auto* hook = dynamic_cast<detail::release_hook*>(detail::hook_of(p));
      if (hook && hook->shared == shared_)
        torch::autograd::impl::set_post_acc_grad_hooks(p, nullptr);
    }
  }

 private:
  std::vector<torch::Tensor> parameters_;
  std::shared_ptr<detail::releasing> shared_;
};

}  // namespace leanopt
