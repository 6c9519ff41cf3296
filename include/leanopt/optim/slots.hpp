// How slots are kept as tensors: their sizes and types, the order of their strides, and the way from
// full precision to codes and back.
#pragma once

#include <leanopt/engine/dispatch.hpp>
#include <leanopt/optim/state.hpp>

#include <string>
#include <vector>

namespace leanopt::detail {

using torch::Tensor;

/// The type of a parameter's state in full precision.
inline at::ScalarType full_type(const Tensor& p) {
  switch (p.scalar_type()) {
    case at::kDouble:
    case at::kComplexDouble:
    case at::kComplexFloat: return p.scalar_type();
    default: return at::kFloat;
  }
}

/// The sizes of a slot of a parameter.
inline std::vector<std::int64_t> slot_sizes(const slot& s, const Tensor& p) {
  auto sizes = p.sizes().vec();
  if (s.shape == extent::row) sizes.end()[-1] = 1;
  if (s.shape == extent::column) sizes.end()[-2] = 1;
  if (s.shape == extent::one) sizes.clear();
  return sizes;
}

/// A slot with a value per element in full precision: zeros where there is none yet, else brought to
/// the type, device and order of strides in which the engine works. The order is the parameter's, or
/// any dense one where the parameter has gaps.
inline Tensor settled(const Tensor& t, const Tensor& p) {
  const auto type = full_type(p);
  if (!t.defined()) return at::zeros_like(p, p.options().dtype(type));
  const bool ordered =
      p.is_non_overlapping_and_dense() ? t.strides() == p.strides() : t.is_non_overlapping_and_dense();
  if (t.scalar_type() == type && t.device() == p.device() && ordered && !t.is_inference()) return t;
  return at::empty_like(p, p.options().dtype(type)).copy_(t);
}

inline std::string header_of(const char* name) { return std::string(name) + ".header"; }
inline bool is_compressed(const ParamState& s, const char* name) {
  const Tensor t = s.tensor(name);
  return t.defined() && t.scalar_type() == at::kByte;
}

/// The slots that a format compresses: those of the rule's formula, with a value per element.
template <class Formula, class Format>
struct codes {
  static constexpr int S = Formula::slot_count;
  static constexpr std::int64_t blocks_of(std::int64_t elements) {
    return (elements + Format::block - 1) / Format::block;
  }

  /// Fresh state is all zeros.
  static void make(ParamState& s, const Tensor& p) {
    for (const slot& one : slots()) {
      s.tensor(one.name, at::zeros(p.sizes(), p.options().dtype(at::kByte)));
      s.tensor(header_of(one.name),
               at::zeros({blocks_of(p.numel())}, p.options().dtype(at::kShort)));
    }
  }

  /// The moments, float32 and in logical order.
  static std::vector<Tensor> decode(const ParamState& s, const Tensor& p) {
    std::vector<Tensor> result;
    float* moments[S];
    for (int k = 0; k < S; ++k) {
      result.push_back(at::empty(p.sizes(), p.options().dtype(at::kFloat)));
      moments[k] = result[k].template data_ptr<float>();
    }
    cpu::decode<Formula, Format>(engine::level_from_environment(), whole(s, p, 0), moments);
    return result;
  }
  static void encode(ParamState& s, const Tensor& p, const std::vector<Tensor>& moments,
                     std::uint64_t key) {
    make(s, p);
    std::vector<Tensor> ordered;
    const float* values[S];
    for (int k = 0; k < S; ++k) {
      ordered.push_back(moments[k].to(at::kFloat).contiguous());
      values[k] = ordered[k].template data_ptr<float>();
    }
    cpu::encode<Formula, Format>(engine::level_from_environment(), whole(s, p, key), values);
  }

  static std::vector<slot> slots() { return {Formula::slots, Formula::slots + S}; }

 private:
  static auto whole(const ParamState& s, const Tensor& p, std::uint64_t key) {
    cpu::piece<float, Format, S> t{nullptr, nullptr, {}, {}, std::size_t(p.numel()), 0, key};
    for (int k = 0; k < S; ++k) {
      const char* name = Formula::slots[k].name;
      t.slots[k] = s.tensor(name).template data_ptr<std::uint8_t>();
      t.headers[k] = reinterpret_cast<std::uint16_t*>(
          s.tensor(header_of(name)).template data_ptr<std::int16_t>());
    }
    return t;
  }
};

}  // namespace leanopt::detail
