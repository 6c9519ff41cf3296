// The optimizers as their users meet them, in runs that can be repeated under other conditions:
// another instruction set, another number of threads, another gradient. Tensors are filled with bit
// patterns, because LibTorch's generators and casts depend on some of these conditions. The classes
// are named in classes.cpp, those by template in more_classes.cpp, so that two units alone pay for
// compiling every kernel of theirs.
#pragma once

#include <leanopt/core/option.hpp>

#include "tests/support/patterns.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace classes {

using torch::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

/// One of the classes with one set of options.
struct subject {
  std::string name;
  bool takes_float16;
  std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>, leanopt::nonfinite)>
      make_groups;
  /// Options for a group of its own.
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>(leanopt::nonfinite)> options;

  std::unique_ptr<Optimizer> make(std::vector<Tensor> parameters,
                                  leanopt::nonfinite what = leanopt::nonfinite::propagate) const {
    return make_groups({OptimizerParamGroup(std::move(parameters))}, what);
  }
};
template <class Class>
subject subject_of(std::string name, typename Class::Options options, bool takes_float16 = true) {
  return {std::move(name), takes_float16,
          [options](std::vector<OptimizerParamGroup> groups, leanopt::nonfinite what) {
            auto o = options;
            return std::make_unique<Class>(std::move(groups), o.nonfinite(what));
          },
          [options](leanopt::nonfinite what) {
            auto o = options;
            return std::make_unique<typename Class::Options>(o.nonfinite(what));
          }};
}
/// Those of more_classes.cpp, and all.
std::vector<subject> more();
std::vector<subject> all();

/// What an optimizer keeps of a parameter, by name; empty before its first step.
std::vector<std::pair<std::string, Tensor>> state_of(Optimizer& optimizer, const Tensor& p);
/// A slot of it as numbers.
Tensor slot_of(Optimizer& optimizer, const Tensor& p, const std::string& name);
/// How many steps it counts; 0 without a state.
std::int64_t steps_of(Optimizer& optimizer, const Tensor& p);
struct skipped {
  std::int64_t elements, steps;
};
skipped skipped_by(const Optimizer& optimizer);

/// A contiguous tensor of made-up numbers; 16-bit ones have magnitudes from 2^-13 to 2 in any case.
inline Tensor made(std::vector<std::int64_t> sizes, torch::ScalarType type, std::uint64_t seed,
                   patterns::kind kind = patterns::kind::normal) {
  Tensor t = torch::empty(sizes, torch::TensorOptions(type));
  patterns::source random(seed);
  const std::int64_t n = t.numel();
  switch (type) {
    case torch::kDouble:
      for (std::int64_t i = 0; i < n; ++i) t.data_ptr<double>()[i] = random.number<double>(kind);
      break;
    case torch::kFloat:
      for (std::int64_t i = 0; i < n; ++i) t.data_ptr<float>()[i] = random.number<float>(kind);
      break;
    default:
      for (std::int64_t i = 0; i < n; ++i) {
        const auto word = std::uint16_t(random.word());
        const std::uint32_t down = random.below(13);
        static_cast<std::uint16_t*>(t.data_ptr())[i] =
            std::uint16_t(type == torch::kHalf ? (word & 0x83ffu) | (15 - down) << 10
                                               : (word & 0x807fu) | (127 - down) << 7);
      }
  }
  return t;
}

/// A leaf that an optimizer may step.
inline Tensor leaf(const Tensor& t) { return t.detach().requires_grad_(true); }

/// Parameters of one type and many shapes: below and above the least size of codes, tails, a matrix
/// in column-major order, a convolution's weight in channels_last order, a scalar.
inline std::vector<Tensor> small_parameters(torch::ScalarType type) {
  return {leaf(made({70, 65}, type, 1)),
          leaf(made({5000}, type, 2)),
          leaf(made({90, 61}, type, 3).t()),
          leaf(made({16, 7, 7, 8}, type, 4).permute({0, 3, 1, 2})),
          leaf(made({300}, type, 5)),
          leaf(made({3, 4, 5}, type, 6)),
          leaf(made({}, type, 7))};
}

/// The bits of a tensor in its logical order.
inline void add(patterns::digest& d, const Tensor& t) {
  const Tensor x = t.detach().contiguous();
  const auto n = std::size_t(x.numel());
  switch (x.scalar_type()) {
    case torch::kDouble: return d.add(x.data_ptr<double>(), n);
    case torch::kFloat: return d.add(x.data_ptr<float>(), n);
    case torch::kByte:
    case torch::kChar: return d.add(static_cast<const std::uint8_t*>(x.data_ptr()), n);
    default: return d.add(static_cast<const std::uint16_t*>(x.data_ptr()), n);
  }
}

/// Parameters and all that an optimizer keeps of them.
inline std::uint64_t digest_of(Optimizer& optimizer) {
  patterns::digest d;
  for (auto& group : optimizer.param_groups())
    for (const Tensor& p : group.params()) {
      add(d, p);
      for (const auto& named : state_of(optimizer, p)) add(d, named.second);
    }
  return d.value();
}

/// Calls the step that it is given, under whatever conditions a test wants.
using condition = std::function<void(const std::function<void()>& step)>;
inline void as_it_is(const std::function<void()>& step) { step(); }

/// Steps parameters with made-up gradients and gives the digest of what is left.
inline std::uint64_t run(const subject& s, const std::vector<Tensor>& parameters, int steps,
                         const condition& under = as_it_is,
                         patterns::kind gradients = patterns::kind::normal) {
  const auto optimizer = s.make(parameters);
  for (int step = 1; step <= steps; ++step) {
    std::uint64_t seed = std::uint64_t(step) * 1000;
    for (const Tensor& p : parameters)
      p.mutable_grad() = made(p.sizes().vec(), p.scalar_type(), ++seed, gradients);
    under([&] { optimizer->step(); });
  }
  return digest_of(*optimizer);
}

}  // namespace classes
