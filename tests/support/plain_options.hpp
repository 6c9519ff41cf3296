// Options of the rules for tests without LibTorch: the rules' own fields on a parent that holds
// what LibTorch's classes would, with nothing to mark, inherit or check.
#pragma once

#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>

#include <tuple>

namespace plain_options {

/// The fields of torch.optim's Adam with its defaults; a rule's own of the same name hide them.
template <class Self>
class stock {
 public:
  using betas_t = std::tuple<double, double>;
  const double& lr() const { return lr_; }
  double& lr() { return lr_; }
  const betas_t& betas() const { return betas_; }
  betas_t& betas() { return betas_; }
  const double& eps() const { return eps_; }
  double& eps() { return eps_; }
  const double& weight_decay() const { return weight_decay_; }
  double& weight_decay() { return weight_decay_; }
  const bool& amsgrad() const { return amsgrad_; }
  bool& amsgrad() { return amsgrad_; }

 protected:
  template <class T>
  Self& mark(const T&) {
    return static_cast<Self&>(*this);
  }

 private:
  double lr_ = 1e-3, eps_ = 1e-8, weight_decay_ = 0;
  betas_t betas_{0.9, 0.999};
  bool amsgrad_ = false;
};

template <class Rule>
struct of : Rule::template fields<of<Rule>, stock<of<Rule>>> {};

using adam = of<leanopt::rules::adam>;
using adamw = of<leanopt::rules::adamw>;
using adafactor = of<leanopt::rules::adafactor>;

}  // namespace plain_options
