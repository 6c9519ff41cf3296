// Lists of parameters: tied ones once, the groups that are decayed, rates by layer.

#include <leanopt/leanopt.hpp>
#include <leanopt/train/param_groups.hpp>

#include "tests/cases/kinds.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using cases::message_of;
using torch::Tensor;

struct tied : torch::nn::Module {
  tied() {
    weight = register_parameter("weight", torch::ones({2, 2}));
    register_parameter("again", weight);
    register_parameter("bias", torch::zeros({2}));
  }
  Tensor weight;
};

/// A module with the parameters of a list of dotted names and shapes; they hold no data.
class listed : public torch::nn::Module {
 public:
  void add(const std::string& name, const std::vector<std::int64_t>& shape) {
    const std::size_t dot = name.find('.');
    if (dot == std::string::npos) {
      register_parameter(name, torch::empty(shape, torch::kMeta));
      return;
    }
    const std::string child = name.substr(0, dot);
    auto& module = children_[child];
    if (!module) module = register_module(child, std::make_shared<listed>());
    module->add(name.substr(dot + 1), shape);
  }

 private:
  std::map<std::string, std::shared_ptr<listed>> children_;
};

std::shared_ptr<listed> distilbert() {
  std::ifstream file(LEANOPT_TEST_DATA "/distilbert_shapes.txt");
  auto model = std::make_shared<listed>();
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string name;
    words >> name;
    std::vector<std::int64_t> shape;
    for (std::int64_t size = 0; words >> size;) shape.push_back(size);
    model->add(name, shape);
  }
  return model;
}

template <class Options>
const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const Options&>(group.options());
}

TEST(unique_parameters, list_a_tied_parameter_once) {
  tied module;
  EXPECT_EQ(module.parameters().size(), 3u);
  const auto unique = leanopt::unique_parameters(module);
  ASSERT_EQ(unique.size(), 2u);
  EXPECT_TRUE(unique[0].is_same(module.weight));
  const auto named = leanopt::unique_named_parameters(module);
  EXPECT_EQ(named[0].names, (std::vector<std::string>{"weight", "again"}));
}

TEST(is_decayed, not_norms_and_biases) {
  for (const char* name :
       {"encoder.layer.0.output.LayerNorm.weight", "model.norm.weight", "layers.3.q_norm.weight",
        "final_rmsnorm.weight", "ln.bias", "h.0.ln_1.weight", "ln_f.weight", "a.bn_1.weight",
        "bn2.weight", "h.0.norm_2.weight", "norm1.weight", "features.BatchNorm2d.weight",
        "layer.0.sa_layer_norm.weight", "fc1.bias", "bias", "ln_final.weight", "attn.norm_q.weight",
        "gn1.weight", "features.InstanceNorm2d.weight"})
    EXPECT_FALSE(leanopt::is_decayed(name)) << name;
}

TEST(is_decayed, all_others) {
  for (const char* name : {"lm_head.weight", "normalizer_proj.weight", "embed.weight", "fc1.weight",
                           "weight", "conv_1.weight", "lnear.weight", "plan.weight"})
    EXPECT_TRUE(leanopt::is_decayed(name)) << name;
}

// D26: which names are not decayed. Known wrong: the weights of norms that a model defines itself.

TEST(D26, names_of_norms_and_biases_are_not_decayed) {
  for (const char* name : {"encoder.layer.0.output.LayerNorm.weight", "model.norm.weight",
                           "layers.3.q_norm.weight", "final_rmsnorm.weight", "ln.bias"})
    EXPECT_FALSE(leanopt::is_decayed(name)) << name;
  for (const char* name : {"lm_head.weight", "normalizer_proj.weight", "embed.weight"})
    EXPECT_TRUE(leanopt::is_decayed(name)) << name;
}

TEST(D26, forty_of_104_parameters_of_distilbert_are_decayed) {
  const auto groups = leanopt::weight_decay_groups(
      *distilbert(), leanopt::AdamW8bitOptions(5e-5).weight_decay(0.1));
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].params().size(), 40u);
  EXPECT_EQ(groups[1].params().size(), 64u);
  EXPECT_EQ(options_of<leanopt::AdamW8bitOptions>(groups[0]).weight_decay(), 0.1);
  EXPECT_EQ(options_of<leanopt::AdamW8bitOptions>(groups[1]).weight_decay(), 0);
  EXPECT_EQ(options_of<leanopt::AdamW8bitOptions>(groups[1]).lr(), 5e-5);
}

TEST(weight_decay_groups, by_rank_are_those_by_name_where_norms_are_vectors) {
  const auto model = distilbert();
  const leanopt::AdamWOptions options(1e-3);
  const auto names = leanopt::weight_decay_groups(*model, options);
  const auto ranks = leanopt::weight_decay_groups(*model, options, leanopt::decayed_by_rank);
  for (int i : {0, 1}) {
    ASSERT_EQ(ranks[i].params().size(), names[i].params().size());
    for (std::size_t j = 0; j < ranks[i].params().size(); ++j)
      EXPECT_TRUE(ranks[i].params()[j].is_same(names[i].params()[j]));
  }
  torch::nn::Linear square(2, 2);
  EXPECT_TRUE(leanopt::decayed_by_rank({{"norm.weight"}, square->weight}));
  EXPECT_FALSE(leanopt::decayed_by_rank({{"weight"}, square->bias}));
}

TEST(weight_decay_groups, a_tied_parameter_is_decayed_if_all_its_names_are) {
  struct model : tied {
    model() { register_parameter("norm", register_parameter("scale", torch::ones({2}))); }
  } module;
  const auto groups = leanopt::weight_decay_groups(module, leanopt::AdamWOptions(1e-3));
  ASSERT_EQ(groups[0].params().size(), 1u);
  EXPECT_TRUE(groups[0].params()[0].is_same(module.weight));
  EXPECT_EQ(groups[1].params().size(), 2u);
}

/// How far decay alone moves the two groups of a linear layer in a step.
template <class Optimizer, class Options>
std::pair<double, double> decay_by(const Options& options, const Options& defaults) {
  torch::nn::Linear layer(2, 2);
  for (Tensor p : layer->parameters()) {
    torch::nn::init::ones_(p);
    p.mutable_grad() = torch::zeros_like(p).detach();
  }
  Optimizer optimizer(leanopt::weight_decay_groups(*layer, options), defaults);
  optimizer.step();
  return {1 - layer->weight.flatten()[0].item<double>(), 1 - layer->bias[0].item<double>()};
}

TEST(weight_decay_groups, decay_weights_and_not_biases) {
  const auto ours = leanopt::AdamWOptions(0.5).weight_decay(0.25);
  EXPECT_EQ((decay_by<leanopt::AdamW>(ours, ours)), std::pair(0.125, 0.0));
  const auto stock = torch::optim::AdamWOptions(0.5).weight_decay(0.25);
  EXPECT_EQ((decay_by<torch::optim::AdamW>(stock, stock)), std::pair(0.125, 0.0));
  // SGD's own default is no decay, which LibTorch takes for unset: the defaults must have none.
  const auto sgd = torch::optim::SGDOptions(0.5).weight_decay(0.25);
  EXPECT_EQ((decay_by<torch::optim::SGD>(sgd, torch::optim::SGDOptions(0.5))),
            std::pair(0.125, 0.0));
}

TEST(layer_decay_groups, rates_fall_with_the_distance_from_the_output) {
  const auto groups =
      leanopt::layer_decay_groups(*distilbert(), leanopt::AdamWOptions(1.0).weight_decay(0.1), 0.5);
  // Embeddings, six layers and the head, decayed and not.
  ASSERT_EQ(groups.size(), 16u);
  std::size_t count = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& options = options_of<leanopt::AdamWOptions>(groups[i]);
    EXPECT_EQ(options.lr(), std::pow(0.5, 7 - int(i / 2))) << i;
    EXPECT_EQ(options.weight_decay(), i % 2 ? 0 : 0.1) << i;
    count += groups[i].params().size();
  }
  EXPECT_EQ(count, 104u);
  EXPECT_EQ(groups[0].params()[0].size(0), 28996);
  EXPECT_EQ(groups[14].params()[1].size(0), 2);
  leanopt::AdamWOptions options(1e-3);
  for (double factor : {0.0, 1.5})
    cases::expect_words(
        message_of([&] { leanopt::layer_decay_groups(*distilbert(), options, factor); }),
        {"layer_decay_groups", "factor"});
}

}  // namespace
