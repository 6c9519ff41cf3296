// A list of tensors as text: a line has a name, if wanted a number type, and the sizes.
#pragma once

#include "examples/plan/file.hpp"
#include "examples/plan/model.hpp"

#include <cctype>
#include <charconv>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace plan {

namespace detail {

// As Python and safetensors name it, in any case; fp32 and fp16 too. Null where it is no type.
inline const number_type* type_in_list(std::string word) {
  for (char& c : word) c = char(std::toupper(static_cast<unsigned char>(c)));
  if (word.rfind("FP", 0) == 0) word.erase(1, 1);
  if (const number_type* t = find_type(&number_type::safetensors, word)) return t;
  for (char& c : word) c = char(std::tolower(static_cast<unsigned char>(c)));
  return find_type(&number_type::name, word);
}

inline void read_line(const std::string& line, model& m) {
  std::istringstream words(line);
  std::string name, word;
  if (!(words >> name) || name.front() == '#') return;
  const number_type* type = nullptr;
  std::vector<std::int64_t> sizes;
  while (words >> word) {
    std::int64_t size = 0;
    const char* end = word.data() + word.size();
    const auto [rest, failed] = std::from_chars(word.data(), end, size);
    if (failed == std::errc() && rest == end)
      sizes.push_back(size);
    else if (!type && sizes.empty() && (type = type_in_list(word)))
      continue;
    else
      throw error(in_quotes(word) + " is neither a size nor, as the second word, a number type");
  }
  if (!type && sizes.empty())
    throw error("expected a name, if wanted a number type, and the sizes of the dimensions");
  m.add(name, std::move(sizes), type ? *type : number_types[0]);
}

}  // namespace detail

/// Lines that are blank or begin with '#' say nothing.
inline void read_list(file& f, model& m) {
  constexpr std::uint64_t longest = 64 << 20;
  if (f.size() > longest) throw error("is too long for a list of tensors");
  std::istringstream lines(f.read(0, f.size(), "the list"));
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    try {
      detail::read_line(line, m);
    } catch (const error& e) {
      throw error("line " + std::to_string(number) + ": " + e.what());
    }
  }
}

}  // namespace plan
