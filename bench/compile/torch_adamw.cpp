// What a training program has without leanopt: LibTorch's own class in the same few lines, and so
// what LibTorch itself costs a source that does more than include it.
#include <torch/torch.h>

int main() {
  torch::Tensor weight = torch::zeros({128, 64}, torch::requires_grad());
  weight.mutable_grad() = torch::ones_like(weight);
  torch::optim::AdamW optimizer({weight}, torch::optim::AdamWOptions(1e-3));
  optimizer.step();
  return optimizer.state().size() == 1 ? 0 : 1;
}
