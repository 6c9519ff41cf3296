// Gradient accumulation: one step from the gradients of several micro-batches, as from one batch of
// their joint size, with the right mean also of a short last window and of unequal micro-batches.
#pragma once

#include <leanopt/config.hpp>
#include <leanopt/train/scaler.hpp>

#include <torch/arg.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <limits>
#include <utility>

LEANOPT_EXACT_BEGIN
namespace leanopt {

struct accumulator_options {
  accumulator_options(std::int64_t micro_batches) : micro_batches_(micro_batches) {}
  TORCH_ARG(std::int64_t, micro_batches);  ///< in a window, which ends with a step
  /// The global norm of the window's gradient is clipped to it, and steps whose norm is not finite
  /// are left out.
  TORCH_ARG(double, max_norm) = std::numeric_limits<double>::infinity();
  TORCH_ARG(bool, skip_nonfinite) = false;  ///< steps with such gradients, also without the above
  /// Gradients of float16 and bfloat16 parameters are added up in float32, 4 bytes each while a
  /// window is open; else in their own type, where small ones are lost.
  TORCH_ARG(bool, in_float32) = true;
};

/// Updates in an epoch whose last window is closed, however short.
inline std::int64_t updates_per_epoch(std::int64_t micro_batches, std::int64_t in_window) {
  return (micro_batches + in_window - 1) / in_window;
}

/// Accumulates gradients for an optimizer. The loop calls for every micro-batch
///   a.backward(loss, is_last);   // is_last: the data, or the epoch, end here
///   a.step(); a.step(scheduler); a.zero_grad();
/// or a.update(scheduler) for the last three. They act only where a window is complete, after
/// `micro_batches` calls of backward() or the last of the data; a window that is not closed at the
/// end of an epoch goes on in the next. What a step does, in this order: divide by what was seen,
/// undo the loss scale, check, clip, step. A window is no large batch for layers that look across
/// samples (batch norm), and is not saved: checkpoint between windows. The optimizer outlives it.
class accumulator {
 public:
  /// A scaler scales the losses, and is updated after each window; no other may share it. @throws
  /// when micro_batches is below 1, max_norm not positive, or gradients are released.
  accumulator(torch::optim::Optimizer& optimizer, accumulator_options options,
              GradScaler* scaler = nullptr)
      : optimizer_(optimizer), options_(options), scaler_(scaler) {
    TORCH_CHECK(options_.micro_batches() >= 1, "leanopt: accumulator: micro_batches is ",
                options_.micro_batches(), "; it must be at least 1");
    TORCH_CHECK(options_.max_norm() > 0, "leanopt: accumulator: max_norm is ", options_.max_norm(),
                "; it must be positive");
    detail::refuse_release(optimizer_, "gradient accumulation");
  }

  /// Adds the gradients of a micro-batch: the window's is the mean of theirs.
  void backward(const torch::Tensor& mean_loss, bool is_last = false) {
    begin(weighting::equal);
    add(mean_loss / double(options_.micro_batches()), is_last);
  }
  /// The same, weighted by the number of items, such as tokens, of which `mean_loss` is the mean:
  /// the window's gradient is the mean over all of its items. One without items adds nothing,
  /// whatever its loss. Windows are weighted as their first micro-batch is.
  void backward_items(const torch::Tensor& mean_loss, std::int64_t items, bool is_last = false) {
    TORCH_CHECK(items >= 0, "leanopt: accumulator: items is ", items, "; it cannot be negative");
    begin(weighting::items);
    if (unit_ == 0) unit_ = items;  // keeps weights near 1, as float16 needs
    items_ += items;
    const double weight = items == 0 ? 0 : double(items) / double(unit_);
    add(items == 0 ? torch::Tensor() : mean_loss * weight, is_last);
  }
  /// The data ended with the last micro-batch: completes a window that is open.
  void finish() {
    check_whole();
    if (phase_ == phase::open && count_ > 0) phase_ = phase::complete;
  }

  /// Micro-batches in the window so far, and whether it is complete: what step() acts on.
  std::int64_t count() const { return count_; }
  bool is_complete() const { return phase_ == phase::complete; }

  /// The optimizer's step where a window is complete. A window without items makes none.
  void step() {
    if (phase_ != phase::complete) return;
    check_whole();
    TORCH_CHECK(!scaler_ || scaler_->generation() == generation_,
                "leanopt: accumulator: the scaler was updated within this window, whose gradients "
                "have the scale of before; give it a scaler of its own, and call discard()");
    tried_ = weighting_ != weighting::items || items_ > 0;
    if (tried_) step_with_window();
    phase_ = phase::stepped;
  }
  /// The scheduler's step, if the optimizer made one. Waits as stepped() does.
  void step(torch::optim::LRScheduler& scheduler) {
    if (stepped()) scheduler.step();
  }
  /// Whether the optimizer made a step in this window. Waits for the device where steps can be left
  /// out: with a scaler, max_norm or skip_nonfinite.
  bool stepped() const {
    return phase_ == phase::stepped && tried_ &&
           !(found_inf_.defined() && found_inf_.item<float>() != 0);
  }
  /// After step(), or a backward() that failed, as discard(); in an open window nothing.
  void zero_grad() {
    TORCH_CHECK(phase_ != phase::complete,
                "leanopt: accumulator: zero_grad() would lose a window; call step() or discard()");
    if (phase_ == phase::stepped || broken_) discard();
  }
  /// step(), the scheduler's and zero_grad(). Returns stepped(), and waits as that does.
  bool update(torch::optim::LRScheduler& scheduler) { return update(&scheduler); }
  bool update() { return update(nullptr); }

  /// Drops the gradients of the window, complete or not. Returns how many micro-batches were in it.
  std::int64_t discard() {
    optimizer_.zero_grad();
    sums_.clear();
    loss_ = found_inf_ = torch::Tensor();
    phase_ = phase::open;
    weighting_ = weighting::none;
    broken_ = tried_ = false;
    items_ = unit_ = 0;
    return std::exchange(count_, 0);
  }
  /// The loss of the window, weighted as its gradient: a scalar on the device of the losses.
  torch::Tensor loss() const { return loss_.defined() ? loss_ * correction() : loss_; }

 private:
  enum class phase { open, complete, stepped };
  enum class weighting { none, equal, items };

  void begin(weighting w) {
    detail::refuse_release(optimizer_, "gradient accumulation");
    TORCH_CHECK(phase_ == phase::open, "leanopt: accumulator: the window of ", count_,
                " micro-batches is complete; call step() and zero_grad() of the accumulator");
    check_whole();
    TORCH_CHECK(weighting_ == weighting::none || weighting_ == w,
                "leanopt: accumulator: one window takes backward() or backward_items(), not both");
    weighting_ = w;
    if (scaler_ && count_ == 0) generation_ = scaler_->generation();
    broken_ = true;  // unless add() returns
  }
  void check_whole() const {
    TORCH_CHECK(!broken_, "leanopt: accumulator: a call failed in this window; call discard()");
  }
  void add(const torch::Tensor& loss, bool is_last) {
    if (loss.defined()) {
      (scaler_ ? scaler_->scale(loss) : loss).backward();
      if (options_.in_float32() && options_.micro_batches() > 1) sums_.take(optimizer_);
      loss_ = loss_.defined() ? loss_ + loss.detach() : loss.detach();
    }
    broken_ = false;
    ++count_;
    if (is_last || count_ == options_.micro_batches()) phase_ = phase::complete;
  }
  /// What the sum is multiplied by to be a mean.
  double correction() const {
    if (weighting_ == weighting::items) return items_ ? double(unit_) / double(items_) : 1;
    return count_ ? double(options_.micro_batches()) / double(count_) : 1;
  }
  void step_with_window() {
    const bool rewrites = !dynamic_cast<training_hooks*>(&optimizer_);
    sums_.give(optimizer_, rewrites);  // ours read float32 gradients of any parameter
    const auto gradients = detail::gradients_of(optimizer_, "gradient accumulation");
    step_scalars s;
    if (scaler_) s = scaler_->check(optimizer_);
    if (const double f = correction(); f != 1 && !gradients.empty())
      s.inv_scale = detail::product(
          at::full({}, f, gradients[0].options().dtype(detail::scalar_type(gradients))),
          s.inv_scale);
    if (options_.skip_nonfinite() && !scaler_) s.found_inf = has_nonfinite(gradients);
    if (options_.max_norm() < std::numeric_limits<double>::infinity())
      clip_grad_norm(optimizer_, options_.max_norm(), s);
    found_inf_ = s.found_inf;
    broken_ = rewrites;  // after a step that fails a second one would rewrite again
    scaler_ ? scaler_->step(optimizer_, s) : step_with(optimizer_, s);
    broken_ = false;
    if (scaler_) scaler_->update();
  }
  bool update(torch::optim::LRScheduler* scheduler) {
    step();
    const bool result = stepped();
    if (result && scheduler) scheduler->step();
    zero_grad();
    return result;
  }

  torch::optim::Optimizer& optimizer_;
  accumulator_options options_;
  GradScaler* scaler_;
  phase phase_ = phase::open;
  weighting weighting_ = weighting::none;
  std::int64_t count_ = 0, items_ = 0, unit_ = 0, generation_ = 0;
  bool broken_ = false, tried_ = false;
  torch::Tensor loss_, found_inf_;
  detail::wide_sums sums_;
};

}  // namespace leanopt
LEANOPT_EXACT_END
