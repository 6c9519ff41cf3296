// The command line of memory_plan. Anything that is not understood completely is an error.
#pragma once

#include "examples/plan/built_in.hpp"
#include "examples/plan/rows.hpp"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace plan {

inline constexpr std::string_view usage =
    "usage: memory_plan [MODEL...] [--fit=GIB] [--gradients=bf16|fp32|as-weights]\n"
    "                   [--optimizer=NAME...] [--skip=TEXT] [--svg=FILE] [--json=FILE] [--help]\n"
    "\n"
    "What training a model costs with each optimizer, in memory that lasts: weights, gradients,\n"
    "the optimizer's state and scratch. Activations come on top. Nothing is allocated.\n"
    "\n"
    "  MODEL        distilbert, gpt2, llama-7b (if none is given), llama-70b, or a file: "
    "safetensors,\n"
    "               a state dict or module of torch.save or torch::save, a list as text (a line "
    "has\n"
    "               a name, if wanted a type like bf16, and the sizes); several files are shards.\n"
    "               Weights are planned in the row's type, whatever the file's\n"
    "  --fit        memory in GiB of 2^30 bytes that the largest model should fit into; default "
    "80\n"
    "  --gradients  type of the gradients; default as-weights\n"
    "  --optimizer  only this one; may be repeated, or have several names with commas between\n"
    "  --skip       leave out tensors whose name ends so; may be repeated\n"
    "  --svg        a chart of the bytes per parameter\n"
    "  --json       all figures, for tools\n";

class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct arguments {
  std::vector<std::string> models;
  double fit = 80;
  at::ScalarType gradients = at::ScalarType::Undefined;  ///< undefined: the weights'
  std::set<std::string> optimizers;                      ///< empty: all
  std::vector<std::string> skipped;
  std::string svg, json;
  bool help = false;
};

namespace detail {

inline double parse_fit(const std::string& value) {
  double result = 0;
  const char* end = value.data() + value.size();
  const auto [rest, failed] = std::from_chars(value.data(), end, result);
  if (failed != std::errc() || rest != end || !(result > 0 && result <= 1e9))
    throw usage_error("--fit takes a number of GiB above 0, 1e9 at most, not '" + value + "'");
  return result;
}
inline at::ScalarType parse_gradients(const std::string& value) {
  if (value == "bf16") return at::kBFloat16;
  if (value == "fp32") return at::kFloat;
  if (value == "as-weights") return at::ScalarType::Undefined;
  throw usage_error("--gradients takes bf16, fp32 or as-weights, not '" + value + "'");
}
inline void parse_optimizers(const std::string& value, std::set<std::string>& names) {
  std::set<std::string> known;
  std::string list;
  for (const contender& c : contenders())
    if (known.insert(c.argument).second) list += (list.empty() ? "" : ", ") + c.argument;
  std::istringstream words(value);
  for (std::string name; std::getline(words, name, ',');) {
    if (!known.count(name)) throw usage_error("there is no optimizer '" + name + "', but: " + list);
    names.insert(name);
  }
}

}  // namespace detail

inline arguments parse_arguments(const std::vector<std::string>& words) {
  arguments result;
  std::set<std::string> given;
  for (const std::string& word : words) {
    if (word == "--help") {
      result.help = true;
      continue;
    }
    if (word.rfind("--", 0) != 0) {
      result.models.push_back(word);
      continue;
    }
    const std::size_t equals = word.find('=');
    const std::string option = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    const bool known = option == "--fit" || option == "--gradients" || option == "--optimizer" ||
                       option == "--skip" || option == "--svg" || option == "--json";
    if (!known) throw usage_error("unknown argument '" + word + "'");
    if (value.empty()) throw usage_error(option + " needs a value: " + option + "=...");
    const bool repeats = option == "--optimizer" || option == "--skip";
    if (!repeats && !given.insert(option).second) throw usage_error(option + " is there twice");
    if (option == "--fit") result.fit = detail::parse_fit(value);
    if (option == "--gradients") result.gradients = detail::parse_gradients(value);
    if (option == "--optimizer") detail::parse_optimizers(value, result.optimizers);
    if (option == "--skip") result.skipped.push_back(value);
    if (option == "--svg") result.svg = value;
    if (option == "--json") result.json = value;
  }
  std::set<std::string> files(result.models.begin(), result.models.end());
  for (const std::string& output : {result.svg, result.json})
    if (!output.empty() && !files.insert(output).second)
      throw usage_error(output + " would be overwritten");
  if (result.models.empty()) result.models = {"llama-7b"};
  return result;
}

}  // namespace plan
