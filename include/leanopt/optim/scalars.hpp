// Scalars of a step: what the loop around an optimizer computes where the gradients are (the scale
// of a mixed-precision loss, the coefficient that clips their norm) and the step uses as it reads
// them, so that no pass rewrites gradients.
#pragma once

#include <torch/optim/optimizer.h>

namespace leanopt {

/// Each has one element, or is undefined and does nothing. Steps on a device read them there,
/// without a copy if they are in its memory, inv_scale and clip as float64 and found_inf as
/// float32.
struct step_scalars {
  torch::Tensor inv_scale;  ///< gradients are multiplied by it
  torch::Tensor found_inf;  ///< not 0: the step changes nothing and is not counted
  torch::Tensor clip;       ///< gradients are multiplied by it, too
};

/// What leanopt/train asks of an optimizer, and every optimizer of ours does.
class training_hooks {
 public:
  virtual ~training_hooks() = default;
  /// For the next step() that returns; one that throws leaves them set. Replaces what an earlier
  /// call set, so that {} drops it. Gradients stay as they are: the step multiplies by the product
  /// of both factors, rounded once. @throws when one is no floating-point tensor of one element.
  virtual void set_step_scalars(step_scalars s) = 0;
  virtual bool has_step_scalars() const = 0;
  /// Before steps of one parameter at a time: makes states with random bits that parameters lack,
  /// in the order of the lists, as a first step of all would, so that the bits do not depend on the
  /// order of the steps. @throws where a step looks at all gradients (nonfinite::skip_step).
  virtual void prepare_single_steps() = 0;
};

/// Sets the scalars of the optimizer's next step. Returns whether it will use them: LibTorch's own
/// optimizers do not, their gradients must be rewritten and their step left out by the caller.
inline bool set_step_scalars(torch::optim::Optimizer& optimizer, step_scalars s) {
  auto* ours = dynamic_cast<training_hooks*>(&optimizer);
  if (ours) ours->set_step_scalars(std::move(s));
  return ours != nullptr;
}

}  // namespace leanopt
