// What an evaluation reports: mean cross entropy, accuracy, and the F1 score weighted by how often
// each class occurs, which is the average that scikit-learn calls "weighted".
#pragma once

#include "examples/digits/data.hpp"
#include "examples/digits/nets.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <vector>

namespace digits {

struct scores {
  double loss;
  double accuracy;
  double f1;
};

namespace detail {

inline void check_predictions(const std::vector<std::int64_t>& truth,
                              const std::vector<std::int64_t>& predicted) {
  if (truth.empty() || truth.size() != predicted.size()) {
    throw std::invalid_argument("scores need one prediction per label, and at least one label");
  }
}

}  // namespace detail

inline double accuracy(const std::vector<std::int64_t>& truth,
                       const std::vector<std::int64_t>& predicted) {
  detail::check_predictions(truth, predicted);
  std::int64_t right = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) right += truth[i] == predicted[i] ? 1 : 0;
  return static_cast<double>(right) / static_cast<double>(truth.size());
}

inline double weighted_f1(const std::vector<std::int64_t>& truth,
                          const std::vector<std::int64_t>& predicted) {
  detail::check_predictions(truth, predicted);
  struct tally {
    double occurs = 0;
    double predicted = 0;
    double right = 0;
  };
  std::map<std::int64_t, tally> per_class;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    per_class[truth[i]].occurs += 1;
    per_class[predicted[i]].predicted += 1;
    if (truth[i] == predicted[i]) per_class[truth[i]].right += 1;
  }

  // F1 in this form needs no precision and no recall, and so no answer to 0/0 where a class is
  // never predicted: a class that occurs or is predicted has a positive denominator.
  double sum = 0;
  for (const auto& [label, count] : per_class) {
    const double f1 = 2 * count.right / (count.occurs + count.predicted);
    sum += count.occurs * f1;
  }
  return sum / static_cast<double>(truth.size());
}

inline scores evaluate(net& model, const samples& data) {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const torch::Tensor logits = model.forward(data.images);
  model.train(was_training);

  const auto as_vector = [](const torch::Tensor& t) {
    const torch::Tensor dense = t.cpu().contiguous();
    const auto* first = dense.data_ptr<std::int64_t>();
    return std::vector<std::int64_t>(first, first + dense.numel());
  };
  const std::vector<std::int64_t> truth = as_vector(data.labels);
  const std::vector<std::int64_t> predicted = as_vector(logits.argmax(1));
  const auto loss = torch::nn::functional::cross_entropy(logits, data.labels).item<double>();
  return {loss, accuracy(truth, predicted), weighted_f1(truth, predicted)};
}

}  // namespace digits
