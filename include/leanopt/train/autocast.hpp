// Mixed precision: a guard that turns autocast on.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/types.h>

namespace leanopt {

/// While it lives, operators on a device run in `type` where that is safe, as under Python's
/// torch.autocast. Forward and loss belong inside, backward and the step outside: casts of weights
/// are kept until the outermost of nested guards ends.
class autocast_guard {
 public:
  explicit autocast_guard(torch::DeviceType device, torch::Dtype type = torch::kBFloat16,
                          bool enabled = true)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        type_before_(at::autocast::get_autocast_dtype(device)) {
    TORCH_CHECK(type == torch::kBFloat16 || type == torch::kFloat16,
                "leanopt: autocast_guard: type is ", type, "; it must be BFloat16 or Half");
    set(enabled, type);
    at::autocast::increment_nesting();
  }
  autocast_guard(const autocast_guard&) = delete;
  autocast_guard& operator=(const autocast_guard&) = delete;
  ~autocast_guard() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set(was_enabled_, type_before_);
  }

 private:
  void set(bool enabled, torch::Dtype type) {
    // The casts of weights are known by weight only: those to another type must go.
    if (type != at::autocast::get_autocast_dtype(device_)) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, enabled);
    at::autocast::set_autocast_dtype(device_, type);
  }

  torch::DeviceType device_;
  bool was_enabled_;
  torch::Dtype type_before_;
};

}  // namespace leanopt
