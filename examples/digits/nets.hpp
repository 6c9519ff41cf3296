// Two small nets for the digits: a perceptron with one hidden layer and a convolutional net. Both
// start from the reference generator, so that a run can be compared with one in another language.
#pragma once

#include "examples/digits/data.hpp"
#include "examples/digits/generator.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace digits {

class net : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(const torch::Tensor& images) = 0;

  std::int64_t parameter_count() const {
    std::int64_t count = 0;
    for (const torch::Tensor& parameter : parameters()) count += parameter.numel();
    return count;
  }

 protected:
  // Weight and bias of a layer start in [-2^exponent, 2^exponent), which is PyTorch's default
  // bound 1/sqrt(fan-in) rounded to a power of two: exact in every precision and language. Layers
  // must be started in the order of registration, since a parameter's position picks its numbers.
  void start(torch::nn::Module& layer, std::int64_t seed, int exponent) {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : layer.parameters()) {
      const auto values = start_values(seed, started_++, exponent, parameter.numel());
      parameter.copy_(torch::tensor(values).reshape(parameter.sizes()));
    }
  }

 private:
  std::uint64_t started_ = 0;
};

class mlp : public net {
 public:
  explicit mlp(std::int64_t seed) {
    start(*fc1, seed, -3);
    start(*fc2, seed, -4);
  }

  torch::Tensor forward(const torch::Tensor& images) override {
    return fc2(torch::relu(fc1(images)));
  }

 private:
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(pixels_per_image, 256));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(256, classes));
};

class cnn : public net {
 public:
  explicit cnn(std::int64_t seed) {
    start(*conv1, seed, -2);
    start(*conv2, seed, -4);
    start(*fc, seed, -4);
  }

  torch::Tensor forward(const torch::Tensor& images) override {
    torch::Tensor x = images.view({-1, 1, side, side});
    x = torch::max_pool2d(torch::relu(conv1(x)), 2);
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    return fc(x.flatten(1));
  }

 private:
  static torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
  }

  torch::nn::Conv2d conv1 = register_module("conv1", convolution(1, 16));
  torch::nn::Conv2d conv2 = register_module("conv2", convolution(16, 32));
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(128, classes));
};

inline std::shared_ptr<net> make_net(const std::string& name, std::int64_t seed) {
  if (name == "mlp") return std::make_shared<mlp>(seed);
  if (name == "cnn") return std::make_shared<cnn>(seed);
  throw std::invalid_argument("there is no net '" + name + "': choose mlp or cnn");
}

}  // namespace digits
