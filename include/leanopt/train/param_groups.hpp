// Lists of parameters for an optimizer's groups: each tied parameter once, and which names are
// decayed.
#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

namespace leanopt {

/// The parameters of a module, each once: `Module::parameters()` lists a tied weight at every place
/// where it is registered, and an optimizer refuses to step a tensor twice.
inline std::vector<torch::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> result;
  std::unordered_set<const void*> known;
  for (const auto& p : module.parameters())
    if (p.defined() && known.insert(p.unsafeGetTensorImpl()).second) result.push_back(p);
  return result;
}

/// Whether a parameter of this name gets weight decay: not if "bias" is in it, and not if one of
/// its components names a normalization, as in `encoder.LayerNorm.weight`, `model.norm.weight` or
/// `layers.3.q_norm.weight`. The rule is that of Hugging Face's Trainer, plus the short names ln,
/// bn, norm1, ln_2, ln_f and the like.
inline bool is_decayed(const std::string& name) {
  std::string lower;
  for (const char c : name) lower += c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
  for (const char* part : {"bias", "layernorm", "layer_norm", "rmsnorm", "batchnorm", "groupnorm"})
    if (lower.find(part) != std::string::npos) return false;
  for (std::size_t begin = 0; begin <= lower.size();) {
    const std::size_t dot = std::min(lower.find('.', begin), lower.size());
    std::string component = lower.substr(begin, dot - begin);
    while (!component.empty() &&
           (component.back() == '_' || (component.back() >= '0' && component.back() <= '9')))
      component.pop_back();
    const auto ends_with = [&](const std::string& s) {
      return component.size() >= s.size() &&
             component.compare(component.size() - s.size(), s.size(), s) == 0;
    };
    if (component == "norm" || component == "ln" || component == "bn" || component == "ln_f" ||
        ends_with("_norm") || ends_with("_ln"))
      return false;
    begin = dot + 1;
  }
  return true;
}

}  // namespace leanopt
