// Lists of parameters: tied ones once, and the names that get weight decay.

#include <leanopt/train/param_groups.hpp>

#include <gtest/gtest.h>

#include <torch/torch.h>

namespace {

TEST(unique_parameters, list_a_tied_parameter_once) {
  struct tied : torch::nn::Module {
    tied() {
      weight = register_parameter("weight", torch::ones({2, 2}));
      register_parameter("again", weight);
      register_parameter("bias", torch::zeros({2}));
    }
    torch::Tensor weight;
  } module;
  EXPECT_EQ(module.parameters().size(), 3u);
  const auto unique = leanopt::unique_parameters(module);
  ASSERT_EQ(unique.size(), 2u);
  EXPECT_TRUE(unique[0].is_same(module.weight));
}

TEST(is_decayed, not_norms_and_biases) {
  for (const char* name :
       {"encoder.layer.0.output.LayerNorm.weight", "model.norm.weight", "layers.3.q_norm.weight",
        "final_rmsnorm.weight", "ln.bias", "h.0.ln_1.weight", "ln_f.weight", "a.bn_1.weight",
        "bn2.weight", "h.0.norm_2.weight", "norm1.weight", "features.BatchNorm2d.weight",
        "layer.0.sa_layer_norm.weight", "fc1.bias", "bias"})
    EXPECT_FALSE(leanopt::is_decayed(name)) << name;
}

TEST(is_decayed, all_others) {
  for (const char* name : {"lm_head.weight", "normalizer_proj.weight", "embed.weight", "fc1.weight",
                           "weight", "conv_1.weight", "lnear.weight", "plan.weight"})
    EXPECT_TRUE(leanopt::is_decayed(name)) << name;
}

}  // namespace
