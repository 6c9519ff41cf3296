// What an optimizer remembers, as Python programs print it: per parameter the name, shape and type
// of every slot under Python's keys, with a few decoded values.
#pragma once

#include <leanopt/memory/size.hpp>
#include <leanopt/optim/rows.hpp>

#include <torch/nn/module.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace leanopt {

/// A slot of one parameter. `values` are the first few, decoded; complex ones are pairs.
struct slot_view {
  std::string key;  ///< Python's
  at::ScalarType type;
  std::vector<std::int64_t> sizes;
  std::vector<double> values;

  bool has_more() const {
    const std::size_t shown = values.size() / (c10::isComplexType(type) ? 2 : 1);
    return c10::multiply_integers(sizes) > std::int64_t(shown);
  }
};
struct state_view {
  std::string parameter;
  std::int64_t step = 0;
  std::vector<slot_view> slots;

  friend std::ostream& operator<<(std::ostream& out, const state_view& s) {
    out << s.parameter << '\n' << "  step " << s.step << '\n';
    for (const slot_view& one : s.slots) {
      out << "  " << one.key << ' ' << one.type << ' ' << at::IntArrayRef(one.sizes) << ':';
      for (const double x : one.values) out << ' ' << x;
      if (one.has_more()) out << " ...";
      out << '\n';
    }
    return out;
  }
};

/// The states of an optimizer of ours, or of LibTorch's Adam and AdamW, in the order of its
/// parameters; those that have no state yet are left out. Names are those that `module` gives,
/// `group.index` without one. @cost decodes every slot, one at a time.
inline std::vector<state_view> inspect(const Optimizer& optimizer,
                                       const torch::nn::Module* module = nullptr,
                                       std::size_t values = 3) {
  std::vector<state_view> result;
  std::unordered_map<const void*, std::string> names;
  if (module)
    for (const auto& named : module->named_parameters())
      names.emplace(named.value().unsafeGetTensorImpl(), named.key());
  const auto name_of = [&](const Tensor& p, std::size_t group, std::size_t index) {
    const auto it = names.find(p.unsafeGetTensorImpl());
    return it == names.end() ? std::to_string(group) + '.' + std::to_string(index) : it->second;
  };
  const auto* ours = dynamic_cast<const detail::front*>(&optimizer);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto it = optimizer.state().find(params[i].unsafeGetTensorImpl());
      if (it == optimizer.state().end() || !it->second) continue;
      state_view view{name_of(params[i], g, i), ours ? ours->steps_of(params[i]) : 0, {}};
      if (!ours)
        detail::with_stock_state(optimizer, params[i],
                                 [&](const auto& s) { view.step = s.step(); });
      detail::each_part(
          *it->second, [](std::int64_t) {},
          [&](const std::string& name, const Tensor& held) {
            slot_view one{ours ? ours->python_key(name, g) : name,
                          held.scalar_type(),
                          held.sizes().vec(),
                          {}};
            const Tensor decoded =
                detail::is_header(name) ? held : slot(optimizer, params[i], name);
            const auto few = std::min(values, std::size_t(decoded.numel()));
            const Tensor first = decoded.flatten().slice(0, 0, std::int64_t(few));
            const Tensor flat =
                (first.is_complex() ? at::view_as_real(first).flatten() : first).to(at::kDouble);
            for (std::int64_t k = 0; k < flat.numel(); ++k)
              one.values.push_back(flat[k].item<double>());
            view.slots.push_back(std::move(one));
          });
      result.push_back(std::move(view));
    }
  }
  return result;
}

}  // namespace leanopt
