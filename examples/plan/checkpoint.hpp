// Files of Python's torch.save and of LibTorch's torch::save: a zip archive with a pickle that
// tells what the tensors are, and their values as one record per storage. Only the pickle is read.
#pragma once

#include "examples/plan/model.hpp"
#include "examples/plan/pickle.hpp"
#include "examples/plan/zip.hpp"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace plan {

class checkpoint {
 public:
  explicit checkpoint(file& f) : archive_(f), pickle_(find_pickle()) {}

  /// The parameters of what the file holds: a state dict, one in a dict beside other things, or a
  /// module. Those of a module that need no gradient are left out.
  void read(model& m) {
    const id root = pickle_.root();
    if (pickle_.is(root, kind::object)) {
      if (tensor_at(root)) throw error("holds a single tensor, not a model");
      read_module("", root, m);
    } else if (pickle_.is(root, kind::dict)) {
      read_dict(root, m);
    } else {
      throw error("holds neither a state dict nor a module");
    }
  }

 private:
  using kind = pickle::kind;
  using id = pickle::id;

  struct stored {
    const number_type* type;
    std::vector<std::int64_t> sizes;
    std::string storage;
    std::int64_t offset;
    bool needs_gradient;
  };

  /// Files of one folder, whose name is any.
  pickle find_pickle() {
    constexpr std::uint64_t longest = 64 << 20;
    const std::string end = "/data.pkl";
    for (const auto& [name, record] : archive_.records()) {
      if (name.size() <= end.size() || name.find('/') != name.size() - end.size() ||
          name.compare(name.size() - end.size(), end.size(), end) != 0)
        continue;
      if (record.size > longest) throw error("its pickle is too long to hold only a model");
      folder_ = name.substr(0, name.size() - end.size());
      bytes_ = archive_.read(record, "the pickle");
      return pickle(bytes_);
    }
    throw error("is a zip archive, but none of torch.save's: it has no data.pkl");
  }

  // ---- what is a model

  void read_dict(id root, model& m) {
    if (has_tensors(root)) return read_state_dict(root, m);
    for (const char* usual : {"state_dict", "model_state_dict", "model", "module"}) {
      const auto inner = pickle_.entry(root, usual);
      if (inner && has_tensors(*inner)) return read_state_dict(*inner, m);
    }
    std::string keys;
    pickle_.each_entry(root, [&](const std::string& key, id) {
      if (keys.size() < 100) keys += (keys.empty() ? "" : ", ") + printable(key);
    });
    throw error("holds a dict with the keys '" + printable(keys) +
                "': no state dict of tensors, nor one under state_dict, model_state_dict, model or "
                "module");
  }
  bool has_tensors(id dict) const {
    bool found = false;
    pickle_.each_entry(dict, [&](const std::string&, id value) {
      found = found || (pickle_.is(value, kind::object) && is_tensor(function_of(value)));
    });
    return found;
  }
  void read_state_dict(id dict, model& m) {
    pickle_.each_entry(dict, [&](const std::string& name, id value) {
      if (!pickle_.is(value, kind::object)) return m.leave_out();
      const auto t = tensor_named(name, value);
      if (!t)
        throw error(in_quotes(name) + " is a " + printable(function_of(value)) +
                    ", not a plain tensor");
      add(name, *t, m);
    });
  }

  // A module of Python keeps its parameters and modules in dicts, one of LibTorch as attributes.
  // Each dict is read once, however many names it has.
  void read_module(const std::string& prefix, id module, model& m) {
    constexpr std::size_t deepest = 1000;  // letters
    const auto& items = pickle_.at(module).items;
    if (items.size() < 3 || !pickle_.is(items[2], kind::dict))
      throw error("holds a " + printable(function_of(module)) +
                  ", which is neither a state dict nor a module");
    if (!visited_.insert(items[2]).second) return;
    const auto read_attribute = [&](const std::string& name, id value) {
      if (!pickle_.is(value, kind::object)) return;
      if (prefix.size() + name.size() > deepest) throw error("its modules are nested too deeply");
      if (const auto t = tensor_named(prefix + name, value)) {
        t->needs_gradient ? add(prefix + name, *t, m) : m.leave_out();
      } else if (pickle_.at(value).items.size() == 3) {
        read_module(prefix + name + '.', value, m);
      }
    };
    const auto parameters = pickle_.entry(items[2], "_parameters");
    const auto modules = pickle_.entry(items[2], "_modules");
    if (!parameters || !modules) return pickle_.each_entry(items[2], read_attribute);
    for (const id dict : {*parameters, *modules})
      if (visited_.insert(dict).second) pickle_.each_entry(dict, read_attribute);
  }

  void add(const std::string& name, const stored& t, model& m) {
    if (count_elements(t.sizes) && !seen_.insert({t.storage, t.offset, t.sizes}).second)
      return m.add_tied();
    m.add(name, t.sizes, *t.type);
  }

  // ---- what is a tensor

  std::string function_of(id object) const {
    const id function = pickle_.at(object).items[0];
    return pickle_.is(function, kind::global) ? pickle_.at(function).text : "nameless object";
  }
  static bool is_tensor(const std::string& function) {
    for (const char* known : {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
                              "_rebuild_parameter_with_state"})
      if (function == std::string("torch._utils.") + known) return true;
    return false;
  }
  std::optional<stored> tensor_named(const std::string& name, id object) {
    try {
      return tensor_at(object);
    } catch (const error& e) {
      throw error(in_quotes(name) + ' ' + e.what());
    }
  }
  /// Nothing where the object is no tensor. Messages go on where its name ends.
  std::optional<stored> tensor_at(id object) {
    std::string function = function_of(object);
    if (!is_tensor(function)) return std::nullopt;
    bool parameter = false, needs_gradient = false;
    if (function.find("_rebuild_parameter") != std::string::npos) {
      parameter = true;  // of a tensor, whether it needs a gradient, hooks
      needs_gradient = integer(argument(object, 1));
      object = argument(object, 0);
      if (pickle_.is(object, kind::object)) function = function_of(object);
      if (!pickle_.is(object, kind::object) || !is_tensor(function)) damaged();
    }
    stored t{};
    // Of a storage, the offset in it, sizes, strides, whether it needs a gradient, hooks; v3: a
    // type.
    const id persistent = argument(object, 0);
    if (!pickle_.is(persistent, kind::persistent)) damaged();
    const auto& place = pickle_.at(pickle_.at(persistent).items[0]).items;
    if (place.size() < 5 || !pickle_.is(place[2], kind::text)) damaged();
    const std::string& type = short_text(place[1]);
    t.type = find_type(&number_type::storage, type.substr(type.find('.') + 1));
    if (function == "torch._utils._rebuild_tensor_v3") {
      const std::string& own = short_text(argument(object, 6));
      t.type = find_type(&number_type::name, own.substr(own.find('.') + 1));
    }
    if (!t.type || t.type->bits % 8)
      throw error("has numbers of a type that is not known: " + printable(type));
    t.storage = short_text(place[2]);
    t.offset = integer(argument(object, 1));
    t.sizes = integers(argument(object, 2));
    t.needs_gradient = parameter ? needs_gradient : integer(argument(object, 4)) != 0;
    check_extent(t, integers(argument(object, 3)));
    return t;
  }
  /// @throws where elements lie outside of the storage, or the archive lacks it.
  void check_extent(const stored& t, const std::vector<std::int64_t>& strides) const {
    const auto record = archive_.records().find(folder_ + "/data/" + t.storage);
    if (record == archive_.records().end()) throw error("has no record of its values");
    if (strides.size() != t.sizes.size() || t.offset < 0) damaged();
    if (count_elements(t.sizes) == 0) return;
    std::int64_t last = t.offset;
    for (std::size_t d = 0; d < strides.size(); ++d) {
      std::int64_t step = 0;
      if (strides[d] < 0 || __builtin_mul_overflow(strides[d], t.sizes[d] - 1, &step) ||
          __builtin_add_overflow(last, step, &last))
        damaged();
    }
    if (std::uint64_t(last) >= record->second.size / (std::uint64_t(t.type->bits) / 8))
      throw error("reaches beyond its storage: the file is damaged");
  }

  id argument(id object, std::size_t k) const {
    const auto& arguments = pickle_.at(pickle_.at(object).items[1]).items;
    if (k >= arguments.size()) damaged();
    return arguments[k];
  }
  /// A name that many tensors may share: a long one would cost far more than its bytes.
  const std::string& short_text(id i) const {
    if (pickle_.at(i).text.size() > 100) damaged();
    return pickle_.at(i).text;
  }
  std::int64_t integer(id i) const {
    if (!pickle_.is(i, kind::integer)) damaged();
    return pickle_.at(i).number;
  }
  std::vector<std::int64_t> integers(id list) const {
    if (!pickle_.is(list, kind::list)) damaged();
    std::vector<std::int64_t> result;
    for (const id i : pickle_.at(list).items) result.push_back(integer(i));
    return result;
  }
  [[noreturn]] static void damaged() { throw error("is no tensor that can be read"); }

  zip archive_;
  std::string folder_, bytes_;
  pickle pickle_;
  std::unordered_set<id> visited_;
  std::set<std::tuple<std::string, std::int64_t, std::vector<std::int64_t>>> seen_;
};

}  // namespace plan
