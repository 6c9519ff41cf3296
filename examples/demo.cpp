// The demo: two small nets learn handwritten digits with four optimizers through one template, and
// one table at the end says what each of them reached and how much state it kept for that. A
// second table measures the state for a model of 65 million parameters.

#include <leanopt/leanopt.hpp>

#include "examples/digits/arguments.hpp"
#include "examples/digits/data.hpp"
#include "examples/digits/device.hpp"
#include "examples/digits/train.hpp"
#include "examples/model_sizes.hpp"
#include "examples/text.hpp"

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

using digits::data_set;
using digits::run_plan;
using digits::run_result;
using digits::train;

struct contender {
  std::string argument;
  std::function<run_result(const data_set&, const run_plan&)> run;
};

// To try another optimizer, add an entry: the type, its options, and a name to print.
std::vector<contender> contenders() {
  const double lr = 1e-3;
  const double decay = 0.01;
  return {
      {"torch-adamw",
       [=](const data_set& data, const run_plan& plan) {
         return train<torch::optim::AdamW>(
             "torch::optim::AdamW", torch::optim::AdamWOptions(lr).weight_decay(decay), data, plan);
       }},
      {"adamw",
       [=](const data_set& data, const run_plan& plan) {
         return train<leanopt::AdamW>("leanopt::AdamW",
                                      leanopt::AdamWOptions(lr).weight_decay(decay), data, plan);
       }},
      {"adafactor",
       [=](const data_set& data, const run_plan& plan) {
         return train<leanopt::Adafactor>("leanopt::Adafactor",
                                          leanopt::AdafactorOptions::hugging_face()
                                              .lr(lr)
                                              .scale_parameter(false)
                                              .relative_step(false)
                                              .weight_decay(decay),
                                          data, plan);
       }},
      {"adamw8bit",
       [=](const data_set& data, const run_plan& plan) {
         return train<leanopt::AdamW8bit>(
             "leanopt::AdamW8bit", leanopt::AdamW8bitOptions(lr).weight_decay(decay), data, plan);
       }},
  };
}

text::table as_table(const std::vector<run_result>& runs) {
  text::table table(
      {"net", "optimizer", "accuracy", "F1", "state MB", "elements", "bytes/parameter", "ms/step"},
      2);
  for (const run_result& run : runs) {
    const auto bytes = static_cast<double>(model_sizes::to_bytes(run.state.megabytes));
    table.add({run.net, run.optimizer, text::fixed(run.evaluation.accuracy, 4),
               text::fixed(run.evaluation.f1, 4), text::fixed(run.state.megabytes, 4),
               text::with_commas(run.state.elements),
               text::fixed(bytes / static_cast<double>(run.parameters), 3),
               text::fixed(run.milliseconds_per_step, 2)});
  }
  return table;
}

int run_demo(const digits::arguments& arguments, const std::vector<contender>& all_contenders,
             const std::vector<std::string>& models) {
  torch::set_num_threads(static_cast<int>(arguments.threads));
  const torch::Device device = digits::device_named(arguments.device);
  // Both files are read first: a wrong folder should not be found out after the training.
  const data_set data = digits::load_digits(arguments.data + "/digits.txt").to(device);
  const std::vector<model_sizes::shape> distilbert =
      model_sizes::load_shapes(arguments.data + "/distilbert_shapes.txt");

  std::vector<run_result> runs;
  for (const std::string& model : models) {
    if (arguments.model != "all" && arguments.model != model) continue;
    for (const contender& entry : all_contenders) {
      if (arguments.optimizer != "all" && arguments.optimizer != entry.argument) continue;
      runs.push_back(entry.run(data, {model, arguments.epochs, arguments.seed}));
    }
  }
  std::cout << "\nAfter " << arguments.epochs << " epochs (" << device << "), on "
            << data.test.size() << " digits that were not trained on (MB of 2^20 bytes):\n\n"
            << as_table(runs) << std::flush;

  if (arguments.sizes) model_sizes::print_state_sizes(distilbert);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> models = {"mlp", "cnn"};
    const std::vector<contender> all_contenders = contenders();
    std::vector<std::string> optimizers;
    for (const contender& entry : all_contenders) optimizers.push_back(entry.argument);

    const digits::arguments arguments = digits::parse_arguments(
        {argv + 1, argv + argc}, models, optimizers, LEANOPT_DEMO_DATA_FOLDER);
    if (arguments.help) {
      std::cout << digits::usage;
      return 0;
    }
    return run_demo(arguments, all_contenders, models);
  } catch (const digits::usage_error& error) {
    std::cerr << "demo: " << error.what() << "\n\n" << digits::usage;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "demo: " << error.what() << '\n';
    return 1;
  }
}
