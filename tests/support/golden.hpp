// Reader of the golden files: what the real Python optimizers did, step by step, in the text format
// that tests/data/golden/README.md describes. Everything that a file says is kept or refused: a
// line, a generator or a type that this reader does not know is an error that names file and line.
// Needs no LibTorch; numbers of every type come back as double, which holds them all.
#pragma once

#include <leanopt/core/random.hpp>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <istream>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace golden {

// The inputs

/// Word `index` of stream (`seed`, `time`).
inline std::uint64_t draw(std::uint64_t seed, std::uint64_t time, std::uint64_t index) {
  return leanopt::mix(((seed << 40) + (time << 32) + index) * 0x9E3779B97F4A7C15u);
}

/// The top `bits` bits of a word, spread evenly over [-2^exponent, 2^exponent).
inline double uniform(std::uint64_t word, int bits, int exponent) {
  const auto magnitude = static_cast<std::int64_t>(word >> (64 - bits));
  const std::int64_t centred = magnitude - (std::int64_t{1} << (bits - 1));
  return std::ldexp(static_cast<double>(centred), exponent + 1 - bits);
}

/// Element `index` of an input at step `time`; start values have time 0.
using generator = std::function<double(std::int64_t time, std::int64_t index)>;

inline std::vector<double> generate(const generator& input, std::int64_t time, std::int64_t count) {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::int64_t index = 0; index < count; ++index) values.push_back(input(time, index));
  return values;
}

// What a file holds

enum class number_type { f64, f32, f16, bf16, u8 };

using shape = std::vector<std::int64_t>;
using settings = std::map<std::string, std::string>;

inline std::int64_t count_elements(const shape& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

struct parameter {
  std::string name;
  std::size_t group = 0;
  number_type type = number_type::f32;
  shape sizes;
  generator initial;
  generator gradient;
  std::map<std::int64_t, generator> gradient_at;
  std::set<std::int64_t> without_gradient;

  std::vector<double> initial_values() const { return generate(initial, 0, count_elements(sizes)); }

  /// Nothing where the gradient is undefined at that step, which is not the same as zero.
  std::optional<std::vector<double>> gradient_values(std::int64_t step) const {
    if (without_gradient.count(step) > 0) return std::nullopt;
    const auto special = gradient_at.find(step);
    const generator& input = special == gradient_at.end() ? gradient : special->second;
    return generate(input, step, count_elements(sizes));
  }
};

/// A value given to an option of a group just before a step.
struct assignment {
  std::int64_t step = 0;
  std::size_t group = 0;
  std::string key;
  std::string value;
};

/// A tensor of the peer after a step; of a sampled one every `stride`-th value.
struct tensor_record {
  std::string parameter;
  std::string field;
  number_type type = number_type::f32;
  shape sizes;
  std::int64_t stride = 1;
  std::vector<double> values;
};

struct integer_record {
  std::string parameter;
  std::string field;
  std::int64_t value = 0;
};

struct checkpoint {
  std::int64_t step = 0;
  std::vector<tensor_record> tensors;
  std::vector<integer_record> integers;
};

/// What an optimizer did; or, without parameters, what a function made of an input.
struct recorded_case {
  std::string name;
  std::string peer;
  std::string peer_version;
  settings constructor;
  std::vector<settings> groups;
  std::vector<parameter> parameters;
  std::vector<assignment> assignments;
  std::int64_t steps = 0;
  std::vector<checkpoint> checkpoints;

  // Of a function: its options, its input where a rule gives it, and what was recorded.
  settings options;
  std::vector<double> input;
  std::vector<tensor_record> tensors;
};

/// The record of one field, or nothing.
inline const tensor_record* find(const std::vector<tensor_record>& records,
                                 const std::string& parameter, const std::string& field) {
  for (const tensor_record& each : records)
    if (each.parameter == parameter && each.field == field) return &each;
  return nullptr;
}

/// Where the files are: in the folder that the environment names, or in `otherwise`.
inline std::string folder(const std::string& otherwise) {
  const char* chosen = std::getenv("LEANOPT_GOLDEN");
  return chosen != nullptr && *chosen != '\0' ? chosen : otherwise;
}

// Text to numbers

inline double parse_real(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') throw std::invalid_argument("not a number: '" + text + "'");
  return value;
}

inline std::int64_t parse_integer(const std::string& text) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') throw std::invalid_argument("not an integer: '" + text + "'");
  return value;
}

inline bool parse_boolean(const std::string& text) {
  if (text != "true" && text != "false") {
    throw std::invalid_argument("neither true nor false: '" + text + "'");
  }
  return text == "true";
}

inline std::optional<double> parse_optional_real(const std::string& text) {
  if (text == "none") return std::nullopt;
  return parse_real(text);
}

inline number_type parse_type(const std::string& text) {
  static const std::map<std::string, number_type> types = {{"f64", number_type::f64},
                                                           {"f32", number_type::f32},
                                                           {"f16", number_type::f16},
                                                           {"bf16", number_type::bf16},
                                                           {"u8", number_type::u8}};
  const auto found = types.find(text);
  if (found == types.end()) throw std::invalid_argument("unknown number type '" + text + "'");
  return found->second;
}

inline std::size_t hexadecimal_digits(number_type type) {
  switch (type) {
    case number_type::f64: return 16;
    case number_type::f32: return 8;
    case number_type::f16:
    case number_type::bf16: return 4;
    case number_type::u8: return 2;
  }
  throw std::logic_error("number type without a width");
}

/// The type that the name of a case ends in: "adamw.default.f32".
inline std::string type_suffix(const std::string& case_name) {
  return case_name.substr(case_name.rfind('.') + 1);
}

namespace detail {

inline double float_of_bits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline double half_of_bits(std::uint32_t bits) {
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 10 & 0x1Fu);
  const auto fraction = static_cast<double>(bits & 0x3FFu);
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  if (exponent == 31) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline double number_of_bits(std::uint64_t bits, number_type type) {
  switch (type) {
    case number_type::f64: {
      double value = 0;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    case number_type::f32: return float_of_bits(static_cast<std::uint32_t>(bits));
    case number_type::bf16: return float_of_bits(static_cast<std::uint32_t>(bits) << 16);
    case number_type::f16: return half_of_bits(static_cast<std::uint32_t>(bits));
    case number_type::u8: return static_cast<double>(bits);
  }
  throw std::logic_error("number type without a decoder");
}

/// The tokens of one line, taken from left to right; all of them have to be taken.
class token_list {
 public:
  explicit token_list(const std::string& line) {
    std::size_t begin = 0;
    while ((begin = line.find_first_not_of(" \t\r", begin)) != std::string::npos) {
      const std::size_t end = line.find_first_of(" \t\r", begin);
      tokens_.push_back(line.substr(begin, end - begin));
      begin = end == std::string::npos ? line.size() : end;
    }
  }

  bool empty() const { return next_ == tokens_.size(); }

  std::string text() {
    if (empty()) throw std::invalid_argument("the line ends too early");
    return tokens_[next_++];
  }

  std::int64_t integer() { return parse_integer(text()); }
  double real() { return parse_real(text()); }

  std::int64_t count() {
    const std::int64_t value = integer();
    if (value < 0) throw std::invalid_argument("a negative count");
    return value;
  }

  std::size_t index_below(std::size_t size) {
    const auto value = static_cast<std::size_t>(count());
    if (value >= size) throw std::invalid_argument("a number that was not introduced");
    return value;
  }

 private:
  std::vector<std::string> tokens_;
  std::size_t next_ = 0;
};

inline int checked_bits(token_list& tokens) {
  const std::int64_t bits = tokens.integer();
  if (bits < 1 || bits > 53) throw std::invalid_argument("a generator has 1 to 53 bits");
  return static_cast<int>(bits);
}

/// `u`, `w` and `s`: a uniform number, and what the low bits of its word do to it.
inline generator parse_random(const std::string& kind, token_list& tokens) {
  const auto seed = static_cast<std::uint64_t>(tokens.count());
  const int bits = checked_bits(tokens);
  const auto exponent = static_cast<int>(tokens.integer());
  const auto at = [=](std::int64_t time, std::int64_t index) {
    return draw(seed, static_cast<std::uint64_t>(time), static_cast<std::uint64_t>(index));
  };
  if (kind == "u") {
    return [=](std::int64_t time, std::int64_t index) {
      return uniform(at(time, index), bits, exponent);
    };
  }
  const std::int64_t low_bits = tokens.count();
  if (low_bits > 32) throw std::invalid_argument("a generator looks at 32 low bits at most");
  const std::uint64_t mask = (std::uint64_t{1} << low_bits) - 1;
  if (kind == "w") {
    return [=](std::int64_t time, std::int64_t index) {
      const std::uint64_t word = at(time, index);
      return std::ldexp(uniform(word, bits, exponent), -static_cast<int>(word & mask));
    };
  }
  return [=](std::int64_t time, std::int64_t index) {
    const std::uint64_t word = at(time, index);
    return (word & mask) == 0 ? uniform(word, bits, exponent) : 0.0;
  };
}

inline generator parse_generator(token_list& tokens) {
  const std::string kind = tokens.text();
  if (kind == "u" || kind == "w" || kind == "s") return parse_random(kind, tokens);
  if (kind == "c") {
    const double value = tokens.real();
    return [=](std::int64_t, std::int64_t) { return value; };
  }
  if (kind == "x") {
    std::vector<double> values;
    for (std::int64_t left = tokens.count(); left > 0; --left) values.push_back(tokens.real());
    return [=](std::int64_t, std::int64_t index) {
      return values.at(static_cast<std::size_t>(index));
    };
  }
  if (kind == "r") {
    const std::int64_t row_length = tokens.count();
    const std::int64_t modulus = tokens.count();
    if (row_length == 0 || modulus == 0) throw std::invalid_argument("rows of no length");
    const generator rows = parse_generator(tokens);
    return [=](std::int64_t time, std::int64_t index) {
      return index / row_length % modulus == 0 ? 0.0 : rows(time, index);
    };
  }
  throw std::invalid_argument("unknown generator '" + kind + "'");
}

inline shape parse_shape(token_list& tokens) {
  shape sizes;
  for (std::int64_t rank = tokens.count(); rank > 0; --rank) sizes.push_back(tokens.count());
  return sizes;
}

/// One pass over a file, a method per kind of line.
class parser {
 public:
  explicit parser(std::istream& input) : input_(input) {}

  std::int64_t line_number() const { return line_number_; }

  std::vector<recorded_case> parse() {
    std::optional<token_list> first = next_line();
    if (!first || first->text() != "golden" || first->integer() != 1) {
      throw std::invalid_argument("the first line is not 'golden 1'");
    }
    std::vector<recorded_case> cases;
    while (std::optional<token_list> line = next_line()) {
      const std::string keyword = line->text();
      if (keyword != "case") throw std::invalid_argument("'" + keyword + "' outside a case");
      current_ = recorded_case{};
      current_.name = line->text();
      finish(*line);
      parse_case();
      cases.push_back(std::move(current_));
    }
    return cases;
  }

 private:
  void parse_case() {
    while (std::optional<token_list> line = next_line()) {
      const std::string keyword = line->text();
      if (keyword == "end") {
        finish(*line);
        check_case();
        return;
      }
      parse_line(keyword, *line);
      finish(*line);
    }
    throw std::invalid_argument("case " + current_.name + " has no end");
  }

  void parse_line(const std::string& keyword, token_list& line) {
    if (keyword == "peer") {
      current_.peer = line.text();
      current_.peer_version = line.text();
    } else if (keyword == "ctor") {
      parse_setting(line, current_.constructor);
    } else if (keyword == "group") {
      const auto number = static_cast<std::size_t>(line.count());
      if (number != current_.groups.size()) throw std::invalid_argument("groups out of order");
      current_.groups.emplace_back();
    } else if (keyword == "opt") {
      parse_setting(line, current_.groups.empty() ? current_.options : current_.groups.back());
    } else if (keyword == "input") {
      parse_input(line);
    } else if (keyword == "param") {
      parse_parameter(line);
    } else if (keyword == "init") {
      parameter& target = named_parameter(line);
      target.initial = parse_generator(line);
    } else if (keyword == "grad") {
      parameter& target = named_parameter(line);
      target.gradient = parse_generator(line);
    } else if (keyword == "gradat") {
      parameter& target = named_parameter(line);
      const std::int64_t step = line.count();
      target.gradient_at[step] = parse_generator(line);
    } else if (keyword == "nograd") {
      parameter& target = named_parameter(line);
      target.without_gradient.insert(line.count());
    } else if (keyword == "set") {
      parse_assignment(line);
    } else if (keyword == "steps") {
      current_.steps = line.count();
    } else if (keyword == "after") {
      current_.checkpoints.emplace_back();
      current_.checkpoints.back().step = line.count();
    } else if (keyword == "tensor" || keyword == "sample") {
      parse_tensor(line, keyword == "sample");
    } else if (keyword == "int") {
      integer_record record;
      record.parameter = named_parameter(line).name;
      record.field = line.text();
      record.value = line.integer();
      last_checkpoint().integers.push_back(std::move(record));
    } else {
      throw std::invalid_argument("unknown line '" + keyword + "'");
    }
  }

  static void parse_setting(token_list& line, settings& target) {
    const std::string key = line.text();
    if (!target.emplace(key, line.text()).second) {
      throw std::invalid_argument("'" + key + "' is given twice");
    }
  }

  void parse_parameter(token_list& line) {
    parameter added;
    added.name = line.text();
    for (const parameter& present : current_.parameters) {
      if (present.name == added.name) throw std::invalid_argument("a parameter is given twice");
    }
    added.group = line.index_below(current_.groups.size());
    added.type = parse_type(line.text());
    added.sizes = parse_shape(line);
    current_.parameters.push_back(std::move(added));
  }

  void parse_assignment(token_list& line) {
    assignment change;
    change.step = line.count();
    change.group = line.index_below(current_.groups.size());
    change.key = line.text();
    change.value = line.text();
    current_.assignments.push_back(std::move(change));
  }

  void parse_input(token_list& line) {
    const std::int64_t count = line.count();
    const std::string sign = line.text();
    if (sign != "plain" && sign != "abs") {
      throw std::invalid_argument("an input is plain or abs, not '" + sign + "'");
    }
    current_.input = generate(parse_generator(line), 0, count);
    if (sign == "abs") {
      for (double& value : current_.input) value = std::abs(value);
    }
  }

  void parse_tensor(token_list& line, bool sampled) {
    const bool of_function = current_.parameters.empty();
    tensor_record record;
    record.parameter = of_function ? line.text() : named_parameter(line).name;
    record.field = line.text();
    record.type = parse_type(line.text());
    record.sizes = parse_shape(line);
    std::int64_t count = count_elements(record.sizes);
    if (sampled) {
      record.stride = line.count();
      const std::int64_t in_tensor = count;
      count = line.count();
      if (record.stride == 0 || (count > 0 && (count - 1) * record.stride >= in_tensor)) {
        throw std::invalid_argument("a sample that leaves its tensor");
      }
    }
    record.values = parse_values(record.type, static_cast<std::size_t>(count));
    auto& tensors = of_function ? current_.tensors : last_checkpoint().tensors;
    tensors.push_back(std::move(record));
  }

  std::vector<double> parse_values(number_type type, std::size_t count) {
    const std::size_t digits = hexadecimal_digits(type);
    std::vector<double> values;
    values.reserve(count);
    while (values.size() < count) {
      std::optional<token_list> line = next_line();
      if (!line) throw std::invalid_argument("the file ends within a tensor");
      while (!line->empty()) {
        const std::string token = line->text();
        if (token.size() % digits != 0 ||
            token.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
          throw std::invalid_argument("not a bit pattern of the tensor's type: '" + token + "'");
        }
        for (std::size_t at = 0; at < token.size(); at += digits) {
          const std::uint64_t bits = std::strtoull(token.substr(at, digits).c_str(), nullptr, 16);
          values.push_back(number_of_bits(bits, type));
        }
      }
    }
    if (values.size() > count) throw std::invalid_argument("a tensor has too many values");
    return values;
  }

  void check_case() const {
    if (current_.peer.empty()) throw std::invalid_argument(current_.name + " names no peer");
    if (current_.parameters.empty()) return check_function();
    if (!current_.options.empty()) throw std::invalid_argument("an option before its group");
    if (!current_.input.empty() || !current_.tensors.empty()) {
      throw std::invalid_argument("an input or a record before the parameters");
    }
    if (current_.checkpoints.empty()) {
      throw std::invalid_argument(current_.name + " expects nothing");
    }
    std::int64_t previous = 0;
    for (const checkpoint& at : current_.checkpoints) {
      if (at.step <= previous || at.step > current_.steps) {
        throw std::invalid_argument(current_.name + ": checkpoints out of order");
      }
      previous = at.step;
    }
    for (const assignment& change : current_.assignments) {
      if (change.step < 1 || change.step > current_.steps) {
        throw std::invalid_argument(current_.name + ": an option is set at no step");
      }
    }
    for (const parameter& each : current_.parameters) check_inputs(each);
  }

  void check_function() const {
    if (current_.tensors.empty()) throw std::invalid_argument(current_.name + " expects nothing");
    if (!current_.groups.empty() || !current_.checkpoints.empty() || current_.steps > 0) {
      throw std::invalid_argument(current_.name + " has steps without parameters");
    }
  }

  void check_inputs(const parameter& each) const {
    if (!each.initial) throw std::invalid_argument(each.name + " has no start value");
    for (std::int64_t step = 1; step <= current_.steps; ++step) {
      const bool given = each.gradient || each.gradient_at.count(step) > 0;
      if (!given && each.without_gradient.count(step) == 0) {
        throw std::invalid_argument(each.name + " has no gradient at some step");
      }
    }
  }

  parameter& named_parameter(token_list& line) {
    const std::string name = line.text();
    for (parameter& candidate : current_.parameters) {
      if (candidate.name == name) return candidate;
    }
    throw std::invalid_argument("unknown parameter '" + name + "'");
  }

  checkpoint& last_checkpoint() {
    if (current_.checkpoints.empty()) throw std::invalid_argument("a record before any 'after'");
    return current_.checkpoints.back();
  }

  static void finish(const token_list& line) {
    if (!line.empty()) throw std::invalid_argument("the line goes on too long");
  }

  std::optional<token_list> next_line() {
    for (std::string line; std::getline(input_, line);) {
      ++line_number_;
      if (line.empty() || line.front() == '#') continue;
      token_list tokens(line);
      if (!tokens.empty()) return tokens;
    }
    return std::nullopt;
  }

  std::istream& input_;
  std::int64_t line_number_ = 0;
  recorded_case current_;
};

}  // namespace detail

/// All cases of a text; errors name `source` and the line.
inline std::vector<recorded_case> read(std::istream& input, const std::string& source) {
  detail::parser parser(input);
  try {
    return parser.parse();
  } catch (const std::exception& error) {
    throw std::runtime_error(source + ":" + std::to_string(parser.line_number()) + ": " +
                             error.what());
  }
}

inline std::vector<recorded_case> read_file(const std::string& path) {
  std::ifstream input(path);
  if (!input) throw std::runtime_error("cannot open " + path);
  return read(input, path);
}

}  // namespace golden
