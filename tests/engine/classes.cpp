// The classes by the names people type, and what is kept of their parameters.

#include "tests/engine/classes.hpp"

#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace classes {

std::vector<subject> all() {
  using namespace leanopt;
  const auto hugging_face = [] { return AdafactorOptions::hugging_face(); };
  std::vector<subject> result = {
      subject_of<Adam>("Adam", AdamOptions(1e-2).weight_decay(0.1)),
      subject_of<Adam>("AdamAmsgrad", AdamOptions(1e-2).amsgrad(true)),
      subject_of<AdamW>("AdamW", AdamWOptions(1e-2).weight_decay(0.1)),
      subject_of<Adam8bit>("Adam8bit", Adam8bitOptions(1e-2).weight_decay(0.1)),
      subject_of<AdamW8bit>("AdamW8bit", AdamW8bitOptions(1e-2).weight_decay(0.1)),
      subject_of<Adafactor>("Adafactor", AdafactorOptions().weight_decay(0.1)),
      subject_of<Adafactor>("AdafactorHuggingFace", hugging_face()),
      subject_of<Adafactor>("AdafactorHuggingFaceBeta1", hugging_face().beta1(0.9)),
      subject_of<Adafactor8bit>("Adafactor8bit", Adafactor8bitOptions()),
  };
  for (subject& s : more()) result.push_back(std::move(s));
  return result;
}

std::vector<std::pair<std::string, Tensor>> state_of(Optimizer& optimizer, const Tensor& p) {
  std::vector<std::pair<std::string, Tensor>> result;
  const auto it = optimizer.state().find(p.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return result;
  const auto collect = [&](const std::string& name, const Tensor& t) {
    result.emplace_back(name, t);
  };
  using torch::optim::AdamParamState;
  using torch::optim::AdamWParamState;
  if (const auto* own = dynamic_cast<const leanopt::ParamState*>(it->second.get()))
    leanopt::detail::each_tensor(*own, collect);
  else if (const auto* adam = dynamic_cast<const AdamParamState*>(it->second.get()))
    leanopt::detail::each_tensor(*adam, collect);
  else
    leanopt::detail::each_tensor(dynamic_cast<const AdamWParamState&>(*it->second), collect);
  return result;
}

Tensor slot_of(Optimizer& optimizer, const Tensor& p, const std::string& name) {
  return leanopt::slot(optimizer, p, name);
}

std::int64_t steps_of(Optimizer& optimizer, const Tensor& p) {
  const auto it = optimizer.state().find(p.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return 0;
  if (const auto* own = dynamic_cast<const leanopt::ParamState*>(it->second.get()))
    return own->step();
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(it->second.get()))
    return adam->step();
  return dynamic_cast<const torch::optim::AdamWParamState&>(*it->second).step();
}

skipped skipped_by(const Optimizer& optimizer) {
  const auto& ours = dynamic_cast<const leanopt::detail::front&>(optimizer);
  return {ours.skipped_elements(), ours.skipped_steps()};
}

}  // namespace classes
