// What a training program adds to torch_only.cpp: the six classes, each built, stepped and
// measured. Compiled with the headers alone and with leanopt::compiled.
#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

template <class Optimizer>
double megabytes_after_one_step(const torch::Tensor& weight) {
  Optimizer optimizer({weight}, typename Optimizer::Options(1e-3));
  optimizer.step();
  return leanopt::compute_optimizer_size(optimizer).megabytes;
}

int main() {
  torch::Tensor weight = torch::zeros({128, 64}, torch::requires_grad());
  weight.mutable_grad() = torch::ones_like(weight);
  const double sum = megabytes_after_one_step<leanopt::Adam>(weight) +
                     megabytes_after_one_step<leanopt::AdamW>(weight) +
                     megabytes_after_one_step<leanopt::Adafactor>(weight) +
                     megabytes_after_one_step<leanopt::Adam8bit>(weight) +
                     megabytes_after_one_step<leanopt::AdamW8bit>(weight) +
                     megabytes_after_one_step<leanopt::Adafactor8bit>(weight);
  return sum > 0 ? 0 : 1;
}
