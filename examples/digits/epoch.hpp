// One epoch of training, the same for every optimizer: batches of 64 in the reference order, the
// short last one kept. Nothing here knows which optimizer it drives: that is the point.
#pragma once

#include "examples/digits/data.hpp"
#include "examples/digits/generator.hpp"
#include "examples/digits/nets.hpp"

#include <torch/torch.h>

#include <cstdint>

namespace digits {

inline constexpr std::int64_t batch_size = 64;

inline std::int64_t steps_per_epoch(const samples& data) {
  return (data.size() + batch_size - 1) / batch_size;
}

// `after_step(step, loss)` is told the number of the step in this epoch, counted from 1, and the
// loss of its batch as a tensor, since reading it would make an accelerator wait.
template <class AfterStep>
void train_epoch(net& model, torch::optim::Optimizer& optimizer, const samples& data,
                 std::int64_t seed, std::int64_t epoch, AfterStep after_step) {
  const torch::Tensor order =
      torch::tensor(epoch_order(seed, epoch, data.size()), torch::kInt64).to(data.images.device());
  std::int64_t step = 0;
  for (const torch::Tensor& batch : order.split(batch_size)) {
    optimizer.zero_grad();
    const torch::Tensor logits = model.forward(data.images.index_select(0, batch));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(logits, data.labels.index_select(0, batch));
    loss.backward();
    optimizer.step();
    after_step(++step, loss);
  }
}

inline void train_epoch(net& model, torch::optim::Optimizer& optimizer, const samples& data,
                        std::int64_t seed, std::int64_t epoch) {
  train_epoch(model, optimizer, data, seed, epoch, [](std::int64_t, const torch::Tensor&) {});
}

}  // namespace digits
