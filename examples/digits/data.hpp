// The data set: 1,797 handwritten digits of 8 x 8 pixels, read from one text file whose first
// line names source and licence, and split into training and test samples.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace digits {

inline constexpr std::int64_t side = 8;
inline constexpr std::int64_t pixels_per_image = side * side;
inline constexpr std::int64_t classes = 10;

struct samples {
  torch::Tensor images;  // [n, 64] float32, 0 to 1
  torch::Tensor labels;  // [n] int64, 0 to 9

  std::int64_t size() const { return labels.size(0); }
  samples to(torch::Device device) const { return {images.to(device), labels.to(device)}; }
};

struct data_set {
  samples training;
  samples test;

  data_set to(torch::Device device) const { return {training.to(device), test.to(device)}; }
};

namespace detail {

class sample_collector {
 public:
  void add(const std::string& pixels, std::int64_t label) {
    // 'g' stands for 16, so the full range of the scanner's sums fits one character.
    for (char c : pixels) {
      const int value = c >= 'a' ? c - 'a' + 10 : c - '0';
      pixels_.push_back(static_cast<float>(value) / 16.0F);
    }
    labels_.push_back(label);
  }

  samples finish() const {
    const auto count = static_cast<std::int64_t>(labels_.size());
    return {torch::tensor(pixels_, torch::kFloat32).reshape({count, pixels_per_image}),
            torch::tensor(labels_, torch::kInt64)};
  }

 private:
  std::vector<float> pixels_;
  std::vector<std::int64_t> labels_;
};

inline bool is_sample_line(const std::string& line) {
  const auto width = static_cast<std::size_t>(pixels_per_image);
  return line.size() == width + 2 && line.find_first_not_of("0123456789abcdefg") == width &&
         line[width] == ' ' && line[width + 1] >= '0' && line[width + 1] <= '9';
}

}  // namespace detail

inline data_set load_digits(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open the digits at '" + path + "'");

  detail::sample_collector training;
  detail::sample_collector test;
  std::string line;
  std::int64_t index = 0;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (!line.empty() && line.front() == '#') continue;
    if (!detail::is_sample_line(line)) {
      throw std::runtime_error(path + ":" + std::to_string(number) +
                               ": expected 64 pixels (0-9, a-g), a blank and a class");
    }
    // Every fifth sample: the writers of neighbouring lines are the same, so both parts hold all
    // of them, and no random choice has to be repeated to get the same split.
    const bool is_test = index % 5 == 4;
    (is_test ? test : training).add(line.substr(0, pixels_per_image), line.back() - '0');
    ++index;
  }
  if (index < 5) throw std::runtime_error(path + " holds too few samples to split");
  return {training.finish(), test.finish()};
}

}  // namespace digits
