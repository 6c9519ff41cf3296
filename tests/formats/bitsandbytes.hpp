// bitsandbytes' rules of its 8-bit state, restated in plain code of one number at a time, and its
// code books and results as they were recorded (tests/data/golden).
#pragma once

#include "tests/support/golden.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace bitsandbytes {

using book = std::vector<float>;

inline std::string file(const std::string& name) {
  return golden::folder(LEANOPT_TEST_DATA "/golden") + "/" + name + ".txt";
}

inline std::vector<float> to_floats(const std::vector<double>& x) { return {x.begin(), x.end()}; }

/// A recorded map: bnb.signed, bnb.unsigned, ao.signed8 or ao.unsigned8.
inline book recorded_book(const std::string& name) {
  static const auto cases = golden::read_file(file("codebooks"));
  const golden::tensor_record* found = golden::find(cases.at(0).tensors, "codebook", name);
  if (found == nullptr) throw std::invalid_argument("no code book " + name);
  return to_floats(found->values);
}
inline const book& book_of(bool is_signed) {
  static const book with_sign = recorded_book("bnb.signed"),
                    without = recorded_book("bnb.unsigned");
  return is_signed ? with_sign : without;
}

/// The float half-way between codes k and k + 1.
inline float midpoint(const book& b, int k) {
  return (b[std::size_t(k)] + b[std::size_t(k) + 1]) * 0.5f;
}

/// The nearest code, of two that are equally near the even one: what the GPU's search finds.
inline int nearest_code(const book& b, float scaled) {
  int k = 0;
  while (k < 255 && midpoint(b, k) < scaled) ++k;
  if (k < 255 && midpoint(b, k) == scaled && k % 2 == 1) ++k;
  return k;
}

/// The code of a moment in the GPU's step kernels, which keep the sign of what is not zero: where
/// the nearest code's is another, its neighbour is taken. (They take -0 for negative, we do not.)
inline int step_code(const book& b, float scaled) {
  const int k = nearest_code(b, scaled);
  return scaled < 0 && !std::signbit(b[std::size_t(k)]) ? k - 1 : k;
}

/// What the CPU's quantizer makes of a scaled number: one of 65536 bins.
inline int bin_of(float scaled) {
  const float clamped = std::min(1.0f, std::max(-1.0f, scaled));
  return int((clamped + 1) * 0.5f * 65535 + 0.5f);
}
/// The code that all of a bin have: that nearest to its centre, of two equally near the lower one,
/// in single precision.
inline int code_of_bin(const book& b, int bin) {
  const float centre = -1 + 2 * float(bin) / 65535;
  int best = 0;
  for (int k = 1; k < 256; ++k)
    if (std::abs(b[std::size_t(k)] - centre) < std::abs(b[std::size_t(best)] - centre)) best = k;
  return best;
}

/// Both rules for many numbers of one book.
class coder {
 public:
  explicit coder(bool is_signed) : book_(book_of(is_signed)) {
    for (int j = 0; j < 65536; ++j) bins_.push_back(code_of_bin(book_, j));
  }
  static const coder& of(bool is_signed) {
    static const coder with_sign(true), without(false);
    return is_signed ? with_sign : without;
  }
  const book& values() const { return book_; }
  int binned(float scaled) const { return bins_[std::size_t(bin_of(scaled))]; }

 private:
  const book& book_;
  std::vector<int> bins_;
};

}  // namespace bitsandbytes
