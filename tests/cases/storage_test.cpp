// Behaviours of storage under their numbers: what decay by less than a unit in the last place does
// to weights of any kind (D24), and what 8-bit state takes (D34).

#include <leanopt/leanopt.hpp>

#include "tests/cases/kinds.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace {

using cases::expect_values;
using cases::ones_parameter;
using cases::step_with;
using torch::Tensor;

// D24: 1 - lr wd is 1 in float32, in which a step is computed whatever the weight has below its
// parameter. Only float64 parameters shrink; so they do in torch.optim.

template <class Optimizer>
Tensor after_decay_alone(Tensor p, typename Optimizer::Options options) {
  Optimizer optimizer({p}, options.lr(1e-4).weight_decay(1e-4));
  for (int t = 0; t < 100'000; ++t) step_with(optimizer, 0);
  return leanopt::master_weight(optimizer, p);
}

LEANOPT_IN_EVERY_KIND(D24, decay_below_the_last_place) {
  using AdamW = typename Kind::AdamW;
  const Tensor p = after_decay_alone<AdamW>(ones_parameter<Kind>({1}),
                                            Kind::every_tensor(typename AdamW::Options()));
  if (Kind::type == torch::kFloat64)
    expect_values(p, {0.9990004998}, Kind::relative);
  else
    expect_values(p, {1}, 0);
}

template <class Weights>
void expect_no_decay() {
  SCOPED_TRACE(Weights::name);
  using AdamW = leanopt::basic_adamw<leanopt::formats::full, Weights>;
  const Tensor p = torch::ones({1}, torch::kBFloat16).requires_grad_();
  expect_values(after_decay_alone<AdamW>(p, {}), {1}, 0);
}
TEST(D24, decay_below_the_last_place_in_bfloat16) {
  expect_no_decay<leanopt::weights::plain>();
  expect_no_decay<leanopt::weights::stochastic>();
  expect_no_decay<leanopt::weights::split24>();
  expect_no_decay<leanopt::weights::split32>();
}

// D34: bytes of 8-bit moments, and the threshold below which there are none

struct tensor_of {
  std::int64_t elements, bytes;
  std::int64_t threshold = 4096;
};

/// Bytes of the state of parameters of these sizes, without their step counts of 8 bytes each.
template <class Optimizer>
std::int64_t state_bytes(const std::vector<std::int64_t>& sizes, std::int64_t threshold) {
  std::vector<Tensor> params;
  for (const std::int64_t n : sizes) {
    params.push_back(torch::zeros({n}).requires_grad_());
    params.back().mutable_grad() = torch::zeros({1}).expand({n});  // takes no memory
  }
  Optimizer optimizer(params, typename Optimizer::Options(1e-3).min_compressed_elements(threshold));
  optimizer.step();
  const auto size = leanopt::compute_optimizer_size(optimizer);
  return std::int64_t(size.megabytes * (1 << 20)) - 8 * std::int64_t(sizes.size());
}

template <class Optimizer>
void expect_bytes(const std::vector<tensor_of>& tensors, std::int64_t tables) {
  for (const tensor_of& t : tensors) {
    SCOPED_TRACE(t.elements);
    const bool has_codes = t.elements >= t.threshold;
    EXPECT_EQ(state_bytes<Optimizer>({t.elements}, t.threshold),
              t.bytes + (has_codes ? tables : 0));
  }
  // Code books are there once, however many tensors they serve.
  const std::int64_t two = tensors[3].bytes + tensors[4].bytes;
  EXPECT_EQ(state_bytes<Optimizer>({4096, 10, 4097}, 4096), two + 8 * 10 + tables);
}

TEST(D34, bytes_of_log8_state_8bit) {
  expect_bytes<leanopt::AdamW8bit>({{0, 0},
                                    {1, 8},
                                    {4095, 32'760},
                                    {4096, 8'256},
                                    {4097, 8'262},
                                    {38'597'376, 77'797'836},
                                    {64, 132, 1}},
                                   0);
}
TEST(D34, bytes_of_dynamic8_state_8bit) {
  expect_bytes<leanopt::basic_adamw<leanopt::formats::dynamic8>>({{0, 0},
                                                                  {1, 8},
                                                                  {4095, 32'760},
                                                                  {4096, 8'320},
                                                                  {4097, 8'330},
                                                                  {38'597'376, 78'400'920},
                                                                  {64, 136, 1}},
                                                                 2048);
}

}  // namespace
