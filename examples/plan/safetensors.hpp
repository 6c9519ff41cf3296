// The header of a safetensors file: its length in 8 bytes, then JSON that names type, sizes and
// place of every tensor. Their values, the rest of the file, are not read.
#pragma once

#include "examples/plan/file.hpp"
#include "examples/plan/model.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace plan {

namespace detail {

using json = nlohmann::json;

/// f(name, JSON) for every entry of a header. Each is dropped before the next: nlohmann's parser
/// with a callback looks at all that it keeps whenever an object ends.
template <class F>
void each_entry(const std::string& header, F f) {
  using event = json::parse_event_t;
  constexpr std::size_t longest_list = 1000;  // far more than the dimensions of any tensor
  std::array<std::set<std::string>, 2> keys;  // of the header, of the entry that is open
  std::string name;
  std::size_t numbers = 0;  // of the list that is open
  const auto handle = [&](int depth, event e, const json& parsed) {
    const auto level = std::size_t(depth);
    if (level == 0 && e != event::object_start && e != event::object_end)
      throw error("the header is no JSON object");
    if (e == event::array_start) numbers = 0;
    if ((e == event::object_start && level > 1) || (e == event::array_start && level > 2) ||
        (level > 2 && ++numbers > longest_list))
      throw error("the header has values that no header has");
    if (e == event::object_start) keys[level].clear();
    if (e == event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys[level - 1].insert(key).second) throw error(in_quotes(key) + " is there twice");
      if (level == 1) name = key;
    }
    const bool ends = e == event::object_end || e == event::array_end || e == event::value;
    if (level != 1 || !ends) return true;
    f(name, parsed);
    return false;
  };
  if (header.find('\0') != header.npos)  // the parser would stop there
    throw error("the header is not JSON: it has a byte of zero");
  try {
    [[maybe_unused]] const json empty = json::parse(header, handle);
  } catch (const json::exception& e) {
    const std::string what = e.what();  // begins with the exception's name in brackets
    throw error("the header is not JSON: " + printable(what.substr(what.find(']') + 2), 200));
  }
}

inline std::int64_t whole_number(const json& j, const char* what) {
  if (!j.is_number_integer()) throw error(std::string(what) + " that is no whole number");
  // Beyond the largest, nlohmann keeps an unsigned number, which the conversion would wrap.
  if (j.is_number_unsigned() && j.get<std::uint64_t>() > std::uint64_t(INT64_MAX))
    throw error(std::string(what) + " beyond 2^63 - 1");
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

  std::vector<detail::entry> entries;
  const auto add = [&](const std::string& name, const detail::json& value) {
    if (name == "__metadata__") return;
    try {
      entries.push_back(detail::read_entry(value));
      entries.back().name = name;
    } catch (const error& e) {
      throw error(in_quotes(name) + ' ' + e.what());
    }
    m.add(name, entries.back().sizes, *entries.back().type);
  };
  detail::each_entry(f.read(8, length, "the header"), add);

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
