// GradScaler: keeps small gradients of float16 from vanishing by scaling the loss, as Python's
// class of this name.
#pragma once

#include <leanopt/train/clip.hpp>

#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <unordered_map>
#include <utility>

namespace leanopt {

struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536;    ///< from 2^-126 to 2^126, where every scale stays
  TORCH_ARG(double, growth_factor) = 2;     ///< after growth_interval steps without overflow
  TORCH_ARG(double, backoff_factor) = 0.5;  ///< after a step with one
  TORCH_ARG(std::int64_t, growth_interval) = 2000;
};

/// Scales losses so that gradients of few bits do not vanish, leaves out steps with gradients that
/// are not finite and finds the largest scale that works. As in Python:
///   scaler.scale(loss).backward();
///   scaler.step(optimizer);   // for each optimizer
///   scaler.update();
/// To clip in between: step_scalars s = scaler.check(optimizer); clip_grad_norm(optimizer, 1, s);
/// scaler.step(optimizer, s). All state is on the device of the loss and the host never waits for
/// it, but in step() of LibTorch's own optimizers, stepped(), get_scale() and save().
class GradScaler {
 public:
  /// @throws when an option is out of its range.
  explicit GradScaler(GradScalerOptions options = {}) : options_(options) {
    check_options(options_);
  }
  GradScaler(const GradScaler&) = delete;  // a copy would share the tensors that update() writes
  GradScaler& operator=(const GradScaler&) = delete;

  /// loss * scale.
  torch::Tensor scale(const torch::Tensor& loss) {
    make_scale(loss.device());
    return loss * scale_.to(loss.device());
  }
  /// The scalars of this optimizer's next step: what undoes the scale, and whether the step must be
  /// left out. @cost a pass over the gradients, which are not written.
  step_scalars check(torch::optim::Optimizer& optimizer) {
    const auto gradients = detail::gradients_of(optimizer, "GradScaler");
    TORCH_CHECK(scale_.defined(),
                "leanopt: GradScaler: no loss was scaled yet; backward() of scale(loss) comes "
                "before the step");
    TORCH_CHECK(!stepped_since_update(optimizer),
                "leanopt: GradScaler: this optimizer was stepped since the last update(); call "
                "update() after the steps of all optimizers");
    known& k = optimizers_[&optimizer];
    k.found_inf = has_nonfinite(gradients).to(scale_.device());
    step_scalars s;
    s.found_inf = k.found_inf;
    if (!k.unscaled) s.inv_scale = scale_.reciprocal();
    return s;
  }
  /// Rewrites the optimizer's gradients unscaled, for programs that look at them; step() knows.
  /// Gradients of float16 keep what float16 has, so that small ones vanish here.
  /// @throws when they are unscaled already.
  void unscale_(torch::optim::Optimizer& optimizer) {
    const step_scalars s = check(optimizer);
    TORCH_CHECK(s.inv_scale.defined(),
                "leanopt: GradScaler: unscale_() was called for this "
                "optimizer already since the last update()");
    detail::multiply(detail::gradients_of(optimizer, "GradScaler"), s.inv_scale);
    optimizers_[&optimizer].unscaled = true;
  }
  /// The optimizer's step, or nothing at all where a gradient is not finite.
  void step(torch::optim::Optimizer& optimizer) { step(optimizer, check(optimizer)); }
  /// The same with the scalars of check(), to which others may have been added.
  void step(torch::optim::Optimizer& optimizer, const step_scalars& scalars) {
    const auto at = optimizers_.find(&optimizer);
    TORCH_CHECK(at != optimizers_.end() && !at->second.stepped && scalars.found_inf.defined(),
                "leanopt: GradScaler: step() needs the scalars of check(), once per update()");
    step_with(optimizer, scalars);
    at->second.stepped = true;
    at->second.found_inf = scalars.found_inf.to(scale_.device());
  }
  /// Whether the optimizer's last step() since update() was not left out. Waits for the device.
  bool stepped(torch::optim::Optimizer& optimizer) const {
    return stepped_since_update(optimizer) &&
           optimizers_.at(&optimizer).found_inf.item<float>() == 0;
  }
  /// Adapts the scale, once after the steps of all optimizers. @throws when none was checked.
  void update() {
    TORCH_CHECK(
        !optimizers_.empty(),
        "leanopt: GradScaler: update() without a step; call step() of each optimizer first");
    torch::Tensor found = at::zeros_like(scale_);
    for (const auto& [optimizer, k] : optimizers_) found = found.maximum(k.found_inf);
    at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor(),
                           options_.backoff_factor(), options_.growth_interval());
    scale_.clamp_(smallest, largest);
    optimizers_.clear();
    ++generation_;
  }
  /// Differs after each update() and load(): gradients of losses scaled before have another scale.
  std::int64_t generation() const { return generation_; }
  /// Waits for the device.
  double get_scale() const {
    return scale_.defined() ? scale_.item<double>() : options_.init_scale();
  }

  /// @throws between step() and update().
  void save(torch::serialize::OutputArchive& archive) const {
    TORCH_CHECK(optimizers_.empty(), "leanopt: GradScaler: save it after update()");
    const std::int64_t grown = scale_.defined() ? growth_tracker_.item<std::int64_t>() : grown_;
    archive.write("scale", torch::IValue(get_scale()));
    archive.write("growth_tracker", torch::IValue(grown));
    archive.write("growth_factor", torch::IValue(options_.growth_factor()));
    archive.write("backoff_factor", torch::IValue(options_.backoff_factor()));
    archive.write("growth_interval", torch::IValue(options_.growth_interval()));
  }
  /// Replaces scale and options. @throws and changes nothing when a value is out of its range.
  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key) {
      torch::IValue value;
      archive.read(key, value);
      return value;
    };
    const auto options = GradScalerOptions()
                             .init_scale(read("scale").toDouble())
                             .growth_factor(read("growth_factor").toDouble())
                             .backoff_factor(read("backoff_factor").toDouble())
                             .growth_interval(read("growth_interval").toInt());
    check_options(options);
    const std::int64_t grown = read("growth_tracker").toInt();
    check_range(grown >= 0 && grown < options.growth_interval(), "growth_tracker", grown,
                "at least 0 and below growth_interval");
    grown_ = grown;
    options_ = options;
    scale_ = growth_tracker_ = torch::Tensor();
    optimizers_.clear();
    ++generation_;
  }

 private:
  /// What is known of an optimizer since the last update.
  struct known {
    torch::Tensor found_inf;
    bool unscaled = false, stepped = false;
  };
  // float32 has the inverses of all between, so that a scale of 0 cannot make gradients NaN.
  static constexpr double smallest = 0x1p-126, largest = 0x1p126;

  template <class T>
  static void check_range(bool fits, const char* name, T value, const char* range) {
    TORCH_CHECK(fits, "leanopt: GradScaler: ", name, " is ", value, "; it must be ", range);
  }
  static void check_options(const GradScalerOptions& o) {
    check_range(o.init_scale() >= smallest && o.init_scale() <= largest, "init_scale",
                o.init_scale(), "between 2^-126 and 2^126");
    check_range(o.growth_factor() > 1, "growth_factor", o.growth_factor(), "above 1");
    check_range(o.backoff_factor() > 0 && o.backoff_factor() < 1, "backoff_factor",
                o.backoff_factor(), "between 0 and 1");
    check_range(o.growth_interval() > 0, "growth_interval", o.growth_interval(), "positive");
  }
  bool stepped_since_update(const torch::optim::Optimizer& optimizer) const {
    const auto at = optimizers_.find(&optimizer);
    return at != optimizers_.end() && at->second.stepped;
  }
  void make_scale(torch::Device device) {
    if (scale_.defined()) return;
    scale_ = at::full({}, options_.init_scale(), at::TensorOptions(at::kFloat).device(device));
    growth_tracker_ = at::full({}, grown_, at::TensorOptions(at::kInt).device(device));
  }

  GradScalerOptions options_;
  std::int64_t grown_ = 0;  // growth_tracker_ before there is one
  std::int64_t generation_ = 0;
  torch::Tensor scale_, growth_tracker_;  // made on the device of the first loss
  std::unordered_map<const torch::optim::Optimizer*, known> optimizers_;
};

inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace leanopt
