// The program that README.md shows below this line.
#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

#include <iostream>

int main() {
  torch::nn::Sequential model(torch::nn::Linear(16, 512), torch::nn::ReLU(),
                              torch::nn::Linear(512, 1));
  leanopt::AdamW8bit optimizer(model->parameters(),
                               leanopt::AdamW8bitOptions(1e-3).weight_decay(0.01));

  const torch::Tensor x = torch::randn({1024, 16}), y = x.sum(1, true).sin();
  torch::Tensor loss;
  for (int step = 0; step < 500; ++step) {  // the loop is LibTorch's
    optimizer.zero_grad();
    loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step();
  }

  const auto [megabytes, elements] = leanopt::compute_optimizer_size(optimizer);
  std::cout << "loss " << loss.item<float>() << ", state " << elements << " numbers in "
            << megabytes << " MB\n";
}
