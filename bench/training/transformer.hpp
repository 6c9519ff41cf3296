// A small causal transformer over characters: pre-norm blocks of attention and a perceptron,
// learned positions. Start values are the generator's, so that a run depends on no library's.
#pragma once

#include "bench/training/task.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace training {

struct transformer_size {
  std::int64_t characters;
  std::int64_t context = 64, layers = 2, width = 96, heads = 4;
};

class transformer_block : public torch::nn::Module {
 public:
  explicit transformer_block(const transformer_size& size)
      : heads_(size.heads),
        norm1(register_module("norm1", layer_norm(size.width))),
        qkv(register_module("qkv", torch::nn::Linear(size.width, 3 * size.width))),
        joined(register_module("joined", torch::nn::Linear(size.width, size.width))),
        norm2(register_module("norm2", layer_norm(size.width))),
        up(register_module("up", torch::nn::Linear(size.width, 4 * size.width))),
        down(register_module("down", torch::nn::Linear(4 * size.width, size.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + attend(norm1(x));
    return x + down(torch::gelu(up(norm2(x))));
  }
  static torch::nn::LayerNorm layer_norm(std::int64_t width) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
  }

 private:
  torch::Tensor attend(const torch::Tensor& x) {
    const auto parts = qkv(x)
                           .unflatten(2, {3, heads_, x.size(2) / heads_})
                           .permute({2, 0, 3, 1, 4});  // part, sample, head, position, feature
    const torch::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {},
                                                             /*dropout_p=*/0, /*is_causal=*/true);
    return joined(y.transpose(1, 2).flatten(2));
  }

  std::int64_t heads_;
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, joined;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};

class transformer : public torch::nn::Module {
 public:
  transformer(const transformer_size& size, std::int64_t seed)
      : character(register_module("character", torch::nn::Embedding(size.characters, size.width))),
        position(register_module("position", torch::nn::Embedding(size.context, size.width))) {
    for (std::int64_t i = 0; i < size.layers; ++i)
      blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<transformer_block>(size)));
    norm = register_module("norm", transformer_block::layer_norm(size.width));
    head = register_module("head", torch::nn::Linear(size.width, size.characters));
    start(seed);
  }

  /// float32 logits [sample, position, character] of int64 characters [sample, position].
  torch::Tensor forward(const torch::Tensor& characters) {
    torch::Tensor x =
        character(characters) + position(torch::arange(characters.size(1), torch::kInt64));
    for (const auto& block : blocks) x = block->forward(x);
    return head(norm(x)).to(torch::kFloat32);
  }

 private:
  /// Matrices uniform in +-1/16, which is a deviation of 0.036; biases 0 and gains 1.
  void start(std::int64_t seed) {
    const torch::NoGradGuard no_grad;
    std::uint64_t stream = 0;
    for (auto& parameter : named_parameters()) {
      torch::Tensor& p = parameter.value();
      if (p.dim() > 1)
        p.copy_(draw_tensor(seed, stream, -4, p.sizes()));
      else if (parameter.key().find("bias") != std::string::npos)
        p.zero_();
      ++stream;
    }
  }

  torch::nn::Embedding character, position;
  std::vector<std::shared_ptr<transformer_block>> blocks;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};

}  // namespace training
