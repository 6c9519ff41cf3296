// Gradient accumulation as it is written with plain PyTorch, Accelerate and Trainer, beside the
// same three loops here, on the digits: a window of two batches of 64, one step of 8-bit AdamW.

#include <leanopt/leanopt.hpp>
#include <leanopt/train/accumulate.hpp>
#include <leanopt/train/param_groups.hpp>
#include <leanopt/train/schedule.hpp>

#include "examples/digits/data.hpp"
#include "examples/digits/epoch.hpp"
#include "examples/digits/metrics.hpp"
#include "examples/digits/nets.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t micro_batches = 2, epochs = 5, seed = 1;

/// All that a loop needs, and nothing that depends on how it accumulates.
struct run {
  explicit run(const digits::data_set& data)
      : data(data),
        model(digits::make_net("mlp", seed)),
        optimizer(leanopt::weight_decay_groups(*model,
                                               leanopt::AdamW8bitOptions(2e-3).weight_decay(0.01))),
        scheduler(optimizer, leanopt::linear_schedule(/*warmup=*/6, updates())) {}

  std::int64_t updates() const {
    return epochs *
           leanopt::updates_per_epoch(digits::steps_per_epoch(data.training), micro_batches);
  }
  /// f(loss, is_last) for the batches of an epoch.
  template <class F>
  void for_each_batch(std::int64_t epoch, F f) {
    const torch::Tensor order =
        torch::tensor(digits::epoch_order(seed, epoch, data.training.size()), torch::kInt64);
    const auto batches = order.split(digits::batch_size);
    for (std::size_t i = 0; i < batches.size(); ++i)
      f(torch::cross_entropy_loss(model->forward(data.training.images.index_select(0, batches[i])),
                                  data.training.labels.index_select(0, batches[i])),
        i + 1 == batches.size());
  }

  const digits::data_set& data;
  std::shared_ptr<digits::net> model;
  leanopt::AdamW8bit optimizer;
  leanopt::LambdaLR scheduler;
};

// The loop that LibTorch programs have: for i, batch in enumerate(loader): (loss / N).backward(),
// and where (i + 1) % N == 0 step, scheduler.step(), zero_grad(). With 23 batches an epoch the last
// one's gradient waits for the next epoch and makes its first window too large.
void written_by_hand(run& r, std::int64_t epoch) {
  std::int64_t i = 0;
  r.for_each_batch(epoch, [&](const torch::Tensor& loss, bool) {
    (loss / double(micro_batches)).backward();
    if (++i % micro_batches == 0) {
      r.optimizer.step();
      r.scheduler.step();
      r.optimizer.zero_grad();
    }
  });
}

// The same loop with the window in the accumulator's hands.
void plain(run& r, std::int64_t epoch) {
  leanopt::accumulator window(r.optimizer, micro_batches);
  r.for_each_batch(epoch, [&](const torch::Tensor& loss, bool is_last) {
    window.backward(loss, is_last);
    if (window.is_complete()) {
      window.step();
      r.scheduler.step();
      window.zero_grad();
    }
  });
}

// Accelerate: for batch in loader: with accelerator.accumulate(model): accelerator.backward(loss),
// optimizer.step(), scheduler.step(), optimizer.zero_grad(): calls that act where a window ends.
void as_in_accelerate(run& r, std::int64_t epoch) {
  leanopt::accumulator window(r.optimizer, micro_batches);
  r.for_each_batch(epoch, [&](const torch::Tensor& loss, bool is_last) {
    window.backward(loss, is_last);
    window.step();
    window.step(r.scheduler);
    window.zero_grad();
  });
}

// Trainer: TrainingArguments(gradient_accumulation_steps=2), trainer.train(). What is hidden there
// is two lines.
void as_in_trainer(run& r, std::int64_t epoch) {
  leanopt::accumulator window(r.optimizer, micro_batches);
  r.for_each_batch(epoch, [&](const torch::Tensor& loss, bool is_last) {
    window.backward(loss, is_last);
    window.update(r.scheduler);
  });
}

std::vector<torch::Tensor> train(const std::string& name, const digits::data_set& data,
                                 void (*loop)(run&, std::int64_t epoch)) {
  run r(data);
  std::printf("\n%s\n", name.c_str());
  for (std::int64_t epoch = 1; epoch <= epochs; ++epoch) {
    loop(r, epoch);
    const digits::scores s = digits::evaluate(*r.model, data.test);
    std::printf("  epoch %d  updates %2d of %d  eval_loss %.4f  eval_accuracy %.4f  eval_f1 %.4f\n",
                int(epoch), int(r.scheduler.last_step()), int(r.updates()), s.loss, s.accuracy,
                s.f1);
  }
  return r.model->parameters();
}

bool equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!torch::equal(a[i], b[i])) return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string folder = argc > 1 ? argv[1] : LEANOPT_DEMO_DATA_FOLDER;
    const digits::data_set data = digits::load_digits(folder + "/digits.txt");
    torch::set_num_threads(1);
    train("By hand", data, written_by_hand);
    const auto first = train("Plain, with an accumulator", data, plain);
    const auto second = train("As in Accelerate", data, as_in_accelerate);
    const auto third = train("As in Trainer", data, as_in_trainer);
    const bool same = equal(first, second) && equal(first, third);
    std::printf("\nThe last three end with %s weights.\n", same ? "the same" : "different");
    return same ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accumulate: %s\n", error.what());
    return 1;
  }
}
