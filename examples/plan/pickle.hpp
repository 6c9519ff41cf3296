// Python's pickle format as far as torch.save and LibTorch's torch::save write it: values are read,
// classes are only named and functions never called. (LibTorch's own reader knows no OrderedDict,
// which is what a state dict is.)
#pragma once

#include "examples/plan/file.hpp"
#include "examples/plan/model.hpp"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace plan {

/// All values of a pickle. They refer to each other by their position, so that neither a cycle nor
/// a deep nesting needs care.
class pickle {
 public:
  using id = std::uint32_t;
  enum class kind {
    other,    ///< None, a real number, bytes, an integer of more than 64 bits
    integer,  ///< a bool as well
    text,
    global,      ///< `text` names a class or function, as "module.name"
    list,        ///< a tuple or a set as well
    dict,        ///< keys and values by turns
    object,      ///< what the class or function items[0] made of the list items[1]; its state, if
                 ///< there is one, is items[2]
    persistent,  ///< named by the value items[0]; a storage, in our files
  };
  struct value {
    pickle::kind kind;
    std::int64_t number = 0;
    std::string text = "";
    std::vector<id> items = {};
  };

  /// @throws where `bytes` are no pickle.
  explicit pickle(std::string_view bytes) : rest_(bytes) {
    while (step()) {
    }
  }

  id root() const { return root_; }
  const value& at(id i) const { return values_[i]; }
  bool is(id i, kind k) const { return values_[i].kind == k; }

  /// f(key, value) for the text keys of a dict; for nothing else.
  template <class F>
  void each_entry(id dict, F f) const {
    const value& d = at(dict);
    if (d.kind != kind::dict) return;
    for (std::size_t k = 0; k + 1 < d.items.size(); k += 2)
      if (is(d.items[k], kind::text)) f(at(d.items[k]).text, d.items[k + 1]);
  }
  std::optional<id> entry(id dict, std::string_view key) const {
    std::optional<id> found;
    each_entry(dict, [&](const std::string& k, id value) {
      if (k == key) found = value;  // the last one, as in Python
    });
    return found;
  }

 private:
  static constexpr std::size_t most_values = 4'000'000, longest_name = 200;

  [[noreturn]] static void damaged(const std::string& what) {
    throw error("its pickle " + what + ": it is truncated or damaged");
  }

  // ---- bytes
  std::string_view take(std::uint64_t n) {
    if (n > rest_.size()) damaged("ends too early");
    const std::string_view bytes = rest_.substr(0, std::size_t(n));
    rest_.remove_prefix(std::size_t(n));
    return bytes;
  }
  template <class T>
  T number() {
    return little_endian<T>(take(sizeof(T)).data());
  }
  std::string_view line() {
    const std::size_t end = rest_.find('\n');
    if (end == std::string_view::npos) damaged("ends too early");
    const std::string_view result = take(end);
    take(1);
    return result;
  }

  // ---- the stack
  id make(kind k, std::int64_t n = 0, std::string_view text = {}, std::vector<id> items = {}) {
    if (values_.size() == most_values) throw error("its pickle has more than 4,000,000 values");
    values_.push_back({k, n, std::string(text), std::move(items)});
    return id(values_.size() - 1);
  }
  void push(id i) { stack_.push_back(i); }
  id top() const {
    if (stack_.empty()) damaged("takes from an empty stack");
    return stack_.back();
  }
  id pop() {
    const id i = top();
    stack_.pop_back();
    return i;
  }
  std::vector<id> pop_several(std::size_t n) {
    if (n > stack_.size()) damaged("takes from an empty stack");
    std::vector<id> result(stack_.end() - std::ptrdiff_t(n), stack_.end());
    stack_.resize(stack_.size() - n);
    return result;
  }
  std::vector<id> pop_to_mark() {
    if (marks_.empty() || marks_.back() > stack_.size()) damaged("has lost a mark");
    const std::size_t n = stack_.size() - marks_.back();
    marks_.pop_back();
    return pop_several(n);
  }
  void put(std::uint64_t at) { memo_[at] = top(); }
  void get(std::uint64_t at) {
    const auto it = memo_.find(at);
    if (it == memo_.end()) damaged("refers to a value that it lacks");
    push(it->second);
  }

  // ---- what the operations mean
  void push_integer(std::string_view bytes) {  // two's complement of any width
    if (bytes.size() > 8) return push(make(kind::other));
    std::uint64_t n = bytes.empty() || std::uint8_t(bytes.back()) < 0x80 ? 0 : ~std::uint64_t(0);
    for (std::size_t i = bytes.size(); i-- > 0;) n = n << 8 | std::uint8_t(bytes[i]);
    push(make(kind::integer, std::int64_t(n)));
  }
  void push_global(std::string_view module, std::string_view name) {
    // Many values may share one text, so that a long one would cost far more than its bytes.
    if (module.size() + name.size() > longest_name) damaged("has a long name");
    push(make(kind::global, 0, std::string(module) + '.' + std::string(name)));
  }
  /// What `items` say goes into the container below them; where that is an object, it is lost.
  void extend(kind container, const std::vector<id>& items) {
    value& v = values_[top()];
    if (v.kind == container) v.items.insert(v.items.end(), items.begin(), items.end());
  }
  void call() {
    const id arguments = pop(), function = pop();
    const bool dict = is(function, kind::global) &&
                      at(function).text == "collections.OrderedDict" && at(arguments).items.empty();
    push(dict ? make(kind::dict) : make(kind::object, 0, {}, {function, arguments}));
  }
  void set_state() {
    const id state = pop();
    value& v = values_[top()];
    if (v.kind != kind::object) return;  // an OrderedDict's are its attributes: _metadata
    v.items.resize(2);
    v.items.push_back(state);
  }

  /// Whether there is more to do.
  bool step() {
    const auto operation = number<std::uint8_t>();
    switch (operation) {
      case '.': root_ = pop(); return false;
      case 0x80: {  // PROTO
        const auto version = number<std::uint8_t>();
        if (version < 2 || version > 5)
          damaged("has the unknown version " + std::to_string(version));
        break;
      }
      case 0x95: take(8); break;  // FRAME
      case '(': marks_.push_back(stack_.size()); break;
      case '0': pop(); break;
      case '1': pop_to_mark(); break;
      case '2': push(top()); break;

      case 'N': push(make(kind::other)); break;
      case 0x88: push(make(kind::integer, 1)); break;
      case 0x89: push(make(kind::integer, 0)); break;
      case 'K': push(make(kind::integer, number<std::uint8_t>())); break;
      case 'M': push(make(kind::integer, number<std::uint16_t>())); break;
      case 'J': push_integer(take(4)); break;
      case 0x8a: push_integer(take(number<std::uint8_t>())); break;
      case 0x8b: push_integer(take(number<std::uint32_t>())); break;
      case 'G': take(8), push(make(kind::other)); break;

      case 'X': push(make(kind::text, 0, take(number<std::uint32_t>()))); break;
      case 0x8c: push(make(kind::text, 0, take(number<std::uint8_t>()))); break;
      case 0x8d: push(make(kind::text, 0, take(number<std::uint64_t>()))); break;
      case 'T':  // BINSTRING, BINBYTES
      case 'B': take(number<std::uint32_t>()), push(make(kind::other)); break;
      case 'U':  // SHORT_BINSTRING, SHORT_BINBYTES
      case 'C': take(number<std::uint8_t>()), push(make(kind::other)); break;
      case 0x8e:  // BINBYTES8, BYTEARRAY8
      case 0x96: take(number<std::uint64_t>()), push(make(kind::other)); break;

      case ')':
      case ']':
      case 0x8f: push(make(kind::list)); break;
      case 0x85: push(make(kind::list, 0, {}, pop_several(1))); break;
      case 0x86: push(make(kind::list, 0, {}, pop_several(2))); break;
      case 0x87: push(make(kind::list, 0, {}, pop_several(3))); break;
      case 't':
      case 'l':
      case 0x91: push(make(kind::list, 0, {}, pop_to_mark())); break;
      case 'a': extend(kind::list, pop_several(1)); break;
      case 'e':
      case 0x90: extend(kind::list, pop_to_mark()); break;
      case '}': push(make(kind::dict)); break;
      case 'd': push(make(kind::dict, 0, {}, pop_to_mark())); break;
      case 's': extend(kind::dict, pop_several(2)); break;
      case 'u': extend(kind::dict, pop_to_mark()); break;

      case 'c': {
        const std::string_view module = line();
        push_global(module, line());
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const id name = pop(), module = pop();
        push_global(at(module).text, at(name).text);
        break;
      }
      case 0x92: pop(); [[fallthrough]];  // NEWOBJ_EX: the arguments' names
      case 'R':
      case 0x81: call(); break;
      case 'b': set_state(); break;
      case 'Q': push(make(kind::persistent, 0, {}, {pop()})); break;

      case 'q': put(number<std::uint8_t>()); break;
      case 'r': put(number<std::uint32_t>()); break;
      case 0x94: put(memo_.size()); break;
      case 'h': get(number<std::uint8_t>()); break;
      case 'j': get(number<std::uint32_t>()); break;
      default: damaged("has the unknown operation " + std::to_string(operation));
    }
    return true;
  }

  std::string_view rest_;
  std::deque<value> values_;  // grows without a copy of all
  std::vector<id> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, id> memo_;
  id root_ = 0;
};

}  // namespace plan
