// How slots are kept as tensors: their sizes and types, the order of their strides, and the way
// from full precision to codes and back.
#pragma once

#include <leanopt/engine/quantize.hpp>
#include <leanopt/optim/state.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <string>
#include <vector>

namespace leanopt::detail {

using torch::Tensor;

/// The type of a parameter's state in full precision.
inline at::ScalarType full_type(at::ScalarType of_parameter) {
  switch (of_parameter) {
    case at::kDouble:
    case at::kComplexDouble:
    case at::kComplexFloat: return of_parameter;
    default: return at::kFloat;
  }
}
inline at::ScalarType full_type(const Tensor& p) { return full_type(p.scalar_type()); }

/// The sizes of a slot of a parameter that it fits.
inline std::vector<std::int64_t> slot_sizes(const slot_spec& s, at::IntArrayRef of_parameter) {
  auto sizes = of_parameter.vec();
  if (s.shape == extent::row) sizes.end()[-1] = 1;
  if (s.shape == extent::column) sizes.end()[-2] = 1;
  if (s.shape == extent::one) sizes.clear();
  return sizes;
}
inline std::vector<std::int64_t> slot_sizes(const slot_spec& s, const Tensor& p) {
  return slot_sizes(s, p.sizes());
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

inline constexpr const char* header_suffix = ".header";
inline std::string header_of(const char* name) { return std::string(name) + header_suffix; }
inline bool is_header(const std::string& name) {
  return name.find(header_suffix) != std::string::npos;
}
/// How a format keeps the slots of a rule's formula, which share its blocks. All functions take the
/// whole state of a parameter of `elements` elements.
struct codec {
  std::vector<slot_spec> slots;
  std::int64_t block = 0;  ///< 0: full precision, nothing is compressed
  at::ScalarType code_type = at::kByte;
  at::ScalarType header_type = at::ScalarType::Undefined;  ///< of formats without headers
  void (*encode)(const codec&, const ParamState&, std::int64_t elements, std::uint64_t key,
                 const std::vector<Tensor>& moments) = nullptr;
  void (*decode)(const codec&, const ParamState&, std::int64_t elements,
                 const std::vector<Tensor>& moments) = nullptr;

  std::int64_t blocks_of(std::int64_t elements) const { return (elements + block - 1) / block; }
  bool has_headers() const { return header_type != at::ScalarType::Undefined; }
  /// Whether the slot `name` of parameter p is there as codes. bfloat16 moments are codes where
  /// they stand as a step needs them.
  bool compresses(const ParamState& s, const char* name, const Tensor& p) const {
    const Tensor t = s.tensor(name);
    return block && t.defined() && t.scalar_type() == code_type &&
           (code_type == at::kByte || (t.is_contiguous() && t.device() == p.device()));
  }

  template <class Formula, class Format>
  static codec of() {
    codec c;
    if constexpr (Format::compressed) {
      c.slots = {Formula::slots, Formula::slots + Formula::slot_count};
      c.block = Format::block;
      c.code_type = engine::code_type<Format>;
      c.header_type = engine::header_type<Format>;
      c.encode = [](const codec& self, const ParamState& s, std::int64_t elements,
                    std::uint64_t key, const std::vector<Tensor>& moments) {
        engine::encode<Formula, Format>(self.whole<Formula, Format>(s, elements, key), moments);
      };
      c.decode = [](const codec& self, const ParamState& s, std::int64_t elements,
                    const std::vector<Tensor>& moments) {
        engine::decode<Formula, Format>(self.whole<Formula, Format>(s, elements, 0), moments);
      };
    }
    return c;
  }

 private:
  template <class Formula, class Format>
  auto whole(const ParamState& s, std::int64_t elements, std::uint64_t key) const {
    cpu::stored_moments<float, Format, Formula::slot_count> t{
        {}, {}, std::size_t(elements), 0, key};
    for (std::size_t k = 0; k < slots.size(); ++k) {
      using stored = typename Format::template stored<float>;
      t.slots[k] = static_cast<stored*>(s.tensor(slots[k].name).data_ptr());
      if (has_headers())
        t.headers[k] =
            static_cast<typename Format::header*>(s.tensor(header_of(slots[k].name)).data_ptr());
    }
    return t;
  }
};

/// Codes and headers of a fresh state: all zeros.
inline void make_codes(const codec& c, ParamState& s, const Tensor& p) {
  for (const slot_spec& one : c.slots) {
    s.tensor(one.name, at::zeros(p.sizes(), p.options().dtype(c.code_type)));
    if (c.has_headers())
      s.tensor(header_of(one.name),
               at::zeros({c.blocks_of(p.numel())}, p.options().dtype(c.header_type)));
  }
}
/// The moments behind the codes, float32 and in logical order; empty where nothing is compressed.
inline std::vector<Tensor> decode(const codec& c, const ParamState& s, const Tensor& p) {
  std::vector<Tensor> moments;
  if (c.slots.empty() || !c.compresses(s, c.slots[0].name, p)) return moments;
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

// ---- residual bits of split weights -------------------------------------------------------------

inline std::int64_t version_of(const Tensor& p) {
  return p.is_inference() ? -1 : std::int64_t(p._version());
}
/// A digest of a weight of 16 bits, never 0.
inline std::int64_t digest_of(const Tensor& p) {
  const Tensor x = p.detach().cpu().contiguous();
  const auto* words = static_cast<const std::uint16_t*>(x.data_ptr());
  std::uint64_t h = 0;
  for (std::int64_t i = 0; i < x.numel(); i += 4) {
    std::uint64_t four = 0;
    for (std::int64_t k = i; k < std::min(i + 4, x.numel()); ++k) four = four << 16 | words[k];
    h = mix(h ^ four);
  }
  return std::int64_t(h | 1);
}
/// Whether the residual bits belong to the weight: nobody wrote it since our last step. Writes that
/// autograd does not count (through data() or a raw pointer) go unseen; the stale bits are then
/// worth half a unit in the weight's last place at most.
inline bool is_current(const ParamState& s, const Tensor& p) {
  if (s.weight) return s.weight == p.data_ptr() && s.weight_version == version_of(p);
  return s.weight_digest() && s.weight_digest() == digest_of(p);
}
inline void remember_weight(ParamState& s, const Tensor& p) {
  s.weight = p.data_ptr();
  s.weight_version = version_of(p);
}
/// The residual bits of p, in the order of the strides of `order`; all 0 if they are not of this
/// weight.
inline Tensor settled_residual(ParamState& s, const Tensor& p, const Tensor& order,
                               at::ScalarType type) {
  const auto wanted = p.options().dtype(type);  // `order` may be on the meta device
  Tensor rest = s.tensor(residual_name);
  if (!rest.defined() || !is_current(s, p))
    rest = at::zeros_like(order, wanted);
  else if (rest.strides() != order.strides() || rest.is_inference())
    rest = at::empty_like(order, wanted).copy_(rest);
  s.tensor(residual_name, rest);
  return rest;
}

}  // namespace leanopt::detail
