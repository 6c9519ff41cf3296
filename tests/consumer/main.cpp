// The program of the three consumers: one step of an 8-bit optimizer must move its parameter.
#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::Tensor parameter = torch::ones({64, 128}, torch::requires_grad());
  leanopt::AdamW8bit optimizer({parameter}, leanopt::AdamW8bitOptions(1e-3));
  parameter.sum().backward();
  optimizer.step();
  const bool moved = (parameter < 1).all().item<bool>();
  const leanopt::optimizer_size size = leanopt::compute_optimizer_size(optimizer);
  std::printf("moved: %d, %lld numbers of state\n", moved, static_cast<long long>(size.elements));
  return moved && size.elements > 2 * parameter.numel() ? 0 : 1;
}
