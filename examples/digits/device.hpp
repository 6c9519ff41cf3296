// Where the demo trains, and why it cannot where it cannot.
#pragma once

#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

#include <stdexcept>
#include <string>

namespace digits {

inline torch::Device device_named(const std::string& name) {
  const torch::Device device(name);
  if (!leanopt::engine::can_step_on(device)) {
    throw std::runtime_error("--device " + name +
                             ": this program was built without leanopt::cuda; the target "
                             "run_demo_cuda builds and runs one with it");
  }
  if (device.is_cuda() && !torch::cuda::is_available()) {
    throw std::runtime_error("--device " + name + ": LibTorch sees no CUDA device on this machine");
  }
  return device;
}

}  // namespace digits
