// The tensors of a model that is to be trained: names, sizes and number types, without their
// values. What a file says is checked here, whatever its format.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace plan {

/// What is wrong with an input. The reader of the file puts its name before it.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Text of a file as part of a message: one line, not too long, nothing that moves a cursor.
inline std::string printable(std::string_view text, std::size_t longest = 100) {
  std::string result;
  for (const char c : text.substr(0, longest))
    result += c >= ' ' && c <= '~' ? c : '?';  // a cut UTF-8 sequence would be none
  if (text.size() > longest) result += "...";
  return result;
}
inline std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

/// A type of number by the names that lists and Python, safetensors, and torch.save give it.
struct number_type {
  std::string_view name, safetensors, storage;
  int bits;
  enum { real, integer, complex } kind;
};
inline constexpr std::array number_types = {
    number_type{"float32", "F32", "FloatStorage", 32, number_type::real},
    number_type{"float64", "F64", "DoubleStorage", 64, number_type::real},
    number_type{"float16", "F16", "HalfStorage", 16, number_type::real},
    number_type{"bfloat16", "BF16", "BFloat16Storage", 16, number_type::real},
    number_type{"float8_e4m3fn", "F8_E4M3", "", 8, number_type::real},
    number_type{"float8_e5m2", "F8_E5M2", "", 8, number_type::real},
    number_type{"float8_e4m3fnuz", "F8_E4M3FNUZ", "", 8, number_type::real},
    number_type{"float8_e5m2fnuz", "F8_E5M2FNUZ", "", 8, number_type::real},
    number_type{"float8_e8m0fnu", "F8_E8M0", "", 8, number_type::real},
    number_type{"float6_e2m3", "F6_E2M3", "", 6, number_type::real},
    number_type{"float6_e3m2", "F6_E3M2", "", 6, number_type::real},
    number_type{"float4_e2m1", "F4", "", 4, number_type::real},
    number_type{"bool", "BOOL", "BoolStorage", 8, number_type::integer},
    number_type{"uint8", "U8", "ByteStorage", 8, number_type::integer},
    number_type{"int8", "I8", "CharStorage", 8, number_type::integer},
    number_type{"uint16", "U16", "", 16, number_type::integer},
    number_type{"int16", "I16", "ShortStorage", 16, number_type::integer},
    number_type{"uint32", "U32", "", 32, number_type::integer},
    number_type{"int32", "I32", "IntStorage", 32, number_type::integer},
    number_type{"uint64", "U64", "", 64, number_type::integer},
    number_type{"int64", "I64", "LongStorage", 64, number_type::integer},
    number_type{"complex64", "C64", "ComplexFloatStorage", 64, number_type::complex},
    number_type{"complex128", "", "ComplexDoubleStorage", 128, number_type::complex},
};
/// Null where no type has the name.
inline const number_type* find_type(std::string_view number_type::*which, std::string_view name) {
  for (const number_type& t : number_types)
    if (!name.empty() && t.*which == name) return &t;
  return nullptr;
}

/// Far more than any model has, and few enough that no count of bytes overflows.
inline constexpr std::int64_t most_elements = 1'000'000'000'000'000;

/// @throws for sizes that no tensor has.
inline std::int64_t count_elements(const std::vector<std::int64_t>& sizes) {
  constexpr std::size_t most_dimensions = 64;
  if (sizes.size() > most_dimensions)
    throw error("has " + std::to_string(sizes.size()) + " dimensions");
  std::int64_t elements = 1;
  bool empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) throw error("has the negative size " + std::to_string(size));
    // Zeros are left out of the product, so that no other size gets past the bound behind one.
    if (size > most_elements / elements) throw error("has more than 10^15 elements");
    elements *= std::max<std::int64_t>(size, 1);
    empty = empty || size == 0;
  }
  return empty ? 0 : elements;
}

struct tensor {
  std::string name;
  std::vector<std::int64_t> sizes;
};

/// Takes the tensors of a model one by one, and leaves out those that are not trained.
class model {
 public:
  /// `skipped`: the ends of names of further tensors that are not trained.
  explicit model(std::vector<std::string> skipped = {}) : skipped_(std::move(skipped)) {}

  void add(const std::string& name, std::vector<std::int64_t> sizes, const number_type& type) {
    if (name.size() > 1000) throw error(in_quotes(name) + " is no name: it is too long");
    const std::int64_t elements = [&] {
      try {
        return count_elements(sizes);
      } catch (const error& e) {
        throw error(in_quotes(name) + ' ' + e.what());
      }
    }();
    if (!names_.insert(name).second) throw error(in_quotes(name) + " is there twice");
    if (type.kind == number_type::integer || is_buffer(name)) {
      ++left_out_;
      return;
    }
    if (type.kind == number_type::complex)
      throw error(in_quotes(name) + " has complex numbers, which are not planned for");
    if (elements_ > most_elements - elements) throw error("has more than 10^15 elements in all");
    elements_ += elements;
    tensors_.push_back({name, std::move(sizes)});
  }
  void leave_out() { ++left_out_; }  ///< one more that is not trained
  void add_tied() { ++tied_; }       ///< one that another name stands for as well

  const std::vector<tensor>& tensors() const { return tensors_; }
  std::int64_t elements() const { return elements_; }
  std::size_t left_out() const { return left_out_; }
  std::size_t tied() const { return tied_; }

 private:
  // A file does not tell a parameter from a buffer. BatchNorm's averages are the buffers of real
  // numbers that nearly all files have; --skip names others.
  bool is_buffer(std::string_view name) const {
    const auto ends_with = [&](std::string_view end) {
      return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
    };
    return ends_with("running_mean") || ends_with("running_var") ||
           std::any_of(skipped_.begin(), skipped_.end(), ends_with);
  }

  std::vector<std::string> skipped_;
  std::unordered_set<std::string> names_;
  std::vector<tensor> tensors_;
  std::int64_t elements_ = 0;
  std::size_t left_out_ = 0, tied_ = 0;
};

}  // namespace plan
