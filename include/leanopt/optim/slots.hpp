// How slots are kept as tensors: their sizes and types, the order of their strides, and the way
// from full precision to codes and back.
#pragma once

#include <leanopt/engine/dispatch.hpp>
#include <leanopt/optim/state.hpp>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

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

/// The sizes of a slot of a parameter that it fits.
inline std::vector<std::int64_t> slot_sizes(const slot_spec& s, const Tensor& p) {
  auto sizes = p.sizes().vec();
  if (s.shape == extent::row) sizes.end()[-1] = 1;
  if (s.shape == extent::column) sizes.end()[-2] = 1;
  if (s.shape == extent::one) sizes.clear();
  return sizes;
}

/// A slot with a value per element in full precision: zeros where there is none yet, else brought
/// to the type, device and order of strides in which the engine works. The order is the
/// parameter's, or any dense one where the parameter has gaps.
inline Tensor settled(const Tensor& t, const Tensor& p) {
  const auto type = full_type(p);
  if (!t.defined()) return at::zeros_like(p, p.options().dtype(type));
  const bool ordered = p.is_non_overlapping_and_dense() ? t.strides() == p.strides()
                                                        : t.is_non_overlapping_and_dense();
  if (t.scalar_type() == type && t.device() == p.device() && ordered && !t.is_inference()) return t;
  return at::empty_like(p, p.options().dtype(type)).copy_(t);
}

inline std::string header_of(const char* name) { return std::string(name) + ".header"; }
inline bool is_compressed(const ParamState& s, const char* name) {
  const Tensor t = s.tensor(name);
  return t.defined() && t.scalar_type() == at::kByte;
}

/// How a format keeps the slots of a rule's formula, which share its blocks. All functions take the
/// whole state of a parameter of `elements` elements.
struct codec {
  std::vector<slot_spec> slots;
  std::int64_t block = 0;  ///< 0: full precision, nothing is compressed
  void (*encode)(const codec&, const ParamState&, std::int64_t elements, std::uint64_t key,
                 const std::vector<Tensor>& moments) = nullptr;
  void (*decode)(const codec&, const ParamState&, std::int64_t elements,
                 const std::vector<Tensor>& moments) = nullptr;

  std::int64_t blocks_of(std::int64_t elements) const { return (elements + block - 1) / block; }

  template <class Formula, class Format>
  static codec of() {
    codec c;
    if constexpr (Format::compressed) {
      c.slots = {Formula::slots, Formula::slots + Formula::slot_count};
      c.block = Format::block;
      c.encode = [](const codec& self, const ParamState& s, std::int64_t elements,
                    std::uint64_t key, const std::vector<Tensor>& moments) {
        const float* values[Formula::slot_count];
        for (std::size_t k = 0; k < moments.size(); ++k)
          values[k] = static_cast<const float*>(moments[k].data_ptr());
        cpu::encode<Formula, Format>(engine::level_from_environment(),
                                     self.whole<Formula, Format>(s, elements, key), values);
      };
      c.decode = [](const codec& self, const ParamState& s, std::int64_t elements,
                    const std::vector<Tensor>& moments) {
        float* values[Formula::slot_count];
        for (std::size_t k = 0; k < moments.size(); ++k)
          values[k] = static_cast<float*>(moments[k].data_ptr());
        cpu::decode<Formula, Format>(engine::level_from_environment(),
                                     self.whole<Formula, Format>(s, elements, 0), values);
      };
    }
    return c;
  }

 private:
  template <class Formula, class Format>
  auto whole(const ParamState& s, std::int64_t elements, std::uint64_t key) const {
    cpu::piece<float, Format, Formula::slot_count> t{
        nullptr, nullptr, {}, {}, std::size_t(elements), 0, key};
    for (std::size_t k = 0; k < slots.size(); ++k) {
      t.slots[k] = static_cast<std::uint8_t*>(s.tensor(slots[k].name).data_ptr());
      t.headers[k] = static_cast<std::uint16_t*>(s.tensor(header_of(slots[k].name)).data_ptr());
    }
    return t;
  }
};

/// Codes and headers of a fresh state: all zeros.
inline void make_codes(const codec& c, ParamState& s, const Tensor& p) {
  for (const slot_spec& one : c.slots) {
    s.tensor(one.name, at::zeros(p.sizes(), p.options().dtype(at::kByte)));
    s.tensor(header_of(one.name),
             at::zeros({c.blocks_of(p.numel())}, p.options().dtype(at::kShort)));
  }
}
/// The moments behind the codes, float32 and in logical order; empty where nothing is compressed.
inline std::vector<Tensor> decode(const codec& c, const ParamState& s, const Tensor& p) {
  std::vector<Tensor> moments;
  if (c.slots.empty() || !is_compressed(s, c.slots[0].name)) return moments;
  for (std::size_t k = 0; k < c.slots.size(); ++k)
    moments.push_back(at::empty(p.sizes(), p.options().dtype(at::kFloat)));
  c.decode(c, s, p.numel(), moments);
  return moments;
}
inline void encode(const codec& c, ParamState& s, const Tensor& p, std::uint64_t key,
                   std::vector<Tensor> moments) {
  make_codes(c, s, p);
  for (Tensor& m : moments) m = m.to(at::kFloat).add(0.0f).contiguous();  // -0 is no moment
  c.encode(c, s, p.numel(), key, moments);
}

}  // namespace leanopt::detail
