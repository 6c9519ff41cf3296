// Models that need no file: their shapes follow from a few public figures.
#pragma once

#include "examples/plan/file.hpp"
#include "examples/plan/list.hpp"
#include "examples/plan/model.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace plan {

inline const std::vector<std::string> built_in_names = {"distilbert", "gpt2", "llama-7b",
                                                        "llama-70b"};

namespace detail {

// The head is tied to the word embedding, and so no parameter of its own.
inline void add_gpt2(model& m) {
  constexpr std::int64_t width = 768, layers = 12, words = 50257, positions = 1024;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> sizes) {
    m.add(name, std::move(sizes), number_types[0]);
  };
  const auto add_affine = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    add(name + ".weight", {in, out});
    add(name + ".bias", {out});
  };
  const auto add_norm = [&](const std::string& name) {
    add(name + ".weight", {width});
    add(name + ".bias", {width});
  };
  add("wte.weight", {words, width});
  add("wpe.weight", {positions, width});
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string layer = "h." + std::to_string(i);
    add_norm(layer + ".ln_1");
    add_affine(layer + ".attn.c_attn", width, 3 * width);
    add_affine(layer + ".attn.c_proj", width, width);
    add_norm(layer + ".ln_2");
    add_affine(layer + ".mlp.c_fc", width, 4 * width);
    add_affine(layer + ".mlp.c_proj", 4 * width, width);
  }
  add_norm("ln_f");
}

struct llama {
  std::int64_t layers, width, keys, hidden;  ///< keys: heads of keys and values, all their columns
};
inline void add_llama(const llama& l, model& m) {
  constexpr std::int64_t words = 32000;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> sizes) {
    m.add(name + ".weight", std::move(sizes), number_types[0]);
  };
  add("model.embed_tokens", {words, l.width});
  for (std::int64_t i = 0; i < l.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i);
    add(layer + ".self_attn.q_proj", {l.width, l.width});
    add(layer + ".self_attn.k_proj", {l.keys, l.width});
    add(layer + ".self_attn.v_proj", {l.keys, l.width});
    add(layer + ".self_attn.o_proj", {l.width, l.width});
    add(layer + ".mlp.gate_proj", {l.hidden, l.width});
    add(layer + ".mlp.up_proj", {l.hidden, l.width});
    add(layer + ".mlp.down_proj", {l.width, l.hidden});
    add(layer + ".input_layernorm", {l.width});
    add(layer + ".post_attention_layernorm", {l.width});
  }
  add("model.norm", {l.width});
  add("lm_head", {words, l.width});
}

}  // namespace detail

/// Whether `name` is one of built_in_names. `data` is the folder of distilbert_shapes.txt.
inline bool add_built_in(const std::string& name, const std::string& data, model& m) {
  if (name == "distilbert") {
    const std::string path = data + "/distilbert_shapes.txt";
    if (!std::filesystem::exists(path))
      throw error("needs the list " + path + ", which is missing");
    file list(path);
    read_list(list, m);
  } else if (name == "gpt2") {
    detail::add_gpt2(m);
  } else if (name == "llama-7b") {
    detail::add_llama({32, 4096, 4096, 11008}, m);
  } else if (name == "llama-70b") {
    detail::add_llama({80, 8192, 1024, 28672}, m);
  } else {
    return false;
  }
  return true;
}

}  // namespace plan
