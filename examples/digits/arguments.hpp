// The command line of the demo. Anything that is not understood completely is an error, because a
// long run that quietly ignored an argument is worse than none.
#pragma once

#include "examples/digits/generator.hpp"

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace digits {

inline constexpr std::string_view usage =
    "usage: demo [--model mlp|cnn|all] [--optimizer NAME|all] [--epochs N] [--seed N]\n"
    "            [--device cpu|cuda] [--threads N] [--data FOLDER] [--no-sizes] [--help]\n"
    "\n"
    "  --model      the net to train; default all\n"
    "  --optimizer  torch-adamw, adamw, adafactor or adamw8bit; default all\n"
    "  --epochs     1 to 255; default 10\n"
    "  --seed       0 to 1048575, start values and batch order; default 1\n"
    "  --device     where nets, data and optimizers are; default cpu. cuda needs a program that\n"
    "               links leanopt::cuda, and a device\n"
    "  --threads    1 to 1024; default 1, as these nets are too small to share\n"
    "  --data       folder of digits.txt and distilbert_shapes.txt\n"
    "  --no-sizes   leave out the table of state sizes for DistilBERT (it needs 1.2 GB)\n";

class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct arguments {
  std::string model = "all";
  std::string optimizer = "all";
  std::int64_t epochs = 10;
  std::int64_t seed = 1;
  std::string device = "cpu";
  std::int64_t threads = 1;
  std::string data;
  bool sizes = true;
  bool help = false;
};

namespace detail {

inline std::int64_t parse_integer(const std::string& option, const std::string& value,
                                  std::int64_t lowest, std::int64_t highest) {
  std::int64_t result = 0;
  const char* end = value.data() + value.size();
  const auto [rest, error] = std::from_chars(value.data(), end, result);
  if (error != std::errc() || rest != end || result < lowest || result > highest) {
    throw usage_error(option + " takes a whole number from " + std::to_string(lowest) + " to " +
                      std::to_string(highest) + ", not '" + value + "'");
  }
  return result;
}

inline std::string parse_choice(const std::string& option, const std::string& value,
                                const std::vector<std::string>& choices) {
  for (const std::string& choice : choices) {
    if (value == choice) return value;
  }
  throw usage_error(option + " has no choice '" + value + "'");
}

inline std::vector<std::string> or_all(std::vector<std::string> choices) {
  choices.push_back("all");
  return choices;
}

}  // namespace detail

inline arguments parse_arguments(const std::vector<std::string>& words,
                                 const std::vector<std::string>& models,
                                 const std::vector<std::string>& optimizers,
                                 const std::string& data_folder) {
  arguments result;
  result.data = data_folder;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& option = words[i];
    const auto value = [&]() -> const std::string& {
      if (i + 1 == words.size()) throw usage_error(option + " needs a value");
      return words[++i];
    };
    if (option == "--model") {
      result.model = detail::parse_choice(option, value(), detail::or_all(models));
    } else if (option == "--optimizer") {
      result.optimizer = detail::parse_choice(option, value(), detail::or_all(optimizers));
    } else if (option == "--epochs") {
      result.epochs = detail::parse_integer(option, value(), 1, most_epochs);
    } else if (option == "--seed") {
      result.seed = detail::parse_integer(option, value(), 0, largest_run_seed);
    } else if (option == "--device") {
      result.device = detail::parse_choice(option, value(), {"cpu", "cuda"});
    } else if (option == "--threads") {
      result.threads = detail::parse_integer(option, value(), 1, 1024);
    } else if (option == "--data") {
      result.data = value();
    } else if (option == "--no-sizes") {
      result.sizes = false;
    } else if (option == "--help") {
      result.help = true;
    } else {
      throw usage_error("unknown argument '" + option + "'");
    }
  }
  return result;
}

}  // namespace digits
