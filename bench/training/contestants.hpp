// Who trains: each contestant's optimizer, the weights it steps, and which float32 run it is paired
// with. The training loops see a torch::optim::Optimizer& and nothing else, so that one source
// instantiates all kernels.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace training {

using make_optimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::Tensor>, std::int64_t seed)>;

enum class weights { float32, perturbed, bfloat16 };

struct contestant {
  std::string name;
  std::string reference;  ///< a contestant before it, or itself
  make_optimizer make;
  training::weights weights = training::weights::float32;
  /// Whether --check holds it to the task's tolerance. What stalls is shown, not judged.
  bool judged = true;

  bool is_reference() const { return name == reference; }
};

std::vector<contestant> contestants();

}  // namespace training
