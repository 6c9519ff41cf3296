// Lists of parameters for an optimizer's groups: each tied parameter once, which parameters are
// decayed, and rates that fall from layer to layer.
//
// LibTorch's own classes take a group's field for unset where it equals the constructor's value
// (since 2.10), so theirs need the decay and the rate in the groups alone: give the optimizer no
// other defaults. For ours a field that was set wins.
#pragma once

#include <leanopt/config.hpp>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

LEANOPT_EXACT_BEGIN
namespace leanopt {

/// A parameter and all names under which a module registers it.
struct named_parameter {
  std::vector<std::string> names;
  torch::Tensor value;
};

/// The parameters of a module with their names, each once, in the module's order.
inline std::vector<named_parameter> unique_named_parameters(const torch::nn::Module& module) {
  std::vector<named_parameter> result;
  std::unordered_map<const void*, std::size_t> known;
  for (const auto& p : module.named_parameters()) {
    if (!p.value().defined()) continue;
    const auto [at, fresh] = known.try_emplace(p.value().unsafeGetTensorImpl(), result.size());
    if (fresh) result.push_back({{}, p.value()});
    result[at->second].names.push_back(p.key());
  }
  return result;
}

/// The parameters of a module, each once: `Module::parameters()` lists a tied weight at every place
/// where it is registered, and an optimizer refuses to step a tensor twice.
inline std::vector<torch::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> result;
  for (const auto& p : unique_named_parameters(module)) result.push_back(p.value);
  return result;
}

/// Whether a parameter of this name gets weight decay: not if "bias" is in it, and not if one of
/// its components names a normalization, as in `encoder.LayerNorm.weight`, `model.norm.weight` or
/// `layers.3.q_norm.weight`. The rule is that of Hugging Face's Trainer, plus the short names ln,
/// bn and gn, and all of these beside numbers and words: norm1, norm_q, ln_2, ln_final.
inline bool is_decayed(const std::string& name) {
  std::string lower;
  for (const char c : name) lower += c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
  for (const char* part :
       {"bias", "layernorm", "layer_norm", "rmsnorm", "batchnorm", "groupnorm", "instancenorm"})
    if (lower.find(part) != std::string::npos) return false;
  for (std::size_t begin = 0; begin <= lower.size();) {
    const std::size_t dot = std::min(lower.find('.', begin), lower.size());
    std::string component = lower.substr(begin, dot - begin);
    while (!component.empty() &&
           (component.back() == '_' || (component.back() >= '0' && component.back() <= '9')))
      component.pop_back();
    component = '_' + component + '_';
    for (const char* word : {"_norm_", "_ln_", "_bn_", "_gn_"})
      if (component.find(word) != std::string::npos) return false;
    begin = dot + 1;
  }
  return true;
}

/// Which parameters are decayed: a tied one only if each of its names is.
inline bool decayed_by_name(const named_parameter& p) {
  return std::all_of(p.names.begin(), p.names.end(), is_decayed);
}
/// Matrices and tensors of higher rank are decayed, vectors and numbers are not.
inline bool decayed_by_rank(const named_parameter& p) { return p.value.dim() > 1; }

/// Two groups from a module: the parameters that are decayed, with `options` as they are, and the
/// others, without decay. `decayed` is a rule as above. Parameters that need no gradient are listed
/// too; they cost nothing.
template <class Options, class Rule = bool (*)(const named_parameter&)>
std::vector<torch::optim::OptimizerParamGroup> weight_decay_groups(const torch::nn::Module& module,
                                                                   const Options& options,
                                                                   Rule decayed = decayed_by_name) {
  std::vector<torch::Tensor> with, without;
  for (const auto& p : unique_named_parameters(module))
    (decayed(p) ? with : without).push_back(p.value);
  Options undecayed = options;
  undecayed.weight_decay(0);
  return {{std::move(with), std::make_unique<Options>(options)},
          {std::move(without), std::make_unique<Options>(undecayed)}};
}

namespace detail {

/// The first component of a dotted name that is a number; -1 where there is none.
inline std::int64_t first_number(const std::string& name) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t dot = std::min(name.find('.', begin), name.size());
    const std::string component = name.substr(begin, dot - begin);
    if (!component.empty() && component.size() < 10 &&
        component.find_first_not_of("0123456789") == std::string::npos)
      return std::stoll(component);
    begin = dot + 1;
  }
  return -1;
}

}  // namespace detail

/// How deep each parameter lies: in layer i, which the first number in its name tells, i + 1; what
/// stands before the first layer, as embeddings do, 0; what stands after it without a number, as
/// heads do, one more than the last layer.
inline std::vector<std::int64_t> layer_depths(const std::vector<named_parameter>& parameters) {
  std::vector<std::int64_t> depths;
  std::int64_t last = 0;
  for (const auto& p : parameters) {
    depths.push_back(detail::first_number(p.names.front()) + 1);
    last = std::max(last, depths.back());
  }
  bool in_layers = false;
  for (std::int64_t& depth : depths) {
    in_layers = in_layers || depth > 0;
    if (depth == 0 && in_layers) depth = last + 1;
  }
  return depths;
}

/// Groups whose rates fall with the distance from the output: `factor` times less per layer, so
/// that the deepest parameters of layer_depths have the rate of `options`. Per depth one group that
/// is decayed and one that is not, without empty ones. @throws where factor is not in (0, 1].
template <class Options, class Rule = bool (*)(const named_parameter&)>
std::vector<torch::optim::OptimizerParamGroup> layer_decay_groups(const torch::nn::Module& module,
                                                                  const Options& options,
                                                                  double factor,
                                                                  Rule decayed = decayed_by_name) {
  TORCH_CHECK(factor > 0 && factor <= 1, "leanopt: layer_decay_groups: factor is ", factor,
              "; it must be in (0, 1]");
  const auto parameters = unique_named_parameters(module);
  const auto depths = layer_depths(parameters);
  std::map<std::pair<std::int64_t, bool>, std::vector<torch::Tensor>> lists;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    lists[{depths[i], !decayed(parameters[i])}].push_back(parameters[i].value);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (auto& [key, list] : lists) {
    const auto& [depth, without_decay] = key;
    auto own = std::make_unique<Options>(options);
    own->lr(options.lr() * std::pow(factor, double(lists.rbegin()->first.first - depth)));
    if (without_decay) own->weight_decay(0);
    groups.emplace_back(std::move(list), std::move(own));
  }
  return groups;
}

}  // namespace leanopt
LEANOPT_EXACT_END
