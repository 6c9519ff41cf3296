// Repeats the training runs that the Python optimizers were recorded with: two small nets on the
// digits, the same start values and batches, so that losses and accuracies can be compared run by
// run; and trains the same nets with 8-bit state, which has to end where float32 ends.

#include <leanopt/leanopt.hpp>

#include "digits/data.hpp"
#include "digits/epoch.hpp"
#include "digits/metrics.hpp"
#include "digits/nets.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t epochs = 20;

/// Loss over the training set and accuracy over the test set, after an epoch.
struct outcome {
  double loss = 0;
  double accuracy = 0;
};

using curve = std::map<std::int64_t, outcome>;

// The recorded runs

struct recorded_run {
  std::string net;
  std::string optimizer;
  std::int64_t seed = 0;
  curve outcomes;
};

/// The fixed form of a line of runs.jsonl, read piece by piece; anything else is an error.
class line_cursor {
 public:
  explicit line_cursor(const std::string& line) : line_(line) {}

  bool accept(std::string_view text) {
    if (line_.compare(at_, text.size(), text) != 0) return false;
    at_ += text.size();
    return true;
  }

  void expect(std::string_view text) {
    if (!accept(text)) {
      throw std::runtime_error("expected '" + std::string(text) + "' at character " +
                               std::to_string(at_) + " of: " + line_);
    }
  }

  std::string quoted() {
    expect("\"");
    const std::size_t end = line_.find('"', at_);
    if (end == std::string::npos) throw std::runtime_error("an open quotation in: " + line_);
    const std::string text = line_.substr(at_, end - at_);
    at_ = end + 1;
    return text;
  }

  double number() {
    char* end = nullptr;
    const char* begin = line_.c_str() + at_;
    const double value = std::strtod(begin, &end);
    if (end == begin) throw std::runtime_error("expected a number in: " + line_);
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

 private:
  const std::string& line_;
  std::size_t at_ = 0;
};

recorded_run parse_run(const std::string& line) {
  line_cursor cursor(line);
  recorded_run run;
  cursor.expect("{\"net\": ");
  run.net = cursor.quoted();
  cursor.expect(", \"optimizer\": ");
  run.optimizer = cursor.quoted();
  cursor.expect(", \"seed\": ");
  run.seed = static_cast<std::int64_t>(cursor.number());
  cursor.expect(", \"curve\": {");
  do {
    const std::int64_t epoch = std::stoll(cursor.quoted());
    outcome& after = run.outcomes[epoch];
    cursor.expect(": [");
    after.loss = cursor.number();
    cursor.expect(", ");
    after.accuracy = cursor.number();
    cursor.expect("]");
  } while (cursor.accept(", "));
  cursor.expect("}}");
  return run;
}

const std::vector<recorded_run>& recorded_runs() {
  static const std::vector<recorded_run> runs = [] {
    const std::string path = LEANOPT_TEST_DATA "/training/runs.jsonl";
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot open " + path);
    std::vector<recorded_run> all;
    for (std::string line; std::getline(file, line);) all.push_back(parse_run(line));
    return all;
  }();
  return runs;
}

const recorded_run& recorded(const std::string& net, const std::string& optimizer,
                             std::int64_t seed) {
  for (const recorded_run& run : recorded_runs()) {
    if (run.net == net && run.optimizer == optimizer && run.seed == seed) return run;
  }
  throw std::runtime_error("no recorded run of " + net + ", " + optimizer + ", seed " +
                           std::to_string(seed));
}

// Our runs

using make_optimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

const digits::data_set& data() {
  static const digits::data_set loaded = digits::load_digits(LEANOPT_TEST_DATA "/digits.txt");
  return loaded;
}

outcome evaluate(digits::net& model) {
  return {digits::evaluate(model, data().training).loss,
          digits::evaluate(model, data().test).accuracy};
}

/// A whole run; evaluated after the epochs that `watched` names.
template <class Epochs>
curve train(const std::string& net, std::int64_t seed, const make_optimizer& make,
            const Epochs& watched) {
  // The peers ran on one thread, and the order of the sums in a matrix product follows the threads.
  torch::set_num_threads(1);
  const auto model = digits::make_net(net, seed);
  const auto optimizer = make(model->parameters());
  curve outcomes;
  for (std::int64_t epoch = 1; epoch <= epochs; ++epoch) {
    digits::train_epoch(*model, *optimizer, data().training, seed, epoch);
    if (std::find(watched.begin(), watched.end(), epoch) != watched.end()) {
      outcomes[epoch] = evaluate(*model);
    }
  }
  return outcomes;
}

/// Accuracies are fractions of the test set: whole samples compare without a rounding error.
std::int64_t correct_samples(double accuracy) {
  return std::llround(accuracy * static_cast<double>(data().test.size()));
}

template <class Figure>
double mean(const std::vector<outcome>& runs, Figure figure) {
  double sum = 0;
  for (const outcome& run : runs) sum += static_cast<double>(figure(run));
  return sum / static_cast<double>(runs.size());
}

leanopt::AdafactorOptions trainer_options() {
  return leanopt::AdafactorOptions::hugging_face().lr(1e-3).scale_parameter(false).relative_step(
      false);
}

template <class Optimizer, class Options>
make_optimizer maker(Options options) {
  return [options](std::vector<torch::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

struct recipe {
  std::string label;
  std::string recorded_name;
  make_optimizer make;
};

// GoogleTest would print the bytes of the struct, addresses included, into the name of the test.
void PrintTo(const recipe& each, std::ostream* out) { *out << each.label; }

std::vector<recipe> full_precision_recipes() {
  using leanopt::Adafactor;
  using leanopt::AdafactorOptions;
  return {
      {"torch_adamw", "torch AdamW lr 1e-3", maker<leanopt::AdamW>(leanopt::AdamWOptions(1e-3))},
      {"torch_adafactor", "torch Adafactor lr 1e-2 (defaults)",
       maker<Adafactor>(AdafactorOptions())},
      {"hf_adafactor", "HF Adafactor defaults (relative step)",
       maker<Adafactor>(AdafactorOptions::hugging_face())},
      {"hf_adafactor_trainer", "HF Adafactor lr 1e-3, no scaling (trainer mode)",
       maker<Adafactor>(trainer_options())},
      {"hf_adafactor_momentum", "HF Adafactor lr 1e-3, no scaling, beta1 0.9",
       maker<Adafactor>(trainer_options().beta1(0.9))}};
}

std::vector<recipe> compressed_recipes() {
  const std::string float32 = "torch AdamW lr 1e-3";
  const leanopt::AdamW8bitOptions as_it_comes(1e-3);
  auto every_tensor = as_it_comes;
  every_tensor.min_compressed_elements(1);
  return {{"as_it_comes", float32, maker<leanopt::AdamW8bit>(as_it_comes)},
          {"every_tensor_compressed", float32, maker<leanopt::AdamW8bit>(every_tensor)}};
}

/// A net and a recipe; tests are named after both.
using training_case = std::tuple<std::string, recipe>;

std::string name_case(const testing::TestParamInfo<training_case>& info) {
  return std::get<0>(info.param) + "_" + std::get<1>(info.param).label;
}

const auto nets = testing::Values("mlp", "cnn");

// The tests

class repeated_training : public testing::TestWithParam<training_case> {};

TEST_P(repeated_training, follows_the_recorded_run) {
  const auto& [net, recipe] = GetParam();
  const bool floored = net == "cnn" && recipe.label == "torch_adafactor";
  const std::int64_t first_epoch = floored ? tolerance::floored_training_first_epoch : 1;
  const double loss = floored ? tolerance::floored_training_loss : tolerance::training_loss;
  const int samples =
      floored ? tolerance::floored_training_accuracy_samples : tolerance::training_accuracy_samples;

  for (const std::int64_t seed : {1, 2, 3}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const curve& expected = recorded(net, recipe.recorded_name, seed).outcomes;
    ASSERT_EQ(expected.count(epochs), 1u);
    std::vector<std::int64_t> watched;
    for (const auto& [epoch, after] : expected) watched.push_back(epoch);

    const curve actual = train(net, seed, recipe.make, watched);
    for (const auto& [epoch, after] : expected) {
      if (epoch < first_epoch) continue;
      SCOPED_TRACE("epoch " + std::to_string(epoch));
      EXPECT_NEAR(actual.at(epoch).loss, after.loss, loss * after.loss);
      EXPECT_NEAR(correct_samples(actual.at(epoch).accuracy), correct_samples(after.accuracy),
                  samples);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(peers, repeated_training,
                         testing::Combine(nets, testing::ValuesIn(full_precision_recipes())),
                         name_case);

class compressed_training : public testing::TestWithParam<training_case> {};

TEST_P(compressed_training, ends_in_the_float32_band) {
  const auto& [net, recipe] = GetParam();
  std::vector<outcome> band;
  std::vector<outcome> ours;
  for (const std::int64_t seed : {1, 2, 3, 4, 5}) {
    band.push_back(recorded(net, recipe.recorded_name, seed).outcomes.at(epochs));
    ours.push_back(train(net, seed, recipe.make, std::vector{epochs}).at(epochs));
  }
  const auto by_loss = [](const outcome& a, const outcome& b) { return a.loss < b.loss; };
  const double highest_loss = std::max_element(band.begin(), band.end(), by_loss)->loss;
  const double float32_loss = mean(band, [](const outcome& run) { return run.loss; });
  const double loss = mean(ours, [](const outcome& run) { return run.loss; });
  EXPECT_NEAR(loss, float32_loss, tolerance::compressed_mean_loss * float32_loss);

  const auto samples = [](const outcome& run) { return correct_samples(run.accuracy); };
  const auto by_samples = [&](const outcome& a, const outcome& b) {
    return samples(a) < samples(b);
  };
  const auto [least, most] = std::minmax_element(band.begin(), band.end(), by_samples);
  EXPECT_GE(mean(ours, samples), samples(*least));
  EXPECT_LE(mean(ours, samples), samples(*most));

  for (std::size_t i = 0; i < ours.size(); ++i) {
    SCOPED_TRACE("seed " + std::to_string(i + 1));
    EXPECT_LE(ours[i].loss, highest_loss * (1 + tolerance::compressed_loss_above_band));
    EXPECT_GE(samples(ours[i]), samples(*least) - tolerance::compressed_accuracy_samples);
    EXPECT_LE(samples(ours[i]), samples(*most) + tolerance::compressed_accuracy_samples);
  }
}

INSTANTIATE_TEST_SUITE_P(eight_bit, compressed_training,
                         testing::Combine(nets, testing::ValuesIn(compressed_recipes())),
                         name_case);

}  // namespace
