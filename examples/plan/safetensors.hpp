// The header of a safetensors file: its length in 8 bytes, then JSON that names type, sizes and
// place of every tensor. Their values, the rest of the file, are not read.
#pragma once

#include "examples/plan/file.hpp"
#include "examples/plan/model.hpp"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace plan {

namespace detail {

using json = nlohmann::json;

/// The JSON of a header. @throws for JSON that no header is, before it takes memory.
inline json parse_header(const std::string& text) {
  constexpr int deepest = 3;  // the header, a tensor, its sizes
  std::set<std::string> names;
  try {
    return json::parse(text, [&](int depth, json::parse_event_t event, const json& parsed) {
      const bool begins =
          event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
      if (begins && depth >= deepest) throw error("the header has values that no header has");
      if (event == json::parse_event_t::key && depth == 1) {
        const auto& name = parsed.get_ref<const std::string&>();
        if (!names.insert(name).second) throw error(in_quotes(name) + " is there twice");
      }
      return true;
    });
  } catch (const json::exception& e) {
    const std::string what = e.what();  // begins with the exception's name in brackets
    throw error("the header is not JSON: " + printable(what.substr(what.find(']') + 2), 200));
  }
}

inline std::int64_t whole_number(const json& j, const char* what) {
  if (!j.is_number_integer()) throw error(std::string(what) + " that is no whole number");
  // Beyond the largest, nlohmann keeps an unsigned number, which the conversion would wrap.
  if (j.is_number_unsigned() && j.get<std::uint64_t>() > std::uint64_t(INT64_MAX))
    throw error(std::string(what) + " beyond 2^63");
  return j.get<std::int64_t>();
}

struct entry {
  const number_type* type = nullptr;
  std::vector<std::int64_t> sizes;
  std::int64_t begin = 0, end = 0;  ///< of its values
  std::string name = "";
};

/// A tensor of the header, without its name. Messages go on where the name ends.
inline entry read_entry(const json& j) {
  const auto field = [&](const char* key) -> const json& {
    if (!j.is_object() || !j.contains(key))
      throw error(std::string("has no ") + key + ", which every tensor has");
    return j[key];
  };
  entry result;
  const json& dtype = field("dtype");
  if (!dtype.is_string()) throw error("has a dtype that is no text");
  const auto& type_name = dtype.get_ref<const std::string&>();
  result.type = find_type(&number_type::safetensors, type_name);
  if (!result.type) throw error("has the unknown dtype " + in_quotes(type_name));

  const json& shape = field("shape");
  if (!shape.is_array()) throw error("has a shape that is no list");
  for (const json& size : shape) result.sizes.push_back(whole_number(size, "has a size"));

  const json& offsets = field("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2)
    throw error("has data_offsets that are no two numbers");
  result.begin = whole_number(offsets[0], "has an offset");
  result.end = whole_number(offsets[1], "has an offset");
  if (result.begin < 0 || result.end < result.begin) throw error("ends before it begins");
  const std::int64_t bits = count_elements(result.sizes) * result.type->bits;  // no overflow
  if (bits % 8 || result.end - result.begin != bits / 8)
    throw error("has " + std::to_string(result.end - result.begin) + " bytes, its shape and " +
                "dtype take " + std::to_string((bits + 7) / 8));
  return result;
}

}  // namespace detail

inline void read_safetensors(file& f, model& m) {
  constexpr std::uint64_t longest = 100'000'000;  // the format's own bound
  const auto length = little_endian<std::uint64_t>(f.read(0, 8, "the header's length").data());
  if (length > longest)
    throw error("says that its header has " + std::to_string(length) +
                " bytes, more than the 100,000,000 of the format: it is damaged or no safetensors");
  const detail::json header = detail::parse_header(f.read(8, length, "the header"));
  if (!header.is_object()) throw error("the header is no JSON object");

  std::vector<detail::entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    try {
      entries.push_back(detail::read_entry(value));
      entries.back().name = name;
    } catch (const error& e) {
      throw error(in_quotes(name) + ' ' + e.what());
    }
    m.add(name, entries.back().sizes, *entries.back().type);
  }
  // The format allows neither gaps nor overlaps.
  std::sort(entries.begin(), entries.end(), [](const detail::entry& a, const detail::entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t end = 0;
  for (const detail::entry& e : entries) {
    if (e.begin < end) throw error(in_quotes(e.name) + " overlaps another tensor");
    if (e.begin > end) throw error("there is a gap before " + in_quotes(e.name));
    end = e.end;
  }
  const std::uint64_t held = f.size() - 8 - length;
  if (held < std::uint64_t(end))
    throw error("is truncated: it holds " + std::to_string(held) + " bytes of values, its header " +
                "names " + std::to_string(end));
  if (held > std::uint64_t(end))
    throw error("has " + std::to_string(held - std::uint64_t(end)) +
                " bytes behind its last tensor: it is damaged");
}

}  // namespace plan
