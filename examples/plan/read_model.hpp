// A model from a built-in name or from its files, whose format their first bytes tell.
#pragma once

#include "examples/plan/built_in.hpp"
#include "examples/plan/checkpoint.hpp"
#include "examples/plan/file.hpp"
#include "examples/plan/list.hpp"
#include "examples/plan/model.hpp"
#include "examples/plan/safetensors.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

namespace plan {

namespace detail {

inline void read_file(const std::string& path, model& m) {
  file f(path);
  if (f.size() == 0) throw error("is empty");
  const std::string extension = std::filesystem::path(path).extension().string();
  const std::string start = f.read(0, std::min<std::uint64_t>(f.size(), 4096), "the file");
  const auto begins_with = [&](const std::string& s) { return start.rfind(s, 0) == 0; };
  const auto is_one_of = [&](std::initializer_list<const char*> list) {
    return std::find(list.begin(), list.end(), extension) != list.end();
  };
  if (extension == ".safetensors") return read_safetensors(f, m);
  if (begins_with("PK\x03\x04") || (is_one_of({".pt", ".pth"}) && !begins_with("\x80")))
    return checkpoint(f).read(m);
  if (begins_with("\x80"))
    throw error(
        "is a bare pickle, as PyTorch wrote them before 1.6: torch.save(torch.load(file), file) in "
        "a newer one makes it a file that can be read");
  if (start.size() > 8 && start[8] == '{') return read_safetensors(f, m);
  if (begins_with("{")) throw error("is JSON: of a model in shards, name the shards themselves");
  const bool text = std::all_of(start.begin(), start.end(), [](char c) {
    return static_cast<unsigned char>(c) >= ' ' || c == '\n' || c == '\r' || c == '\t';
  });
  if (!text)
    throw error("is neither safetensors, nor a file of torch.save, nor a list of tensors as text");
  read_list(f, m);
}

}  // namespace detail

/// @throws with a message that names the file. Several files are the shards of one model.
inline void read_model(const std::vector<std::string>& names, const std::string& data, model& m) {
  for (const std::string& name : names) {
    try {
      if (!add_built_in(name, data, m)) detail::read_file(name, m);
    } catch (const error& e) {
      throw error(printable(name, 1000) + ": " + e.what());
    }
  }
  if (m.elements() == 0)
    throw error(printable(names.back(), 1000) + ": has no parameters of real numbers that train");
}

}  // namespace plan
