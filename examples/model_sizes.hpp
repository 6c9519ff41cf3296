// How much state the optimizers keep for a real model: each one takes a step over tensors of the
// model's shapes and is then measured, beside the figures that a PyTorch course on efficient
// training prints for the same model with the Python classes.
#pragma once

#include <leanopt/leanopt.hpp>
#include <leanopt/memory/size.hpp>

#include "examples/text.hpp"

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace model_sizes {

using shape = std::vector<std::int64_t>;

// One line per parameter: its name, then its shape. The names only help a reader of the file.
inline std::vector<shape> load_shapes(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open the shapes at '" + path + "'");
  std::vector<shape> shapes;
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (line.empty() || line.front() == '#') continue;
    std::istringstream words(line);
    std::string name;
    words >> name;
    shape sizes;
    for (std::int64_t size = 0; words >> size;) sizes.push_back(size);
    if (sizes.empty() || !words.eof()) {
      throw std::runtime_error(path + ":" + std::to_string(number) +
                               ": expected a name and the sizes of its dimensions");
    }
    shapes.push_back(std::move(sizes));
  }
  return shapes;
}

inline std::int64_t count_parameters(const std::vector<shape>& shapes) {
  std::int64_t count = 0;
  for (const shape& sizes : shapes) {
    std::int64_t elements = 1;
    for (const std::int64_t size : sizes) elements *= size;
    count += elements;
  }
  return count;
}

struct course_figures {
  std::int64_t elements;
  std::int64_t megabytes;
};

struct measurement {
  std::string optimizer;
  leanopt::optimizer_size state;
  std::int64_t moments;
  std::optional<course_figures> course;
};

inline std::int64_t to_bytes(double megabytes) { return std::llround(megabytes * 1024.0 * 1024.0); }

// Parameters, gradients and state live only as long as this call, so the optimizers of a table
// need no more memory together than the largest one alone.
template <class Optimizer>
measurement measure(const std::string& name, const leanopt::options_of<Optimizer>& options,
                    const std::vector<shape>& shapes, std::optional<course_figures> course) {
  std::vector<torch::Tensor> parameters;
  for (const shape& sizes : shapes) {
    parameters.push_back(torch::randn(sizes).mul_(0.02).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(sizes).mul_(0.001);
  }
  Optimizer optimizer(std::move(parameters), options);
  const leanopt::optimizer_size before = leanopt::compute_optimizer_size(optimizer);
  optimizer.step();
  const leanopt::optimizer_size after = leanopt::compute_optimizer_size(optimizer);
  std::printf("  %s: before the first step %.0f MB, %s elements; after it %.0f MB, %s elements\n",
              name.c_str(), before.megabytes, text::with_commas(before.elements).c_str(),
              after.megabytes, text::with_commas(after.elements).c_str());
  std::fflush(stdout);
  return {name, after, leanopt::count_moments(optimizer), course};
}

inline void print_estimates(std::int64_t parameters) {
  std::printf("Number of model parameters: %s\n", text::with_commas(parameters).c_str());
  std::printf("Estimated memory usage of AdamW: %.0f MB\n",
              leanopt::estimate_optimizer_size<leanopt::AdamW>(parameters));
  std::printf("Estimated memory usage of 8-bit Adam: %.0f MB\n",
              leanopt::estimate_optimizer_size<leanopt::Adam8bit>(parameters));
}

inline text::table as_table(const std::vector<measurement>& rows) {
  text::table table(
      {"optimizer", "elements", "moments + steps", "bytes", "MB", "course: elements", "course: MB"},
      1);
  for (const measurement& row : rows) {
    table.add({row.optimizer, text::with_commas(row.state.elements), text::with_commas(row.moments),
               text::with_commas(to_bytes(row.state.megabytes)),
               text::fixed(row.state.megabytes, 4),
               row.course ? text::with_commas(row.course->elements) : "-",
               row.course ? text::with_commas(row.course->megabytes) : "-"});
  }
  return table;
}

inline bool prints_like_the_course(const measurement& row) {
  return row.course && row.state.elements == row.course->elements &&
         std::llround(row.state.megabytes) == row.course->megabytes;
}

inline void print_comparison(const measurement& row, const std::string& why_it_differs) {
  const std::string text = prints_like_the_course(row) ? "as the course prints it" : why_it_differs;
  std::printf("  %s: %s\n", row.optimizer.c_str(), text.c_str());
}

inline void print_state_sizes(const std::vector<shape>& shapes) {
  const course_figures course_adamw{131566188, 502};
  const course_figures course_adafactor{178712, 1};
  const course_figures course_8bit{131566188, 128};

  std::printf("\nDistilBERT with two labels (%zu tensors)\n", shapes.size());
  print_estimates(count_parameters(shapes));

  const measurement torch_adamw = measure<torch::optim::AdamW>(
      "AdamW (torch::optim)", torch::optim::AdamWOptions(), shapes, course_adamw);
  const measurement adamw =
      measure<leanopt::AdamW>("AdamW", leanopt::AdamWOptions(), shapes, course_adamw);
  // What Hugging Face's Trainer chooses with optim="adafactor": its rate alone decides.
  const measurement hugging_face = measure<leanopt::Adafactor>(
      "Adafactor (Hugging Face)",
      leanopt::AdafactorOptions::hugging_face().lr(1e-3).scale_parameter(false).relative_step(
          false),
      shapes, course_adafactor);
  const measurement torch_form = measure<leanopt::Adafactor>(
      "Adafactor (torch.optim)", leanopt::AdafactorOptions(), shapes, std::nullopt);
  const measurement adamw8bit =
      measure<leanopt::AdamW8bit>("AdamW8bit", leanopt::AdamW8bitOptions(), shapes, course_8bit);

  std::cout << '\n' << as_table({torch_adamw, adamw, hugging_face, torch_form, adamw8bit});
  std::printf("\nBeside the course's figures (MB of 2^20 bytes, rounded there):\n");
  print_comparison(torch_adamw, "not as the course prints it");
  print_comparison(adamw, "not as the course prints it");
  print_comparison(hugging_face, "not as the course prints it");
  print_comparison(torch_form,
                   "the course sizes Hugging Face's class only; torch's has no RMS and a 4-byte "
                   "step, so " +
                       text::with_commas(hugging_face.state.elements - torch_form.state.elements) +
                       " elements and " +
                       text::with_commas(to_bytes(hugging_face.state.megabytes) -
                                         to_bytes(torch_form.state.megabytes)) +
                       " bytes fewer");
  print_comparison(adamw8bit,
                   "the course counts AdamW's moments and steps (" +
                       text::with_commas(adamw8bit.moments) +
                       " here), we also the headers; it stores 4-byte scales and code books, we "
                       "2-byte headers and no tables");
  std::fflush(stdout);
}

}  // namespace model_sizes
